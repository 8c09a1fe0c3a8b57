//! The step of a recurrence over time, as expressions.
//!
//! A step reads, for every position `j` of a row of width `H`, the gates' inputs `x_g[j]`, the products
//! `q_g[j] = (h·Wᵀ + b)[g·H + j]` of the state `h` before the step, and all states before it. It computes a list of
//! values; some of them are the states after the step, the others are kept for the backward pass.
//! [`Cell::gradient`] derives the step of the backward pass. Both are attributes of a library node, so that
//! interpreter, expansion and code generators read the same formulas. Never knows a cell: `ops::recurrence` has them.

use crate::expr::Expr;
use crate::graph::{Attr, Attrs};

/// The step of the forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// How many products of width `H` a step reads.
    pub gates: usize,
    /// What the step computes, over the inputs `x_0…, q_0…, s_0…, v_0…`: inputs of gates, products, states before
    /// the step, earlier values.
    pub values: Vec<Expr>,
    /// Which values are the states after the step. The first one is the `h` of the products.
    pub states: Vec<usize>,
}

/// The step of the backward pass, over the inputs `s_0…, v_0…, d_0…`: states before the step, values of the step,
/// gradients of the states after it.
#[derive(Clone, Debug, PartialEq)]
pub struct CellGradient {
    /// Which values are states.
    pub states: Vec<usize>,
    /// How many values a step has.
    pub n_values: usize,
    /// Gradients of the gates' inputs.
    pub x: Vec<Expr>,
    /// Gradients of the products; equal to `x` where the two are only ever added.
    pub q: Vec<Expr>,
    /// Gradients of the states before the step, without what goes through the products.
    pub before: Vec<Expr>,
}

impl Cell {
    /// How many states a step has.
    pub fn n_states(&self) -> usize {
        self.states.len()
    }

    /// Values that are not states, in order.
    pub fn kept(&self) -> Vec<usize> {
        kept(self.values.len(), &self.states)
    }

    /// The cell as attributes: `gates`, `states`, `value0`, `value1`, ….
    pub fn attrs(&self) -> Attrs {
        let mut attrs = Attrs::new();
        attrs.insert("gates".into(), Attr::Int(self.gates as i64));
        attrs.insert("states".into(), positions(&self.states));
        insert(&mut attrs, "value", &self.values);
        attrs
    }

    /// The cell that attributes hold; `None` if they hold none, or one that refers to what comes later.
    pub fn from_attrs(attrs: &Attrs) -> Option<Cell> {
        let Some(Attr::Int(gates)) = attrs.get("gates") else {
            return None;
        };
        let cell = Cell {
            gates: usize::try_from(*gates).ok().filter(|g| *g > 0)?,
            values: expressions(attrs, "value"),
            states: states_of(attrs)?,
        };
        let before = 2 * cell.gates + cell.n_states();
        let in_order = |(n, value): (usize, &Expr)| value.inputs().iter().all(|i| *i < before + n);
        let known = cell.states.iter().all(|s| *s < cell.values.len());
        (known && cell.values.iter().enumerate().all(in_order)).then_some(cell)
    }

    /// The step of the backward pass, by the chain rule over the values from last to first. A value that occurs in a
    /// derivative, as `tanh x` in `1 − tanh² x`, is read from what was kept. `None` if a derivative needs an input of
    /// a gate or a product that no value keeps.
    pub fn gradient(&self) -> Option<CellGradient> {
        let (n_states, n_values) = (self.n_states(), self.values.len());
        let first = 2 * self.gates + n_states;
        let gradient_of_state = |k: usize| Expr::In(first + n_values + k);
        let mut gradients: Vec<Option<Expr>> = vec![None; first + n_values];
        for (k, value) in self.states.iter().enumerate() {
            gradients[first + value] = Some(gradient_of_state(k));
        }
        for (n, value) in self.values.iter().enumerate().rev() {
            let Some(factor) = gradients[first + n].clone() else {
                continue;
            };
            for input in value.inputs() {
                let Some(part) = value.pullback(input, &factor) else {
                    continue;
                };
                gradients[input] = Some(match gradients[input].take() {
                    Some(sum) => sum.add(part),
                    None => part,
                });
            }
        }
        let known: Vec<(&Expr, usize)> = self.values.iter().zip(first..).collect();
        let finished = |input: usize| -> Option<Expr> {
            let Some(gradient) = &gradients[input] else {
                return Some(Expr::float(0.0));
            };
            let gradient = with_known(gradient, &known);
            let is_kept = |i: &usize| *i >= 2 * self.gates;
            gradient
                .inputs()
                .iter()
                .all(is_kept)
                .then(|| gradient.substitute_inputs(&|i| Expr::In(i - 2 * self.gates)))
        };
        let all =
            |from: usize, n: usize| (from..from + n).map(finished).collect::<Option<Vec<_>>>();
        Some(CellGradient {
            states: self.states.clone(),
            n_values,
            x: all(0, self.gates)?,
            q: all(self.gates, self.gates)?,
            before: all(2 * self.gates, n_states)?,
        })
    }
}

