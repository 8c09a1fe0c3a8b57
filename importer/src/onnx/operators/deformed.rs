//! Windows that read at positions that are data: deformable convolutions and regions of an image.

use super::contraction::contract;
use super::convolution::{Geometry, kernel_of, spatial};
use super::sampling::{Interpolation, Outside, Sampling, Tap, combined, read};
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Binary, ContainerId, DType, Expr, SymExpr, Tensor};

pub static RULES: Rules = &[("DeformConv", deform_conv), ("RoiAlign", roi_align)];

/// Most positions at which the windows of an image read.
const MOST_READS: i64 = 1 << 24;

/// Most parts of a region, and most samples in a part, along a dimension.
const MOST_SAMPLES: i64 = 1 << 10;

/// Inputs: x `[N, C, H, W]`, the weight, offsets `[N, groups·taps·2, …]` of every tap of the window, a bias, and
/// factors `[N, groups·taps, …]`. All taps are read first; then they are a product with the weight.
fn deform_conv(cx: &mut NodeCx) -> Values {
    let (x, weight, offset) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (shape, w_shape) = (cx.shape(x), cx.shape(weight));
    let geometry = Geometry::new(cx, kernel_of(&w_shape)?)?.resolve(spatial(&shape)?)?;
    if shape.len() != 4 || geometry.kernel.len() != 2 {
        return Err("only images of 2 dimensions are supported".into());
    }
    let numbers =
        |sizes: &[SymExpr]| -> Option<Vec<i64>> { sizes.iter().map(SymExpr::as_const).collect() };
    let sizes = numbers(&shape[1..]).ok_or("its input has dynamic sizes")?;
    let of_weight = numbers(&w_shape[..2]).ok_or("its weight has dynamic sizes")?;
    let to = numbers(cx.shape(offset).get(2..4).unwrap_or_default());
    let to = to
        .filter(|to| to.len() == 2)
        .ok_or("its offsets have dynamic sizes")?;
    let (groups, offset_groups) = (cx.int("group", 1)?, cx.int("offset_group", 1)?);
    let (channels, taps) = (sizes[0], geometry.kernel[0] * geometry.kernel[1]);
    let points = to[0].checked_mul(to[1]);
    let reads = points.and_then(|points| points.checked_mul(taps));
    if !(taps > 0 && reads.is_some_and(|n| n <= MOST_READS)) {
        return Err("it reads at too many positions".into());
    }
    let fits = groups > 0
        && offset_groups > 0
        && Some(channels) == of_weight[1].checked_mul(groups)
        && of_weight[0] % groups == 0
        && channels % offset_groups == 0;
    if !fits {
        return Err("its groups do not fit its channels".into());
    }
    let points = to[0] * to[1];
    let images = shape[0].clone() * offset_groups;
    let all = SymExpr::constant(taps * points);
    let split = vec![images.clone(), taps.into(), 2.into(), points.into()];
    let offset = cx.reshape(offset, split)?;
    let dtype = cx.dtype(offset);
    let sampling = Sampling {
        interpolation: Interpolation::Linear,
        outside: Outside::Zeros,
        align_corners: true,
        dtype,
    };
    let flat = vec![images.clone(), all.clone()];
    let mut along = Vec::new();
    for d in 0..2 {
        let own = cx.part(offset, 2, d.into(), (d + 1).into())?;
        let own = cx.reshape(own, flat.clone())?;
        let regular = regular_positions(&geometry, &to, d);
        let regular = cx.constant(Tensor::from_f64(dtype, &[regular.len()], regular));
        let at = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[own, regular])?;
        along.push(sampling.taps(cx, at, &shape[2 + d])?);
    }
    let both = combined(cx, &along[0], &along[1], &shape[3])?;
    let image = vec![images.clone(), (channels / offset_groups).into()];
    let image = cx.reshape(x, [&image, &shape[2..]].concat())?;
    let mut sampled = read(cx, (image, &both), &all, Binary::Add)?;
    if let Some(factors) = cx.optional(4)? {
        let factors = cx.reshape(factors, vec![images, 1.into(), all])?;
        sampled = cx.elementwise(Expr::In(0).mul(Expr::In(1)), &[sampled, factors])?;
    }
    let y = multiplied(cx, sampled, weight, (groups, taps, points))?;
    let mut sizes = vec![shape[0].clone(), of_weight[0].into()];
    sizes.extend(to.into_iter().map(SymExpr::constant));
    let y = cx.reshape(y, sizes)?;
    match cx.optional(3)? {
        Some(bias) => single(cx.add_channels(y, bias)?),
        None => single(y),
    }
}

/// Where each tap of each window reads along a dimension if its offset is 0.
fn regular_positions(geometry: &Geometry, to: &[i64], d: usize) -> Vec<f64> {
    let mut positions = Vec::new();
    let kernel = &geometry.kernel;
    for tap in 0..kernel[0] * kernel[1] {
        let tap = [tap / kernel[1], tap % kernel[1]][d];
        for point in 0..to[0] * to[1] {
            let point = [point / to[1], point % to[1]][d];
            let at = point * geometry.stride[d] + tap * geometry.dilation[d];
            positions.push((at - geometry.pad_low[d]) as f64);
        }
    }
    positions
}

