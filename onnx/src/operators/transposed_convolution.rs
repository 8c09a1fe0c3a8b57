//! ConvTranspose: the windows of a convolution, written instead of read.

use super::products::{matrix, matrix_mut, multiply_here};
use super::real::{Real, in_real};
use super::windows::Placed;
use super::{Call, Inference, Operator, threads};
use crate::attributes::Attributes;
use crate::fact::Fact;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[Operator::new("ConvTranspose", infer, |call| {
    let element = call.input(0)?.element();
    in_real!(element, R => {
        let (shape, y) = transposed::<R>(call)?;
        R::tensor(element, &shape, y)
    })
    .map(|y| vec![y])
})];

/// Elements of a block of taps.
const BLOCK: usize = 1 << 19;

/// Attributes along one dimension.
struct Dimension {
    stride: i64,
    dilation: i64,
    low: i64,
    high: i64,
    more: i64,
    given: Option<i64>,
}

fn dimensions(attributes: Attributes, n: usize) -> Result<Vec<Dimension>, String> {
    let ints = |name: &str, len: usize, default: i64| match attributes.ints(name) {
        None => Ok(vec![default; len]),
        Some(v) if v.len() == len && v.iter().all(|v| v.unsigned_abs() < 1 << 31) => Ok(v.to_vec()),
        Some(v) => Err(format!("{name} {v:?} do not fit {n} dimensions")),
    };
    let (strides, dilations) = (ints("strides", n, 1)?, ints("dilations", n, 1)?);
    let (pads, more) = (ints("pads", 2 * n, 0)?, ints("output_padding", n, 0)?);
    if strides.iter().chain(&dilations).any(|s| *s < 1) {
        return Err("a step is not positive".to_string());
    }
    let given = attributes.ints("output_shape").filter(|v| !v.is_empty());
    // Some files give the sizes of batch and channels too.
    let given = given.map(|v| &v[v.len().saturating_sub(n)..]);
    let one = |d: usize| Dimension {
        stride: strides[d],
        dilation: dilations[d],
        low: pads[d],
        high: pads[n + d],
        more: more[d],
        given: given.and_then(|v| v.get(d).copied()),
    };
    Ok((0..n).map(one).collect())
}

fn is_same(attributes: Attributes) -> bool {
    matches!(
        attributes.text("auto_pad"),
        Some("SAME_UPPER" | "SAME_LOWER")
    )
}

impl Dimension {
    /// What windows of size `kernel` cover of an output without padding.
    fn reach(&self, input: &SymExpr, kernel: &SymExpr) -> SymExpr {
        (input.clone() - 1) * self.stride + (kernel.clone() - 1) * self.dilation + (1 + self.more)
    }

    fn output(&self, attributes: Attributes, input: &SymExpr, kernel: &SymExpr) -> SymExpr {
        if let Some(given) = self.given {
            return given.into();
        }
        if is_same(attributes) {
            return input.clone() * self.stride;
        }
        let pads = match attributes.text("auto_pad") {
            Some("VALID") => 0,
            _ => self.low + self.high,
        };
        self.reach(input, kernel) - pads
    }

    /// Elements of the covered output that are cut off before the first.
    fn cut(&self, attributes: Attributes, reach: i64, output: i64) -> i64 {
        let total = (reach - output).max(0);
        match attributes.text("auto_pad") {
            Some("SAME_UPPER") => total / 2,
            Some("SAME_LOWER") => total - total / 2,
            Some("VALID") if self.given.is_none() => 0,
            _ if self.given.is_some() => total - total / 2,
            _ => self.low,
        }
    }
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let (x, w) = (cx.shape(0)?, cx.shape(1)?);
    if x.len() != w.len() || x.len() < 2 {
        return None;
    }
    let group = cx.attributes.int("group").unwrap_or(1);
    let mut shape = vec![x[0].clone(), w[1].clone() * group];
    for (d, along) in dimensions(cx.attributes, x.len() - 2)
        .ok()?
        .iter()
        .enumerate()
    {
        shape.push(along.output(cx.attributes, &x[d + 2], &w[d + 2]));
    }
    cx.like_first(Some(shape))
}

/// The windows that read the output back into the input.
fn windows(call: &Call, x: &[usize], w: &[usize]) -> Result<Placed, String> {
    let n = x.len() - 2;
    let mut placed = Placed {
        input: Vec::new(),
        kernel: w[2..].to_vec(),
        strides: Vec::new(),
        dilations: Vec::new(),
        low: Vec::new(),
        high: vec![0; n],
        output: x[2..].to_vec(),
    };
    for (d, along) in dimensions(call.attributes, n)?.iter().enumerate() {
        let (input, kernel) = (x[d + 2].into(), w[d + 2].into());
        let constant = |e: SymExpr| e.as_const().unwrap_or(-1);
        let output = constant(along.output(call.attributes, &input, &kernel));
        let reach = constant(along.reach(&input, &kernel));
        let size = usize::try_from(output).map_err(|_| "its padding leaves nothing".to_string())?;
        placed.input.push(size);
        placed.strides.push(along.stride as usize);
        placed.dilations.push(along.dilation as usize);
        placed.low.push(along.cut(call.attributes, reach, output));
    }
    Ok(placed)
}

