//! Operators of detection networks: NonMaxSuppression chooses among boxes, RoiAlign reads regions of images.
//!
//! Both are as the standard's own cases and ONNX Runtime have them. With mode `max`, RoiAlign compares the
//! weighted elements around every sample, not the samples.

use super::real::{Real, in_real};
use super::{Call, Inference, Operator, threads};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use std::cmp::Ordering;

pub const ROWS: &[Operator] = &[
    Operator::new("NonMaxSuppression", infer_selected, |call| {
        let element = call.input(0)?.element();
        in_real!(element, R => selected::<R>(call)).map(|y| vec![y])
    }),
    Operator::new("RoiAlign", infer_regions, |call| {
        let element = call.input(0)?.element();
        in_real!(element, R => {
            let (shape, y) = regions::<R>(call)?;
            R::tensor(element, &shape, y)
        })
        .map(|y| vec![y])
    }),
];

fn infer_selected(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = vec![cx.unknown(), SymExpr::constant(3)];
    Some(vec![Fact::new(Some(Element::I64), Some(shape))])
}

fn infer_regions(cx: &Inference) -> Option<Vec<Fact>> {
    let size = |name| SymExpr::constant(cx.attributes.int(name).unwrap_or(1));
    let (images, regions) = (cx.shape(0)?, cx.shape(1)?);
    let shape = vec![
        regions.first()?.clone(),
        images.get(1)?.clone(),
        size("output_height"),
        size("output_width"),
    ];
    cx.like_first(Some(shape))
}

/// A box by its corners.
struct Corners<R> {
    y: [R; 2],
    x: [R; 2],
}

impl<R: Real> Corners<R> {
    fn new(given: &[R], is_centered: bool) -> Corners<R> {
        let ordered = |a: R, b: R| if a >= b { [b, a] } else { [a, b] };
        let around = |center: R, size: R| {
            let half = size / R::of(2.0);
            [center - half, center + half]
        };
        match is_centered {
            false => Corners {
                y: ordered(given[0], given[2]),
                x: ordered(given[1], given[3]),
            },
            true => Corners {
                y: around(given[1], given[3]),
                x: around(given[0], given[2]),
            },
        }
    }

    fn area(&self) -> R {
        (self.x[1] - self.x[0]) * (self.y[1] - self.y[0])
    }

    /// Whether the common area of the boxes is more than `threshold` of the area that they cover together.
    fn overlaps(&self, other: &Corners<R>, threshold: R) -> bool {
        let common = |a: [R; 2], b: [R; 2]| a[1].min(b[1]) - a[0].max(b[0]);
        let (width, height) = (common(self.x, other.x), common(self.y, other.y));
        let is_some = |n: R| n > R::zero();
        if !is_some(width) || !is_some(height) {
            return false;
        }
        let shared = width * height;
        let (own, others) = (self.area(), other.area());
        let all = own + others - shared;
        [shared, own, others, all].into_iter().all(is_some) && shared / all > threshold
    }
}

/// What NonMaxSuppression chooses by.
struct Choice<R> {
    /// Boxes for each class of each image, at most.
    most: usize,
    /// Boxes that overlap a chosen one by more than this are left out.
    overlap: R,
    /// Boxes with a score up to this are left out.
    score: Option<R>,
    is_centered: bool,
}

impl<R: Real> Choice<R> {
    fn new(call: &Call) -> Result<Choice<R>, String> {
        let number = |at: usize| match call.optional(at) {
            None => Ok(None),
            Some(tensor) => R::read(tensor).map(|v| v.first().copied()),
        };
        let most = match call.optional(2) {
            None => 0,
            Some(_) => call.ints(2)?.first().copied().unwrap_or(0),
        };
        let overlap = number(3)?.unwrap_or(R::zero());
        if !(R::zero()..=R::one()).contains(&overlap) {
            return Err(format!(
                "its iou_threshold is {overlap:?}, which is not between 0 and 1"
            ));
        }
        let is_centered = match call.attributes.int("center_point_box").unwrap_or(0) {
            0 => false,
            1 => true,
            other => return Err(format!("its center_point_box is {other}, not 0 or 1")),
        };
        Ok(Choice {
            most: usize::try_from(most).unwrap_or(0),
            overlap,
            score: number(4)?,
            is_centered,
        })
    }

    /// Positions of the chosen boxes of a class, the best one first.
    fn among(&self, boxes: &[Corners<R>], scores: &[R]) -> Vec<usize> {
        let is_high = |at: &usize| self.score.is_none_or(|least| scores[*at] > least);
        let mut order: Vec<usize> = (0..boxes.len()).filter(is_high).collect();
        // Equal scores keep their order.
        let by_score = |a: R, b: R| {
            let decided = b.partial_cmp(&a);
            decided.unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        };
        order.sort_by(|a, b| -> Ordering { by_score(scores[*a], scores[*b]) });
        let mut chosen: Vec<usize> = Vec::new();
        for at in order {
            if chosen.len() >= self.most {
                break;
            }
            let covers = |other: &usize| boxes[at].overlaps(&boxes[*other], self.overlap);
            if !chosen.iter().any(covers) {
                chosen.push(at);
            }
        }
        chosen
    }
}

