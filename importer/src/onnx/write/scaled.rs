//! Constant factors of matrix products, joined ones too, as an attribute of the product instead of a pass over it.
//!
//! Before: `g = Gemm(a, b)`, `h = Mul(0.1, g)`, as the running mean of an optimizer wants it. After:
//! `h = Gemm(a, b, alpha 0.1)`, and where `g` is a result, `g = Mul(h, 10)`: one pass less if `g` is not asked
//! for, and otherwise no more. In single precision only, as attributes are. Where rows are added into zeros, as in
//! the gradient of a lookup, the rows are scaled instead of the table, which has more rows.

use super::super::proto::{AttributeProto, NodeProto, TensorProto};
use super::nodes::{Nodes, float};
use graph::{DType, Scalar};
use std::collections::BTreeMap;

/// The row count assumed for a symbolic size.
const MOST_OPEN_ROWS: i64 = 4096;

impl Nodes<'_> {
    /// Moves factors into products; `results` are the values that the file gives.
    pub(super) fn scale_products(&mut self, results: &[&str]) {
        let mut reads: BTreeMap<String, usize> = BTreeMap::new();
        for input in self.list.iter().flat_map(|node| &node.input) {
            *reads.entry(input.clone()).or_default() += 1;
        }
        let mut unread = Vec::new();
        for at in 0..self.list.len() {
            let Some((value, factor)) = self.scaling(&self.list[at]) else {
                continue;
            };
            let once = |name: &str| reads.get(name) == Some(&1);
            let inner = |name: &str| once(name) && !results.contains(&name);
            let made = self.position(&value).filter(|_| once(&value));
            let products = made.and_then(|last| Some((self.products_of(last, &inner)?, last)));
            let Some((products, last)) = products else {
                if let Some(sum) = self.scattered(&value).filter(|_| inner(&value)) {
                    self.scale_before(at, sum);
                }
                continue;
            };
            let scaled = std::mem::take(&mut self.list[at].output[0]);
            for product in products {
                let alpha = float("alpha", f64::from(factor));
                self.list[product].attribute.push(alpha);
            }
            self.list[last].output[0].clone_from(&scaled);
            self.made_at(&scaled, last);
            if !results.contains(&value.as_str()) {
                unread.push(at);
                continue;
            }
            let inverse = Scalar::Float(1.0 / f64::from(factor));
            let inverse = self.number(inverse, DType::F32);
            let node = &mut self.list[at];
            node.input = vec![scaled, inverse];
            node.output[0] = value;
        }
        for at in unread.into_iter().rev() {
            self.list.remove(at);
        }
    }

    /// The position of the node that makes a value by adding rows into zeros, if these are fewer than the value's rows.
    fn scattered(&self, value: &str) -> Option<usize> {
        let at = self.position(value)?;
        let node = Some(&self.list[at]).filter(|node| node.op_type == "ScatterND")?;
        let [into, _, added] = node.input.as_slice() else {
            return None;
        };
        let is_sum = |a: &AttributeProto| a.s.as_deref() == Some(b"add");
        let into = self.maker(into).filter(|n| n.op_type == "Expand")?;
        let is_zero = self.initializer(&into.input[0]).and_then(number) == Some(0.0);
        let n_rows = |value: &str| self.shapes.get(value)?.first();
        let n_added = n_rows(added)?.as_const().unwrap_or(MOST_OPEN_ROWS);
        let are_fewer = n_rows(value)?.as_const()? > n_added;
        let adds = node.attribute.iter().any(is_sum);
        (adds && is_zero && are_fewer).then_some(at)
    }

    /// Multiplies the added rows instead of the sum: the two nodes change places, and nothing between them reads
    /// the sum.
    fn scale_before(&mut self, scaling: usize, sum: usize) {
        let added = self.list[sum].input[2].clone();
        let name = self.fresh(&format!("{added}.scaled"));
        let unscaled = self.list[sum].output[0].clone();
        let scaled = std::mem::replace(&mut self.list[scaling].output[0], name.clone());
        for input in &mut self.list[scaling].input {
            if *input == unscaled {
                input.clone_from(&added);
            }
        }
        self.list[sum].input[2] = name;
        self.list[sum].output[0] = scaled;
        self.list.swap(scaling, sum);
        self.find_makers();
    }

    /// What a node multiplies with a stored number, and the number.
    fn scaling(&self, node: &NodeProto) -> Option<(String, f32)> {
        let number = |name: &str| self.initializer(name).and_then(number);
        let [a, b] = node.input.as_slice() else {
            return None;
        };
        let (value, factor) = match (number(a), number(b)) {
            (Some(factor), None) => (b, factor),
            (None, Some(factor)) => (a, factor),
            _ => return None,
        };
        // With a factor farther from 1, the product or the inverse may leave the range of single precision.
        let usable = (2f32.powi(-20)..=2f32.powi(20)).contains(&factor.abs());
        (node.op_type == "Mul" && usable).then(|| (value.clone(), factor))
    }

    /// The products that a node's result consists of, perhaps transposed, reshaped or joined.
    fn products_of(&self, last: usize, inner: &dyn Fn(&str) -> bool) -> Option<Vec<usize>> {
        let (mut open, mut products) = (vec![last], Vec::new());
        while let Some(at) = open.pop() {
            let node = &self.list[at];
            let n_moved = match node.op_type.as_str() {
                "Transpose" | "Reshape" => 1,
                // Factors after the transpose of a concatenation stay: without a node after it, ONNX Runtime moves the
                // transpose through more of the graph, and steps of convolutional networks become slower.
                "Concat" if at == last => node.input.len(),
                "Gemm" => {
                    let has_factor = node.attribute.iter().any(|a| a.name == "alpha");
                    (node.input.len() == 2 && !has_factor).then_some(())?;
                    products.push(at);
                    continue;
                }
                _ => return None,
            };
            for from in &node.input[..n_moved] {
                open.push(self.position(from).filter(|_| inner(from))?);
            }
        }
        Some(products)
    }
}

