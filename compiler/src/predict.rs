//! Predicted times of kernels: from the bytes that each level of memory gives, the operations, and the machine.
//!
//! What is touched of a container lies in the nearest cache that holds all that was touched since it was touched last.
//! So a value that the kernel before has just written is read from a cache if both fit, and one that is kept for the
//! backward pass comes from memory. Nothing here is measured.

use crate::bounds::moved;
use graph::{ContainerId, Graph, Machine};
use kernels::lowering::KernelInfo;
use serde::Serialize;
use std::collections::BTreeMap;

/// What a kernel is predicted to take, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Prediction {
    /// The whole time.
    pub us: f64,
    /// For a contraction: multiplying, and fetching operands again for each block.
    pub product_us: f64,
    /// Operations of loops.
    pub loop_us: f64,
    /// Moving each element once.
    pub movement_us: f64,
    /// Launches.
    pub launch_us: f64,
    /// Bytes that come from or go to the second-level cache, the third-level cache and memory.
    pub level_bytes: [i64; 3],
}

/// What kernels run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct On {
    /// The machine.
    pub machine: Machine,
    /// How many of its threads.
    pub threads: usize,
}

/// Predicts each kernel of a step, in order.
pub fn predict(graph: &Graph, kernels: &[KernelInfo], on: &On) -> Vec<Prediction> {
    let On { machine, threads } = *on;
    let machine = &machine;
    let mut recent = Recent::default();
    let moved = moved(graph, kernels);
    let each = kernels.iter().zip(&moved).map(|(info, moved)| {
        let touched = || {
            let sizes = moved.reads.iter().chain(&moved.writes);
            info.reads.iter().chain(&info.writes).zip(sizes)
        };
        let mut level_bytes = [0; 3];
        let distances: Vec<(i64, i64)> = touched()
            .map(|(id, size)| (recent.distance(*id), *size))
            .collect();
        for (distance, size) in distances {
            level_bytes[level(machine, distance, threads)] += size;
        }
        for (id, size) in touched() {
            recent.touch(*id, *size);
        }
        let moved = machine.levels().into_iter().zip(level_bytes);
        let movement_us = moved.map(|(level, n)| n as f64 / level.rate(threads)).sum();
        let rate = machine.loop_operations_per_us.max(1) as f64 * threads.max(1) as f64;
        let wait = if threads > 1 { machine.barrier_ns } else { 0 };
        let mut found = Prediction {
            us: 0.0,
            product_us: info.work.product_ns as f64 / 1e3,
            loop_us: info.work.loop_operations as f64 / rate,
            movement_us,
            launch_us: info.n_launches as f64 * (machine.launch_ns + wait) as f64 / 1e3,
            level_bytes,
        };
        found.us = (found.product_us + found.loop_us).max(found.movement_us) + found.launch_us;
        found
    });
    each.collect()
}

/// The level of memory that holds something after `distance` other bytes were touched.
fn level(machine: &Machine, distance: i64, threads: usize) -> usize {
    let fits = |bytes: u64| distance >= 0 && (distance as u64) <= bytes;
    if fits(machine.l2.bytes.saturating_mul(threads.max(1) as u64)) {
        0
    } else if fits(machine.l3.bytes) {
        1
    } else {
        2
    }
}

/// Containers by the time of their last touch.
#[derive(Default)]
struct Recent {
    now: u64,
    last: BTreeMap<ContainerId, u64>,
    /// Bytes touched of each container, by the time of its last touch.
    sizes: BTreeMap<u64, i64>,
}

impl Recent {
    /// Bytes touched since the container was, its own included; -1 if it never was.
    fn distance(&self, id: ContainerId) -> i64 {
        let since = self.last.get(&id);
        since.map_or(-1, |at| self.sizes.range(at..).map(|(_, size)| size).sum())
    }

    fn touch(&mut self, id: ContainerId, size: i64) {
        self.now += 1;
        if let Some(before) = self.last.insert(id, self.now) {
            self.sizes.remove(&before);
        }
        self.sizes.insert(self.now, size);
    }
}