/// Rows of image, class and box, for boxes `[images, n, 4]` and scores `[images, classes, n]`.
fn selected<R: Real>(call: &Call) -> Result<Tensor, String> {
    let (boxes, scores) = (call.input(0)?, call.input(1)?);
    let (n_images, n_classes, n) = match (boxes.shape.as_slice(), scores.shape.as_slice()) {
        ([a, n, 4], [b, classes, m]) if a == b && n == m => (*a, *classes, *n),
        (boxes, scores) => {
            return Err(format!(
                "boxes of sizes {boxes:?} do not fit scores of sizes {scores:?}"
            ));
        }
    };
    let choice = Choice::<R>::new(call)?;
    let (boxes, scores) = (R::read(boxes)?, R::read(scores)?);
    let mut rows = Vec::new();
    for image in 0..n_images {
        let own = boxes[image * n * 4..][..n * 4].chunks_exact(4);
        let own: Vec<Corners<R>> = own.map(|b| Corners::new(b, choice.is_centered)).collect();
        for class in 0..n_classes {
            let scores = &scores[(image * n_classes + class) * n..][..n];
            let chosen = choice.among(&own, scores);
            rows.extend(
                chosen
                    .into_iter()
                    .flat_map(|at| [image as i64, class as i64, at as i64]),
            );
        }
    }
    Ok(Tensor::new(&[rows.len() / 3, 3], Values::I64(rows)))
}

/// Most samples of all regions of a call.
const MOST_SAMPLES: usize = 1 << 28;
/// Most samples along single dimensions, over all regions of a call: their positions are kept.
const MOST_ALONG: usize = 1 << 22;

/// How RoiAlign reads regions.
struct Method {
    is_max: bool,
    /// What is taken off coordinates: half an element or nothing.
    offset: f64,
    /// Whether a region is at least one element wide.
    is_whole: bool,
    scale: f64,
    /// Samples of a part along a dimension; 0: by the size of the region.
    n_samples: usize,
    /// Parts of a region: rows and columns.
    parts: [usize; 2],
}

impl Method {
    fn new(call: &Call) -> Result<Method, String> {
        let a = &call.attributes;
        let is_max = match a.text("mode").unwrap_or("avg") {
            "avg" => false,
            "max" => true,
            other => return Err(format!("the mode `{other}` is not known")),
        };
        // Before version 16, only this one existed.
        let usual = match call.opset {
            ..16 => "output_half_pixel",
            _ => "half_pixel",
        };
        let is_shifted = match a.text("coordinate_transformation_mode").unwrap_or(usual) {
            "half_pixel" => true,
            "output_half_pixel" => false,
            other => {
                return Err(format!(
                    "the coordinate_transformation_mode `{other}` is not known"
                ));
            }
        };
        let part = |name: &str| {
            let n = a.int(name).unwrap_or(1);
            let size = usize::try_from(n).ok().filter(|n| *n > 0);
            size.ok_or_else(|| format!("its {name} is {n}"))
        };
        let n_samples = a.int("sampling_ratio").unwrap_or(0);
        Ok(Method {
            is_max,
            offset: if is_shifted { 0.5 } else { 0.0 },
            is_whole: !is_shifted,
            scale: f64::from(a.float("spatial_scale").unwrap_or(1.0)),
            n_samples: usize::try_from(n_samples)
                .map_err(|_| format!("its sampling_ratio is {n_samples}"))?,
            parts: [part("output_height")?, part("output_width")?],
        })
    }
}

/// A sample along one dimension: the elements before and after it, with their weights.
type Tap<R> = ([usize; 2], [R; 2]);

/// Samples of a region along one dimension, part after part; `None` where there is no image.
struct Along<R> {
    taps: Vec<Option<Tap<R>>>,
    n_samples: usize,
}

impl<R: Real> Along<R> {
    /// The samples of the region from `first` to `last` along dimension `d`, of `size` elements.
    fn new(
        method: &Method,
        d: usize,
        [first, last]: [R; 2],
        size: usize,
    ) -> Result<Along<R>, String> {
        let place = |at: R| at * R::of(method.scale) - R::of(method.offset);
        let start = place(first);
        let mut length = place(last) - start;
        if method.is_whole {
            length = length.max(R::one());
        }
        if !length.is_finite() {
            return Err("its regions must be finite".to_string());
        }
        let n_parts = method.parts[d];
        let part = length / R::of(n_parts as f64);
        let n_samples = match method.n_samples {
            // A region that ends before it starts has no samples.
            0 => part.ceil().max(R::zero()).wide() as usize,
            given => given,
        };
        let n = n_parts.checked_mul(n_samples);
        let n = n.filter(|n| *n <= MOST_ALONG);
        let n = n.ok_or_else(|| {
            format!("a region takes {n_samples} samples in each of {n_parts} parts, too many")
        })?;
        let sample = |k: usize| {
            let (at, within) = (R::of((k / n_samples) as f64), (k % n_samples) as f64);
            start + at * part + R::of(within + 0.5) * part / R::of(n_samples as f64)
        };
        let taps = (0..n).map(|k| tap(sample(k), size)).collect();
        Ok(Along { taps, n_samples })
    }

