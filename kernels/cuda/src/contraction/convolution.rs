//! From a contraction to the convolution that it is, in cuDNN's terms, if it is one.
//!
//! Owns the conditions, on the indices of the three operands alone: which of them are images, filters
//! and responses follows from what their dimensions share, and the one that is written says which of
//! forward, data gradient and filter gradient it is. Layouts are described, not judged: the library says
//! which it takes. Chooses nothing.

use super::{Types, Unsupported};
use crate::vendor::{Array, Convolution, Direction, Finish};
use graph::DType;
use kernels::contraction::Contraction;
use kernels::contraction::access::{Access, Coord, Problem};

/// Why a contraction is no convolution.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotAConvolution {
    /// The description contradicts itself.
    #[error(transparent)]
    Form(#[from] Unsupported),
    /// It is something else.
    #[error("{0}")]
    Shape(&'static str),
    /// The library does not convolve these types in f32.
    #[error("cuDNN has no convolution of {a} and {b} to {out} with sums in f32")]
    Types {
        /// Type of the left factor.
        a: DType,
        /// Type of the right factor.
        b: DType,
        /// Type of the result.
        out: DType,
    },
}

/// The convolution that a contraction is, without anything done to its sums.
///
/// # Errors
/// Why it is none.
pub fn convolution(c: &Contraction, types: Types) -> Result<Convolution, NotAConvolution> {
    kernels::contraction::check(c).map_err(Unsupported::from)?;
    let Types { a, b, out } = types;
    let is_known = matches!(out, DType::BF16 | DType::F16 | DType::F32);
    if !is_known || a != out || b != out {
        return Err(NotAConvolution::Types { a, b, out });
    }
    let problem = Problem::new(c);
    let operands = [&problem.a, &problem.b, &problem.out];
    let mut reason = "its indices are not those of images, filters and responses";
    // Images, filters, responses among a, b, out.
    const OUT: usize = 2;
    let readings = [
        [0, 1, OUT],
        [1, 0, OUT],
        [OUT, 1, 0],
        [OUT, 0, 1],
        [0, OUT, 1],
        [1, OUT, 0],
    ];
    for [x, w, y] in readings {
        // Where groups of channels are a dimension of their own, it is before the channels.
        let (Some(of_x), Some(of_w), Some(of_y)) = (
            four(operands[x], 1),
            four(operands[w], 0),
            four(operands[y], 1),
        ) else {
            reason = "an operand has not two spatial directions, or its channels lie in parts";
            continue;
        };
        let roles = Roles {
            dims: &problem.dims,
            x: &of_x,
            w: &of_w,
            y: &of_y,
        };
        match roles.geometry() {
            Ok(geometry) => {
                let direction = match (x, y) {
                    (_, OUT) => Direction::Forward,
                    (OUT, _) => Direction::Data,
                    _ => Direction::Filter,
                };
                let array = |coords: &[Coord], at: usize| array(coords, operands[at].base, out);
                let first = if direction == Direction::Data { y } else { x };
                return Ok(Convolution {
                    direction,
                    x: array(&of_x, x),
                    w: array(&of_w, w),
                    y: array(&of_y, y),
                    groups: geometry.groups,
                    pads: geometry.pads,
                    strides: geometry.strides,
                    dilations: geometry.dilations,
                    finish: Finish::Nothing,
                    is_swapped: first == 1,
                });
            }
            Err(Some(better)) => reason = better,
            Err(None) => (),
        }
    }
    Err(NotAConvolution::Shape(reason))
}

/// An operand's coordinates, with the dimension of groups at `at` and the next one joined.
fn four(x: &Access, at: usize) -> Option<Vec<Coord>> {
    let mut coords = x.coords.clone();
    if coords.len() == 5 {
        let (groups, within) = (coords.remove(at), coords[at].clone());
        let is_plain = |c: &Coord| !c.guarded && c.offset == 0;
        if !is_plain(&groups) || !is_plain(&within) || groups.stride != within.stride * within.size
        {
            return None;
        }
        let counted = |(d, k): &(usize, i64)| (*d, k * within.size);
        coords[at] = Coord {
            terms: (groups.terms.iter().map(counted))
                .chain(within.terms.iter().copied())
                .collect(),
            size: groups.size * within.size,
            ..within
        };
    }
    (coords.len() == 4).then_some(coords)
}

fn array(coords: &[Coord], offset: i64, dtype: DType) -> Array {
    let each = |f: &dyn Fn(&Coord) -> i64| [0, 1, 2, 3].map(|d| f(&coords[d]));
    Array {
        dtype,
        sizes: each(&|c| c.size),
        strides: each(&|c| c.stride),
        offset,
    }
}

/// What is known of a convolution besides its arrays.
struct Geometry {
    groups: i64,
    pads: [[i64; 2]; 2],
    strides: [i64; 2],
    dilations: [i64; 2],
}

/// Operands as a reading of the contraction has them.
struct Roles<'a> {
    dims: &'a [i64],
    x: &'a [Coord],
    w: &'a [Coord],
    y: &'a [Coord],
}

/// `None`: not this reading. A text: there is no reading, for that reason.
type Refused = Option<&'static str>;

