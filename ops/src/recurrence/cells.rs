//! The cells of PyTorch's recurrent layers.
//!
//! Sources: LSTM (Hochreiter and Schmidhuber 1997), GRU (Cho et al. 2014, with the reset gate after the product, as
//! `torch.nn.GRU`), plain recurrences (Elman 1990).

use graph::{Cell, Expr};

/// All cells, by their names in PyTorch's operators.
pub(super) fn all() -> [(&'static str, Cell); 4] {
    [
        ("lstm", lstm()),
        ("gru", gru()),
        ("rnn_tanh", rnn_tanh()),
        ("rnn_relu", rnn_relu()),
    ]
}

/// The input of a gate and its product, added.
fn sum(gates: usize, g: usize) -> Expr {
    Expr::In(g).add(Expr::In(gates + g))
}

/// `torch.nn.LSTM`, with states `h` and `c`.
pub fn lstm() -> Cell {
    // Inputs: x_0 to x_3, q_0 to q_3, h, c, then values: i, f, g, o, c, h.
    let v = |n: usize| Expr::In(10 + n);
    Cell {
        gates: 4,
        values: vec![
            sum(4, 0).sigmoid(),
            sum(4, 1).sigmoid(),
            sum(4, 2).tanh(),
            sum(4, 3).sigmoid(),
            v(1).mul(Expr::In(9)).add(v(0).mul(v(2))),
            v(3).mul(v(4).tanh()),
        ],
        states: vec![5, 4],
    }
}

/// `torch.nn.GRU`.
pub fn gru() -> Cell {
    // Inputs: x_0 to x_2, q_0 to q_2, h, then values: r, z, the product of n, n, h.
    let v = |n: usize| Expr::In(7 + n);
    let rest = Expr::float(1.0).sub(v(1));
    Cell {
        gates: 3,
        values: vec![
            sum(3, 0).sigmoid(),
            sum(3, 1).sigmoid(),
            Expr::In(5),
            Expr::In(2).add(v(0).mul(v(2))).tanh(),
            rest.mul(v(3)).add(v(1).mul(Expr::In(6))),
        ],
        states: vec![4],
    }
}

/// `torch.nn.RNN` with tanh.
pub fn rnn_tanh() -> Cell {
    Cell {
        gates: 1,
        values: vec![sum(1, 0).tanh()],
        states: vec![0],
    }
}

/// `torch.nn.RNN` with ReLU.
pub fn rnn_relu() -> Cell {
    Cell {
        gates: 1,
        values: vec![sum(1, 0), Expr::In(3).max(Expr::float(0.0))],
        states: vec![1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{CellGradient, Scalar};

    fn run(list: &[Expr], mut inputs: Vec<f64>, extend: bool) -> Vec<f64> {
        let mut results = Vec::new();
        for e in list {
            let given: Vec<Scalar> = inputs.iter().map(|x| Scalar::Float(*x)).collect();
            let value = e.eval(&given, &|_| None).unwrap().as_f64();
            results.push(value);
            if extend {
                inputs.push(value);
            }
        }
        results
    }

    /// Σ over states of `weight · state` after one step of one element.
    fn loss(cell: &Cell, inputs: &[f64], weights: &[f64]) -> f64 {
        let values = run(&cell.values, inputs.to_vec(), true);
        cell.states
            .iter()
            .zip(weights)
            .map(|(s, w)| values[*s] * w)
            .sum()
    }

    #[test]
    fn attributes_keep_cells_and_their_gradients() {
        for (name, cell) in all() {
            assert_eq!(
                Cell::from_attrs(&cell.attrs()).as_ref(),
                Some(&cell),
                "{name}"
            );
            let gradient = cell.gradient().unwrap();
            let kept = CellGradient::from_attrs(&gradient.attrs());
            assert_eq!(kept.as_ref(), Some(&gradient), "{name}");
            assert_eq!(gradient.is_shared(), name != "gru", "{name}");
        }
    }

    #[test]
    fn gradients_of_cells_are_finite_differences() {
        for (name, cell) in all() {
            let n_inputs = 2 * cell.gates + cell.n_states();
            let inputs: Vec<f64> = (0..n_inputs)
                .map(|n| (n as f64 * 1.7).sin() * 0.9 + 0.05)
                .collect();
            let weights: Vec<f64> = (0..cell.n_states()).map(|k| 0.7 - k as f64).collect();
            let values = run(&cell.values, inputs.clone(), true);
            let gradient = cell.gradient().unwrap();
            let given = [&inputs[2 * cell.gates..], &values, &weights].concat();
            let all = [
                gradient.x.clone(),
                gradient.q.clone(),
                gradient.before.clone(),
            ]
            .concat();
            for (n, found) in run(&all, given, false).into_iter().enumerate() {
                let h = 1e-6;
                let moved = |by: f64| {
                    let mut at = inputs.clone();
                    at[n] += by;
                    loss(&cell, &at, &weights)
                };
                let expected = (moved(h) - moved(-h)) / (2.0 * h);
                // Central differences of numbers near 1 are exact to 1e-10.
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{name}, input {n}: {found} instead of {expected}"
                );
            }
        }
    }
}
