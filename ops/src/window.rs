//! Sliding windows: the geometry that convolution and pooling share.
//!
//! Along one spatial dimension, output `o` and window position `r` meet at input position
//! `o·stride + r·dilation − pad_low`. This file knows sizes and indices, never what is computed.

use crate::op::{Call, OpError};
use graph::{Attr, Attrs, SymExpr};

/// A window over `kernel.len()` spatial dimensions; all vectors have that length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Positions in the window.
    pub kernel: Vec<i64>,
    /// Input elements between windows.
    pub stride: Vec<i64>,
    /// Positions before the input's first element.
    pub pad_low: Vec<i64>,
    /// Positions after the input's last element.
    pub pad_high: Vec<i64>,
    /// Input elements between neighbours in the window.
    pub dilation: Vec<i64>,
    /// Whether a last window that reaches past the padded input counts.
    pub ceil: bool,
}

impl Window {
    /// The window a node describes by `stride`, `pad_low`, `pad_high`, `dilation` and `ceil`.
    /// Absent ones mean 1, 0, 0, 1 and false.
    ///
    /// # Errors
    /// An attribute has another length than `kernel`, or a value that makes no sense.
    pub fn new(call: &Call, kernel: Vec<i64>) -> Result<Window, OpError> {
        let d = kernel.len();
        let window = Window {
            stride: call.ints_or("stride", vec![1; d])?,
            pad_low: call.ints_or("pad_low", vec![0; d])?,
            pad_high: call.ints_or("pad_high", vec![0; d])?,
            dilation: call.ints_or("dilation", vec![1; d])?,
            ceil: call.bool_or("ceil", false)?,
            kernel,
        };
        let checks = [
            ("kernel", &window.kernel, 1),
            ("stride", &window.stride, 1),
            ("pad_low", &window.pad_low, 0),
            ("pad_high", &window.pad_high, 0),
            ("dilation", &window.dilation, 1),
        ];
        for (name, values, least) in checks {
            if values.len() != d || values.iter().any(|v| *v < least) {
                return Err(call.shape_error(format!(
                    "`{name}` must be {d} numbers of at least {least}, found {values:?}"
                )));
            }
        }
        Ok(window)
    }

    /// Number of spatial dimensions.
    pub fn rank(&self) -> usize {
        self.kernel.len()
    }

    /// The attributes that [`Window::new`] reads, without `kernel`.
    pub fn attrs(&self) -> Attrs {
        let ints = [
            ("stride", &self.stride),
            ("pad_low", &self.pad_low),
            ("pad_high", &self.pad_high),
            ("dilation", &self.dilation),
        ];
        let mut attrs: Attrs = ints
            .into_iter()
            .map(|(name, v)| (name.to_string(), Attr::Ints(v.clone())))
            .collect();
        if self.ceil {
            attrs.insert("ceil".into(), Attr::Bool(true));
        }
        attrs
    }

    /// Input elements a window spans along `d`.
    pub fn span(&self, d: usize) -> i64 {
        self.dilation[d] * (self.kernel[d] - 1) + 1
    }

    /// Number of windows along `d` over `size` elements. With `ceil`, a last window must start
    /// inside the input or the padding before it, as PyTorch rules.
    pub fn output_size(&self, d: usize, size: &SymExpr) -> SymExpr {
        let room = size.clone() + (self.pad_low[d] + self.pad_high[d] - self.span(d));
        let stride = SymExpr::constant(self.stride[d]);
        if !self.ceil {
            return room.floor_div(&stride) + 1;
        }
        let rounded_up = (room + (self.stride[d] - 1)).floor_div(&stride) + 1;
        let starts_inside = (size.clone() + (self.pad_low[d] - 1)).floor_div(&stride) + 1;
        rounded_up.min_with(&starts_inside)
    }

    /// Sizes of the output for spatial sizes `input`.
    ///
    /// # Errors
    /// The window does not fit into the padded input.
    pub fn output_sizes(&self, call: &Call, input: &[SymExpr]) -> Result<Vec<SymExpr>, OpError> {
        let mut sizes = Vec::new();
        for (d, size) in input.iter().enumerate() {
            let out = self.output_size(d, size);
            if out.as_const().is_some_and(|n| n < 1) {
                return Err(call.shape_error(format!(
                    "a window spanning {} does not fit into size {size} padded by {} and {}",
                    self.span(d),
                    self.pad_low[d],
                    self.pad_high[d]
                )));
            }
            sizes.push(out);
        }
        Ok(sizes)
    }

    /// Input index along `d` of output `o` and window position `r`.
    pub fn index(&self, d: usize, o: &SymExpr, r: &SymExpr) -> SymExpr {
        o.clone() * self.stride[d] + r.clone() * self.dilation[d] - self.pad_low[d]
    }

    /// [`Window::index`] for numbers.
    pub fn at(&self, d: usize, o: usize, r: usize) -> i64 {
        o as i64 * self.stride[d] + r as i64 * self.dilation[d] - self.pad_low[d]
    }

    /// Whether some window position can fall outside an input of `input` sizes. When the answer
    /// depends on a symbolic size it is yes.
    pub fn leaves(&self, input: &[SymExpr], output: &[SymExpr]) -> bool {
        (0..self.rank()).any(|d| {
            let last = (output[d].clone() - 1) * self.stride[d] + (self.span(d) - 1);
            let past_the_end = (last - self.pad_low[d]) - input[d].clone();
            let ends_inside = match past_the_end.as_const() {
                Some(n) => n < 0,
                None => self.pad_high[d] == 0 && !self.ceil,
            };
            self.pad_low[d] > 0 || !ends_inside
        })
    }

    /// Whether every input element lies in exactly one window.
    pub fn tiles(&self, input: &[SymExpr], output: &[SymExpr]) -> bool {
        self.stride == self.kernel
            && self.pad_low.iter().all(|p| *p == 0)
            && (0..self.rank()).all(|d| {
                (self.dilation[d] == 1 || self.kernel[d] == 1)
                    && output[d].clone() * self.stride[d] == input[d]
            })
    }

    /// Names of output positions and window positions along each dimension, as in the papers.
    pub fn names(&self) -> (&'static [&'static str], &'static [&'static str]) {
        match self.rank() {
            1 => (&["ow"], &["s"]),
            2 => (&["oh", "ow"], &["r", "s"]),
            _ => (&["od", "oh", "ow"], &["q", "r", "s"]),
        }
    }
}