impl Roles<'_> {
    fn geometry(&self) -> Result<Geometry, Refused> {
        let (x, w, y) = (self.x, self.w, self.y);
        let n = self.whole(&x[0])?;
        if self.whole(&y[0])? != n || y[0].size != x[0].size {
            return Err(None);
        }
        let groups = self.groups()?;
        let per_group = [w[1].size, w[0].size / groups.n];
        // Channels count groups, then those of a group.
        let channels = [&x[1], &w[0], &y[1]].map(|c| self.grouped(c, groups.dim));
        let [of_x, of_w, of_y] = channels;
        let ((c, of_x), (k, of_w), (also_k, of_y)) = (of_x?, of_w?, of_y?);
        let is_counted = |found: Option<i64>, n: i64| found.is_none_or(|f| f == n);
        let fits = self.whole(&w[1])? == c
            && k == also_k
            && x[1].size == per_group[0] * groups.n
            && y[1].size == w[0].size
            && self.size(c) == per_group[0]
            && self.size(k) == per_group[1]
            && is_counted(of_x, per_group[0])
            && is_counted(of_w, per_group[1])
            && is_counted(of_y, per_group[1]);
        if !fits {
            return Err(None);
        }
        let mut used: Vec<usize> = [n, groups.dim, c, k].into_iter().flatten().collect();
        let mut geometry = Geometry {
            groups: groups.n,
            pads: [[0; 2]; 2],
            strides: [1; 2],
            dilations: [1; 2],
        };
        for at in 0..2 {
            let (p, r) = (self.whole(&y[2 + at])?, self.whole(&w[2 + at])?);
            let along = self.window(&x[2 + at], p, r)?;
            used.extend([p, r].into_iter().flatten());
            geometry.pads[0][at] = along.before;
            geometry.pads[1][at] = along.behind;
            geometry.strides[at] = along.stride;
            geometry.dilations[at] = along.dilation;
        }
        let all = (0..self.dims.len()).filter(|d| self.dims[*d] > 1);
        let mut sorted = used.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let each_once = sorted.len() == used.len() && all.eq(sorted.iter().copied());
        each_once.then_some(geometry).ok_or(None)
    }

    fn size(&self, dim: Option<usize>) -> i64 {
        dim.map_or(1, |d| self.dims[d])
    }

    /// The dim that alone reaches every position of a coordinate; `None` for a coordinate of a single position.
    fn whole(&self, c: &Coord) -> Result<Option<usize>, Refused> {
        let is_plain = c.covers(self.dims) && c.offset == 0;
        is_plain.then(|| c.terms.first().map(|t| t.0)).ok_or(None)
    }

    /// Groups: the dim that all three operands have, and how many.
    fn groups(&self) -> Result<Groups, Refused> {
        let has = |x: &[Coord], d: usize| x.iter().any(|c| c.coeff(d) != 0);
        let everywhere = |d: &usize| [self.x, self.w, self.y].iter().all(|x| has(x, *d));
        let mut found = (0..self.dims.len()).filter(everywhere);
        match (found.next(), found.next()) {
            (None, _) => Ok(Groups { dim: None, n: 1 }),
            (Some(d), None) => Ok(Groups {
                dim: Some(d),
                n: self.dims[d],
            }),
            _ => Err(Some("two dimensions are in all operands")),
        }
    }

    /// The dim within a group, and the distance of groups where there are some.
    #[allow(clippy::type_complexity)]
    fn grouped(
        &self,
        c: &Coord,
        group: Option<usize>,
    ) -> Result<(Option<usize>, Option<i64>), Refused> {
        if c.guarded || c.offset != 0 {
            return Err(None);
        }
        let within: Vec<_> = c.terms.iter().filter(|t| Some(t.0) != group).collect();
        let distance = group.map(|g| c.coeff(g));
        match within.as_slice() {
            [] => Ok((None, distance)),
            [(d, 1)] => Ok((Some(*d), distance)),
            _ => Err(None),
        }
    }

    /// A direction of the images as positions of responses and taps.
    fn window(&self, c: &Coord, p: Option<usize>, r: Option<usize>) -> Result<Window, Refused> {
        let known = |t: &&(usize, i64)| Some(t.0) == p || Some(t.0) == r;
        if c.terms.iter().any(|t| !known(&t)) {
            return Err(None);
        }
        let step = |d: Option<usize>| d.map_or(1, |d| c.coeff(d));
        let (stride, dilation) = (step(p), step(r));
        if stride < 1 || dilation < 1 {
            return Err(Some("its window runs backwards"));
        }
        let before = -c.offset;
        if before < 0 {
            return Err(Some("it reads a part of its images"));
        }
        let span = (self.size(r) - 1) * dilation + 1;
        let read = (self.size(p) - 1) * stride + span;
        let behind = (read - c.size - before).max(0);
        // How the library counts responses.
        let counted = (c.size + before + behind - span) / stride + 1;
        let covered = c.guarded || (before == 0 && behind == 0);
        if counted != self.size(p) || !covered {
            return Err(Some("it reads a part of its images"));
        }
        Ok(Window {
            before,
            behind,
            stride,
            dilation,
        })
    }
}

struct Groups {
    dim: Option<usize>,
    n: i64,
}

/// One direction of the window.
struct Window {
    before: i64,
    behind: i64,
    stride: i64,
    dilation: i64,
}
