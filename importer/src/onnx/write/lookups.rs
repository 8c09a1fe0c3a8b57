//! Positions: lookups, additions at positions, sorting, counting.

use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::rules::Written;
use graph::{DType, Scalar, SymExpr};
use ops::Call;

fn added() -> Vec<super::nodes::Attribute> {
    vec![text("reduction", "add")]
}

impl Nodes<'_> {
    /// Zeros of a shape.
    pub(super) fn zeros(&mut self, shape: &[SymExpr], dtype: DType) -> Result<String, Refusal> {
        let zero = self.number(Scalar::Float(0.0), dtype);
        let shape = self.shape(shape)?;
        Ok(self.of2("Expand", &zero, &shape))
    }

    /// The indices before negative ones were counted from the end: the standard's lookups do this themselves. `size` is
    /// the size of the dimension.
    fn uncounted(&mut self, index: &str, size: &SymExpr) -> String {
        let whole = || index.to_string();
        let Some([is_low, counted, own]) = self.operands(index, "Where") else {
            return whole();
        };
        let [Some([below, zero]), Some([moved, n])] =
            [(&is_low, "Less"), (&counted, "Add")].map(|(value, op)| self.operands(value, op))
        else {
            return whole();
        };
        let by_zero = self.stored_ints(&zero) == Some(vec![0]);
        match self.size(size) {
            Ok(size) if by_zero && n == size && below == own && moved == own => own,
            _ => whole(),
        }
    }

    /// The operands of the node that makes a value, if it is of operator `op` and has `N` operands.
    fn operands<const N: usize>(&self, value: &str, op: &str) -> Option<[String; N]> {
        let node = self.maker(value).filter(|node| node.op_type == op)?;
        node.input.clone().try_into().ok()
    }

    /// The value with its dimensions in another order.
    fn ordered(&mut self, value: String, order: &[i64]) -> String {
        if order.iter().enumerate().all(|(d, o)| d as i64 == *o) {
            return value;
        }
        self.node("Transpose", &[&value], vec![int_list("perm", order)])
    }
}

pub(super) fn gather(n: &mut Nodes, c: &Call) -> Written {
    let axis = c.int("axis")?;
    let (x, index) = (n.input(c, 0)?, n.input(c, 1)?);
    let shape = &c.input(0)?.shape;
    let size = shape.get(axis.rem_euclid(shape.len().max(1) as i64) as usize);
    let index = size.map_or(index.clone(), |size| n.uncounted(&index, size));
    let value = n.node("Gather", &[&x, &index], vec![int("axis", axis)]);
    n.output(c, 0, value);
    Ok(())
}

/// Adds rows of dy where they were looked up. Meanwhile the axis of the lookup is the first.
pub(super) fn gather_gradient(n: &mut Nodes, c: &Call) -> Written {
    let axis = c.int("axis")?;
    let (dy, index) = (c.input(0)?.clone(), c.input(1)?.clone());
    let (mut updates, index_name) = (n.input(c, 0)?, n.input(c, 1)?);
    let (before, count) = (axis as usize, index.rank());
    let [first, after] = [0..before, before + count..dy.rank()];
    let row: Vec<SymExpr> = [&dy.shape[first.clone()], &dy.shape[after.clone()]].concat();
    let others = first.chain(after).map(|d| d as i64);
    let order: Vec<i64> = (before..before + count)
        .map(|d| d as i64)
        .chain(others)
        .collect();
    updates = n.ordered(updates, &order);
    if let Some(graph::Attr::Int(padding)) = c.library.attrs.get("padding_idx") {
        let padding = n.number(Scalar::Int(*padding), index.dtype);
        let skip = n.of2("Equal", &index_name, &padding);
        let ones = row.iter().map(|_| SymExpr::constant(1));
        let shape: Vec<SymExpr> = index.shape.iter().cloned().chain(ones).collect();
        let skip = n.reshaped(&skip, &shape)?;
        let zero = n.number(Scalar::Float(0.0), dy.dtype);
        updates = n.node("Where", &[&skip, &zero, &updates], Vec::new());
    }
    let count = SymExpr::product(&index.shape);
    let flat: Vec<SymExpr> = std::iter::once(count.clone())
        .chain(row.iter().cloned())
        .collect();
    let updates = n.reshaped(&updates, &flat)?;
    let index_name = n.uncounted(&index_name, &c.sizes("size")?[0]);
    let rows = n.reshaped(&index_name, &[count, SymExpr::constant(1)])?;
    let rows = n.cast(rows, index.dtype, DType::I64);
    let size: Vec<SymExpr> = c
        .sizes("size")?
        .into_iter()
        .chain(row.iter().cloned())
        .collect();
    let zeros = n.zeros(&size, dy.dtype)?;
    let value = n.node("ScatterND", &[&zeros, &rows, &updates], added());
    let back: Vec<i64> = (1..=axis)
        .chain([0])
        .chain(axis + 1..size.len() as i64)
        .collect();
    let value = n.ordered(value, &back);
    n.output(c, 0, value);
    Ok(())
}

