//! The loop over time of a recurrence, forward and backward, as C.
//!
//! Each thread takes a block of rows and runs all their steps: rows do not depend on one another, so threads meet
//! nowhere, and results do not depend on their number. A first launch packs the weights in panels of two vectors of
//! columns. A step multiplies the state's rows with every panel, a few rows at a time so that their sums stay in
//! registers, then computes the cell ([`graph::Cell`]) for every position of a row, in vectors. Weights that do not
//! fit into a core's cache are read once for all rows of a block. Formulas: `ops::recurrence`. Never decides which
//! nodes stay whole.

mod products;
mod statements;
mod steps;

use crate::contraction::text::vector_functions;
use crate::emit::scalar;
use graph::{Cell, CellGradient, DType, Expr};
pub(crate) use statements::NotReal;

/// What surrounds the text of one node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Recurrence {
    /// Steps.
    pub(crate) steps: i64,
    /// Rows of a batch.
    pub(crate) rows: i64,
    /// Width of a state.
    pub(crate) width: i64,
    /// Type of the elements: 32 or 64 bits.
    pub(crate) dtype: DType,
    /// Bytes of a vector.
    pub(crate) vector_bytes: i64,
    /// Whether time runs from the last step to the first.
    pub(crate) reverse: bool,
    /// Threads to share rows among.
    pub(crate) threads: i64,
    /// What a step computes.
    pub(crate) step: Step,
    /// Elements before the first one of each buffer.
    pub(crate) offsets: Vec<i64>,
}

/// What a step computes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// A step of the forward pass.
    Forward {
        /// The cell.
        cell: Cell,
        /// Whether products have a bias.
        has_bias: bool,
        /// Whether kept values are stored.
        stores_kept: bool,
    },
    /// A step of the backward pass.
    Backward {
        /// The derivatives.
        cell: CellGradient,
        /// Whether a gradient is given, for each state.
        given: Vec<bool>,
        /// Whether gradients of the products are stored beside those of the gates' inputs.
        stores_products: bool,
    },
}

/// What a buffer of a launch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Input of the node, by its position.
    Input(usize),
    /// Output of the node, by its position.
    Output(usize),
    /// The packed weights.
    Packed,
}

