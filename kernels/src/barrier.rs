//! The barrier between launches, and waiting as such.
//!
//! Owns how a thread waits for another: first on its core, then yielding the core
//! between looks, so that PyTorch's own threads there make progress and so do we,
//! and at last asleep. Never starts threads.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a thread spins at a barrier before it sleeps; waking costs about 50 µs.
const BARRIER_SPIN: Duration = Duration::from_micros(200);

/// A reusable barrier that spins, then sleeps.
#[derive(Default)]
pub(crate) struct Barrier {
    arrived: Padded<AtomicUsize>,
    generation: Padded<AtomicU32>,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

impl Barrier {
    /// Returns when `n_threads` threads, this one included, have come here. What any
    /// of them wrote before, all see after.
    pub fn wait(&self, n_threads: usize) {
        if n_threads == 1 {
            return;
        }
        // Cannot advance before this thread arrives.
        let generation = self.generation.0.load(Ordering::Relaxed);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == n_threads {
            self.arrived.0.store(0, Ordering::Relaxed);
            // Sequentially consistent together with the sleeper's two steps below:
            // either it sees the new generation or we see the sleeper.
            self.generation
                .0
                .store(generation.wrapping_add(1), Ordering::SeqCst);
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
                self.wake.notify_all();
            }
            return;
        }
        let open = || self.generation.0.load(Ordering::SeqCst) != generation;
        if spin_until(BARRIER_SPIN, open) {
            return;
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !open() {
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits for `ready` at most about `limit`: first without leaving the core, then
/// yielding it between looks. Returns whether it became ready.
pub(crate) fn spin_until(limit: Duration, ready: impl Fn() -> bool) -> bool {
    // About 2 µs: the usual wait at a barrier.
    for _ in 0..64 {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > limit {
            return false;
        }
        thread::yield_now();
    }
}
