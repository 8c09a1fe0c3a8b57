//! The barrier between launches, and waiting as such.
//!
//! Owns how a thread waits for another: first on its core, then asleep. Where there are more threads than
//! processors it yields the core between looks, so that the thread it waits for gets one. Otherwise it does not: the
//! system would give the core to a process of the lowest priority for a time slice of milliseconds, and a step has
//! a thousand barriers. Never starts threads.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a thread spins at a barrier before it sleeps. Waking costs as much again. Longer spins gained nothing on an
/// idle machine of two processors. On a busy one, they use up the time slice of a thread while its partner waits for a
/// core; a step then takes many times as long.
const BARRIER_SPIN: Duration = Duration::from_micros(50);
/// The same for a thread that yields its core between looks.
const YIELDING_SPIN: Duration = Duration::from_micros(200);

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
    /// Returns when `n_threads` threads, this one included, have come here. After it, all
    /// see what any of them wrote before it.
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
        let limit = match fits(n_threads) {
            true => BARRIER_SPIN,
            false => YIELDING_SPIN,
        };
        if spin_until(limit, n_threads, open) {
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

/// Whether there is a processor for each of `n_threads` threads.
fn fits(n_threads: usize) -> bool {
    n_threads <= processors()
}

/// Processors of this process, asked once: the answer costs the system several files to read.
pub(crate) fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| thread::available_parallelism().map_or(1, NonZeroUsize::get))
}

/// Waits for `ready` at most about `limit`, as one of `n_threads` that work together. Returns whether it became
/// ready.
pub(crate) fn spin_until(limit: Duration, n_threads: usize, ready: impl Fn() -> bool) -> bool {
    // About 2 µs: the usual wait at a barrier.
    for _ in 0..64 {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    let keeps_core = fits(n_threads);
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
        if !keeps_core {
            thread::yield_now();
        }
    }
}