impl CellGradient {
    /// Values that are not states, in order.
    pub fn kept(&self) -> Vec<usize> {
        kept(self.n_values, &self.states)
    }

    /// Whether the gradients of the products are those of the gates' inputs.
    pub fn is_shared(&self) -> bool {
        self.x == self.q
    }

    /// The cell as attributes: `states`, `n_values`, `x0`, …, `q0`, …, `before0`, ….
    pub fn attrs(&self) -> Attrs {
        let mut attrs = Attrs::new();
        attrs.insert("states".into(), positions(&self.states));
        attrs.insert("n_values".into(), Attr::Int(self.n_values as i64));
        insert(&mut attrs, "x", &self.x);
        insert(&mut attrs, "q", &self.q);
        insert(&mut attrs, "before", &self.before);
        attrs
    }

    /// The gradient that attributes hold; `None` if they hold none.
    pub fn from_attrs(attrs: &Attrs) -> Option<CellGradient> {
        let Some(Attr::Int(n_values)) = attrs.get("n_values") else {
            return None;
        };
        let found = CellGradient {
            states: states_of(attrs)?,
            n_values: usize::try_from(*n_values).ok()?,
            x: expressions(attrs, "x"),
            q: expressions(attrs, "q"),
            before: expressions(attrs, "before"),
        };
        let n_states = found.states.len();
        let n_inputs = 2 * n_states + found.n_values;
        let all = [&found.x, &found.q, &found.before];
        let is_known = |e: &Expr| e.inputs().iter().all(|i| *i < n_inputs);
        let fits = all.into_iter().flatten().all(is_known)
            && found.states.iter().all(|s| *s < found.n_values)
            && !found.x.is_empty()
            && found.x.len() == found.q.len()
            && found.before.len() == n_states;
        fits.then_some(found)
    }
}

fn kept(n_values: usize, states: &[usize]) -> Vec<usize> {
    (0..n_values).filter(|n| !states.contains(n)).collect()
}

fn positions(list: &[usize]) -> Attr {
    Attr::Ints(list.iter().map(|n| *n as i64).collect())
}

fn insert(attrs: &mut Attrs, name: &str, list: &[Expr]) {
    for (n, e) in list.iter().enumerate() {
        attrs.insert(format!("{name}{n}"), Attr::Expr(e.clone()));
    }
}

fn expressions(attrs: &Attrs, name: &str) -> Vec<Expr> {
    let at = |n: usize| match attrs.get(&format!("{name}{n}")) {
        Some(Attr::Expr(e)) => Some(e.clone()),
        _ => None,
    };
    (0..).map_while(at).collect()
}

fn states_of(attrs: &Attrs) -> Option<Vec<usize>> {
    let Some(Attr::Ints(list)) = attrs.get("states") else {
        return None;
    };
    let list: Option<Vec<usize>> = list.iter().map(|n| usize::try_from(*n).ok()).collect();
    list.filter(|list| !list.is_empty())
}

/// The expression with every part that equals a known one replaced by its input.
fn with_known(e: &Expr, known: &[(&Expr, usize)]) -> Expr {
    if let Some((_, input)) = known.iter().find(|(k, _)| *k == e) {
        return Expr::In(*input);
    }
    e.map_children(|child| with_known(child, known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_that_reads_a_later_value_is_none() {
        let mut cell = Cell {
            gates: 1,
            values: vec![Expr::In(0).add(Expr::In(1)), Expr::In(3).tanh()],
            states: vec![1],
        };
        assert_eq!(Cell::from_attrs(&cell.attrs()).as_ref(), Some(&cell));
        cell.values[0] = Expr::In(4);
        assert_eq!(Cell::from_attrs(&cell.attrs()), None);
        cell.values[0] = Expr::float(1.0);
        cell.states = vec![2];
        assert_eq!(Cell::from_attrs(&cell.attrs()), None);
    }

    #[test]
    fn a_cell_that_does_not_keep_what_its_gradient_reads_has_none() {
        // exp(x·q) needs both factors.
        let cell = Cell {
            gates: 1,
            values: vec![Expr::In(0).mul(Expr::In(1)).exp()],
            states: vec![0],
        };
        assert_eq!(cell.gradient(), None);
    }
}
