//! Operators that a target with ordered loops computes whole, instead of expanding them to maps.
//!
//! Maps have no order: the steps of a recurrence are unrolled, a running sum of n elements takes n² additions, and a
//! sort n² comparisons. A loop takes n, or n·log n. Attention as maps stores its scores; as a loop over blocks of
//! keys, it does not. Short axes are expanded all the same, since their maps can be fused with their neighbours. Never
//! says how the loops look (`kernels`).

use crate::attention_lse::row_sums;
use crate::op::{Call, OpError};
use crate::shape_rules::axis;
use graph::{DType, Graph, Library, NodeKind};

/// The name of what computes nodes that stay whole.
pub const LOOP: &str = "loop";

/// Longest axis whose running sums or order are computed by maps.
const SHORT_AXIS: i64 = 8;

/// Keeps nodes whole for a target that has ordered loops.
pub fn keep_loops(graph: &mut Graph) {
    let Some(state) = graph.single_state_mut() else {
        return;
    };
    let mut nodes = std::mem::take(&mut state.nodes);
    for node in &mut nodes {
        if let NodeKind::Library(library) = &mut node.kind
            && is_loop(graph, library)
        {
            library.compute_by(LOOP);
        }
    }
    graph.last_state().nodes = nodes;
}

fn is_loop(graph: &Graph, library: &Library) -> bool {
    let mut types = library
        .inputs
        .iter()
        .flatten()
        .map(|id| graph.container(*id).dtype);
    let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::F64);
    match library.op.as_str() {
        _ if !is_filled(graph, library) => false,
        "recurrence" | "recurrence_gradient" => types.all(is_float),
        // The compiler makes these operators only where it wants their loop.
        "attention_with_lse" | "attention_gradient" => {
            // Kernels keep the rows' sums in f32, also of operands of 16 bits.
            let is_single = |id| graph.container(id).dtype == DType::F32;
            types.all(|dtype| dtype != DType::F64) && row_sums(library).all(is_single)
        }
        "cumsum" | "topk" => has_long_axis(graph, library),
        _ => false,
    }
}

fn has_long_axis(graph: &Graph, library: &Library) -> bool {
    let call = Call::of(graph, library);
    let size = || -> Result<Option<i64>, OpError> {
        let shape = &call.input(0)?.shape;
        let axis = axis(&call, call.int_or("axis", -1)?, shape.len())?;
        Ok(shape[axis].as_const())
    };
    size().is_ok_and(|n| n.is_some_and(|n| n > SHORT_AXIS))
}

/// Whether no operand is empty: loops need rows, and maps without points are left out.
fn is_filled(graph: &Graph, library: &Library) -> bool {
    let operands = library.inputs.iter().flatten();
    let mut sizes = operands.flat_map(|id| &graph.container(*id).shape);
    sizes.all(|n| n.as_const().is_some_and(|n| n > 0))
}
