//! Whatever somebody did to the files of a folder: nothing that was not stored is served or told, and the store goes on. Seeded; `fuzz/` has the
//! same without an end.

#[path = "common/noise.rs"]
mod noise;

/// Of a splitmix generator.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn files_that_were_cut_flipped_copied_and_overwritten_give_misses() {
    let whole = noise::written();
    let all = whole.copy().check();
    assert!(all >= 40, "{all} of 40 blocks: nothing was done to them");
    let rounds: u64 =
        std::env::var("FOLIO_NOISE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(600);
    let (mut fewer, mut some) = (0, 0);
    for seed in 0..rounds {
        let mut state = seed;
        let orders: Vec<u8> = (0..6 * (1 + seed % 12)).map(|_| random(&mut state) as u8).collect();
        let files = whole.copy();
        files.spoil(&orders);
        let found = std::panic::catch_unwind(|| files.check());
        let found = found.unwrap_or_else(|_| panic!("seed {seed}: {orders:?}"));
        fewer += u64::from(found < all);
        some += u64::from(found > 0);
    }
    assert!(fewer > rounds / 2 && some > rounds / 2, "{fewer} and {some} of {rounds}");
}
