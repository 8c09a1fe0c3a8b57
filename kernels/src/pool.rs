//! A persistent team of threads that runs one job on every thread: our own, or the
//! host's where we are a guest ([`HostThreads`]).
//!
//! Owns the threads, their scratch blocks and how an idle thread waits: it spins for
//! a while, then sleeps, so that consecutive steps start at once and an idle process
//! burns nothing.
//! After `fork` a child finds no threads; it starts its own at the first run.
//! Never knows what a job does.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::barrier::{Barrier, processors, spin_until};
use crate::host_threads::HostThreads;
use crate::memory::AlignedBuffer;

/// How long a worker spins for the next job before it sleeps. A training loop's
/// pause between forward and backward is shorter, a data loader's wait is longer.
const IDLE_SPIN: Duration = Duration::from_micros(100);
/// A job could not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// A thread could not get its scratch block.
    #[error("no memory for {bytes} bytes of scratch on each of {n_threads} threads")]
    OutOfMemory {
        /// Scratch bytes asked for, per thread.
        bytes: usize,
        /// Threads asked.
        n_threads: usize,
    },
}

/// One thread's view of a running job.
pub(crate) struct Member<'a> {
    /// This thread, in `0..n_threads`; 0 is the caller's.
    pub tid: usize,
    /// Threads that run the job.
    pub n_threads: usize,
    /// This thread's scratch block, aligned to 64 bytes; its contents are arbitrary.
    pub scratch: *mut u8,
    barrier: &'a Barrier,
}

impl Member<'_> {
    /// Waits until every member has come here. After it, all see what any of them wrote before it.
    pub fn barrier(&self) {
        self.barrier.wait(self.n_threads);
    }
}

type Job<'a> = dyn Fn(&Member<'_>) + Sync + 'a;

/// A team of threads. Several callers may share a pool: their jobs run one after
/// the other.
pub struct Pool {
    /// Threads wanted; 0 stands for one per available processor.
    wanted: AtomicUsize,
    /// Null until the first run; replaced in a forked child.
    team: AtomicPtr<TeamCell>,
    /// The threads that run the jobs, if not our own.
    host: OnceLock<HostThreads>,
}

static GLOBAL: Pool = Pool::new();

impl Pool {
    /// A pool with one thread per available processor. Threads start at the first
    /// run.
    pub const fn new() -> Pool {
        Pool {
            wanted: AtomicUsize::new(0),
            team: AtomicPtr::new(ptr::null_mut()),
            host: OnceLock::new(),
        }
    }

    /// Runs jobs on the host's threads from now on, except in forked children. The first host that is
    /// given stays.
    pub fn use_host_threads(&self, host: HostThreads) {
        let _ = self.host.set(host);
    }

    /// The pool that a process normally uses.
    pub fn global() -> &'static Pool {
        &GLOBAL
    }

    /// Sets how many threads the next run uses, the caller's included; 0 means one
    /// per available processor. Does not wait for a running job.
    pub fn set_threads(&self, n_threads: usize) {
        self.wanted.store(n_threads, Ordering::Relaxed);
    }

    /// Threads that the next run asks for, the caller's included.
    pub fn threads(&self) -> usize {
        match self.wanted.load(Ordering::Relaxed) {
            0 => processors(),
            n_threads => n_threads,
        }
    }

    /// Runs `job` on every thread, but on at most `at_most` of them, and returns when all are
    /// done. If the system refuses further threads, fewer members run it;
    /// `Member::n_threads` is their real number. A job that panics ends the process:
    /// its partners would wait forever.
    pub(crate) fn run(
        &self,
        at_most: usize,
        scratch_bytes: usize,
        job: &Job<'_>,
    ) -> Result<(), PoolError> {
        let cell = self.team();
        let mut team = cell.lock();
        if let Some(host) = self.host.get().filter(|host| host.are_here()) {
            let n_threads = self.threads().clamp(1, at_most.max(1));
            return team.run_on(host, n_threads, scratch_bytes, job);
        }
        // Never fewer than there are: another program may use them again.
        let present = team.workers.len() + 1;
        let wanted = self.threads();
        team.resize(wanted.min(at_most.max(present)));
        team.run(at_most, scratch_bytes, job)
    }

    /// This process's team. A team made before `fork` belongs to the parent: its
    /// threads do not exist here and its lock may be held for ever, so it is left
    /// alone and forgotten.
    fn team(&self) -> &TeamCell {
        loop {
            let current = self.team.load(Ordering::Acquire);
            // SAFETY: a team is freed only by `drop`, which excludes other users.
            if let Some(cell) = unsafe { current.as_ref() }
                && cell.process == process::id()
            {
                return cell;
            }
            let fresh = Box::into_raw(Box::new(TeamCell {
                process: process::id(),
                team: Mutex::new(Team::new()),
            }));
            let swapped =
                self.team
                    .compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire);
            if swapped.is_err() {
                // SAFETY: `fresh` was just made and never shared.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Pool::new()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let current = *self.team.get_mut();
        // SAFETY: null or made by `team`; `&mut self` excludes other users.
        if unsafe { current.as_ref() }.is_some_and(|cell| cell.process == process::id()) {
            // SAFETY: as above, and it is not the parent's.
            drop(unsafe { Box::from_raw(current) });
        }
    }
}

