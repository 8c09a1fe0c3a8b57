//! Scaled dot-product attention as its two products with a masked softmax between them.
//!
//! `y = dropout(softmax(scale·q·kᵀ + mask))·v` (arXiv 1706.03762; ONNX `Attention`, PyTorch
//! `scaled_dot_product_attention`). It expands to those operators, and so does its gradient; fusion decides
//! which scores are stored.

use crate::index_space::for_each_index;
use crate::op::{Call, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{broadcast_offset, constant_shape, ravel, required};
use crate::shape_rules::{broadcast, display};
use graph::{Attr, Binary, Builder, ContainerId, DType, Expr, Library, SymExpr, Tensor};

/// `attention` (q `[…, L, D]`, k `[…, M, D]`, v `[…, M, E]`, mask?, seed?) → `[…, L, E]`.
///
/// Leading dimensions are equal. The mask broadcasts to `[…, L, M]`: bool (true takes part) or added to
/// the scores. Attributes `scale` (1/√D), `causal` (row l sees columns up to l), `dropout`
/// (probability, 0; needs seed), `id` of the dropout, `fill` (value that replaces scores hidden by a bool mask; by
/// default −∞ is added to them), `safe` (true: a row without visible keys gives zeros; false: NaN).
#[derive(Debug)]
pub struct Attention;

/// Letters for leading dimensions; rows, columns and widths have letters of their own.
const LEADING: &str = "abcfgh";

/// Shapes and attributes; the first inputs of the call are q, k, v and the mask.
pub(crate) struct AttentionShapes {
    leading: Vec<SymExpr>,
    /// `[…, L, M]`
    pub(crate) scores: Vec<SymExpr>,
    pub(crate) y: TensorType,
    pub(crate) scale: Expr,
    causal: bool,
    dropout: f64,
    fill: Option<f64>,
    safe: bool,
}

/// Attributes of the `dropout` of the probabilities.
fn dropout_attrs(call: &Call, probability: f64) -> Result<graph::Attrs, OpError> {
    let id = Attr::Int(call.int_or("id", 0)?);
    Ok(attrs([("p", Attr::Float(probability)), ("id", id)]))
}

impl AttentionShapes {
    pub(crate) fn new(call: &Call) -> Result<AttentionShapes, OpError> {
        let (q, k, v) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let rank = q.rank();
        let fits = (2..=LEADING.len() + 2).contains(&rank)
            && k.rank() == rank
            && v.rank() == rank
            && k.shape[rank - 1] == q.shape[rank - 1]
            && k.shape[rank - 2] == v.shape[rank - 2]
            && q.shape[..rank - 2] == k.shape[..rank - 2]
            && q.shape[..rank - 2] == v.shape[..rank - 2];
        if !fits {
            return Err(call.shape_error(format!(
                "queries {}, keys {} and values {} do not fit",
                display(&q.shape),
                display(&k.shape),
                display(&v.shape)
            )));
        }
        let leading = q.shape[..rank - 2].to_vec();
        let with =
            |a: &SymExpr, b: &SymExpr| [leading.as_slice(), &[a.clone(), b.clone()]].concat();
        let scores = with(&q.shape[rank - 2], &k.shape[rank - 2]);
        if let Some(Some(mask)) = call.inputs.get(3)
            && broadcast(&mask.shape, &scores).as_ref() != Some(&scores)
        {
            return Err(call.shape_error(format!(
                "a mask {} for scores {}",
                display(&mask.shape),
                display(&scores)
            )));
        }
        let width = &q.shape[rank - 1];
        let scale = match (call.library.attrs.contains_key("scale"), width.as_const()) {
            (true, _) => Expr::float(call.float("scale")?),
            (false, Some(d)) => Expr::float(1.0 / (d as f64).sqrt()),
            (false, None) => Expr::Index(width.clone()).cast(q.dtype).rsqrt(),
        };
        let dropout = call.float_or("dropout", 0.0)?;
        if dropout > 0.0 {
            let library = Library {
                op: "dropout".into(),
                attrs: dropout_attrs(call, dropout)?,
                inputs: vec![None; 2],
                outputs: vec![],
            };
            crate::random::rule(&Call {
                library: &library,
                inputs: vec![None, Some(call.input(4)?.clone())],
            })?;
        }
        Ok(AttentionShapes {
            y: TensorType::new(q.dtype, with(&q.shape[rank - 2], &v.shape[rank - 1])),
            leading,
            scores,
            scale,
            causal: call.bool_or("causal", false)?,
            dropout,
            fill: match call.library.attrs.contains_key("fill") {
                true => Some(call.float("fill")?),
                false => None,
            },
            safe: call.bool_or("safe", true)?,
        })
    }

    /// An equation over letters of rows and widths, the leading dimensions added.
    pub(crate) fn equation(&self, a: &str, b: &str, y: &str) -> Attr {
        let lead = &LEADING[..self.leading.len()];
        Attr::Str(format!("{lead}{a},{lead}{b}->{lead}{y}"))
    }

    /// The scores scaled and masked; `In(1)` is the mask.
    pub(crate) fn masked(&self, mask: Option<DType>) -> Expr {
        let scaled = Expr::In(0).mul(self.scale.clone());
        let never = || Expr::float(f64::NEG_INFINITY);
        let mut value = match (mask, self.fill) {
            (Some(DType::Bool), Some(fill)) => Expr::select(Expr::In(1), scaled, Expr::float(fill)),
            // Added as PyTorch does: NaN or +∞ in a masked key makes the row NaN.
            (Some(DType::Bool), None) => {
                scaled.add(Expr::select(Expr::In(1), Expr::float(0.0), never()))
            }
            (Some(_), _) => scaled.add(Expr::In(1)),
            (None, _) => scaled,
        };
        if self.causal {
            let dim = |d: usize| Expr::Index(SymExpr::symbol(format!("i{d}").as_str()));
            let n = self.leading.len();
            let sees = Expr::binary(Binary::Le, dim(n + 1), dim(n));
            value = Expr::select(sees, value, never());
        }
        value
    }

    /// Whether a row that sees nothing gives zeros instead of NaN.
    pub(crate) fn is_safe(&self) -> bool {
        self.safe
    }

    /// Whether a mask of this type takes the place of scores, so that these have no gradient there.
    pub(crate) fn replaces_scores(&self, mask: Option<DType>) -> bool {
        mask == Some(DType::Bool) && self.fill.is_some()
    }

    /// Dropout of numbers in the shape of the scores, row-major; without one, the numbers.
    pub(crate) fn dropped(
        &self,
        call: &Call,
        inputs: &[Option<&Tensor>],
        shape: &[usize],
        x: Vec<f64>,
    ) -> Result<Vec<f64>, OpError> {
        if self.dropout <= 0.0 {
            return Ok(x);
        }
        let (x, seed) = (
            Tensor::from_f64(self.y.dtype, shape, x),
            required(call, inputs, 4)?,
        );
        let library = Library {
            op: "dropout".into(),
            attrs: dropout_attrs(call, self.dropout)?,
            inputs: vec![None; 2],
            outputs: vec![],
        };
        let drop = Call {
            library: &library,
            inputs: vec![
                Some(crate::meaning::type_of(&x)),
                Some(crate::meaning::type_of(seed)),
            ],
        };
        let dropped = crate::random::Dropout.evaluate(&drop, &[Some(&x), Some(seed)])?;
        Ok(dropped[0].to_f64())
    }

    /// Appends the dropout of a container in the shape of the scores, if there is one.
    pub(crate) fn append_dropout(
        &self,
        call: &Call,
        builder: &mut Builder,
        x: ContainerId,
        seed: Option<ContainerId>,
    ) -> Result<ContainerId, OpError> {
        match seed {
            Some(seed) if self.dropout > 0.0 => {
                builder.op1("dropout", &[x, seed], dropout_attrs(call, self.dropout)?)
            }
            _ => Ok(x),
        }
    }

    /// The scores scaled and masked, row-major, and their shape.
    pub(crate) fn masked_scores(
        &self,
        call: &Call,
        inputs: &[Option<&Tensor>],
    ) -> Result<(Vec<f64>, Vec<usize>), OpError> {
        let (q, k) = (required(call, inputs, 0)?, required(call, inputs, 1)?);
        let (qs, ks) = (q.to_f64(), k.to_f64());
        let mask = inputs.get(3).copied().flatten();
        let shape = constant_shape(call, &self.scores)?;
        let n = shape.len();
        let width = q.shape[n - 1];
        let scale = call.float_or("scale", 1.0 / (width as f64).sqrt())?;
        let mut scores = Vec::new();
        for_each_index(&shape, |index| {
            let row = |m: usize| [&index[..n - 2], &[index[m]]].concat();
            let start = |m: usize, of: &Tensor| ravel(&row(m), &of.shape[..n - 1]) * width;
            let (a, b) = (start(n - 2, q), start(n - 1, k));
            let dot: f64 = (0..width).map(|d| qs[a + d] * ks[b + d]).sum();
            let mut score = dot * scale;
            if let Some(mask) = mask {
                let m = mask.at(broadcast_offset(&mask.shape, index));
                score = match mask.dtype {
                    DType::Bool if !m.as_bool() => match self.fill {
                        Some(fill) => fill,
                        None => score + f64::NEG_INFINITY,
                    },
                    DType::Bool => score,
                    _ => score + m.as_f64(),
                };
            }
            if self.causal && index[n - 1] > index[n - 2] {
                score = f64::NEG_INFINITY;
            }
            scores.push(score);
        });
        Ok((scores, shape))
    }

    /// The probabilities, row-major in the shape of the scores.
    fn probabilities(
        &self,
        call: &Call,
        inputs: &[Option<&Tensor>],
    ) -> Result<(Vec<f64>, Vec<usize>), OpError> {
        let (mut p, shape) = self.masked_scores(call, inputs)?;
        for row in p.chunks_mut(shape[shape.len() - 1].max(1)) {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY && self.safe {
                row.fill(0.0);
                continue;
            }
            row.iter_mut().for_each(|s| *s = (*s - max).exp());
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|s| *s /= sum);
        }
        Ok((p, shape))
    }
}

