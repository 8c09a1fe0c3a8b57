//! Conv and ConvTranspose, and the geometry of windows that pooling shares.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, Attrs, SymExpr, Tensor};
use ops::attrs;

pub static RULES: Rules = &[
    ("Col2Im", col2im),
    ("Conv", conv),
    ("ConvTranspose", conv_transpose),
];

/// A window as the attributes `kernel_shape`, `strides`, `pads`, `dilations` and `auto_pad` give it.
pub struct Geometry {
    pub kernel: Vec<i64>,
    pub stride: Vec<i64>,
    pub dilation: Vec<i64>,
    pub pad_low: Vec<i64>,
    pub pad_high: Vec<i64>,
    /// How pads follow from sizes: `NOTSET`, `VALID`, `SAME_UPPER` or `SAME_LOWER`.
    auto_pad: String,
}

/// The largest size, step or pad of a window: sums of their products are 64-bit numbers.
const MOST: u64 = 1 << 30;

impl Geometry {
    /// Reads the attributes for windows of size `kernel`.
    pub fn new(cx: &NodeCx, kernel: Vec<i64>) -> Result<Geometry, Refusal> {
        let d = kernel.len();
        let list = |name: &str, n: usize, default: i64| {
            let values = cx.ints(name)?.unwrap_or_else(|| vec![default; n]);
            if values.len() != n {
                return Err(Refusal(format!(
                    "its attribute `{name}` has {} numbers; {n} are needed for {d} dimensions",
                    values.len()
                )));
            }
            match values.iter().find(|n| n.unsigned_abs() > MOST) {
                Some(n) => Err(Refusal(format!("its attribute `{name}` has {n}"))),
                None => Ok(values),
            }
        };
        if let Some(n) = kernel.iter().find(|n| n.unsigned_abs() > MOST) {
            return Err(Refusal(format!(
                "its kernel_shape has size {n}, which is not supported"
            )));
        }
        let pads = list("pads", 2 * d, 0)?;
        let auto_pad = cx.text("auto_pad", "NOTSET")?;
        let explicit = auto_pad == "NOTSET";
        let pads = if explicit { pads } else { vec![0; 2 * d] };
        Ok(Geometry {
            stride: list("strides", d, 1)?,
            dilation: list("dilations", d, 1)?,
            pad_low: pads[..d].to_vec(),
            pad_high: pads[d..].to_vec(),
            kernel,
            auto_pad,
        })
    }

    /// Input elements that a window covers along a dimension.
    fn span(&self, d: usize) -> i64 {
        self.dilation[d] * (self.kernel[d] - 1) + 1
    }

    /// Fixes the pads that `auto_pad` leaves to the input's sizes: the output has
    /// `⌈input / stride⌉` elements.
    pub fn resolve(mut self, spatial: &[SymExpr]) -> Result<Geometry, Refusal> {
        let same = match self.auto_pad.as_str() {
            "NOTSET" | "VALID" => return Ok(self),
            "SAME_UPPER" | "SAME_LOWER" => spatial,
            other => return Err(Refusal(format!("its attribute `auto_pad` is `{other}`"))),
        };
        check_sizes(same.iter().filter_map(SymExpr::as_const))?;
        for (d, size) in same.iter().enumerate().take(self.kernel.len()) {
            let total = match (size.as_const(), self.stride[d]) {
                (_, 1) => self.span(d) - 1,
                (Some(n), stride) => {
                    (n.saturating_add(stride - 1) / stride - 1) * stride + self.span(d) - n
                }
                (None, _) => {
                    return Err(Refusal(format!(
                        "its padding depends on the dynamic size `{size}`; fix that size"
                    )));
                }
            };
            self.share(d, total.max(0));
        }
        Ok(self)
    }

    /// Splits a padding; `SAME_UPPER` puts an odd element at the end, anything else at the start, as the
    /// standard has it for an explicit `output_shape`.
    fn share(&mut self, d: usize, total: i64) {
        let (small, large) = (total / 2, total - total / 2);
        let upper = self.auto_pad == "SAME_UPPER";
        (self.pad_low[d], self.pad_high[d]) = if upper {
            (small, large)
        } else {
            (large, small)
        };
    }

    /// The windows as attributes of the library nodes.
    pub fn attrs(&self) -> Attrs {
        attrs([
            ("stride", Attr::Ints(self.stride.clone())),
            ("pad_low", Attr::Ints(self.pad_low.clone())),
            ("pad_high", Attr::Ints(self.pad_high.clone())),
            ("dilation", Attr::Ints(self.dilation.clone())),
        ])
    }
}

/// Refuses sizes whose products could overflow 64 bits.
fn check_sizes(mut sizes: impl Iterator<Item = i64>) -> Result<(), Refusal> {
    match sizes.find(|n| n.unsigned_abs() > MOST) {
        Some(n) => Err(Refusal(format!(
            "a size of {n} is not supported in a convolution or a pool"
        ))),
        None => Ok(()),
    }
}

/// The window of a weight `[K, C, R…]`.
pub fn kernel_of(weight: &[SymExpr]) -> Result<Vec<i64>, Refusal> {
    let fixed = weight.iter().skip(2).map(SymExpr::as_const);
    let fixed: Option<Vec<i64>> = fixed.collect();
    fixed.ok_or_else(|| Refusal("its weight has a dynamic size".into()))
}

/// The dimensions after batch and channels.
pub fn spatial(shape: &[SymExpr]) -> Result<&[SymExpr], Refusal> {
    let few = || Refusal("its input must have batch, channel and spatial dimensions".into());
    shape.get(2..).filter(|s| !s.is_empty()).ok_or_else(few)
}