struct TeamCell {
    process: u32,
    team: Mutex<Team>,
}

impl TeamCell {
    fn lock(&self) -> MutexGuard<'_, Team> {
        self.team.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads; whoever holds the lock around it is member 0.
struct Team {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    scratch: AlignedBuffer,
    /// Scratch bytes that the first threads are known to have, and how many those are.
    scratch_ready: (usize, usize),
    /// Scratch blocks of the host's threads.
    host_scratch: Vec<AlignedBuffer>,
}

struct Worker {
    slot: Arc<Slot>,
    handle: JoinHandle<()>,
}

/// What all threads of a team see.
struct Shared {
    order: UnsafeCell<Order>,
    barrier: Barrier,
    /// Some member has no scratch block.
    failed: AtomicBool,
}

/// The job being run. Written by member 0 before it raises the workers' epochs,
/// read by workers after they see that.
#[derive(Clone, Copy)]
struct Order {
    job: *const Job<'static>,
    n_threads: usize,
    scratch_bytes: usize,
    grow_scratch: bool,
}

// SAFETY: `order` is written only by member 0 between the end of one job (its last
// barrier) and the release of the next (epochs), and read only inside a job.
unsafe impl Sync for Shared {}
// SAFETY: the job behind the pointer is `Sync`, so any thread may call it.
unsafe impl Send for Shared {}

/// A worker's mailbox, alone in its cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Slot {
    /// Raised by one for each job and for the end.
    epoch: AtomicU32,
    asleep: AtomicBool,
    ends: AtomicBool,
}

impl Team {
    fn new() -> Team {
        Team {
            shared: Arc::new(Shared {
                order: UnsafeCell::new(Order {
                    job: &|_: &Member<'_>| {},
                    n_threads: 1,
                    scratch_bytes: 0,
                    grow_scratch: false,
                }),
                barrier: Barrier::default(),
                failed: AtomicBool::new(false),
            }),
            workers: Vec::new(),
            scratch: AlignedBuffer::default(),
            scratch_ready: (0, 0),
            host_scratch: Vec::new(),
        }
    }

    /// Runs the job on the host's threads.
    fn run_on(
        &mut self,
        host: &HostThreads,
        n_threads: usize,
        scratch_bytes: usize,
        job: &Job<'_>,
    ) -> Result<(), PoolError> {
        self.host_scratch.resize_with(
            n_threads.max(self.host_scratch.len()),
            AlignedBuffer::default,
        );
        for block in &mut self.host_scratch[..n_threads] {
            if block.len() < scratch_bytes {
                *block = AlignedBuffer::default();
                *block = AlignedBuffer::zeroed(scratch_bytes).ok_or(PoolError::OutOfMemory {
                    bytes: scratch_bytes,
                    n_threads,
                })?;
            }
        }
        let blocks = Blocks(
            self.host_scratch
                .iter()
                .map(AlignedBuffer::as_ptr)
                .collect(),
        );
        let barrier = &self.shared.barrier;
        if n_threads == 1 {
            // The caller alone needs no team.
            let (tid, scratch) = (0, blocks.of(0));
            let bomb = AbortOnUnwind;
            job(&Member {
                tid,
                n_threads,
                scratch,
                barrier,
            });
            std::mem::forget(bomb);
            return Ok(());
        }
        host.run(n_threads, &|tid, n_threads| {
            let bomb = AbortOnUnwind;
            job(&Member {
                tid,
                n_threads,
                scratch: blocks.of(tid),
                barrier,
            });
            std::mem::forget(bomb);
        });
        Ok(())
    }

    /// Starts or ends workers so that there are `n_threads` members.
    fn resize(&mut self, n_threads: usize) {
        let n_workers = n_threads.max(1) - 1;
        while self.workers.len() > n_workers {
            if let Some(worker) = self.workers.pop() {
                worker.end();
                // A worker started later in its place has no scratch.
                self.scratch_ready.1 = self.scratch_ready.1.min(self.workers.len() + 1);
            }
        }
        while self.workers.len() < n_workers {
            let Some(worker) = Worker::start(self.workers.len() + 1, &self.shared) else {
                break;
            };
            self.workers.push(worker);
        }
    }