impl Recurrence {
    fn real(&self) -> &'static str {
        scalar::c_type(self.dtype)
    }

    fn bytes(&self) -> i64 {
        self.dtype.bytes() as i64
    }

    fn is_forward(&self) -> bool {
        matches!(self.step, Step::Forward { .. })
    }

    fn gates(&self) -> i64 {
        match &self.step {
            Step::Forward { cell, .. } => cell.gates as i64,
            Step::Backward { cell, .. } => cell.x.len() as i64,
        }
    }

    fn n_states(&self) -> usize {
        match &self.step {
            Step::Forward { cell, .. } => cell.states.len(),
            Step::Backward { cell, .. } => cell.states.len(),
        }
    }

    fn lanes(&self) -> i64 {
        self.vector_bytes / self.bytes()
    }

    /// Columns of a panel.
    fn panel(&self) -> i64 {
        2 * self.lanes()
    }

    /// Panels of the weights.
    fn panels(&self) -> i64 {
        let (columns, _) = self.product();
        (columns + self.panel() - 1) / self.panel()
    }

    /// Elements of a row of a step's product.
    fn stride(&self) -> i64 {
        self.panels() * self.panel()
    }

    /// Most rows whose sums stay in registers, beside two vectors of weights: 32 registers with AVX-512, else 16.
    fn most_rows(&self) -> i64 {
        if self.vector_bytes >= 64 { 12 } else { 6 }
    }

    /// Blocks of rows, one for a thread, and rows of a full block.
    fn blocks(&self) -> (i64, i64) {
        let n = self.threads.min(self.rows).max(1);
        let rows = ((self.rows + n - 1) / n).max(1);
        ((self.rows + rows - 1) / rows, rows)
    }

    /// How many threads have work.
    pub(crate) fn n_blocks(&self) -> u64 {
        self.blocks().0 as u64
    }

    /// Bytes of an output.
    pub(crate) fn output_bytes(&self, n: usize) -> usize {
        let (state, gates) = (self.rows * self.width, self.gates());
        let elements = match &self.step {
            Step::Forward { .. } => self.steps * state,
            Step::Backward { .. } if n < 2 => self.steps * state * gates,
            Step::Backward { .. } => state,
        };
        (elements * self.bytes()) as usize
    }

    /// Rows of the blocks that occur: a full one, and the last one where it has fewer.
    fn block_sizes(&self) -> Vec<i64> {
        let (n_blocks, rows) = self.blocks();
        let last = self.rows - (n_blocks - 1) * rows;
        match last == rows || last <= 0 {
            true => vec![rows],
            false => vec![rows, last],
        }
    }

    /// Splits a block's rows into parts whose sums stay in registers, as equal as they can be.
    fn parts(&self, rows: i64) -> Vec<i64> {
        let n = (rows + self.most_rows() - 1) / self.most_rows();
        (0..n).map(|k| rows * (k + 1) / n - rows * k / n).collect()
    }

    /// Columns and depth of the product of a step.
    fn product(&self) -> (i64, i64) {
        let wide = self.gates() * self.width;
        match self.is_forward() {
            true => (wide, self.width),
            false => (self.width, wide),
        }
    }

    /// Bytes of the packed weights.
    pub(crate) fn packed_bytes(&self) -> usize {
        let (_, depth) = self.product();
        (self.stride() * depth * self.bytes()) as usize
    }

    /// Bytes that each thread needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let carried = match &self.step {
            Step::Forward { .. } => 0,
            Step::Backward { cell, .. } => cell.before.len() as i64 * self.width,
        };
        (self.blocks().1 * (self.stride() + carried) * self.bytes()) as usize
    }

    /// Operations of the products.
    pub(crate) fn product_operations(&self) -> u64 {
        (2 * self.steps * self.rows * self.gates() * self.width * self.width) as u64
    }

    /// Operations of the cells, a function such as tanh counted as several.
    pub(crate) fn cell_operations(&self) -> u64 {
        let count = |list: &[Expr]| list.iter().map(|e| u64::from(e.cost())).sum::<u64>();
        let each = match &self.step {
            Step::Forward { cell, .. } => count(&cell.values),
            Step::Backward { cell, .. } => count(&cell.x) + count(&cell.before),
        };
        each * (self.steps * self.rows * self.width) as u64
    }

    /// The buffers of both launches, in order.
    pub(crate) fn places(&self) -> Vec<Place> {
        let n = self.n_states();
        let mut list = Vec::new();
        match &self.step {
            Step::Forward {
                has_bias,
                stores_kept,
                ..
            } => {
                list.extend([Place::Input(0), Place::Input(1)]);
                list.extend(has_bias.then_some(Place::Input(2)));
                list.extend((0..n).map(|k| Place::Input(3 + k)));
                list.extend((0..n).map(Place::Output));
                list.extend(stores_kept.then_some(Place::Output(n)));
            }
            Step::Backward {
                cell,
                given,
                stores_products,
            } => {
                list.extend((0..1 + 2 * n).map(Place::Input));
                if !cell.kept().is_empty() {
                    list.push(Place::Input(1 + 2 * n));
                }
                let position = |k: usize| Place::Input(2 + 2 * n + k);
                list.extend((0..n).filter(|k| given[*k]).map(position));
                list.push(Place::Output(0));
                list.extend(stores_products.then_some(Place::Output(1)));
                list.extend((0..n).map(|k| Place::Output(2 + k)));
            }
        }
        list.push(Place::Packed);
        list
    }

    /// The name of a buffer in the text.
    fn name_of(&self, place: Place) -> String {
        let n = self.n_states();
        match (&self.step, place) {
            (_, Place::Packed) => "packed".into(),
            (Step::Forward { .. }, Place::Input(0)) => "x".into(),
            (Step::Forward { .. }, Place::Input(1)) | (Step::Backward { .. }, Place::Input(0)) => {
                "w".into()
            }
            (Step::Forward { .. }, Place::Input(2)) => "bias".into(),
            (Step::Forward { .. }, Place::Input(k)) => format!("first{}", k - 3),
            (Step::Forward { .. }, Place::Output(k)) if k < n => format!("state{k}"),
            (Step::Forward { .. }, Place::Output(_)) => "kept".into(),
            (Step::Backward { .. }, Place::Input(k)) if k <= n => format!("first{}", k - 1),
            (Step::Backward { .. }, Place::Input(k)) if k <= 2 * n => format!("state{}", k - 1 - n),
            (Step::Backward { .. }, Place::Input(k)) if k == 1 + 2 * n => "kept".into(),
            (Step::Backward { .. }, Place::Input(k)) => format!("given{}", k - 2 - 2 * n),
            (Step::Backward { .. }, Place::Output(0)) => "dx".into(),
            (Step::Backward { .. }, Place::Output(1)) => "dq".into(),
            (Step::Backward { .. }, Place::Output(k)) => format!("dfirst{}", k - 2),
        }
    }

    fn has(&self, place: Place) -> bool {
        self.places().contains(&place)
    }

    /// The text of both functions.
    pub(crate) fn text(&self, name: &str) -> Result<String, NotReal> {
        let real = self.real();
        let head = format!(
            "typedef {real} {name}_v __attribute__((vector_size({}), aligned({}), may_alias));\n{}",
            self.vector_bytes,
            self.bytes(),
            vector_functions(&format!("{name}_v"), real, self.vector_bytes)
        );
        let body = match &self.step {
            Step::Forward { cell, .. } => self.forward(name, cell)?,
            Step::Backward { cell, given, .. } => self.backward(name, cell, given)?,
        };
        let product = self.product_text(name);
        Ok(head + &product + &self.pack_text(name) + &self.frame(name) + &body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loop_of(rows: i64, threads: i64) -> Recurrence {
        // Inputs: x_0 to x_2, q_0 to q_2, the state, then values.
        let sum = |g: usize| Expr::In(g).add(Expr::In(3 + g));
        let cell = Cell {
            gates: 3,
            values: vec![
                sum(0).sigmoid(),
                sum(1).sigmoid(),
                Expr::In(2).add(Expr::In(7).mul(Expr::In(5))).tanh(),
                Expr::In(8).mul(Expr::In(9)).add(sum(0).sigmoid()),
            ],
            states: vec![3],
        };
        let step = Step::Forward {
            cell,
            has_bias: true,
            stores_kept: true,
        };
        Recurrence {
            steps: 3,
            rows,
            width: 5,
            dtype: DType::F32,
            vector_bytes: 64,
            reverse: false,
            threads,
            step,
            offsets: vec![0; 7],
        }
    }

    #[test]
    fn blocks_and_their_parts_hold_all_rows() {
        for (rows, threads) in [(1, 4), (7, 2), (39, 2), (64, 3), (0, 2)] {
            let form = loop_of(rows, threads);
            let (n_blocks, full) = form.blocks();
            let sizes = form.block_sizes();
            let last = sizes[sizes.len() - 1];
            assert_eq!(
                (n_blocks - 1).max(0) * full + last,
                rows.max(1),
                "{rows} rows"
            );
            assert!(n_blocks <= threads);
            for size in sizes {
                let parts = form.parts(size);
                assert_eq!(parts.iter().sum::<i64>(), size);
                assert!(parts.iter().all(|n| (1..=form.most_rows()).contains(n)));
            }
        }
    }

    #[test]
    fn equal_parts_of_expressions_are_computed_once() {
        let text = loop_of(4, 2).text("f").expect("a text");
        // Two gates through the sigmoid, one candidate through tanh.
        assert_eq!(text.matches("sh_sigmoid(").count(), 2);
        assert_eq!(text.matches("sh_tanh(").count(), 1);
    }

    #[test]
    fn a_cell_with_an_index_has_no_text() {
        let mut form = loop_of(4, 2);
        if let Step::Forward { cell, .. } = &mut form.step {
            cell.values[0] = Expr::Index(graph::SymExpr::constant(1));
        }
        let refused = form.text("f").expect_err("no real number");
        assert!(
            refused.to_string().contains("real numbers only"),
            "{refused}"
        );
    }
}
