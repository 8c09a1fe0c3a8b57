//! Sizes that are known when the file runs: computed from the shapes of its inputs.

use super::nodes::{Nodes, Refusal, int};
use graph::{Atom, DType, Scalar, SymExpr, Symbol};

impl Nodes<'_> {
    /// A list of sizes as an operand: a constant where all are numbers.
    pub(super) fn shape(&mut self, sizes: &[SymExpr]) -> Result<String, Refusal> {
        let fixed: Option<Vec<i64>> = sizes.iter().map(SymExpr::as_const).collect();
        if let Some(fixed) = fixed {
            return Ok(self.ints(&fixed));
        }
        let mut parts = Vec::new();
        for size in sizes {
            parts.push(match (size.as_const(), size.as_symbol()) {
                (Some(n), _) => self.ints(&[n]),
                (_, Some(symbol)) => {
                    let (input, axis) = self.holder(symbol)?;
                    let only = vec![int("start", axis), int("end", axis + 1)];
                    self.node("Shape", &[&input], only)
                }
                _ => {
                    let scalar = self.size(size)?;
                    let one = self.ints(&[1]);
                    self.node("Reshape", &[&scalar, &one], Vec::new())
                }
            });
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        Ok(match parts.as_slice() {
            [one] => one.to_string(),
            parts => self.node("Concat", parts, vec![int("axis", 0)]),
        })
    }

    /// One size as an i64 without dimensions.
    pub(super) fn size(&mut self, size: &SymExpr) -> Result<String, Refusal> {
        if let Some(n) = size.as_const() {
            return Ok(self.number(Scalar::Int(n), DType::I64));
        }
        let key = size.to_string();
        if let Some(known) = self.sizes.get(&key) {
            return Ok(known.clone());
        }
        let mut sum: Option<String> = None;
        for (atoms, coefficient) in size.terms() {
            let mut product: Option<String> = None;
            for atom in atoms {
                let factor = self.atom(atom)?;
                product = Some(match product {
                    Some(p) => self.node("Mul", &[&p, &factor], Vec::new()),
                    None => factor,
                });
            }
            let factor = self.number(Scalar::Int(*coefficient), DType::I64);
            let term = match product {
                Some(p) if *coefficient == 1 => p,
                Some(p) => self.node("Mul", &[&p, &factor], Vec::new()),
                None => factor,
            };
            sum = Some(match sum {
                Some(s) => self.node("Add", &[&s, &term], Vec::new()),
                None => term,
            });
        }
        let sum = sum.unwrap_or_else(|| self.number(Scalar::Int(0), DType::I64));
        self.sizes.insert(key, sum.clone());
        Ok(sum)
    }

    fn atom(&mut self, atom: &Atom) -> Result<String, Refusal> {
        let pair = |nodes: &mut Self, op: &str, a: &SymExpr, b: &SymExpr| {
            let (a, b) = (nodes.size(a)?, nodes.size(b)?);
            Ok(nodes.node(op, &[&a, &b], Vec::new()))
        };
        match atom {
            Atom::Symbol(symbol) => self.symbol(symbol),
            // Sizes are not negative, and for those C's division, which ONNX has, is the floor.
            Atom::FloorDiv(a, b) => pair(self, "Div", a, b),
            Atom::Mod(a, b) => pair(self, "Mod", a, b),
            Atom::Min(a, b) => pair(self, "Min", a, b),
            Atom::Max(a, b) => pair(self, "Max", a, b),
        }
    }

    /// A dynamic size, without dimensions.
    fn symbol(&mut self, symbol: &Symbol) -> Result<String, Refusal> {
        let (input, axis) = self.holder(symbol)?;
        let shape = self.node("Shape", &[&input], Vec::new());
        let axis = self.number(Scalar::Int(axis), DType::I64);
        Ok(self.node("Gather", &[&shape, &axis], vec![int("axis", 0)]))
    }

    /// The first input that has a dynamic size as a dimension, and which one.
    fn holder(&self, symbol: &Symbol) -> Result<(String, i64), Refusal> {
        for id in &self.graph.inputs {
            let shape = &self.graph.container(*id).shape;
            if let Some(axis) = shape.iter().position(|s| s.as_symbol() == Some(symbol)) {
                return Ok((self.value(*id), axis as i64));
            }
        }
        Err(Refusal(format!(
            "no input has the size `{symbol}` as a dimension"
        )))
    }
}
