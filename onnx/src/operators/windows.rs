//! Windows that slide over spatial dimensions: where convolutions and pooling put them.

use super::{Call, Inference};
use crate::attributes::Attributes;
use graph::SymExpr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Padding {
    Explicit,
    SameUpper,
    SameLower,
    Valid,
}

/// Most elements that all windows of one channel read: windows of 64 by 64 everywhere in an image of 4096 by 4096.
const MOST_WORK: usize = 1 << 36;

/// Windows over `[d1, …]` as attributes describe them.
#[derive(Clone, Debug)]
pub struct Windows {
    /// Sizes of a window.
    pub kernel: Vec<SymExpr>,
    /// Steps between windows.
    pub strides: Vec<i64>,
    /// Steps between the elements of a window.
    pub dilations: Vec<i64>,
    low: Vec<i64>,
    high: Vec<i64>,
    padding: Padding,
    ceil: bool,
}

/// Windows over an input of known sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Sizes of the input.
    pub input: Vec<usize>,
    /// Sizes of a window.
    pub kernel: Vec<usize>,
    /// Steps between windows.
    pub strides: Vec<usize>,
    /// Steps between the elements of a window.
    pub dilations: Vec<usize>,
    /// Elements before the input.
    pub low: Vec<i64>,
    /// Elements after the input; a window may reach beyond where sizes are rounded up.
    pub high: Vec<i64>,
    /// How many windows there are.
    pub output: Vec<usize>,
}

impl Windows {
    /// The windows of a node; `kernel` has their sizes.
    ///
    /// # Errors
    /// A sentence: attributes that do not fit.
    pub fn new(attributes: Attributes, kernel: Vec<SymExpr>) -> Result<Windows, String> {
        let n = kernel.len();
        let steps = |name: &str| match attributes.ints(name) {
            None => Ok(vec![1; n]),
            Some(v) if v.len() == n && v.iter().all(|s| (1..1 << 31).contains(s)) => Ok(v.to_vec()),
            Some(v) => Err(format!("{name} {v:?} do not fit {n} dimensions")),
        };
        let padding = match attributes.text("auto_pad").unwrap_or("NOTSET") {
            "" | "NOTSET" => Padding::Explicit,
            "SAME_UPPER" => Padding::SameUpper,
            "SAME_LOWER" => Padding::SameLower,
            "VALID" => Padding::Valid,
            other => return Err(format!("auto_pad `{other}` is not known")),
        };
        let mut pads = attributes.ints("pads").unwrap_or(&[]).to_vec();
        if padding != Padding::Explicit || pads.is_empty() {
            pads = vec![0; 2 * n];
        }
        if pads.len() != 2 * n || pads.iter().any(|p| p.unsigned_abs() > 1 << 31) {
            return Err(format!("pads {pads:?} do not fit {n} dimensions"));
        }
        Ok(Windows {
            kernel,
            strides: steps("strides")?,
            dilations: steps("dilations")?,
            low: pads[..n].to_vec(),
            high: pads[n..].to_vec(),
            padding,
            ceil: attributes.flag("ceil_mode"),
        })
    }

    /// The windows that a node's `kernel_shape` describes.
    ///
    /// # Errors
    /// A sentence: attributes that do not fit.
    pub fn of_attribute(attributes: Attributes) -> Result<Windows, String> {
        let kernel = attributes
            .ints("kernel_shape")
            .ok_or("its kernel_shape is missing")?;
        if kernel.iter().any(|k| !(1..1 << 31).contains(k)) {
            return Err(format!("kernel_shape {kernel:?} is not one of sizes"));
        }
        Windows::new(attributes, kernel.iter().map(|k| (*k).into()).collect())
    }

    /// The windows of a convolution with weights of sizes `weights`.
    ///
    /// # Errors
    /// A sentence: attributes that do not fit.
    pub fn of_weights(attributes: Attributes, weights: &[SymExpr]) -> Result<Windows, String> {
        let spatial = weights.get(2..).ok_or("its weights have no channels")?;
        Windows::new(attributes, spatial.to_vec())
    }

    /// Elements from a window's first to beyond its last.
    fn extent(&self, d: usize) -> SymExpr {
        (self.kernel[d].clone() - 1) * self.dilations[d] + 1
    }

    /// Windows along dimension `d` of size `input`.
    fn windows(&self, d: usize, input: &SymExpr) -> SymExpr {
        let stride = SymExpr::constant(self.strides[d]);
        if matches!(self.padding, Padding::SameUpper | Padding::SameLower) {
            return input.ceil_div(&stride);
        }
        let room = input.clone() + (self.low[d] + self.high[d]) - self.extent(d);
        if !self.ceil {
            return room.floor_div(&stride) + 1;
        }
        // The last window starts inside the input or the padding before it.
        let started = (input.clone() + self.low[d]).ceil_div(&stride);
        (room.ceil_div(&stride) + 1).min_with(&started)
    }