/// `p·v` for each head: p row-major in `shape` `[…, L, M]`, v `[…, M, width]`.
pub(crate) fn weighted(p: &[f64], v: &[f64], shape: &[usize], width: usize) -> Vec<f64> {
    let n = shape.len();
    let (rows, columns) = (shape[n - 2], shape[n - 1]);
    let mut y = Vec::new();
    for (row, weights) in p.chunks(columns.max(1)).enumerate() {
        let head = row / rows.max(1);
        for e in 0..width {
            let value = |m: usize| v[(head * columns + m) * width + e];
            y.push((0..columns).map(|m| weights[m] * value(m)).sum());
        }
    }
    y
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![AttentionShapes::new(call)?.y])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let plan = AttentionShapes::new(call)?;
        let (p, shape) = plan.probabilities(call, inputs)?;
        // Probabilities are numbers of y's type.
        let p = Tensor::from_f64(plan.y.dtype, &shape, p).to_f64();
        let p = plan.dropped(call, inputs, &shape, p)?;
        let v = required(call, inputs, 2)?;
        let out = constant_shape(call, &plan.y.shape)?;
        let y = weighted(&p, &v.to_f64(), &shape, out[out.len() - 1]);
        Ok(vec![Tensor::from_f64(plan.y.dtype, &out, y)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let plan = AttentionShapes::new(call)?;
        let (q, k, v) = (call.input_id(0)?, call.input_id(1)?, call.input_id(2)?);
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let equation = plan.equation("ld", "md", "lm");
        let scores = builder.op1("einsum", &[q, k], attrs([("equation", equation)]))?;
        let mask = call.optional_id(3);
        let expr = plan.masked(mask.map(|m| builder.dtype(m)));
        let list = attrs([
            ("expr", Attr::Expr(expr)),
            ("dtype", Attr::DType(plan.y.dtype)),
        ]);
        let inputs: Vec<_> = [scores].into_iter().chain(mask).collect();
        let scores = builder.op1("elementwise", &inputs, list)?;
        // Only with a mask can a row see nothing.
        let list = attrs([
            ("axis", Attr::Int(-1)),
            ("safe", Attr::Bool(mask.is_some() && plan.safe)),
        ]);
        let p = builder.op1("softmax", &[scores], list)?;
        let p = plan.append_dropout(call, builder, p, call.optional_id(4))?;
        builder.library(Library {
            op: "einsum".into(),
            attrs: attrs([("equation", plan.equation("lm", "me", "le"))]),
            inputs: vec![Some(p), Some(v)],
            outputs: vec![Some(y)],
        });
        Ok(())
    }

    fn samples(&self) -> Vec<Sample> {
        let qkv: [&[i64]; 3] = [&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]];
        let causal = attrs([("causal", Attr::Bool(true)), ("scale", Attr::Float(0.7))]);
        let mut bits = vec![1; 15];
        (bits[1], bits[7], bits[14]) = (0, 0, 0);
        let mask = Tensor::from_i64(DType::Bool, &[3, 5], bits);
        let mut none = vec![1; 15];
        none[5..10].fill(0);
        let none = Tensor::from_i64(DType::Bool, &[3, 5], none);
        let mut never = vec![0.0; 10];
        never[5..].fill(f64::NEG_INFINITY);
        let never = Tensor::from_f64(DType::F32, &[2, 1, 1, 5], never);
        let bias: Vec<f64> = (0..10).map(|i| f64::from(i) * 0.2 - 1.0).collect();
        let bias = Tensor::from_f64(DType::F32, &[2, 1, 1, 5], bias);
        let filled = |fill| attrs([("fill", Attr::Float(fill)), ("safe", Attr::Bool(false))]);
        let drop = attrs([("dropout", Attr::Float(0.3)), ("id", Attr::Int(2))]);
        let seed = Tensor::from_i64(DType::I64, &[], vec![7]);
        vec![
            Sample::new("plain", &qkv, attrs([])),
            Sample::new("causal", &qkv, causal.clone()),
            Sample::new("no leading dimension", &[&[3, 2], &[3, 2], &[3, 2]], causal),
            Sample::new("truth mask", &qkv, attrs([])).value(3, mask.clone()),
            Sample::new("hidden scores are -∞", &qkv, filled(f64::NEG_INFINITY)).value(3, mask),
            Sample::new("hidden scores are a number", &qkv, filled(-2.5)).value(3, none.clone()),
            Sample::new("added mask", &qkv, attrs([])).value(3, bias),
            Sample::new("a row that sees nothing", &qkv, attrs([])).value(3, none),
            // Where the mask is infinite, its own gradient is not a number.
            Sample::new("rows that see nothing, added", &qkv, attrs([])).value(3, never),
            Sample::new("dropout", &qkv, drop).value(4, seed),
        ]
    }
}