/// `[N, groups, outputs of a group, points]` of what the taps read.
fn multiplied(
    cx: &mut NodeCx,
    sampled: ContainerId,
    weight: ContainerId,
    (groups, taps, points): (i64, i64, i64),
) -> Result<ContainerId, Refusal> {
    let w_shape = cx.shape(weight);
    let outputs = w_shape[0].divide_exactly(&groups.into());
    let outputs = outputs.ok_or("its groups do not fit its channels")?;
    let split = vec![groups.into(), outputs, w_shape[1].clone(), taps.into()];
    let weight = cx.reshape(weight, split)?;
    let elements = SymExpr::product(&cx.shape(sampled));
    let row = w_shape[1].clone() * (groups * taps * points);
    let batch = elements
        .divide_exactly(&row)
        .ok_or("its groups do not fit its channels")?;
    let by_group = vec![
        batch,
        groups.into(),
        w_shape[1].clone(),
        taps.into(),
        points.into(),
    ];
    let sampled = cx.reshape(sampled, by_group)?;
    contract(cx, "ngctp,goct->ngop".to_string(), &[sampled, weight])
}

/// Means or maxima of samples in the parts of regions. Inputs: x `[N, C, H, W]`, regions `[R, 4]` from their first
/// corner to their last, and each one's image.
fn roi_align(cx: &mut NodeCx) -> Values {
    let (x, regions, images) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    // The largest sample is that of its largest weighted element.
    let (kind, together) = match cx.text("mode", "avg")?.as_str() {
        "avg" => ("mean", Binary::Add),
        "max" => ("max", Binary::Max),
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    };
    let samples = cx.int("sampling_ratio", 0)?;
    if !(1..=MOST_SAMPLES).contains(&samples) {
        return Err("a number of samples that depends on data is not supported".into());
    }
    // Before version 16, only this one existed.
    let usual = match cx.opset() {
        ..16 => "output_half_pixel",
        _ => "half_pixel",
    };
    let mode = cx.text("coordinate_transformation_mode", usual)?;
    let (offset, least) = match mode.as_str() {
        "half_pixel" => (0.5, f64::NEG_INFINITY),
        "output_half_pixel" => (0.0, 1.0),
        other => {
            return Err(Refusal(format!(
                "coordinates by `{other}` are not supported"
            )));
        }
    };
    let scale = cx.float("spatial_scale", 1.0)?;
    let parts = [cx.int("output_height", 1)?, cx.int("output_width", 1)?];
    if parts.iter().any(|n| !(1..=MOST_SAMPLES).contains(n)) {
        return Err("its output has an unusual size".into());
    }
    let images = cx.cast(images, DType::I64)?;
    let image = cx.along("gather", &[x, images], 0)?;
    let shape = cx.shape(image);
    let [count, channels, _, _] = shape.as_slice() else {
        return Err("its input must have 4 dimensions".into());
    };
    let dtype = cx.dtype(regions);
    let sampling = Sampling {
        interpolation: Interpolation::Linear,
        outside: Outside::Border,
        align_corners: true,
        dtype,
    };
    let mut along = Vec::new();
    for (d, n) in parts.into_iter().enumerate() {
        let corner = |cx: &mut NodeCx, at: usize| cx.part(regions, 1, at.into(), (at + 1).into());
        let (first, last) = (corner(cx, 1 - d)?, corner(cx, 3 - d)?);
        // How far into a region each sample is.
        let total = n * samples;
        let into = (0..total).map(|k| (k as f64 + 0.5) / total as f64);
        let into = Tensor::from_f64(dtype, &[1, total as usize], into.collect());
        let into = cx.constant(into);
        let place = |corner: usize| {
            Expr::In(corner)
                .mul(Expr::float(scale))
                .sub(Expr::float(offset))
        };
        let length = place(1).sub(place(0)).max(Expr::float(least));
        let at = place(0).add(length.mul(Expr::In(2)));
        let at = cx.elementwise(at, &[first, last, into])?;
        let size = Expr::Index(shape[2 + d].clone()).cast(dtype);
        let (zero, one) = (Expr::float(0.0), Expr::float(1.0));
        let is_near = Expr::In(0)
            .ge(Expr::float(-1.0))
            .and(Expr::In(0).le(size.clone()));
        let is_near = cx.elementwise(is_near, &[at])?;
        let inside = Expr::In(0).max(zero).min(size.sub(one));
        let inside = cx.elementwise(inside, &[at])?;
        let mut sizes = vec![count.clone(), 1.into(), 1.into()];
        sizes[1 + d] = total.into();
        let mut taps = Vec::new();
        for tap in sampling.taps(cx, inside, &shape[2 + d])? {
            taps.push(Tap {
                place: cx.reshape(tap.place, sizes.clone())?,
                weight: cx.reshape(tap.weight, sizes.clone())?,
                counts: Some(cx.reshape(is_near, sizes.clone())?),
            });
        }
        along.push(taps);
    }
    let points = parts[0] * parts[1] * samples * samples;
    let flat = vec![count.clone(), points.into()];
    let mut taps = Vec::new();
    for tap in combined(cx, &along[0], &along[1], &shape[3])? {
        let counts = tap.counts.map(|counts| cx.reshape(counts, flat.clone()));
        taps.push(Tap {
            place: cx.reshape(tap.place, flat.clone())?,
            weight: cx.reshape(tap.weight, flat.clone())?,
            counts: counts.transpose()?,
        });
    }
    let y = read(cx, (image, &taps), &points.into(), together)?;
    let mut split = vec![count.clone(), channels.clone()];
    split.extend([parts[0], samples, parts[1], samples].map(SymExpr::constant));
    let y = cx.reshape(y, split)?;
    single(cx.reduce(y, kind, &[3, 5], false)?)
}
