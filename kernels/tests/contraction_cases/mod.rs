//! Contractions of known networks and random shapes, as index expressions. Shared by the
//! correctness test and the benchmark; compiles nothing.

#![allow(dead_code)]

use kernels::contraction::{Axis, Contraction, Element, Operand};

/// A convolution over any number of spatial dims, activations channels-last unless `nchw`.
#[derive(Clone, Debug)]
pub struct Conv {
    pub n: i64,
    /// Channels per group, in and out.
    pub c: i64,
    pub k: i64,
    pub groups: i64,
    /// Input sizes, kernel sizes.
    pub size: Vec<i64>,
    pub kernel: Vec<i64>,
    pub stride: i64,
    pub dilation: i64,
    pub pad: i64,
    /// The input image has its channels outermost.
    pub nchw_input: bool,
}

impl Conv {
    pub fn square(n: i64, c: i64, k: i64, size: i64, kernel: i64, stride: i64) -> Self {
        Conv {
            n,
            c,
            k,
            groups: 1,
            size: vec![size; 2],
            kernel: vec![kernel; 2],
            stride,
            dilation: 1,
            pad: kernel / 2,
            nchw_input: false,
        }
    }

    pub fn depthwise(n: i64, channels: i64, size: i64, kernel: i64, stride: i64) -> Self {
        Conv {
            groups: channels,
            c: 1,
            k: 1,
            ..Conv::square(n, 1, 1, size, kernel, stride)
        }
    }

    pub fn out_size(&self, d: usize) -> i64 {
        (self.size[d] + 2 * self.pad - self.dilation * (self.kernel[d] - 1) - 1) / self.stride + 1
    }

    /// Dims: n, g, k, c, then per spatial dim: out position, tap.
    fn dims(&self) -> Vec<i64> {
        let mut d = vec![self.n, self.groups, self.k, self.c];
        for s in 0..self.size.len() {
            d.extend([self.out_size(s), self.kernel[s]]);
        }
        d
    }

    fn activation(
        &self,
        sizes: &[i64],
        channels: (usize, i64),
        spatial: Vec<Axis>,
        nchw: bool,
    ) -> Operand {
        let (c_dim, per_group) = channels;
        let all = per_group * self.groups;
        let volume: i64 = sizes.iter().product();
        let c_stride = if nchw { volume } else { 1 };
        let mut axes = vec![
            plain(0, self.n, all * volume),
            plain(1, self.groups, per_group * c_stride),
            plain(c_dim, per_group, c_stride),
        ];
        let mut stride = if nchw { 1 } else { all };
        for (s, mut ax) in spatial.into_iter().enumerate().rev() {
            ax.stride = stride;
            stride *= sizes[s];
            axes.push(ax);
        }
        Operand { axes, base: 0 }
    }

    fn input(&self) -> Operand {
        let window = |s: usize| Axis {
            size: self.size[s],
            stride: 0,
            terms: vec![(4 + 2 * s, self.stride), (5 + 2 * s, self.dilation)],
            offset: -self.pad,
            guarded: true,
        };
        let spatial = (0..self.size.len()).map(window).collect();
        self.activation(&self.size, (3, self.c), spatial, self.nchw_input)
    }

    fn output(&self) -> Operand {
        let sizes: Vec<i64> = (0..self.size.len()).map(|s| self.out_size(s)).collect();
        let spatial = (0..sizes.len())
            .map(|s| plain(4 + 2 * s, sizes[s], 0))
            .collect();
        self.activation(&sizes, (2, self.k), spatial, false)
    }

    /// `[groups*k, c, taps..]`.
    fn weight(&self) -> Operand {
        let taps: i64 = self.kernel.iter().product();
        let mut axes = vec![
            plain(1, self.groups, self.k * self.c * taps),
            plain(2, self.k, self.c * taps),
            plain(3, self.c, taps),
        ];
        let mut stride = taps;
        for s in 0..self.kernel.len() {
            stride /= self.kernel[s];
            axes.push(plain(5 + 2 * s, self.kernel[s], stride));
        }
        Operand { axes, base: 0 }
    }

    pub fn forward(&self) -> Contraction {
        Contraction {
            element: Element::F32,
            dims: self.dims(),
            a: self.input(),
            b: self.weight(),
            out: self.output(),
        }
    }

    pub fn data_gradient(&self) -> Contraction {
        Contraction {
            element: Element::F32,
            dims: self.dims(),
            a: self.output(),
            b: self.weight(),
            out: self.input(),
        }
    }

    pub fn weight_gradient(&self) -> Contraction {
        Contraction {
            element: Element::F32,
            dims: self.dims(),
            a: self.input(),
            b: self.output(),
            out: self.weight(),
        }
    }
}

/// An axis that is one dim.
pub fn plain(dim: usize, size: i64, stride: i64) -> Axis {
    Axis {
        size,
        stride,
        terms: vec![(dim, 1)],
        offset: 0,
        guarded: false,
    }
}

/// `out[batch, m, n] = sum over k`, each operand row-major in the order its dims are named:
/// letters of `b` (batch), `m`, `n`, `k`.
pub fn matmul(sizes: [i64; 4], a: &str, b: &str, out: &str) -> Contraction {
    let operand = |names: &str| {
        let mut stride = 1;
        let mut axes = Vec::new();
        for ch in names.chars().rev() {
            let dim = "bmnk".find(ch).expect("a letter of b, m, n, k");
            axes.push(plain(dim, sizes[dim], stride));
            stride *= sizes[dim];
        }
        Operand { axes, base: 0 }
    };
    Contraction {
        element: Element::F32,
        dims: sizes.to_vec(),
        a: operand(a),
        b: operand(b),
        out: operand(out),
    }
}

/// Elements from the start of the buffer to the end of the container.
pub fn extent(op: &Operand) -> usize {
    let last: i64 = op.axes.iter().map(|ax| (ax.size - 1) * ax.stride).sum();
    (op.base + last + 1) as usize
}