/// A convolution with an optional bias.
pub fn conv(cx: &mut NodeCx) -> Values {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    let kernel = kernel_of(&cx.shape(w))?;
    let geometry = Geometry::new(cx, kernel)?.resolve(spatial(&cx.shape(x))?)?;
    let mut list = geometry.attrs();
    list.insert("groups".into(), Attr::Int(cx.int("group", 1)?));
    let y = cx.op1("conv", &[x, w], list)?;
    match cx.optional(2)? {
        Some(bias) => single(cx.add_channels(y, bias)?),
        None => single(y),
    }
}

/// Output size `(I−1)·stride + output_padding + span − pads`; `output_shape` and `auto_pad` give
/// the pads instead.
fn conv_transpose(cx: &mut NodeCx) -> Values {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    let mut geometry = Geometry::new(cx, kernel_of(&cx.shape(w))?)?;
    let d = geometry.kernel.len();
    let mut extra = cx.ints("output_padding")?.unwrap_or_else(|| vec![0; d]);
    if extra.len() != d {
        return Err(Refusal(
            "its attribute `output_padding` has the wrong length".into(),
        ));
    }
    let shape = cx.shape(x);
    let wanted = cx.ints("output_shape")?;
    let given = wanted.iter().flatten().chain(&extra).copied();
    check_sizes(given.chain(spatial(&shape)?.iter().filter_map(SymExpr::as_const)))?;
    let same = geometry.auto_pad.starts_with("SAME");
    for (n, size) in spatial(&shape)?.iter().enumerate().take(d) {
        let full = (geometry.span(n) + extra[n]) - geometry.stride[n];
        // Elements beyond `size·stride`.
        let total = match (&wanted, same) {
            (Some(wanted), _) => {
                let wanted = wanted[wanted.len().saturating_sub(d)..].get(n).copied();
                let size = size.as_const().zip(wanted);
                let (size, wanted) =
                    size.ok_or("its `output_shape` needs an input of fixed size")?;
                size * geometry.stride[n] + full - wanted
            }
            (None, true) => full,
            (None, false) => continue,
        };
        // Less than no padding means more output, to which nothing contributes.
        extra[n] += (-total).max(0);
        geometry.share(n, total.max(0));
    }
    let mut list = geometry.attrs();
    list.insert("groups".into(), Attr::Int(cx.int("group", 1)?));
    list.insert("output_padding".into(), Attr::Ints(extra));
    let y = cx.op1("conv_transpose", &[x, w], list)?;
    match cx.optional(2)? {
        Some(bias) => single(cx.add_channels(y, bias)?),
        None => single(y),
    }
}

/// Most elements of a window whose columns are summed.
const MOST_TAPS: i64 = 1 << 10;

/// Columns of windows summed to the image they came from: a transposed convolution whose weights put each element of a
/// window at its place.
fn col2im(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let constants =
        |sizes: Vec<SymExpr>| -> Option<Vec<i64>> { sizes.iter().map(SymExpr::as_const).collect() };
    let (image, block) = (constants(cx.sizes(1)?), constants(cx.sizes(2)?));
    let (Some(image), Some(block)) = (image, block) else {
        return Err("its image or its window has a dynamic size".into());
    };
    let geometry = Geometry::new(cx, block)?;
    let d = geometry.kernel.len();
    let sizes = geometry.kernel.iter().chain(&geometry.stride);
    let is_usual = sizes.chain(&geometry.dilation).all(|n| *n >= 1)
        && image.iter().all(|n| n.unsigned_abs() <= MOST);
    let taps = geometry
        .kernel
        .iter()
        .try_fold(1i64, |all, n| all.checked_mul(*n));
    let taps = taps.filter(|n| is_usual && *n <= MOST_TAPS);
    let taps = taps.ok_or("its window or its image has an unusual size")?;
    let shape = cx.shape(x);
    let [batch, rows, _] = shape.as_slice() else {
        return Err("its input must have 3 dimensions".into());
    };
    let channels = rows.divide_exactly(&taps.into()).filter(|_| taps > 0);
    let channels = channels.ok_or("its rows do not divide into windows")?;
    if image.len() != d {
        return Err("its image and its window have different numbers of dimensions".into());
    }
    let mut split = vec![batch.clone() * channels.clone(), taps.into()];
    let mut extra = Vec::new();
    for (n, size) in image.iter().enumerate() {
        let room = size + geometry.pad_low[n] + geometry.pad_high[n] - geometry.span(n);
        if room < 0 {
            return Err("its window does not fit its image".into());
        }
        split.push((room / geometry.stride[n] + 1).into());
        extra.push(room % geometry.stride[n]);
    }
    let x = cx.reshape(x, split)?;
    let n = usize::try_from(taps).unwrap_or(0);
    let mut one_place = vec![0.0; n * n];
    (0..n).for_each(|tap| one_place[tap * n + tap] = 1.0);
    let mut weight = vec![n, 1];
    weight.extend(geometry.kernel.iter().map(|k| *k as usize));
    let dtype = cx.dtype(x);
    let weight = cx.constant(Tensor::from_f64(dtype, &weight, one_place));
    let mut list = geometry.attrs();
    list.insert("groups".into(), Attr::Int(1));
    list.insert("output_padding".into(), Attr::Ints(extra));
    let y = cx.op1("conv_transpose", &[x, weight], list)?;
    let mut to = vec![batch.clone(), channels];
    to.extend(image.into_iter().map(SymExpr::constant));
    single(cx.reshape(y, to)?)
}
