//! Initial states of zeros, and biases of zeros, of recurrent cells.
//!
//! Before: `LSTM(x, w, r, b, , h, c)` whose `h` and `c` are zeros, as constants or made by ConstantOfShape or Expand;
//! after: `LSTM(x, w, r, b)`. The same for GRU and RNN. Legal because the standard takes zeros for an input that is left
//! out; the zeros must be positive, so that no sign of a sum changes. A state of wrong sizes, which is an error, goes too.
//! Saves the nodes that make the zeros in the sizes of the batch.

use super::Rule;
use super::patch::Patch;
use super::scope::Scope;
use crate::attributes::{Attributes, is_standard};
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[Rule {
    name: "drop-zero-states",
    at: drop_zeros,
}];

/// Most values that are looked at for one input of a cell.
const MOST: usize = 32;

fn drop_zeros(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    let optional: &[usize] = match node.op_type.as_str() {
        "LSTM" => &[3, 5, 6],
        "GRU" | "RNN" => &[3, 5],
        _ => return None,
    };
    if !is_standard(node) {
        return None;
    }
    let is_gone = |at: usize| {
        let given = scope.input(n, at);
        optional.contains(&at) && given.is_some_and(|name| is_zeros(scope, name, &mut MOST.clone()))
    };
    let gone: Vec<usize> = (0..node.input.len()).filter(|at| is_gone(*at)).collect();
    let mut without = node.clone();
    for at in &gone {
        without.input[*at].clear();
    }
    while without.input.last().is_some_and(String::is_empty) {
        without.input.pop();
    }
    (!gone.is_empty()).then(|| Patch::exchange(scope, n, without))
}

/// Whether all elements are positive zeros, in any sizes. Looks at no more than `left` values.
fn is_zeros(scope: &Scope, name: &str, left: &mut usize) -> bool {
    let is_zero = |value: Option<f64>| value.is_some_and(|v| v == 0.0 && v.is_sign_positive());
    if is_zero(scope.all_equal(name)) {
        return true;
    }
    let producer = scope.producer(name);
    let Some(p) = producer.filter(|p| *left > 0 && is_standard(scope.node(*p))) else {
        return false;
    };
    *left -= 1;
    let node = scope.node(p);
    let mut of = |at: usize| {
        let x = scope.input(p, at);
        x.is_some_and(|x| is_zeros(scope, x, left))
    };
    match node.op_type.as_str() {
        "ConstantOfShape" => match Attributes::new(node).tensor("value") {
            None => true,
            Some(value) => is_zero(
                Tensor::of_proto(value)
                    .ok()
                    .and_then(|value| value.scalar()),
            ),
        },
        "Expand" | "Reshape" | "Transpose" | "Unsqueeze" | "Squeeze" | "Slice" | "Tile"
        | "Split" | "Gather" | "Identity" | "Flatten" => of(0),
        "Concat" => (0..node.input.len()).all(of),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, reals};
    use crate::rewrite::patch::int;
    use crate::tensor::{Tensor, Values};

    fn cell() -> Trial {
        let trial = Trial::new(17).only(&["drop-zero-states"]);
        let trial = trial.input("x", "5 2 3").ints("sizes", &[1, 2, 4]);
        let trial = trial.constant("w", reals(&[1, 16, 3]));
        let trial = trial.constant("r", reals(&[1, 16, 4]));
        trial.constant("b", reals(&[1, 32]))
    }

    fn hidden() -> Vec<crate::proto::AttributeProto> {
        vec![int("hidden_size", 4)]
    }

    #[test]
    fn states_of_zeros_go() {
        let zeros = Tensor::new(&[1, 1, 4], Values::F32(vec![0.0; 4]));
        cell()
            .constant("zero", zeros)
            .node("h = ConstantOfShape(sizes)")
            .node("c = Expand(zero, sizes)")
            .with("all, y, last = LSTM(x, w, r, b, , h, c)", hidden())
            .output("y", "1 2 4")
            .gives(&["all, y, last = LSTM(x, w, r, b) {hidden_size=4}"]);
    }

    #[test]
    fn other_states_stay() {
        let ones = |first: f32| Tensor::new(&[1, 1, 4], Values::F32(vec![first, 0.0, 0.0, 0.0]));
        let stays = |made: [&str; 2]| {
            let trial = cell()
                .constant("one", ones(1.0))
                .constant("zero", ones(0.0));
            let trial =
                trial.constant("minus", Tensor::new(&[1, 1, 4], Values::F32(vec![-0.0; 4])));
            let trial = made
                .into_iter()
                .filter(|line| !line.is_empty())
                .fold(trial, Trial::node);
            let trial = trial.with("all, y, last = LSTM(x, w, r, b, , , c)", hidden());
            trial.output("y", "1 2 4").stays();
        };
        stays(["c = Expand(one, sizes)", ""]);
        stays(["c = Expand(minus, sizes)", ""]);
        stays(["d = ConstantOfShape(sizes)", "c = Add(d, one)"]);
    }

    #[test]
    fn one_part_that_is_not_zero_keeps_a_state() {
        let part = |first: f32| Tensor::new(&[1, 1, 4], Values::F32(vec![first, 0.0, 0.0, 0.0]));
        cell()
            .constant("one", part(1.0))
            .constant("zero", part(0.0))
            .with("c = Concat(zero, one)", vec![int("axis", 1)])
            .with("all, y, last = LSTM(x, w, r, b, , , c)", hidden())
            .output("y", "1 2 4")
            .stays();
    }
}