fn transposed<R: Real>(call: &Call) -> Result<(Vec<usize>, Vec<R>), String> {
    let (x, w) = (call.input(0)?, call.input(1)?);
    let groups = call.attributes.int("group").unwrap_or(1);
    let groups = usize::try_from(groups)
        .ok()
        .filter(|g| *g > 0)
        .ok_or("its group is not positive")?;
    let fits = x.shape.len() == w.shape.len()
        && x.shape.len() > 2
        && x.shape[1] == w.shape[0]
        && x.shape[1].is_multiple_of(groups);
    if !fits {
        return Err(format!(
            "weights of sizes {:?} in {groups} groups do not fit an input of sizes {:?}",
            w.shape, x.shape
        ));
    }
    let placed = windows(call, &x.shape, &w.shape)?;
    let mut shape = vec![x.shape[0], w.shape[1] * groups];
    shape.extend(&placed.input);
    let placed = placed.in_three();
    let placed = placed.ok_or("more than three spatial dimensions are not supported")?;
    let (vx, vw) = (R::read(x)?, R::read(w)?);
    let (channels, filters, taps) = (x.shape[1] / groups, w.shape[1], placed.window_len());
    let (image, n_windows) = (placed.input.iter().product::<usize>(), placed.n_windows());
    let bias = call.optional(2).map(|b| R::read(b)).transpose()?;
    if bias.as_ref().is_some_and(|b| b.len() != shape[1]) {
        return Err("its bias does not fit".to_string());
    }
    let mut y = vec![R::zero(); crate::tensor::room(&shape)?];
    let block =
        (BLOCK / (taps * n_windows).max(1)).clamp(1, filters.div_ceil(threads::count()).max(1));
    let mut pieces = Vec::new();
    for (at, y) in y.chunks_mut((filters * image).max(1)).enumerate() {
        for (n, y) in y.chunks_mut((block * image).max(1)).enumerate() {
            pieces.push((at, n * block, y));
        }
    }
    let piece = |copied: &mut Vec<R>, at: usize, first: usize, y: &mut [R]| -> Result<(), String> {
        let n = y.len() / image;
        let x = matrix(
            &vx[at * channels * n_windows..][..channels * n_windows],
            channels,
            n_windows,
        )?;
        let w = &vw[at % groups * channels * filters * taps..][..channels * filters * taps];
        let w = matrix(w, channels, filters * taps)?;
        let w = w.slice(ndarray::s![.., first * taps..(first + n) * taps]);
        copied.resize(n * taps * n_windows, R::zero());
        multiply_here(w.t(), x, &mut matrix_mut(copied, n * taps, n_windows)?);
        for (n, y) in y.chunks_mut(image).enumerate() {
            if let Some(bias) = &bias {
                y.fill(bias[at % groups * filters + first + n]);
            }
            for tap in 0..taps {
                add_tap(
                    &placed,
                    tap,
                    &copied[(n * taps + tap) * n_windows..][..n_windows],
                    y,
                );
            }
        }
        Ok(())
    };
    let problem = std::sync::Mutex::new(None);
    threads::each(pieces.into_iter(), Vec::new, |copied, (at, first, y)| {
        if let (Err(what), Ok(mut problem)) = (piece(copied, at, first, y), problem.lock()) {
            *problem = Some(what);
        }
    });
    match problem.into_inner().ok().flatten() {
        Some(what) => Err(what),
        None => Ok((shape, y)),
    }
}

/// Adds `row`, the values of all windows at tap `tap`, to the elements of `y` that the windows read at that tap.
fn add_tap<R: Real>(w: &Placed, tap: usize, row: &[R], y: &mut [R]) {
    let inside = w.inside(2, tap % w.kernel[2]);
    let is_in = |p: i64, d: usize| (0..w.input[d] as i64).contains(&p);
    for (line, row) in row.chunks(w.output[2].max(1)).enumerate() {
        let p0 = w.position(0, line / w.output[1], tap / (w.kernel[1] * w.kernel[2]));
        let p1 = w.position(1, line % w.output[1], tap / w.kernel[2] % w.kernel[1]);
        if !is_in(p0, 0) || !is_in(p1, 1) || inside.is_empty() {
            continue;
        }
        let first = w.position(2, inside.start, tap % w.kernel[2]) as usize;
        let line = (p0 as usize * w.input[1] + p1 as usize) * w.input[2];
        let to = y[line + first..].iter_mut().step_by(w.strides[2]);
        to.zip(&row[inside.clone()]).for_each(|(y, x)| *y += *x);
    }
}
