//! Work in pieces over the machine's cores. Results never depend on the number of cores.

use std::sync::Mutex;

/// How many threads compute.
pub fn count() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(16))
}

/// Calls `work` on every piece, each exactly once, on several threads where there are several pieces.
/// Every thread makes what it keeps between pieces with `start`.
pub fn each<T: Send, S>(
    pieces: impl ExactSizeIterator<Item = T> + Send,
    start: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let n_threads = count().min(pieces.len());
    if n_threads <= 1 {
        let mut kept = start();
        pieces.for_each(|piece| work(&mut kept, piece));
        return;
    }
    let queue = Mutex::new(pieces);
    let run = || {
        let mut kept = start();
        loop {
            // A thread that panicked left the queue as it was before its piece.
            let next = match queue.lock() {
                Ok(mut queue) => queue.next(),
                Err(poisoned) => poisoned.into_inner().next(),
            };
            match next {
                Some(piece) => work(&mut kept, piece),
                None => return,
            }
        }
    };
    rayon::scope(|scope| {
        for _ in 1..n_threads {
            scope.spawn(|_| run());
        }
        run();
    });
}

/// What `work` makes of every piece, in order; on several threads only `if_side_by_side`.
pub fn map_if<T: Send, U: Send>(
    if_side_by_side: bool,
    pieces: Vec<T>,
    work: impl Fn(T) -> U + Sync,
) -> Vec<U> {
    if !if_side_by_side {
        return pieces.into_iter().map(work).collect();
    }
    let mut made: Vec<Option<U>> = pieces.iter().map(|_| None).collect();
    let places = pieces.into_iter().zip(&mut made);
    each(
        places,
        || (),
        |(), (piece, place)| *place = Some(work(piece)),
    );
    made.into_iter().flatten().collect()
}

/// Calls `work` with the number of each run of `each` elements of `out`, on several threads if `out`
/// has at least `least` elements.
pub fn runs<T: Send>(
    out: &mut [T],
    each_len: usize,
    least: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let each_len = each_len.max(1);
    if out.len() < least {
        for (n, run) in out.chunks_mut(each_len).enumerate() {
            work(n, run);
        }
        return;
    }
    each(
        out.chunks_mut(each_len).enumerate(),
        || (),
        |(), (n, run)| work(n, run),
    );
}
