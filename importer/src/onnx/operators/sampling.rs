//! Sampling an image at computed positions: GridSample, AffineGrid.
//!
//! A sample is a sum of elements, read where data says, times weights that follow from the position; so its gradients,
//! also with respect to positions, are those of these operators.

use super::contraction::contract;
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Binary, ContainerId, DType, Expr, SymExpr, Tensor, Unary};

pub static RULES: Rules = &[("AffineGrid", affine_grid), ("GridSample", grid_sample)];

/// Coordinates of a grid, at most.
const MOST_POINTS: usize = 1 << 24;

/// What is read outside of an image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outside {
    Zeros,
    Border,
    Reflection,
}

/// Which elements around a position count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Interpolation {
    Nearest,
    Linear,
    Cubic,
}

/// Elements along one dimension, or in an image: `[batch, points]` each.
#[derive(Clone, Copy)]
pub struct Tap {
    /// Where they are read.
    pub place: ContainerId,
    /// What they are multiplied with.
    pub weight: ContainerId,
    /// Whether they count; absent if all do. One that does not may be infinite, which a weight of 0 would not take
    /// away.
    pub counts: Option<ContainerId>,
}

/// Elements whose weighted sum is read.
pub type Taps = Vec<Tap>;

/// How a position is read.
pub struct Sampling {
    /// Which elements around it count.
    pub interpolation: Interpolation,
    /// What is read outside.
    pub outside: Outside,
    /// Whether −1 and 1 are the middles of the first and the last element, or their outer edges.
    pub align_corners: bool,
    /// The type of positions and weights.
    pub dtype: DType,
}

impl Sampling {
    fn of(cx: &NodeCx, dtype: DType) -> Result<Sampling, Refusal> {
        let interpolation = match cx.text("mode", "linear")?.as_str() {
            "nearest" => Interpolation::Nearest,
            "linear" | "bilinear" => Interpolation::Linear,
            "cubic" | "bicubic" => Interpolation::Cubic,
            other => return Err(Refusal(format!("mode `{other}` is not supported"))),
        };
        let outside = match cx.text("padding_mode", "zeros")?.as_str() {
            "zeros" => Outside::Zeros,
            "border" => Outside::Border,
            "reflection" => Outside::Reflection,
            other => return Err(Refusal(format!("padding_mode `{other}` is not supported"))),
        };
        Ok(Sampling {
            interpolation,
            outside,
            align_corners: cx.int("align_corners", 0)? != 0,
            dtype,
        })
    }

    /// A size as a number of this type.
    fn size(&self, size: &SymExpr) -> Expr {
        Expr::Index(size.clone()).cast(self.dtype)
    }

    /// The first and the last position of a dimension.
    fn borders(&self, size: &SymExpr) -> (Expr, Expr) {
        match self.align_corners {
            true => (Expr::float(0.0), self.size(size).sub(Expr::float(1.0))),
            false => (Expr::float(-0.5), self.size(size).sub(Expr::float(0.5))),
        }
    }

    /// The position in a dimension of `size` for the normalized coordinate `In(0)`.
    fn position(&self, size: &SymExpr) -> Expr {
        let (half, one) = (Expr::float(0.5), Expr::float(1.0));
        let from_start = Expr::In(0).add(one.clone());
        let mut x = match self.align_corners {
            true => from_start.mul(half).mul(self.size(size).sub(one)),
            false => from_start.mul(self.size(size)).sub(one).mul(half),
        };
        if self.interpolation == Interpolation::Nearest {
            x = Expr::unary(Unary::Round, x);
        }
        match self.outside {
            Outside::Zeros => x,
            // Cubic windows stay where they are; each of their elements is moved.
            Outside::Border if self.interpolation == Interpolation::Cubic => x,
            Outside::Border => self.clamped(x, size),
            Outside::Reflection => self.reflected(x, size),
        }
    }

    fn clamped(&self, x: Expr, size: &SymExpr) -> Expr {
        let last = self.size(size).sub(Expr::float(1.0));
        x.max(Expr::float(0.0)).min(last)
    }

