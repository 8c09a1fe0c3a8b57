//! Which parameters a training graph updates together, as one array.
//!
//! An update is some element-wise operators for each parameter: nodes that a runtime schedules, and passes too
//! short to be worth a second thread. Vectors, and matrices of one shape, can be joined along their first
//! dimension, updated as one, and parted again; the same numbers. That copies each of them once for every operand
//! and result of the update. Where it pays was measured in ONNX Runtime with the transformer of
//! `bench/onnx/training_graphs.py` and Adam (2 threads, 2-core machine with AVX-512): its step took 4.45 ms with
//! vectors joined only, 4.28 with its eight matrices of 2¹⁴ elements, 4.15 with its two pairs of 2¹⁶ too. Groups
//! of 2¹⁸ elements or of several shapes gained less. Weights of convolutions stay alone: the runtime moves the
//! transposes of their gradients behind what joins them, and ResNet-18's step took 63 ms instead of 56.

use graph::{DType, SymExpr};

/// From how many elements on ONNX Runtime computes a sum or product of two arrays in several threads.
const THREADED: i64 = 88_000;
/// What a group has at most: larger arrays leave the caches between two passes.
const MOST_TOGETHER: i64 = 1 << 17;
/// So many elements are copied seven times, for Adam, in the time that eleven nodes take to be scheduled.
const WORTH_A_PARAMETER: i64 = 25_000;

/// Positions of parameters, those that are updated together in one list. `has_many_passes` says whether an
/// update is several times as many passes as it has operands and results.
pub(crate) fn update_groups(
    parameters: &[(DType, Vec<SymExpr>)],
    has_many_passes: bool,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<Group> = Vec::new();
    for (at, (dtype, shape)) in parameters.iter().enumerate() {
        let sizes: Option<Vec<i64>> = shape.iter().map(SymExpr::as_const).collect();
        let n: Option<i64> = sizes.as_ref().map(|sizes| sizes.iter().product());
        let is_vector = shape.len() == 1;
        let joins = match n {
            Some(n) => is_vector || has_many_passes && shape.len() == 2 && n < THREADED,
            None => false,
        };
        let n = n.unwrap_or(0);
        let like = if is_vector { &[] } else { shape.as_slice() };
        let kind = joins.then(|| (*dtype, like.to_vec()));
        let open = groups.iter_mut().find(|group| {
            let has_room = is_vector || group.n_elements + n <= MOST_TOGETHER;
            kind.is_some() && group.kind == kind && has_room
        });
        match open {
            Some(group) => {
                group.n_elements += n;
                group.members.push(at);
            }
            None => groups.push(Group {
                kind,
                n_elements: n,
                members: vec![at],
            }),
        }
    }
    let parted = groups.into_iter().flat_map(|group| match group.pays() {
        true => vec![group.members],
        false => group.members.into_iter().map(|at| vec![at]).collect(),
    });
    parted.collect()
}

/// Parameters that can be joined.
struct Group {
    /// What they share: type and shape, vectors no shape. `None` for one that stays alone.
    kind: Option<(DType, Vec<SymExpr>)>,
    n_elements: i64,
    members: Vec<usize>,
}

impl Group {
    fn pays(&self) -> bool {
        let is_vectors = self.kind.as_ref().is_some_and(|(_, like)| like.is_empty());
        let saved = WORTH_A_PARAMETER * (self.members.len() as i64 - 1);
        is_vectors || self.n_elements >= THREADED || self.n_elements <= saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(shapes: &[&[i64]], has_many_passes: bool) -> Vec<Vec<usize>> {
        let sizes = |shape: &&[i64]| shape.iter().copied().map(SymExpr::constant).collect();
        let parameters: Vec<_> = shapes.iter().map(|s| (DType::F32, sizes(s))).collect();
        update_groups(&parameters, has_many_passes)
    }

    #[test]
    fn vectors_are_always_joined() {
        let shapes: [&[i64]; 4] = [&[4], &[2, 4], &[100_000], &[3]];
        for many in [true, false] {
            assert_eq!(groups(&shapes, many), [vec![0, 2, 3], vec![1]]);
        }
    }

    #[test]
    fn matrices_are_joined_where_passes_outweigh_copies() {
        let shapes: [&[i64]; 4] = [&[512, 128], &[128, 512], &[512, 128], &[128, 512]];
        assert_eq!(groups(&shapes, true), [[0, 2], [1, 3]]);
        assert_eq!(groups(&shapes, false), [[0], [1], [2], [3]]);
        // Neither many nodes nor a second thread.
        assert_eq!(groups(&[&[160, 256], &[160, 256]], true), [[0], [1]]);
        assert_eq!(groups(&[&[16, 256], &[16, 256]], true), [[0, 1]]);
        // In several threads already.
        assert_eq!(groups(&[&[1000, 128], &[1000, 128]], true), [[0], [1]]);
    }

    #[test]
    fn groups_do_not_outgrow_the_caches() {
        let shapes: Vec<&[i64]> = vec![&[256, 256]; 6];
        assert_eq!(groups(&shapes, true), [[0, 1], [2, 3], [4, 5]]);
    }

    #[test]
    fn other_types_and_ranks_and_unknown_sizes_stay_apart() {
        let size = |n: i64| SymExpr::constant(n);
        let parameters = [
            (DType::F32, vec![size(4), size(4)]),
            (DType::F16, vec![size(4), size(4)]),
            (DType::F32, vec![SymExpr::symbol("n"), size(4)]),
            (DType::F32, vec![]),
            (DType::F32, vec![]),
            (DType::F32, vec![size(4); 4]),
            (DType::F32, vec![size(4); 4]),
        ];
        let alone: Vec<Vec<usize>> = (0..7).map(|at| vec![at]).collect();
        assert_eq!(update_groups(&parameters, true), alone);
    }
}
