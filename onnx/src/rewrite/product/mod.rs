//! Products with constant weights, for the rules that fold a scale and a shift into them.
//!
//! Owns what is such a product and which element of its weights belongs to which channel; the changed
//! product is in `rebuild.rs`. Never decides whether a fold pays: that is in the rules' files.

mod rebuild;

pub use rebuild::{Affine, is_matrix_product};

use super::scope::Scope;
use crate::attributes::{Attributes, is_standard};
use crate::element::Element;
use crate::tensor::Tensor;

/// What kind of product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearKind {
    /// `Conv(x, weights [M, C/group, …], bias [M])`.
    Conv,
    /// `ConvTranspose(x, weights [C, M/group, …], bias [M])`.
    ConvTranspose,
    /// `Gemm(x, weights [K, N] or [N, K], bias)`, its bias one row.
    Gemm,
    /// `MatMul(x, weights [K, N])`, perhaps with the Add of a row after it.
    MatMul,
    /// A normalization whose scale [C] is the weights: `BatchNormalization` and the like.
    Norm,
}

/// A value that is linear in constant weights and a constant bias.
pub struct LinearOperation<'a> {
    /// The nodes that compute it, in order; each but the last has the next as only reader.
    pub nodes: Vec<usize>,
    /// What it is.
    pub kind: LinearKind,
    /// Number of output channels.
    pub n_channels: usize,
    /// Number of input channels; 0 for normalizations.
    pub n_in: usize,
    weight: Constant<'a>,
    bias: Option<Constant<'a>>,
    /// Whether the channels are the last dimension of the output; otherwise they are the second.
    from_end: bool,
    groups: usize,
    trans_b: bool,
}

/// A constant operand, given by an initializer or made by a node of few values.
#[derive(Clone)]
struct Constant<'a> {
    name: &'a str,
    element: Element,
    shape: Vec<usize>,
    generated: Option<Generated<'a>>,
}

/// Values that a node repeats, so that the file does not store them.
#[derive(Clone)]
struct Generated<'a> {
    /// The sizes, as an operand.
    shape: &'a str,
    /// One value for `ConstantOfShape`; one for each position of the first dimension for `Expand`.
    values: Vec<f64>,
}

impl<'a> Generated<'a> {
    fn new(scope: &Scope<'a>, name: &'a str, shape: &[usize]) -> Option<Generated<'a>> {
        if let Some(n) = scope.made_by(name, "ConstantOfShape") {
            let value = Attributes::new(scope.node(n)).tensor("value");
            let value = match value {
                Some(value) => Tensor::of_proto(value).ok()?.scalar()?,
                None => 0.0,
            };
            return Some(Generated {
                shape: scope.input(n, 0)?,
                values: vec![value],
            });
        }
        let n = scope.made_by(name, "Expand")?;
        let (from, to) = (scope.input(n, 0)?, scope.input(n, 1)?);
        let (first, rest) = scope
            .fact(from)?
            .sizes()?
            .split_first()
            .map(|(f, r)| (*f, r.to_vec()))?;
        let fits = Some(&first) == shape.first()
            && rest.len() + 1 == shape.len()
            && rest.iter().all(|d| *d == 1);
        let values = scope.constant(from).filter(|_| fits)?.to_f64()?;
        Some(Generated { shape: to, values })
    }
}

/// The element for channel `n` of a vector, whose only element may stand for all channels.
fn at(values: &[f64], n: usize) -> f64 {
    values[if values.len() == 1 { 0 } else { n }]
}

impl<'a> Constant<'a> {
    fn new(scope: &Scope<'a>, name: &'a str) -> Option<Constant<'a>> {
        let fact = scope.fact(name)?;
        let (element, shape) = (fact.element?, fact.sizes()?);
        let generated = Generated::new(scope, name, &shape);
        let known = fact.constant.is_some() || generated.is_some();
        (element.is_float() && known).then_some(Constant {
            name,
            element,
            shape,
            generated,
        })
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    fn values(&self, scope: &Scope) -> Option<Vec<f64>> {
        let Some(generated) = &self.generated else {
            return scope.constant(self.name)?.to_f64();
        };
        let run = self.len() / generated.values.len().max(1);
        let runs = generated
            .values
            .iter()
            .map(|v| std::iter::repeat_n(*v, run));
        Some(runs.flatten().collect())
    }