    /// Reflected at the nearer border until it is inside.
    fn reflected(&self, x: Expr, size: &SymExpr) -> Expr {
        let (low, high) = self.borders(size);
        let zero = || Expr::float(0.0);
        let range = high.clone().sub(low.clone());
        let before = low.clone().sub(x.clone());
        let after = x.clone().sub(high.clone());
        let past = before.clone().max(after);
        let turns = past.clone().div(range.clone()).floor();
        let rest = past.clone().sub(turns.clone().mul(range.clone()));
        // After an even number of turns it is counted from the border that it passed.
        let half = turns.clone().mul(Expr::float(0.5));
        let is_even = half.clone().floor().eq_(half);
        let is_before = before.gt(zero());
        let from_low = is_before
            .clone()
            .and(is_even.clone())
            .or(is_before.not().and(is_even.not()));
        let inside = Expr::select(from_low, low.clone().add(rest.clone()), high.sub(rest));
        let moved = Expr::select(past.gt(zero()), inside, x);
        // A single element has nothing to reflect.
        Expr::select(range.le(zero()), low.max(zero()), moved)
    }

    /// Elements and weights along a dimension for positions `[batch, points]`.
    pub fn taps(&self, cx: &mut NodeCx, at: ContainerId, size: &SymExpr) -> Result<Taps, Refusal> {
        let base = Expr::In(0).floor();
        let t = Expr::In(0).sub(base.clone());
        let one = || Expr::float(1.0);
        let weights: Vec<(Expr, Expr)> = match self.interpolation {
            // All the same, for every position.
            Interpolation::Nearest => {
                let is_position = Expr::In(0).eq_(Expr::In(0));
                vec![(Expr::In(0), Expr::select(is_position, one(), one()))]
            }
            Interpolation::Linear => {
                vec![(base.clone(), one().sub(t.clone())), (base.add(one()), t)]
            }
            Interpolation::Cubic => (-1..3)
                .map(|k| {
                    let k = Expr::float(f64::from(k));
                    (base.clone().add(k.clone()), cubic(t.clone().sub(k)))
                })
                .collect(),
        };
        let mut taps = Vec::new();
        for (x, weight) in weights {
            let counts = match self.outside {
                Outside::Zeros => {
                    let from_start = x.clone().ge(Expr::float(0.0));
                    let is_inside = from_start.and(x.clone().lt(self.size(size)));
                    Some(cx.elementwise(is_inside, &[at])?)
                }
                _ => None,
            };
            let x = match self.outside {
                Outside::Reflection => Expr::unary(Unary::Trunc, self.reflected(x, size)),
                _ => x,
            };
            let x = self.clamped(x, size).cast(DType::I64);
            taps.push(Tap {
                place: cx.elementwise(x, &[at])?,
                weight: cx.elementwise(weight.cast(self.dtype), &[at])?,
                counts,
            });
        }
        Ok(taps)
    }
}

/// The weight of an element at distance `x`.
fn cubic(x: Expr) -> Expr {
    let (a, x) = (-0.75, x.abs());
    let number = Expr::float;
    let near = x
        .clone()
        .mul(number(a + 2.0))
        .sub(number(a + 3.0))
        .mul(x.clone())
        .mul(x.clone())
        .add(number(1.0));
    let far = x
        .clone()
        .mul(number(a))
        .sub(number(5.0 * a))
        .mul(x.clone())
        .add(number(8.0 * a))
        .mul(x.clone())
        .sub(number(4.0 * a));
    let far = Expr::select(x.clone().lt(number(2.0)), far, number(0.0));
    Expr::select(x.le(number(1.0)), near, far)
}

/// x `[batch, channels, …]` at the positions of a grid `[batch, …, dimensions]`, which names the last dimension first.
fn grid_sample(cx: &mut NodeCx) -> Values {
    let (x, grid) = (cx.input(0)?, cx.input(1)?);
    let (shape, grid_shape) = (cx.shape(x), cx.shape(grid));
    let n = shape.len().saturating_sub(2);
    let fits = n > 0
        && grid_shape.len() == n + 2
        && grid_shape[n + 1].as_const() == Some(n as i64)
        && grid_shape[0] == shape[0];
    if !fits {
        return Err("its grid does not fit its input".into());
    }
    let dtype = cx.dtype(grid);
    let sampling = Sampling::of(cx, dtype)?;
    let points = SymExpr::product(&grid_shape[1..=n]);
    let flat = vec![shape[0].clone(), points.clone()];
    // Places in the image with weights, one dimension after the other.
    let mut all: Option<Taps> = None;
    for (d, size) in shape[2..].iter().enumerate() {
        let column = SymExpr::from(n - 1 - d);
        let at = cx.part(grid, n + 1, column.clone(), column + 1)?;
        let at = cx.reshape(at, flat.clone())?;
        let at = cx.elementwise(sampling.position(size), &[at])?;
        let own = sampling.taps(cx, at, size)?;
        all = Some(match all {
            None => own,
            Some(outer) => combined(cx, &outer, &own, size)?,
        });
    }
    let taps = all.ok_or("its input has no spatial dimensions")?;
    let y = read(cx, (x, &taps), &points, Binary::Add)?;
    let mut to = shape[..2].to_vec();
    to.extend_from_slice(&grid_shape[1..=n]);
    single(cx.reshape(y, to)?)
}

