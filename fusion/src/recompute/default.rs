//! What is computed again although no memory budget asks for it: large values that take little time.
//!
//! Such values are the results of activations, normalizations and softmax whose operands are kept anyway. Training
//! keeps them in most frameworks. To compute one again takes about two bytes of traffic for each byte that it frees,
//! and a small part of a step whose products take most of the time. A minimum cut finds the values
//! ([`Problem::cut`]) where a kept byte costs as much as moving some bytes. The price falls until the choice adds
//! little time.

use super::{Choice, Problem};

/// Part of the step's time that the choice may add, both predicted before fusion.
const MAX_PART: f64 = 0.03;
/// Smaller values are kept: what they free does not pay for another kernel.
pub(super) const MIN_BYTES: i64 = 1 << 20;
/// Bytes that may be moved for each byte freed, from the most to the least that is tried.
const MOVED_PER_FREED: [f64; 5] = [12.0, 8.0, 5.0, 3.5, 2.5];

impl Problem {
    /// What the recipe asks for, and what frees memory for little time besides.
    pub fn by_default(&self) -> Choice {
        let pinned = self.pinned();
        let max_us = MAX_PART * self.step_us;
        if self.cost(&pinned).us > max_us {
            return pinned;
        }
        let keeps_small = |v: &super::Value| v.pinned.or((v.bytes < MIN_BYTES).then_some(false));
        let pins: Vec<Option<bool>> = self.values.iter().map(keeps_small).collect();
        let mut best = pinned.clone();
        let mut too_slow = Choice::default();
        for moved in MOVED_PER_FREED {
            let (mut choice, _, _) = self.cut(moved * self.byte_us, &pins);
            choice.copied.extend(&pinned.copied);
            if self.cost(&choice).us <= max_us {
                best = choice;
                break;
            }
            too_slow = choice;
        }
        // Of what was too slow as a whole, as much as there is time for.
        let mut cost = self.cost(&best);
        for unit in too_slow.copied {
            let mut more = best.clone();
            more.copied.insert(unit);
            let new = self.cost(&more);
            if new.kept_bytes < cost.kept_bytes && new.us <= max_us {
                (best, cost) = (more, new);
            }
        }
        // A copy that is in memory when most memory is needed frees nothing.
        let peak = self.peak_bytes(&best);
        self.without_idle(best, &pinned, peak)
    }
}