    /// Bytes the file loses when one node no longer reads it.
    fn freed(&self, scope: &Scope) -> usize {
        let alone = scope.is_initializer(self.name) && scope.sole_reader(self.name).is_some();
        let each = self.element.bytes().unwrap_or(0);
        if alone { each * self.len() } else { 0 }
    }
}

/// Operators that give what they read in other sizes, another order or another type.
const MOVEMENTS: [&str; 14] = [
    "Cast",
    "Concat",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
];
/// Most movements in a row that are looked through.
const MOST_MOVEMENTS: usize = 16;

/// Whether a value comes out of, or goes into, a quantized stretch whose structure is to stay.
pub fn is_quantized(scope: &Scope, n: usize) -> bool {
    let node = scope.node(n);
    let mut readers = node.output.iter().flat_map(|o| scope.readers(o));
    node.input.iter().any(|i| is_dequantized(scope, i))
        || readers.any(|r| scope.is(*r, "QuantizeLinear"))
}

/// Whether a value is one that was quantized, perhaps moved since.
fn is_dequantized(scope: &Scope, value: &str) -> bool {
    let mut open = vec![(value, MOST_MOVEMENTS)];
    while let Some((value, left)) = open.pop() {
        let Some(n) = scope.producer(value) else {
            continue;
        };
        if scope.is(n, "DequantizeLinear") {
            return true;
        }
        if left > 0 && MOVEMENTS.iter().any(|op| scope.is(n, op)) {
            let n_moved = match scope.is(n, "Concat") {
                true => scope.node(n).input.len(),
                false => 1,
            };
            let moved = (0..n_moved).filter_map(|at| scope.input(n, at));
            open.extend(moved.map(|x| (x, left - 1)));
        }
    }
    false
}