/// Places in two dimensions from those in each.
pub fn combined(
    cx: &mut NodeCx,
    outer: &Taps,
    inner: &Taps,
    size: &SymExpr,
) -> Result<Taps, Refusal> {
    let mut all = Vec::new();
    for row in outer {
        for column in inner {
            let place = Expr::In(0).mul(Expr::Index(size.clone())).add(Expr::In(1));
            let weight = Expr::In(0).mul(Expr::In(1));
            let counts = match (row.counts, column.counts) {
                (Some(row), Some(column)) => {
                    let both = Expr::In(0).and(Expr::In(1));
                    Some(cx.elementwise(both, &[row, column])?)
                }
                (one, other) => one.or(other),
            };
            all.push(Tap {
                place: cx.elementwise(place, &[row.place, column.place])?,
                weight: cx.elementwise(weight, &[row.weight, column.weight])?,
                counts,
            });
        }
    }
    Ok(all)
}

/// `[batch, channels, points]`: the sums of elements of `x` at places in an image, times weights; or what another
/// function makes of these products.
pub fn read(
    cx: &mut NodeCx,
    (x, taps): (ContainerId, &Taps),
    points: &SymExpr,
    together: Binary,
) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    let (batch, channels) = (shape[0].clone(), shape[1].clone());
    let image = SymExpr::product(&shape[2..]);
    let x = cx.reshape(x, vec![batch.clone(), channels.clone(), image])?;
    let wide = vec![batch.clone(), channels, points.clone()];
    let thin = vec![batch, 1.into(), points.clone()];
    let mut inputs = Vec::new();
    let mut sum: Option<Expr> = None;
    for tap in taps {
        let place = cx.reshape(tap.place, thin.clone())?;
        let place = expanded(cx, place, wide.clone())?;
        let element = cx.along("gather_elements", &[x, place], 2)?;
        let weight = cx.reshape(tap.weight, thin.clone())?;
        let first = inputs.len();
        let mut product = Expr::In(first).mul(Expr::In(first + 1));
        inputs.extend([element, weight]);
        if let Some(counts) = tap.counts {
            inputs.push(cx.reshape(counts, thin.clone())?);
            product = Expr::select(Expr::In(first + 2), product, Expr::float(0.0));
        }
        sum = Some(match sum {
            None => product,
            Some(sum) => Expr::binary(together, sum, product),
        });
    }
    let sum = sum.ok_or("it reads nothing")?;
    let dtype = cx.dtype(x);
    cx.elementwise(sum.cast(dtype), &inputs)
}

/// Coordinates of an image's elements, from −1 to 1, turned by a matrix `[batch, dimensions, dimensions + 1]`.
fn affine_grid(cx: &mut NodeCx) -> Values {
    let theta = cx.input(0)?;
    let sizes = cx.sizes(1)?;
    let align_corners = cx.int("align_corners", 0)? != 0;
    let spatial: Option<Vec<usize>> = sizes
        .iter()
        .skip(2)
        .map(|n| usize::try_from(n.as_const()?).ok())
        .collect();
    let spatial = spatial.filter(|s| !s.is_empty());
    let spatial = spatial.ok_or("its size has dynamic spatial sizes, or none")?;
    let n = spatial.len();
    let points = spatial
        .iter()
        .try_fold(1usize, |all, size| all.checked_mul(*size));
    let points = points.filter(|all| *all <= MOST_POINTS / (n + 1));
    let points = points.ok_or("its grid has too many points")?;
    let mut places = Vec::with_capacity(points * (n + 1));
    for point in 0..points {
        let mut rest = point;
        for size in spatial.iter().rev() {
            let (i, count) = ((rest % size) as f64, *size as f64);
            rest /= size;
            places.push(match align_corners {
                true if *size == 1 => -1.0,
                true => 2.0 * i / (count - 1.0) - 1.0,
                false => (2.0 * i + 1.0) / count - 1.0,
            });
        }
        places.push(1.0);
    }
    let dtype = cx.dtype(theta);
    let places = cx.constant(Tensor::from_f64(dtype, &[points, n + 1], places));
    let y = contract(cx, "pk,njk->npj".to_string(), &[places, theta])?;
    let mut to = vec![sizes[0].clone()];
    to.extend(spatial.iter().map(|n| SymExpr::from(*n)));
    to.push(n.into());
    single(cx.reshape(y, to)?)
}
