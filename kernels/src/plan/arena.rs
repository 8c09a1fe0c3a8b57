//! Offsets for buffers whose lifetimes are known.

use crate::memory::ALIGNMENT;

/// A buffer's lifetime, in launches, both ends included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval<T> {
    pub(super) owner: T,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) bytes: usize,
}

/// Rounded up to whole cache lines.
pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// An offset for each owner, and the size of the arena. Largest first; each goes into the smallest
/// gap between buffers alive at the same time that holds it. Quadratic in the number of buffers.
pub(super) fn place<T: Copy + Ord>(mut intervals: Vec<Interval<T>>) -> (Vec<(T, usize)>, usize) {
    intervals.sort_by_key(|i| (std::cmp::Reverse(i.bytes), i.first, i.owner));
    let mut placed: Vec<(usize, Interval<T>)> = Vec::new();
    let mut size = 0;
    for interval in intervals {
        let need = aligned(interval.bytes);
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|(_, p)| p.first <= interval.last && interval.first <= p.last)
            .map(|(at, p)| (*at, at + aligned(p.bytes)))
            .collect();
        taken.sort_unstable();
        let offset = smallest_gap(&taken, need);
        size = size.max(offset + need);
        placed.push((offset, interval));
    }
    (
        placed.into_iter().map(|(at, p)| (p.owner, at)).collect(),
        size,
    )
}

/// Start of the smallest gap that holds `need` bytes; past the end if none does.
fn smallest_gap(taken: &[(usize, usize)], need: usize) -> usize {
    let mut best: Option<(usize, usize)> = None;
    let mut end = 0;
    for (from, to) in taken {
        if *from > end {
            let gap = from - end;
            if gap >= need && best.is_none_or(|(g, _)| gap < g) {
                best = Some((gap, end));
            }
        }
        end = end.max(*to);
    }
    best.map_or(end, |(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::{Interval, place};

    fn interval(owner: u32, first: usize, last: usize, bytes: usize) -> Interval<u32> {
        Interval {
            owner,
            first,
            last,
            bytes,
        }
    }

    #[test]
    fn buffers_alive_together_never_overlap() {
        let all: Vec<_> = (0..40u32)
            .map(|n| {
                interval(
                    n,
                    (n * 7 % 30) as usize,
                    (n * 7 % 30 + n % 5) as usize,
                    (n as usize * 331) % 2000 + 1,
                )
            })
            .collect();
        let (offsets, size) = place(all.clone());
        let at = |n: u32| offsets.iter().find(|(o, _)| *o == n).map(|(_, at)| *at);
        for a in &all {
            for b in all.iter().filter(|b| b.owner < a.owner) {
                let together = a.first <= b.last && b.first <= a.last;
                let (x, y) = (at(a.owner).expect("placed"), at(b.owner).expect("placed"));
                assert!(
                    !together || x + a.bytes <= y || y + b.bytes <= x,
                    "{a:?} {b:?}"
                );
                assert!(x + a.bytes <= size && x % 64 == 0);
            }
        }
    }

    #[test]
    fn a_chain_needs_two_buffers() {
        let chain: Vec<_> = (0..10)
            .map(|n| interval(n, n as usize, n as usize + 1, 640))
            .collect();
        assert_eq!(place(chain).1, 1280);
    }
}