/// An index may be smaller than what it scatters into along the other dimensions, as in the standard.
pub(super) fn scatter_add(n: &mut Nodes, c: &Call) -> Written {
    let (index, source) = (n.input(c, 1)?, n.input(c, 2)?);
    let into = match c.optional_id(0) {
        Some(id) => n.operand(id),
        None => n.zeros(&c.sizes("shape")?, c.input(2)?.dtype)?,
    };
    let mut attributes = added();
    attributes.push(int("axis", c.int("axis")?));
    let value = n.node("ScatterElements", &[&into, &index, &source], attributes);
    n.output(c, 0, value);
    Ok(())
}

pub(super) fn topk(n: &mut Nodes, c: &Call) -> Written {
    let (x, k) = (n.input(c, 0)?, n.shape(&c.sizes("k")?)?);
    let attributes = vec![
        int("axis", c.int("axis")?),
        int("largest", c.bool_or("largest", true)?.into()),
    ];
    let made = n.nodes("TopK", &[&x, &k], 2, attributes);
    n.output(c, 0, made[0].clone());
    n.output(c, 1, made[1].clone());
    Ok(())
}

pub(super) fn arg_reduce(n: &mut Nodes, c: &Call) -> Written {
    let op = match c.str("kind")?.as_str() {
        "argmax" => "ArgMax",
        _ => "ArgMin",
    };
    let keep = int("keepdims", c.bool_or("keep", false)?.into());
    n.apply(c, op, vec![int("axis", c.int("axis")?), keep])
}

/// `start, start + step, …`, counted in integers.
pub(super) fn iota(n: &mut Nodes, c: &Call) -> Written {
    let (start, step, size) = (c.sizes("start")?, c.sizes("step")?, c.sizes("size")?);
    let stop = start[0].clone() + step[0].clone() * size[0].clone();
    let (start, stop, step) = (n.size(&start[0])?, n.size(&stop)?, n.size(&step[0])?);
    let value = n.node("Range", &[&start, &stop, &step], Vec::new());
    let value = n.cast(value, DType::I64, c.dtype("dtype")?);
    n.output(c, 0, value);
    Ok(())
}

/// Whether each class is the one that is named.
pub(super) fn one_hot(n: &mut Nodes, c: &Call) -> Written {
    let index = c.input(0)?.clone();
    let name = n.input(c, 0)?;
    let name = n.cast(name, index.dtype, DType::I64);
    let last = n.ints(&[-1]);
    let name = n.of2("Unsqueeze", &name, &last);
    let (zero, one) = (
        n.number(Scalar::Int(0), DType::I64),
        n.number(Scalar::Int(1), DType::I64),
    );
    let depth = n.size(&c.sizes("depth")?[0])?;
    let classes = n.node("Range", &[&zero, &depth, &one], Vec::new());
    let hot = n.of2("Equal", &name, &classes);
    let hot = n.cast(hot, DType::Bool, c.dtype("dtype")?);
    n.output(c, 0, hot);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::trial::written;
    use super::*;

    /// What is looked up where indices `a` below `low` are counted from the end of `rows` rows, and others are
    /// those of `own`.
    fn looked_up(low: i64, rows: i64, own: &str) -> Vec<String> {
        written(|n| {
            let number = |n: &mut Nodes, i: i64| n.number(Scalar::Int(i), DType::I64);
            let (low, rows) = (number(n, low), number(n, rows));
            let below = n.of2("Less", "a", &low);
            let counted = n.of2("Add", "a", &rows);
            let index = n.node("Where", &[&below, &counted, own], Vec::new());
            let index = n.uncounted(&index, &SymExpr::constant(9));
            vec![n.of2("Gather", "b", &index)]
        })
    }

    #[test]
    fn lookups_count_negative_indices_themselves() {
        assert_eq!(looked_up(0, 9, "a"), ["0 = Gather(b, a)"]);
        for others in [
            looked_up(1, 9, "a"),
            looked_up(0, 8, "a"),
            looked_up(0, 9, "b"),
        ] {
            assert_eq!(others.len(), 4, "{others:?}");
        }
        let plain = written(|n| {
            let index = n.uncounted("a", &SymExpr::constant(9));
            vec![n.of2("Gather", "b", &index)]
        });
        assert_eq!(plain, ["0 = Gather(b, a)"]);
    }
}
