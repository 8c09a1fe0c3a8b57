//! What is computed again although no memory budget asks for it: large values that take little time.
//!
//! Such values are the results of activations, normalizations and softmax whose operands are kept, or take less memory.
//! Most frameworks keep them for the backward pass. To compute one again moves about two bytes for each byte that
//! becomes free, in a step whose time is mostly that of products. A minimum cut finds the values ([`Problem::cut`]),
//! with a price for each kept byte: the time of moving some bytes. The price falls until the choice adds little time.

use super::{Choice, Problem, Value};

/// Part of the step's time that the choice may add, both predicted before fusion. Steps of ViT-B/16, Swin-T, GPT-2 and
/// a BERT layer took as long as before with 0.04.
const MAX_PART: f64 = 0.03;
/// Smaller values are kept: they fit into a cache, and a kernel of its own takes some microseconds to start.
pub(super) const MIN_BYTES: i64 = 1 << 20;
/// Bytes that may be moved for each byte freed, tried in order: the first allows several element-wise kernels for one
/// value, the last one kernel that reads as many bytes as it writes.
const MOVED_PER_FREED: [f64; 5] = [12.0, 8.0, 5.0, 3.5, 2.5];
/// Most units that are tried one by one.
const MAX_TRIES: usize = 1000;

impl Problem {
    /// What the recipe asks for, and what else frees memory for little time.
    pub fn by_default(&self) -> Choice {
        let pinned = self.pinned();
        if !self.values.iter().any(|v| v.crosses) {
            return pinned;
        }
        let max_us = self.cost(&pinned).us + MAX_PART * self.step_us;
        let keeps_small = |v: &Value| v.pinned.or((v.bytes < MIN_BYTES).then_some(false));
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
        // From the choice that is too slow as a whole, adds units that free bytes by themselves, as long as there is
        // time.
        let mut cost = self.cost(&best);
        for unit in too_slow.copied.into_iter().take(MAX_TRIES) {
            let mut more = best.clone();
            more.copied.insert(unit);
            let new = self.cost(&more);
            if new.kept_bytes < cost.kept_bytes && new.us <= max_us {
                (best, cost) = (more, new);
            }
        }
        // A copy that is in memory when the step needs most memory frees nothing.
        let peak = self.peak_bytes(&best);
        self.without_idle(best, &pinned, peak)
    }
}