impl<'a> LinearOperation<'a> {
    /// The product whose value node `n` gives.
    pub fn new(scope: &Scope<'a>, n: usize) -> Option<LinearOperation<'a>> {
        let node = scope.node(n);
        if !is_standard(node) || is_quantized(scope, n) {
            return None;
        }
        match node.op_type.as_str() {
            "Conv" => LinearOperation::conv(scope, n, LinearKind::Conv),
            "ConvTranspose" => LinearOperation::conv(scope, n, LinearKind::ConvTranspose),
            "Gemm" => LinearOperation::gemm(scope, n),
            "MatMul" => LinearOperation::matmul(scope, n),
            "Add" => LinearOperation::matmul_with_bias(scope, n),
            "BatchNormalization" | "InstanceNormalization" => {
                LinearOperation::norm(scope, n, false)
            }
            "LayerNormalization" => LinearOperation::norm(scope, n, true),
            _ => None,
        }
    }

    fn conv(scope: &Scope<'a>, n: usize, kind: LinearKind) -> Option<LinearOperation<'a>> {
        let weight = Constant::new(scope, scope.input(n, 1)?)?;
        let groups = Attributes::new(scope.node(n)).int("group").unwrap_or(1);
        let groups = usize::try_from(groups).ok().filter(|g| *g > 0)?;
        let [first, second] = weight.shape.get(..2)?.try_into().ok()?;
        let (n_channels, n_in) = match kind {
            LinearKind::Conv => (first, second * groups),
            _ => (second * groups, first),
        };
        let bias = match scope.input(n, 2) {
            Some(bias) => Some(Constant::new(scope, bias)?),
            None => None,
        };
        if bias.as_ref().is_some_and(|b| b.shape != [n_channels])
            || weight.len() == 0
            || first % groups != 0
        {
            return None;
        }
        Some(LinearOperation {
            nodes: vec![n],
            kind,
            n_channels,
            n_in,
            weight,
            bias,
            from_end: false,
            groups,
            trans_b: false,
        })
    }

    fn gemm(scope: &Scope<'a>, n: usize) -> Option<LinearOperation<'a>> {
        let weight = Constant::new(scope, scope.input(n, 1)?)?;
        let trans_b = Attributes::new(scope.node(n)).flag("transB");
        let [k, columns] = match weight.shape[..] {
            [n, k] if trans_b => [k, n],
            [k, n] => [k, n],
            _ => return None,
        };
        let bias = match scope.input(n, 2) {
            Some(bias) => Some(Constant::new(scope, bias)?),
            None => None,
        };
        if scope.opset() < 7 || bias.as_ref().is_some_and(|b| !is_row(&b.shape, columns)) {
            return None;
        }
        (k * columns > 0).then_some(LinearOperation {
            nodes: vec![n],
            kind: LinearKind::Gemm,
            n_channels: columns,
            n_in: k,
            weight,
            bias,
            from_end: true,
            groups: 1,
            trans_b,
        })
    }

    fn matmul(scope: &Scope<'a>, n: usize) -> Option<LinearOperation<'a>> {
        let weight = Constant::new(scope, scope.input(n, 1)?)?;
        let &[k, columns] = weight.shape.as_slice() else {
            return None;
        };
        (k * columns > 0).then_some(LinearOperation {
            nodes: vec![n],
            kind: LinearKind::MatMul,
            n_channels: columns,
            n_in: k,
            weight,
            bias: None,
            from_end: true,
            groups: 1,
            trans_b: false,
        })
    }

    fn matmul_with_bias(scope: &Scope<'a>, n: usize) -> Option<LinearOperation<'a>> {
        for (value, row) in [(0, 1), (1, 0)] {
            let (value, row) = (scope.input(n, value)?, scope.input(n, row)?);
            let Some(p) = scope.made_by(value, "MatMul") else {
                continue;
            };
            if scope.sole_user(p) != Some(n) || is_quantized(scope, p) {
                continue;
            }
            let (Some(product), Some(bias)) =
                (LinearOperation::matmul(scope, p), Constant::new(scope, row))
            else {
                continue;
            };
            let rank = scope.fact(value)?.rank().unwrap_or(1);
            if is_row(&bias.shape, product.n_channels) && bias.shape.len() <= rank {
                return Some(LinearOperation {
                    nodes: vec![p, n],
                    bias: Some(bias),
                    ..product
                });
            }
        }
        None
    }

    fn norm(scope: &Scope<'a>, n: usize, from_end: bool) -> Option<LinearOperation<'a>> {
        let node = scope.node(n);
        let weight = Constant::new(scope, scope.input(n, 1)?)?;
        let bias = match scope.input(n, 2) {
            Some(bias) => Some(Constant::new(scope, bias)?),
            None => None,
        };
        let &[n_channels] = weight.shape.as_slice() else {
            return None;
        };
        let a = Attributes::new(node);
        let last = !from_end || a.int("axis").unwrap_or(-1) == -1;
        // Before version 14 of BatchNormalization, further outputs mean statistics of the batch.
        let others = node.output.iter().skip(1).any(|o| !o.is_empty());
        if !last || others || a.flag("training_mode") || a.int("spatial") == Some(0) {
            return None;
        }
        if n_channels == 0 || bias.as_ref().is_some_and(|b| b.shape != [n_channels]) {
            return None;
        }
        Some(LinearOperation {
            nodes: vec![n],
            kind: LinearKind::Norm,
            n_channels,
            n_in: 0,
            weight,
            bias,
            from_end,
            groups: 1,
            trans_b: false,
        })
    }

    /// The node that multiplies.
    pub fn first(&self) -> usize {
        self.nodes[0]
    }

    /// Element type of the weights.
    pub fn element(&self) -> Element {
        self.weight.element
    }

    /// Name of the weights.
    pub fn weight_name(&self) -> &'a str {
        self.weight.name
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> usize {
        self.element().bytes().unwrap_or(0) * self.weight.len()
    }

    /// Whether the weights are an initializer that nobody else reads.
    pub fn weight_is_own(&self, scope: &Scope) -> bool {
        self.weight.freed(scope) > 0
    }

    /// Name of the bias, if there is one.
    pub fn bias_name(&self) -> Option<&'a str> {
        self.bias.as_ref().map(|b| b.name)
    }

    /// Whether the channels of a value (the input or the output) are its second dimension.
    pub fn has_channels_second(&self, scope: &Scope, value: &str) -> bool {
        !self.from_end || scope.fact(value).and_then(|f| f.rank()) == Some(2)
    }

    /// The elements of a constant that is the same along all dimensions but the output's channels:
    /// one, or one for each channel.
    pub fn per_channel(&self, scope: &Scope<'a>, name: &'a str) -> Option<Vec<f64>> {
        let last = *self.nodes.last()?;
        let output = scope.node(last).output.first()?;
        let rank = match self.kind {
            LinearKind::Conv | LinearKind::ConvTranspose => Some(self.weight.shape.len()),
            _ => scope.fact(output).and_then(|f| f.rank()),
        };
        let channels = self.n_channels;
        along(scope, name, self.element(), rank, self.from_end, channels)
    }

    /// Like [`LinearOperation::per_channel`], for the channels of the input.
    pub fn per_input_channel(&self, scope: &Scope<'a>, name: &'a str) -> Option<Vec<f64>> {
        if self.kind == LinearKind::Norm {
            return None;
        }
        let rank = scope.fact(scope.input(self.first(), 0)?)?.rank();
        along(scope, name, self.element(), rank, self.from_end, self.n_in)
    }

    /// The output channel of element `n` of the weights.
    fn out_channel(&self, n: usize) -> usize {
        let window: usize = self.weight.shape.iter().skip(2).product();
        match self.kind {
            LinearKind::Conv => n / (window * self.weight.shape[1]),
            LinearKind::ConvTranspose => {
                let [c, m] = [self.weight.shape[0], self.weight.shape[1]];
                let (row, column) = (n / (window * m), n / window % m);
                row / (c / self.groups) * m + column
            }
            LinearKind::Gemm if self.trans_b => n / self.n_in,
            LinearKind::Gemm | LinearKind::MatMul => n % self.n_channels,
            LinearKind::Norm => n,
        }
    }

    /// How many elements of the weights, one after the other, have the same output channel.
    fn channel_run(&self) -> usize {
        let window: usize = self.weight.shape.iter().skip(2).product();
        match self.kind {
            LinearKind::Conv => window * self.weight.shape[1],
            LinearKind::ConvTranspose => window,
            LinearKind::Gemm if self.trans_b => self.n_in,
            LinearKind::Gemm | LinearKind::MatMul | LinearKind::Norm => 1,
        }
    }

    /// The input channel of element `n` of the weights.
    fn in_channel(&self, n: usize) -> usize {
        let window: usize = self.weight.shape.iter().skip(2).product();
        match self.kind {
            LinearKind::Conv => {
                let (m, c) = (self.weight.shape[0], self.weight.shape[1]);
                let (row, column) = (n / (window * c), n / window % c);
                row / (m / self.groups) * c + column
            }
            LinearKind::ConvTranspose => n / (window * self.weight.shape[1]),
            LinearKind::Gemm if self.trans_b => n % self.n_in,
            LinearKind::Gemm | LinearKind::MatMul => n / self.n_channels,
            LinearKind::Norm => n,
        }
    }
}

/// Whether a bias is one number or one row of `n`.
fn is_row(shape: &[usize], n: usize) -> bool {
    let (last, rest) = shape.split_last().unwrap_or((&1, &[]));
    (*last == n || *last == 1) && rest.iter().all(|d| *d == 1)
}

/// The elements of a float constant of type `element`, beside a value of that rank. Its size is 1 or `n_channels` along
/// one dimension (the last, or the second), and 1 along all others. `None` also if the constant would give the value
/// more dimensions.
fn along<'a>(
    scope: &Scope<'a>,
    name: &'a str,
    element: Element,
    rank: Option<usize>,
    from_end: bool,
    n_channels: usize,
) -> Option<Vec<f64>> {
    let constant = Constant::new(scope, name).filter(|c| c.element == element)?;
    let own = constant.shape.len();
    // A value of unknown rank has one dimension, at least.
    if own > rank.unwrap_or(1) {
        return None;
    }
    let channels = match (from_end, rank) {
        (true, _) => own.checked_sub(1),
        (false, Some(rank)) => (own + 1).checked_sub(rank),
        (false, None) => None,
    };
    let fits =
        |(d, size): (usize, &usize)| *size == 1 || (Some(d) == channels && *size == n_channels);
    let is_channel_wise = constant.shape.iter().enumerate().all(fits);
    is_channel_wise.then(|| constant.values(scope))?
}