    fn run(
        &mut self,
        at_most: usize,
        scratch_bytes: usize,
        job: &Job<'_>,
    ) -> Result<(), PoolError> {
        let n_threads = at_most.clamp(1, self.workers.len() + 1);
        let (ready_bytes, ready_threads) = self.scratch_ready;
        let grow_scratch = scratch_bytes > ready_bytes || n_threads > ready_threads;
        let order = Order {
            // SAFETY: only the lifetime changes; workers use the pointer only until
            // the last barrier below, which member 0 waits for while it borrows.
            job: unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) },
            n_threads,
            scratch_bytes,
            grow_scratch,
        };
        // SAFETY: no job runs (the team is locked), so no worker reads the order.
        unsafe { *self.shared.order.get() = order };
        for worker in &self.workers[..n_threads - 1] {
            worker.release();
        }
        let everyone_has_scratch = take_part(0, order, &self.shared, &mut self.scratch);
        if !everyone_has_scratch {
            // Some members gave up their old block for one they could not get.
            self.scratch_ready = (0, 0);
            return Err(PoolError::OutOfMemory {
                bytes: scratch_bytes,
                n_threads,
            });
        }
        if grow_scratch {
            self.scratch_ready = (scratch_bytes, n_threads);
        }
        Ok(())
    }
}

/// Where each member's scratch begins.
struct Blocks(Vec<*mut u8>);

// SAFETY: a member takes only its own block.
unsafe impl Sync for Blocks {}

impl Blocks {
    fn of(&self, tid: usize) -> *mut u8 {
        self.0[tid]
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.resize(1);
    }
}

impl Worker {
    fn start(tid: usize, shared: &Arc<Shared>) -> Option<Worker> {
        let slot = Arc::new(Slot::default());
        let (its_slot, its_shared) = (Arc::clone(&slot), Arc::clone(shared));
        let handle = thread::Builder::new()
            .name(format!("shorthaul-{tid}"))
            .spawn(move || work(tid, &its_slot, &its_shared))
            .ok()?;
        Some(Worker { slot, handle })
    }

    /// Lets the worker take the present order.
    fn release(&self) {
        // Sequentially consistent together with the worker's store of `asleep` and
        // load of `epoch`: one of the two sides sees the other.
        self.slot.epoch.fetch_add(1, Ordering::SeqCst);
        if self.slot.asleep.load(Ordering::SeqCst) {
            self.handle.thread().unpark();
        }
    }

    fn end(self) {
        self.slot.ends.store(true, Ordering::Relaxed);
        self.release();
        // A worker cannot panic (`take_part` ends the process first).
        let _ = self.handle.join();
    }
}

/// A worker's life.
fn work(tid: usize, slot: &Slot, shared: &Shared) {
    let mut scratch = AlignedBuffer::default();
    let mut seen = 0;
    loop {
        let released = || slot.epoch.load(Ordering::SeqCst) != seen;
        // The team has at least the threads up to this one.
        if !spin_until(IDLE_SPIN, tid + 1, released) {
            slot.asleep.store(true, Ordering::SeqCst);
            while !released() {
                thread::park();
            }
            slot.asleep.store(false, Ordering::Relaxed);
        }
        seen = seen.wrapping_add(1);
        if slot.ends.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: released, and until this worker's last barrier nobody writes it.
        let order = unsafe { *shared.order.get() };
        take_part(tid, order, shared, &mut scratch);
    }
}

/// One member's part of a job, up to and including the last barrier. False if some
/// member has no scratch block; then nobody ran the job.
fn take_part(tid: usize, order: Order, shared: &Shared, scratch: &mut AlignedBuffer) -> bool {
    let Shared {
        barrier, failed, ..
    } = shared;
    if order.grow_scratch {
        if scratch.len() < order.scratch_bytes {
            // The old block first: the two need not fit at once. The worker itself
            // allocates, so that the pages are near its core.
            *scratch = AlignedBuffer::default();
            match AlignedBuffer::zeroed(order.scratch_bytes) {
                Some(block) => *scratch = block,
                None => failed.store(true, Ordering::Relaxed),
            }
        }
        barrier.wait(order.n_threads);
        let someone_failed = failed.load(Ordering::Relaxed);
        barrier.wait(order.n_threads);
        if someone_failed {
            // After everybody has read it; the next job starts after this return.
            if tid == 0 {
                failed.store(false, Ordering::Relaxed);
            }
            return false;
        }
    }
    let bomb = AbortOnUnwind;
    let member = Member {
        tid,
        n_threads: order.n_threads,
        scratch: scratch.as_ptr(),
        barrier,
    };
    // SAFETY: member 0 keeps the job borrowed until it passed the last barrier.
    unsafe { (*order.job)(&member) };
    barrier.wait(order.n_threads);
    std::mem::forget(bomb);
    true
}

/// Ends the process if a job unwinds, because its partners wait at a barrier.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        process::abort();
    }
}

#[cfg(test)]
mod tests;
