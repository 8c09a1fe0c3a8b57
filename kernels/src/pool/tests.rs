//! The team under changing numbers of threads, pauses, failures and forks.
#![allow(unsafe_code)]

use super::*;

#[test]
fn every_member_runs_between_barriers() {
    let pool = Pool::new();
    for n_threads in [1, 2, 5, 3, 1, 4] {
        pool.set_threads(n_threads);
        let counts: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
        pool.run(64, 0, &|member| {
            for count in &counts {
                count.fetch_add(1, Ordering::Relaxed);
                member.barrier();
                assert_eq!(count.load(Ordering::Relaxed), n_threads);
            }
        })
        .unwrap();
        assert!(
            counts
                .iter()
                .all(|c| c.load(Ordering::Relaxed) == n_threads)
        );
    }
}

#[test]
fn many_short_jobs_with_sleeps_between() {
    let pool = Pool::new();
    pool.set_threads(3);
    let total = AtomicUsize::new(0);
    for round in 0..2000 {
        if round % 200 == 0 {
            // Long enough that workers sleep.
            thread::sleep(Duration::from_millis(1));
        }
        pool.run(64, 0, &|member| {
            total.fetch_add(member.tid + 1, Ordering::Relaxed);
        })
        .unwrap();
    }
    assert_eq!(total.into_inner(), 2000 * 6);
}

#[test]
fn late_members_are_waited_for_asleep() {
    let pool = Pool::new();
    pool.set_threads(3);
    let done = AtomicUsize::new(0);
    pool.run(64, 0, &|member| {
        if member.tid == 1 {
            thread::sleep(Duration::from_millis(5));
        }
        member.barrier();
        done.fetch_add(1, Ordering::Relaxed);
        if member.tid == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        member.barrier();
    })
    .unwrap();
    assert_eq!(done.into_inner(), 3);
}

#[test]
fn several_callers_and_changing_thread_counts() {
    let pool = Pool::new();
    thread::scope(|scope| {
        for caller in 0..3 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..200 {
                    pool.set_threads(1 + (caller + round) % 4);
                    let inside = AtomicUsize::new(0);
                    let seen = AtomicUsize::new(0);
                    pool.run(64, 64 * round, &|member| {
                        inside.fetch_add(1, Ordering::Relaxed);
                        member.barrier();
                        seen.fetch_max(member.n_threads, Ordering::Relaxed);
                    })
                    .unwrap();
                    assert_eq!(inside.into_inner(), seen.into_inner());
                }
            });
        }
    });
}

#[test]
fn scratch_is_private_aligned_and_grows() {
    let pool = Pool::new();
    pool.set_threads(3);
    for bytes in [64, 4096, 100, 8 << 20] {
        let starts = Mutex::new(Vec::new());
        pool.run(64, bytes, &|member| {
            // SAFETY: the block has `bytes` bytes and belongs to this thread.
            let block = unsafe { std::slice::from_raw_parts_mut(member.scratch, bytes) };
            block.fill(member.tid as u8);
            member.barrier();
            assert!(block.iter().all(|byte| *byte == member.tid as u8));
            starts.lock().unwrap().push(member.scratch as usize);
        })
        .unwrap();
        let starts = starts.into_inner().unwrap();
        assert_eq!(starts.len(), 3);
        assert!(starts.iter().all(|start| start % 64 == 0));
    }
}

#[test]
fn a_job_for_fewer_threads_runs_on_those_alone() {
    let pool = Pool::new();
    pool.set_threads(4);
    // Scratch grows for few threads first; the others must get theirs all the same.
    for (at_most, bytes) in [(2, 64), (4, 64), (1, 256), (3, 256), (4, 128)] {
        let ran = Mutex::new(Vec::new());
        pool.run(at_most, bytes, &|member| {
            assert_eq!(member.n_threads, at_most);
            // SAFETY: the block has `bytes` bytes and belongs to this thread.
            unsafe { member.scratch.write_bytes(1, bytes) };
            member.barrier();
            ran.lock().unwrap().push(member.tid);
        })
        .unwrap();
        let mut ran = ran.into_inner().unwrap();
        ran.sort_unstable();
        assert_eq!(ran, (0..at_most).collect::<Vec<_>>());
    }
}

#[test]
fn too_much_scratch_is_an_error_and_the_pool_lives_on() {
    let pool = Pool::new();
    pool.set_threads(2);
    pool.run(64, 4096, &|_| {}).unwrap();
    let ran = AtomicBool::new(false);
    let error = pool
        .run(64, isize::MAX as usize / 2, &|_| {
            ran.store(true, Ordering::Relaxed)
        })
        .unwrap_err();
    assert!(error.to_string().contains("2 threads"), "{error}");
    assert!(!ran.load(Ordering::Relaxed));
    pool.run(64, 128, &|member| {
        // SAFETY: the block has 128 bytes and belongs to this thread.
        unsafe { member.scratch.write_bytes(1, 128) };
        ran.store(true, Ordering::Relaxed);
    })
    .unwrap();
    assert!(ran.load(Ordering::Relaxed));
}

#[test]
fn a_forked_child_starts_its_own_threads() {
    let pool = Pool::new();
    pool.set_threads(3);
    pool.run(64, 256, &|_| {}).unwrap();
    // The lock is held at the time of the fork, as by another caller.
    let held = pool.team().lock();
    // SAFETY: the child only runs the pool and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let count = AtomicUsize::new(0);
        let fine = pool
            .run(64, 256, &|member| {
                count.fetch_add(1, Ordering::Relaxed);
                member.barrier();
            })
            .is_ok();
        let code = i32::from(!(fine && count.into_inner() == 3));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    drop(held);
    let mut status = -1;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    pool.run(64, 256, &|member| member.barrier()).unwrap();
}

#[test]
fn idle_threads_sleep() {
    let pool = Pool::new();
    pool.set_threads(4);
    pool.run(64, 0, &|_| {}).unwrap();
    thread::sleep(Duration::from_millis(50));
    let team = pool.team().lock();
    assert!(
        team.workers
            .iter()
            .all(|w| w.slot.asleep.load(Ordering::SeqCst))
    );
}