    /// How many windows there are over spatial sizes `input`.
    pub fn output(&self, input: &[SymExpr]) -> Option<Vec<SymExpr>> {
        let fits = input.len() == self.kernel.len();
        fits.then(|| {
            (0..input.len())
                .map(|d| self.windows(d, &input[d]))
                .collect()
        })
    }

    /// The windows over an input of spatial sizes `input`.
    ///
    /// # Errors
    /// A sentence: dimensions that do not fit, an input smaller than a window.
    pub fn placed(&self, input: &[usize]) -> Result<Placed, String> {
        let n = input.len();
        if self.kernel.len() != n {
            return Err(format!(
                "windows of {} dimensions do not slide over {n}",
                self.kernel.len()
            ));
        }
        let small = || format!("an input of sizes {input:?} is too small for its windows");
        let whole = |x: &SymExpr| x.as_const().and_then(|x| usize::try_from(x).ok());
        let mut placed = Placed {
            input: input.to_vec(),
            kernel: self.kernel.iter().filter_map(whole).collect(),
            strides: self.strides.iter().map(|s| *s as usize).collect(),
            dilations: self.dilations.iter().map(|s| *s as usize).collect(),
            low: self.low.clone(),
            high: self.high.clone(),
            output: Vec::with_capacity(n),
        };
        for (d, size) in input.iter().enumerate() {
            let output = whole(&self.windows(d, &(*size).into())).ok_or_else(small)?;
            placed.output.push(output);
            let extent = self.extent(d).as_const().unwrap_or(0);
            let reach = (output as i64 - 1) * self.strides[d] + extent;
            let missing = (reach - *size as i64).max(0);
            (placed.low[d], placed.high[d]) = match self.padding {
                Padding::SameUpper => (missing / 2, missing - missing / 2),
                Padding::SameLower => (missing - missing / 2, missing / 2),
                _ => (self.low[d], self.high[d]),
            };
        }
        let steps = placed.kernel.iter().chain(&placed.output);
        let work = steps
            .copied()
            .filter(|n| *n > 0)
            .try_fold(1, usize::checked_mul);
        match work.filter(|n| *n <= MOST_WORK) {
            Some(_) => Ok(placed),
            None => Err(format!(
                "windows of sizes {:?} over an input of sizes {input:?} are too many elements to compute with",
                placed.kernel
            )),
        }
    }
}

impl Placed {
    /// How many elements of an input one window covers.
    pub fn window_len(&self) -> usize {
        self.kernel.iter().product()
    }

    /// How many windows there are.
    pub fn n_windows(&self) -> usize {
        self.output.iter().product()
    }

    /// Returns the windows with leading dimensions of size 1, so that there are three.
    pub fn in_three(&self) -> Option<Placed> {
        let more = 3usize.checked_sub(self.input.len())?;
        fn led<T: Clone>(more: usize, with: T, v: &[T]) -> Vec<T> {
            let mut all = vec![with; more];
            all.extend_from_slice(v);
            all
        }
        Some(Placed {
            input: led(more, 1, &self.input),
            kernel: led(more, 1, &self.kernel),
            strides: led(more, 1, &self.strides),
            dilations: led(more, 1, &self.dilations),
            low: led(more, 0, &self.low),
            high: led(more, 0, &self.high),
            output: led(more, 1, &self.output),
        })
    }

    /// Where tap `tap` of window `window` reads along dimension `d`; outside is padding.
    pub fn position(&self, d: usize, window: usize, tap: usize) -> i64 {
        (window * self.strides[d] + tap * self.dilations[d]) as i64 - self.low[d]
    }

    /// The windows along dimension `d` whose tap `tap` is inside the input.
    pub fn inside(&self, d: usize, tap: usize) -> std::ops::Range<usize> {
        let (stride, shift) = (self.strides[d] as i64, self.position(d, 0, tap));
        let at_least = |from: i64| (from + stride - 1).div_euclid(stride).max(0) as usize;
        let end = at_least(self.input[d] as i64 - shift).min(self.output[d]);
        at_least(-shift).min(end)..end
    }
}

/// `[batch, channels, …windows]` of a node whose input 0 is pooled by windows, and of how many windows.
pub fn infer_pooled(cx: &Inference) -> Option<Vec<SymExpr>> {
    let x = cx.shape(0)?;
    let windows = Windows::of_attribute(cx.attributes).ok()?;
    let mut shape = x.get(..2)?.to_vec();
    shape.extend(windows.output(&x[2..])?);
    Some(shape)
}

/// The windows a node's `kernel_shape` puts over its input 0.
///
/// # Errors
/// A sentence: dimensions or attributes that do not fit.
pub fn pooled(call: &Call) -> Result<Placed, String> {
    let x = call.input(0)?;
    let spatial = x.shape.get(2..).ok_or("its input has no channels")?;
    Windows::of_attribute(call.attributes)?.placed(spatial)
}