    /// The samples of a part.
    fn part(&self, at: usize) -> &[Option<Tap<R>>] {
        &self.taps[at * self.n_samples..][..self.n_samples]
    }
}

fn tap<R: Real>(at: R, size: usize) -> Option<Tap<R>> {
    let is_near = at >= R::of(-1.0) && at <= R::of(size as f64);
    let last = size.checked_sub(1).filter(|_| is_near)?;
    let at = at.max(R::zero());
    let low = at.wide() as usize;
    if low >= last {
        return Some(([last, last], [R::one(), R::zero()]));
    }
    let after = at - R::of(low as f64);
    Some(([low, low + 1], [R::one() - after, after]))
}

/// A region of an image.
struct Region<R> {
    image: usize,
    rows: Along<R>,
    columns: Along<R>,
}

fn regions<R: Real>(call: &Call) -> Result<(Vec<usize>, Vec<R>), String> {
    let (x, corners, images) = (call.input(0)?, call.input(1)?, call.ints(2)?);
    let method = Method::new(call)?;
    let &[n_images, channels, height, width] = x.shape.as_slice() else {
        return Err(format!("its images have sizes {:?}", x.shape));
    };
    if corners.shape != [images.len(), 4] {
        return Err(format!(
            "regions of sizes {:?} do not fit the images of {} regions",
            corners.shape,
            images.len()
        ));
    }
    let corners = R::read(corners)?;
    let mut found = Vec::with_capacity(images.len());
    let (mut n_samples, mut n_along) = (0usize, 0);
    for (image, at) in images.iter().zip(corners.chunks_exact(4)) {
        let image = usize::try_from(*image).ok().filter(|n| *n < n_images);
        let region = Region {
            image: image.ok_or_else(|| format!("a region is of no image among {n_images}"))?,
            rows: Along::new(&method, 0, [at[1], at[3]], height)?,
            columns: Along::new(&method, 1, [at[0], at[2]], width)?,
        };
        let own = region
            .rows
            .taps
            .len()
            .checked_mul(region.columns.taps.len());
        let own = own.and_then(|n| n.checked_mul(channels));
        n_samples = own.map_or(usize::MAX, |n| n_samples.saturating_add(n));
        n_along += region.rows.taps.len() + region.columns.taps.len();
        if n_samples > MOST_SAMPLES || n_along > MOST_ALONG {
            return Err("its regions take too many samples".to_string());
        }
        found.push(region);
    }
    let x = R::read(x)?;
    let [rows, columns] = method.parts;
    let shape = vec![images.len(), channels, rows, columns];
    let mut y = vec![R::zero(); shape.iter().product()];
    threads::runs(&mut y, rows * columns, 1 << 10, |at, y| {
        let region = &found[at / channels];
        let image = region.image * channels + at % channels;
        let image = &x[image * height * width..][..height * width];
        for (part, y) in y.iter_mut().enumerate() {
            let rows = region.rows.part(part / columns);
            let columns = region.columns.part(part % columns);
            *y = pooled(image, width, rows, columns, method.is_max);
        }
    });
    Ok((shape, y))
}

fn pooled<R: Real>(
    image: &[R],
    width: usize,
    rows: &[Option<Tap<R>>],
    columns: &[Option<Tap<R>>],
    is_max: bool,
) -> R {
    let mut sum = R::zero();
    let mut largest: Option<R> = None;
    for row in rows {
        for column in columns {
            let mut around = [R::zero(); 4];
            if let (Some((y, of_row)), Some((x, of_column))) = (row, column) {
                for (k, around) in around.iter_mut().enumerate() {
                    let (i, j) = (k / 2, k % 2);
                    *around = of_row[i] * of_column[j] * image[y[i] * width + x[j]];
                }
            }
            match is_max {
                false => sum += around.iter().copied().sum(),
                true => {
                    let all = around.into_iter().chain(largest);
                    largest = all.reduce(|a, b| if b > a || b.is_nan() { b } else { a });
                }
            }
        }
    }
    match is_max {
        true => largest.unwrap_or(R::zero()),
        false => sum / R::of((rows.len() * columns.len()).max(1) as f64),
    }
}
