//! The simulator's own randomness: splitmix64. One seed, one story.

/// A small, fast, splittable generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// Scrambles 64 bits.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x5eed_5eed_5eed_5eed))
    }

    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in `low..=high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.word() % (high - low + 1)
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True once in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.word().is_multiple_of(n)
    }

    /// Small values often, large ones rarely: the exponent is uniform.
    pub fn skewed(&mut self, low: u64, high: u64) -> u64 {
        let span = (high - low + 1) as f64;
        low + ((span.powf(self.unit()) - 1.0) as u64).min(high - low)
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[(self.word() % items.len() as u64) as usize]
    }
}
