//! Which parameters a training graph updates together, as one array.
//!
//! An update is some element-wise operators for each parameter: nodes that a runtime schedules, and passes too
//! short to be worth a second thread. Vectors, and matrices of one shape, can be joined along their first
//! dimension, updated as one, and parted again; the same numbers. That copies each of them once for every operand
//! and result of the update. Where it pays was found with ONNX Runtime and the networks of
//! `bench/onnx/training_graphs.py`: for Adam, and less where groups have 2¹⁸ elements or several shapes. Weights of
//! convolutions stay alone, since the runtime moves the transposes of their gradients behind what joins them.

use graph::{DType, SymExpr};

/// Number of elements from which on ONNX Runtime computes a sum or product of two arrays in several threads: 2¹⁶ took
/// one and 128 000 two (its profile, 1.31); between them the estimate of costs per element puts the limit.
const THREADED: i64 = 88_000;
/// Most elements of a group: larger arrays leave the caches between two passes.
const MOST_TOGETHER: i64 = 1 << 17;
/// Copying this many elements seven times, as for Adam, takes about as long as scheduling eleven nodes.
const WORTH_A_PARAMETER: i64 = 25_000;

/// How an update's passes over arrays compare with the arrays that it reads and writes, which joining copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Passes {
    /// About as many, as for gradient descent.
    Few,
    /// More by half or above, as for Adam.
    Many,
}

/// Positions of parameters of these types and shapes, one list for each group that is updated together.
pub(crate) fn update_groups(
    parameters: &[(DType, Vec<SymExpr>)],
    passes: Passes,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<Group> = Vec::new();
    for (at, (dtype, shape)) in parameters.iter().enumerate() {
        let sizes: Option<Vec<i64>> = shape.iter().map(SymExpr::as_const).collect();
        let n: Option<i64> = sizes.as_ref().map(|sizes| sizes.iter().product());
        let is_vector = shape.len() == 1;
        let joins = match n {
            Some(n) => is_vector || passes == Passes::Many && shape.len() == 2 && n < THREADED,
            None => false,
        };
        let n = n.unwrap_or(0);
        let kind = joins.then(|| match is_vector {
            true => Kind::Vectors(*dtype),
            false => Kind::Matrices(*dtype, shape.clone()),
        });
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

/// What parameters that can be joined share.
#[derive(PartialEq)]
enum Kind {
    Vectors(DType),
    Matrices(DType, Vec<SymExpr>),
}

struct Group {
    /// `None` for one that stays alone.
    kind: Option<Kind>,
    n_elements: i64,
    members: Vec<usize>,
}

impl Group {
    fn pays(&self) -> bool {
        let saved = WORTH_A_PARAMETER * (self.members.len() as i64 - 1);
        matches!(self.kind, Some(Kind::Vectors(_)))
            || self.n_elements >= THREADED
            || self.n_elements <= saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(shapes: &[&[i64]], passes: Passes) -> Vec<Vec<usize>> {
        let sizes = |shape: &&[i64]| shape.iter().copied().map(SymExpr::constant).collect();
        let parameters: Vec<_> = shapes.iter().map(|s| (DType::F32, sizes(s))).collect();
        update_groups(&parameters, passes)
    }

    #[test]
    fn vectors_are_always_joined() {
        let shapes: [&[i64]; 4] = [&[4], &[2, 4], &[100_000], &[3]];
        for passes in [Passes::Many, Passes::Few] {
            assert_eq!(groups(&shapes, passes), [vec![0, 2, 3], vec![1]]);
        }
    }

    #[test]
    fn matrices_are_joined_where_passes_outweigh_copies() {
        let shapes: [&[i64]; 4] = [&[512, 128], &[128, 512], &[512, 128], &[128, 512]];
        assert_eq!(groups(&shapes, Passes::Many), [[0, 2], [1, 3]]);
        assert_eq!(groups(&shapes, Passes::Few), [[0], [1], [2], [3]]);
        // Neither many nodes nor a second thread.
        assert_eq!(
            groups(&[&[160, 256], &[160, 256]], Passes::Many),
            [[0], [1]]
        );
        assert_eq!(groups(&[&[16, 256], &[16, 256]], Passes::Many), [[0, 1]]);
        // In several threads already.
        assert_eq!(
            groups(&[&[1000, 128], &[1000, 128]], Passes::Many),
            [[0], [1]]
        );
    }

    #[test]
    fn groups_do_not_outgrow_the_caches() {
        let shapes: Vec<&[i64]> = vec![&[256, 256]; 6];
        assert_eq!(groups(&shapes, Passes::Many), [[0, 1], [2, 3], [4, 5]]);
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
        assert_eq!(update_groups(&parameters, Passes::Many), alone);
    }
}
