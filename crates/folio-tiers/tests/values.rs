//! Whatever a server answers: what comes was stored, or is a miss. `fuzz/` has the same without an end.

mod common;

use common::values::{ALL, RECORD, Values};

#[test]
fn a_value_that_was_cut_anywhere_or_has_any_bit_flipped_is_a_miss() {
    let values = Values::written();
    let engine = values.engine();
    assert_eq!(values.load(&engine), (ALL, true));
    assert_eq!(values.values(), 3, "two chunks, and what a window reads");
    for at in [0, 2] {
        let whole = values.value(at);
        let length = whole.len();
        for cut in 0..length {
            values.set(at, whole[..cut].to_vec());
            let (came, all) = values.load(&engine);
            assert!(came < ALL && !all, "value {at}, cut at {cut}");
        }
        for byte in 0..length {
            // All bits of one record, of the others one of each byte.
            let bits = if at == 0 && byte < RECORD { 0..8 } else { byte % 8..byte % 8 + 1 };
            for bit in bits {
                let mut wrong = whole.clone();
                wrong[byte] ^= 1 << bit;
                values.set(at, wrong);
                let (came, all) = values.load(&engine);
                assert!(came < ALL && !all, "value {at}, bit {bit} of byte {byte}");
            }
        }
        values.set(at, whole);
        assert_eq!(values.load(&engine), (ALL, true));
    }
}

#[test]
fn values_that_were_spoilt_give_misses_and_are_written_over() {
    let whole = Values::written();
    assert_eq!(whole.copy().check(), ALL);
    let mut state = 11u64;
    let mut fewer = 0;
    for round in 0..400 {
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let orders: Vec<u8> = (0..5 * (1 + round % 6)).map(|_| random()).collect();
        let values = whole.copy();
        values.spoil(&orders);
        let came = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| values.check()));
        let came = came.unwrap_or_else(|_| panic!("round {round}: {orders:?}"));
        fewer += u32::from(came < ALL);
    }
    assert!(fewer > 200, "{fewer} of 400 had fewer blocks");
}
