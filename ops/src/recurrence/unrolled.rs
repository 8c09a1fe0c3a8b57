//! The steps of a recurrence one after the other, as operators.

use super::{Sizes, evaluated};
use crate::op::{OpBuilder, OpError, attrs};
use graph::{Attr, Attrs, Builder, ContainerId, DType, Expr, Library, SymExpr};

/// Appends operators of an unrolled loop.
pub(super) struct Unrolled<'a, 'g> {
    pub(super) builder: &'a mut Builder<'g>,
    pub(super) sizes: &'a Sizes,
}

impl Unrolled<'_, '_> {
    /// Appends an expression whose inputs are positions in a table of values.
    pub(super) fn element(
        &mut self,
        e: &Expr,
        table: &[ContainerId],
    ) -> Result<ContainerId, OpError> {
        let read = e.inputs();
        if read.is_empty() {
            let value = evaluated(e, &[]);
            return self.builder.op1(
                "full",
                &[],
                full(&self.sizes.state(), value, self.sizes.dtype),
            );
        }
        let position = |i: usize| read.iter().position(|r| *r == i).unwrap_or_default();
        let e = e.substitute_inputs(&|i| Expr::In(position(i)));
        let inputs: Vec<ContainerId> = read.iter().map(|i| table[*i]).collect();
        self.builder.elementwise(e, &inputs)
    }

    fn part(
        &mut self,
        x: ContainerId,
        axis: i64,
        from: SymExpr,
        to: SymExpr,
    ) -> Result<ContainerId, OpError> {
        let list = attrs([
            ("axis", Attr::Int(axis)),
            ("start", Attr::Sizes(vec![from])),
            ("stop", Attr::Sizes(vec![to])),
        ]);
        self.builder.op1("slice", &[x], list)
    }

    /// Step `t` of `[T, B, n]` as `[B, n]`.
    pub(super) fn step(&mut self, x: ContainerId, t: i64) -> Result<ContainerId, OpError> {
        let one = self.part(x, 0, SymExpr::constant(t), SymExpr::constant(t + 1))?;
        let shape = self.builder.shape(one)[1..].to_vec();
        let list = attrs([("shape", Attr::Sizes(shape))]);
        self.builder.op1("reshape", &[one], list)
    }

    /// The `n` parts of `[B, n·H]`.
    pub(super) fn parts(&mut self, z: ContainerId, n: usize) -> Result<Vec<ContainerId>, OpError> {
        let at = |n: usize| self.sizes.times(n);
        (0..n).map(|n| self.part(z, 1, at(n), at(n + 1))).collect()
    }

    pub(super) fn product(
        &mut self,
        a: ContainerId,
        b: ContainerId,
        equation: &str,
    ) -> Result<ContainerId, OpError> {
        let list = attrs([("equation", Attr::Str(equation.into()))]);
        self.builder.op1("einsum", &[a, b], list)
    }

    pub(super) fn joined(
        &mut self,
        parts: &[ContainerId],
        axis: i64,
    ) -> Result<ContainerId, OpError> {
        let list = attrs([("axis", Attr::Int(axis))]);
        self.builder.op1("concat", parts, list)
    }

    /// Stacks the values `[B, n]` of all steps to `[T, B, n]`.
    pub(super) fn stack(
        &mut self,
        steps: &[ContainerId],
        into: Option<ContainerId>,
    ) -> Result<(), OpError> {
        let Some(into) = into else {
            return Ok(());
        };
        let mut rows = Vec::new();
        for step in steps {
            let mut shape = vec![SymExpr::constant(1)];
            shape.extend(self.builder.shape(*step));
            let list = attrs([("shape", Attr::Sizes(shape))]);
            rows.push(Some(self.builder.op1("reshape", &[*step], list)?));
        }
        self.builder.library(Library {
            op: "concat".into(),
            attrs: attrs([("axis", Attr::Int(0))]),
            inputs: rows,
            outputs: vec![Some(into)],
        });
        Ok(())
    }

    pub(super) fn copy(&mut self, from: ContainerId, into: Option<ContainerId>) {
        if let Some(into) = into {
            self.builder.library(Library {
                op: "elementwise".into(),
                attrs: attrs([("expr", Attr::Expr(Expr::In(0)))]),
                inputs: vec![Some(from)],
                outputs: vec![Some(into)],
            });
        }
    }
}

fn full(shape: &[SymExpr], value: f64, dtype: DType) -> Attrs {
    attrs([
        ("shape", Attr::Sizes(shape.to_vec())),
        ("value", Attr::Float(value)),
        ("dtype", Attr::DType(dtype)),
    ])
}
