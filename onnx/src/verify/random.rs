//! Random numbers that are the same everywhere.
//!
//! Owns the generator; what is made of its numbers is the caller's.

/// Numbers that a seed gives: SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A random number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// A number of the standard normal distribution, nearly: the sum of twelve uniform ones.
    pub fn normal(&mut self) -> f64 {
        let sum: f64 = (0..3)
            .map(|_| {
                let bits = self.next();
                (0..4)
                    .map(|k| f64::from((bits >> (16 * k)) as u16) / 65536.0)
                    .sum::<f64>()
            })
            .sum();
        sum - 6.0
    }
}