/// The number of a tensor without dimensions, in single precision.
fn number(tensor: &TensorProto) -> Option<f32> {
    let bytes: [u8; 4] = tensor.raw_data.as_deref()?.try_into().ok()?;
    (tensor.dims.is_empty() && tensor.data_type == 1).then(|| f32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::super::nodes::{int, text};
    use super::super::trial::written;
    use super::*;
    use graph::SymExpr;

    /// `factor · value`.
    fn times(nodes: &mut Nodes, factor: f64, value: &str) -> String {
        let factor = nodes.number(Scalar::Float(factor), DType::F32);
        nodes.node("Mul", &[&factor, value], Vec::new())
    }

    fn product(nodes: &mut Nodes) -> String {
        nodes.node("Gemm", &["a", "b"], Vec::new())
    }

    #[test]
    fn a_factor_becomes_an_attribute_of_its_product() {
        let lines = written(|n| {
            let g = product(n);
            vec![times(n, 0.25, &g)]
        });
        assert_eq!(lines, ["0 = Gemm(a, b) alpha 0.25"]);
    }

    #[test]
    fn a_product_that_is_a_result_is_computed_from_the_scaled_one() {
        let lines = written(|n| {
            let g = product(n);
            vec![times(n, 0.25, &g), g]
        });
        assert_eq!(lines, ["0 = Gemm(a, b) alpha 0.25", "1 = Mul(0, 4)"]);
    }

    #[test]
    fn transposes_and_shapes_between_are_looked_through() {
        let lines = written(|n| {
            let g = product(n);
            let t = n.node("Transpose", &[&g], Vec::new());
            vec![times(n, 0.25, &t)]
        });
        let alpha = "n.gemm = Gemm(a, b) alpha 0.25";
        assert_eq!(lines, [alpha, "0 = Transpose(n.gemm)"]);
    }

    #[test]
    fn each_of_joined_products_takes_the_factor() {
        let joined = |n: &mut Nodes, of: &str| {
            let (g, h) = (product(n), n.node("Gemm", &["b", of], Vec::new()));
            let both = n.node("Concat", &[&g, &h], vec![int("axis", 0)]);
            vec![times(n, 0.25, &both), h]
        };
        let lines = written(|n| joined(n, "a")[..1].to_vec());
        let made = [
            "n.gemm = Gemm(a, b) alpha 0.25",
            "n.gemm_2 = Gemm(b, a) alpha 0.25",
            "0 = Concat(n.gemm, n.gemm_2) axis 0",
        ];
        assert_eq!(lines, made);
        // One of them is a result.
        let lines = written(|n| joined(n, "a"));
        assert!(lines.iter().all(|l| !l.contains("alpha")), "{lines:?}");
        // Joined, then turned.
        let lines = written(|n| {
            let g = product(n);
            let twice = n.node("Concat", &[&g, "a"], vec![int("axis", 0)]);
            let turned = n.node("Transpose", &[&twice], Vec::new());
            vec![times(n, 0.25, &turned)]
        });
        assert!(lines.iter().all(|l| !l.contains("alpha")), "{lines:?}");
    }

    #[test]
    fn rows_are_scaled_before_they_are_added_into_zeros() {
        let scattered = |n: &mut Nodes, into: f64, n_rows: i64| {
            let zero = n.number(Scalar::Float(into), DType::F32);
            let shape = n.ints(&[n_rows, 4]);
            let (zeros, rows) = (n.of2("Expand", &zero, &shape), n.ints(&[0, 0, 3, 4]));
            let how = vec![text("reduction", "add")];
            let sum = n.node("ScatterND", &[&zeros, &rows, "a"], how);
            let sizes = [n_rows, 4].map(SymExpr::constant);
            n.shapes.insert(sum.clone(), sizes.to_vec());
            // Between the two nodes that change places.
            let other = n.node("Exp", &["b"], Vec::new());
            (times(n, 0.25, &sum), sum, other)
        };
        let lines = written(|n| {
            let (scaled, _, other) = scattered(n, 0.0, 9);
            vec![n.of2("Sub", &scaled, &other)]
        });
        let made = [
            "n.expand = Expand(0, [9, 4])",
            "a.scaled = Mul(0.25, a)",
            "n.exp = Exp(b)",
            "n.mul = ScatterND(n.expand, [0, 0, 3, 4], a.scaled) reduction add",
            "0 = Sub(n.mul, n.exp)",
        ];
        assert_eq!(lines, made);
        let stays = |lines: Vec<String>| {
            let scaled = lines.iter().any(|l| l.starts_with("a.scaled"));
            assert!(!scaled, "{lines:?}");
        };
        // Not into zeros; into a table of no more rows.
        stays(written(|n| vec![scattered(n, 1.0, 9).0]));
        stays(written(|n| vec![scattered(n, 0.0, 4).0]));
        // Another node of zeros, of two operands.
        stays(written(|n| {
            let (shape, two) = (n.ints(&[4, 4]), n.of2("Mul", "a", "b"));
            let zero = n.number(Scalar::Float(0.0), DType::F32);
            let zeros = n.of2("Expand", &zero, &shape);
            let wide = n.of2("Pow", &zeros, &two);
            n.shapes
                .insert(wide.clone(), [4, 4].map(SymExpr::constant).to_vec());
            vec![times(n, 0.25, &wide)]
        }));
        // The sum is a result, or read by another node.
        stays(written(|n| {
            let (scaled, sum, _) = scattered(n, 0.0, 9);
            vec![scaled, sum]
        }));
        stays(written(|n| {
            let (scaled, sum, _) = scattered(n, 0.0, 9);
            vec![scaled, n.node("Exp", &[&sum], Vec::new())]
        }));
    }

    #[test]
    fn what_others_read_keeps_its_factor() {
        let unscaled = |lines: Vec<String>| {
            assert!(lines.iter().all(|l| !l.contains("alpha")), "{lines:?}");
        };
        // The product is read by another node as well.
        unscaled(written(|n| {
            let g = product(n);
            let e = n.node("Exp", &[&g], Vec::new());
            vec![times(n, 0.25, &g), e]
        }));
        // What is transposed is a result itself.
        unscaled(written(|n| {
            let g = product(n);
            let t = n.node("Transpose", &[&g], Vec::new());
            vec![times(n, 0.25, &t), g]
        }));
        // The product has an addend, which must not be scaled.
        unscaled(written(|n| {
            let g = n.node("Gemm", &["a", "b", "a"], Vec::new());
            vec![times(n, 0.25, &g)]
        }));
        // The factor has no inverse in reach, or none at all.
        for factor in [0.0, 1e-30, f64::INFINITY, f64::NAN] {
            unscaled(written(|n| {
                let g = product(n);
                vec![times(n, factor, &g)]
            }));
        }
        // The factor is no single-precision number.
        unscaled(written(|n| {
            let g = product(n);
            let factor = n.number(Scalar::Float(0.25), DType::F64);
            vec![n.node("Mul", &[&factor, &g], Vec::new())]
        }));
        // A product takes one factor.
        let lines = written(|n| {
            let g = product(n);
            let h = times(n, 0.25, &g);
            vec![times(n, 0.5, &h)]
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
    }

    #[test]
    fn a_result_twice_is_copied_under_a_name_of_its_own() {
        let lines = written(|n| {
            // Left out, since nothing reads them; their names are not given again.
            for input in ["a", "b"] {
                n.node("Exp", &[input], Vec::new());
            }
            let g = product(n);
            vec![g.clone(), g]
        });
        assert_eq!(lines, ["0 = Gemm(a, b)", "1 = Identity(0)"]);
    }
}
