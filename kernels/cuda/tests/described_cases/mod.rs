//! Contractions of one map, and executed descriptions of them compared with the interpreter. Shared by the
//! tests of products and of convolutions.
//!
//! Factors are multiples of 1/8 in [-1, 1], so that every sum is exact and only the last rounding counts.

use cuda_kernels::contraction::{self, Types};
use cuda_kernels::vendor::Operands;
use graph::{Bindings, ContainerId, Graph, NoLibrary, Precision, Tensor, interpret};
use kernels::recognize::{Recognized, recognize_typed};

/// A graph of one map, from the declarations of its containers `x`, `w` and `y` and the map.
pub fn graph(x: &str, w: &str, y: &str, map: &str) -> Graph {
    let text = format!(
        "graph \"one\" {{\n  %x: {x} input\n  %w: {w} input\n  %y: {y}\n  inputs %x, %w\n  \
         state {{\n    map {map}\n  }}\n  outputs %y\n}}\n"
    );
    graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

pub fn found(graph: &Graph) -> (Recognized, Types) {
    let node = &graph.single_state().unwrap().nodes[0];
    let found = recognize_typed(graph, node, &contraction::multiplies).expect("a contraction");
    let dtype = |id| graph.container(id).dtype;
    let types = Types {
        a: dtype(found.a),
        b: dtype(found.b),
        out: dtype(found.out),
    };
    (found, types)
}

/// Position in memory of each element, in row-major order.
fn positions(graph: &Graph, id: ContainerId) -> Vec<usize> {
    let c = graph.container(id);
    let shape: Vec<i64> = c.shape.iter().map(|s| s.as_const().unwrap()).collect();
    let strides = c.layout.strides(&shape);
    let place = |mut flat: i64| {
        let mut at = 0;
        for (size, stride) in shape.iter().zip(&strides).rev() {
            at += flat % size * stride;
            flat /= size;
        }
        at as usize
    };
    (0..shape.iter().product()).map(place).collect()
}

fn eighths(graph: &Graph, id: ContainerId, salt: u64) -> Tensor {
    let c = graph.container(id);
    let shape: Vec<usize> = c
        .shape
        .iter()
        .map(|s| s.as_const().unwrap() as usize)
        .collect();
    let unit = |i| f64::from(graph::philox::uniform(salt, i)) * 2.0 - 1.0;
    let n: usize = shape.iter().product();
    let data = (0..n as u64)
        .map(|i| (unit(i) * 8.0).round() / 8.0)
        .collect();
    Tensor::from_f64(c.dtype, &shape, data)
}

/// Holds an executed description against the interpreter in double precision: `compute` is given the two
/// operands in the description's order and a place for each element of the result.
pub fn check(
    graph: &Graph,
    is_swapped: bool,
    compute: impl FnOnce(&Operands<'_>, &mut dyn FnMut(usize, f64)) -> Result<(), String>,
) {
    let (found, _) = found(graph);
    let given: Vec<Tensor> = (graph.inputs.iter().zip(1..))
        .map(|(id, salt)| eighths(graph, *id, salt))
        .collect();
    let none = Bindings::new();
    let expected = interpret(graph, &given, &none, &NoLibrary, Precision::Double);
    let expected = expected.unwrap()[0].to_f64();
    let memory = |id: ContainerId| {
        let at = graph.inputs.iter().position(|input| *input == id).unwrap();
        let places = positions(graph, id);
        let mut memory = vec![f64::NAN; places.len()];
        for (place, value) in places.iter().zip(given[at].to_f64()) {
            memory[*place] = value;
        }
        memory
    };
    let (left, right) = match is_swapped {
        true => (memory(found.b), memory(found.a)),
        false => (memory(found.a), memory(found.b)),
    };
    let operands = Operands {
        a: &left,
        b: &right,
        bias: None,
    };
    let places = positions(graph, found.out);
    let mut result = vec![f64::NAN; places.len()];
    let mut n_stored = 0;
    let mut store = |at: usize, value| {
        result[at] = value;
        n_stored += 1;
    };
    compute(&operands, &mut store).unwrap();
    assert_eq!(n_stored, places.len(), "every element once");
    let dtype = graph.container(found.out).dtype;
    for (i, (place, value)) in places.iter().zip(expected).enumerate() {
        assert_eq!(result[*place], dtype.round(value), "element {i}");
    }
}
