//! Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11):
//! counter-based random numbers, the same on every back end.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a counter of 128 bits and a key of 64.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [
            (p1 >> 32) as u32 ^ c[1] ^ k[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ c[3] ^ k[1],
            p0 as u32,
        ];
    }
    c
}

/// The `n`-th uniform number in [0, 1) under a key, a multiple of 2⁻²⁴.
///
/// Four neighbours share the four words of one counter, `n / 4`.
pub fn uniform(key: u64, n: u64) -> f32 {
    let counter = n / 4;
    let words = philox4x32(
        [counter as u32, (counter >> 32) as u32, 0, 0],
        [key as u32, (key >> 32) as u32],
    );
    (words[(n % 4) as usize] >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Which elements a dropout keeps, and what it multiplies them with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// An element is kept if its uniform number is at least this. A multiple of 2⁻²⁴, so that it is exact in f32.
    pub threshold: f64,
    /// Factor of the kept elements; 0 if none is kept.
    pub scale: f64,
    /// Added to the seed of a step so that each dropout of a model has its own key.
    pub offset: i64,
}

impl Dropout {
    /// The dropout with a probability in `[0, 1]`, at the place `id` in `[0, 2³⁰)`.
    pub fn new(probability: f64, id: i64) -> Dropout {
        const RESOLUTION: f64 = 1.0 / 16_777_216.0;
        Dropout {
            threshold: (probability / RESOLUTION).ceil() * RESOLUTION,
            scale: match probability < 1.0 {
                true => 1.0 / (1.0 - probability),
                false => 0.0,
            },
            // Seeds of steps are consecutive; this distance keeps the keys of different dropouts apart.
            offset: id << 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::philox4x32;

    /// Known answers of the authors' Random123 distribution.
    #[test]
    fn known_answers() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }
}
