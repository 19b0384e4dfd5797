//! Counter-based randomness: Philox4x32-10 (Salmon et al., SC 2011). A draw is a pure function of its key and counter,
//! so it does not matter who draws when.

const MULTIPLY: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The bijection itself: four counter words to four random words.
pub fn philox4x32_10(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    rounds(key, counter.map(|word| [word])).map(|[word]| word)
}

/// The same of `N` counters: of each its first word, of each its second, and so on. Round by round, which vectorizes.
#[inline(always)]
fn rounds<const N: usize>([mut k0, mut k1]: [u32; 2], mut words: [[u32; N]; 4]) -> [[u32; N]; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = &mut words;
        for i in 0..N {
            let p0 = u64::from(MULTIPLY[0]) * u64::from(c0[i]);
            let p1 = u64::from(MULTIPLY[1]) * u64::from(c2[i]);
            (c0[i], c1[i]) = ((p1 >> 32) as u32 ^ c1[i] ^ k0, p1 as u32);
            (c2[i], c3[i]) = ((p0 >> 32) as u32 ^ c3[i] ^ k1, p0 as u32);
        }
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    words
}

/// The stream of one request's choice at one absolute position.
#[derive(Clone, Copy, Debug)]
pub struct PositionRng {
    key: [u32; 2],
    position: u32,
}

impl PositionRng {
    pub fn new(seed: u64, position: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], position }
    }

    /// Words for tokens `4 * group .. 4 * group + 4`.
    pub fn group(&self, group: u32) -> [u32; 4] {
        philox4x32_10(self.key, [group, self.position, 0, 0])
    }

    /// Words of `N` groups from `first` on: of each its first, of each its second, and so on.
    pub fn groups<const N: usize>(&self, first: u32) -> [[u32; N]; 4] {
        let mut words = [[0; N], [self.position; N], [0; N], [0; N]];
        (first..).zip(&mut words[0]).for_each(|(group, word)| *word = group);
        rounds(self.key, words)
    }

    pub fn token(&self, token: u32) -> u32 {
        self.group(token >> 2)[(token & 3) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the reference implementation (Random123, `kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        let zero = philox4x32_10([0; 2], [0; 4]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox4x32_10([u32::MAX; 2], [u32::MAX; 4]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi =
            philox4x32_10([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn groups_together_are_those_alone() {
        for (seed, position, first) in
            [(1, 2, 0), (1 << 40 | 7, u32::MAX, 1000), (u64::MAX, 0, u32::MAX - 100)]
        {
            let rng = PositionRng::new(seed, position);
            let words = rng.groups::<16>(first);
            for at in 0..16 {
                assert_eq!(words.map(|words| words[at]), rng.group(first + at as u32));
            }
        }
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let draw = |seed, position, token| PositionRng::new(seed, position).token(token);
        let base = draw(1, 2, 3);
        assert_ne!(base, draw(1 << 40, 2, 3));
        assert_ne!(base, draw(2, 2, 3));
        assert_ne!(base, draw(1, 3, 3));
        assert_ne!(base, draw(1, 2, 4));
        assert_ne!(base, draw(1, 2, 7));
    }
}
