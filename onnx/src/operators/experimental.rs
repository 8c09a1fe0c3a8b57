//! Operators that the standard had as experiments before version 10: Affine, Crop, DynamicSlice, ImageScaler,
//! ParametricSoftplus, Scale and ScaledTanh. Converters from Core ML and Caffe2 write them, and ONNX Runtime runs them.

use super::movement::same;
use super::real::{Real, in_real};
use super::strided::{View, taken};
use super::{Call, Inference, Operator, join};
use crate::attributes::Attributes;
use crate::fact::Fact;
use crate::tensor::Tensor;

pub const ROWS: &[Operator] = &[
    Operator::new("Affine", same, |call| {
        let (a, b) = (real(call, "alpha", 1.0), real(call, "beta", 0.0));
        each(call, |x| a * x + b)
    }),
    Operator::new("Scale", same, |call| {
        let a = real(call, "scale", 1.0);
        each(call, |x| a * x)
    }),
    Operator::new("ScaledTanh", same, |call| {
        let (a, b) = both(call)?;
        each(call, |x| a * (b * x).tanh())
    }),
    Operator::new("ParametricSoftplus", same, |call| {
        let (a, b) = both(call)?;
        each(call, |x| {
            let x = b * x;
            // The exponential of a large number is infinite.
            a * (x.max(0.0) + (-x.abs()).exp().ln_1p())
        })
    }),
    Operator::new("ImageScaler", same, scaled_image),
    Operator::new("Crop", infer_crop, crop),
    Operator::new("DynamicSlice", join::infer_slice, join::slice),
];

fn real(call: &Call, name: &str, default: f64) -> f64 {
    call.attributes.float(name).map_or(default, f64::from)
}

/// Parameters that have no default.
fn both(call: &Call) -> Result<(f64, f64), String> {
    let given = |name: &str| {
        let value = call.attributes.float(name).map(f64::from);
        value.ok_or_else(|| format!("its attribute `{name}` is missing"))
    };
    Ok((given("alpha")?, given("beta")?))
}

fn each(call: &Call, f: impl Fn(f64) -> f64) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let y = in_real!(x.element(), R => {
        let y = R::read(x)?.iter().map(|x| R::of(f(x.wide()))).collect();
        R::tensor(x.element(), &x.shape, y)
    });
    y.map(|y| vec![y])
}

/// Pixels times one number, plus a number for each channel.
fn scaled_image(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let [_, channels, height, width] = x.shape[..] else {
        return Err(format!(
            "its input has sizes {:?}, not those of images",
            x.shape
        ));
    };
    let scale = real(call, "scale", 1.0);
    let bias = call.attributes.floats("bias").unwrap_or(&[]);
    if bias.len() != channels {
        return Err(format!(
            "it has {} biases for {channels} channels",
            bias.len()
        ));
    }
    let image = (height * width).max(1);
    let y = in_real!(x.element(), R => {
        let v = R::read(x)?;
        let y = v.chunks(image).enumerate().flat_map(|(n, pixels)| {
            let bias = f64::from(bias[n % channels]);
            pixels.iter().map(move |x| R::of(x.wide() * scale + bias))
        });
        R::tensor(x.element(), &x.shape, y.collect())
    });
    y.map(|y| vec![y])
}

/// What a Crop removes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Border {
    /// Lines and columns before what stays.
    pub before: [i64; 2],
    /// Lines and columns after what stays, where the result has no sizes of its own.
    pub after: [i64; 2],
    /// Height and width of the result, where the node gives them.
    pub sizes: Option<[i64; 2]>,
}

impl Border {
    /// The border that the attributes describe.
    ///
    /// # Errors
    /// A sentence: they do not fit.
    pub fn new(attributes: Attributes) -> Result<Border, String> {
        let border = attributes.ints("border").unwrap_or(&[]);
        let sides = border.iter().all(|n| (0..1 << 31).contains(n));
        let [left, top, right, bottom] = *border else {
            return Err(format!("its border {border:?} has not four sides"));
        };
        let sizes = match attributes.ints("scale") {
            None => None,
            Some([height, width]) => Some([*height, *width]),
            Some(other) => return Err(format!("its scale {other:?} is not a height and a width")),
        };
        if !sides || sizes.iter().flatten().any(|n| !(0..1 << 31).contains(n)) {
            return Err(format!("its border {border:?} does not fit an image"));
        }
        Ok(Border {
            before: [top, left],
            after: [bottom, right],
            sizes,
        })
    }
}

fn infer_crop(cx: &Inference) -> Option<Vec<Fact>> {
    let border = Border::new(cx.attributes).ok()?;
    let mut shape = cx.shape(0)?.to_vec();
    if shape.len() != 4 {
        return None;
    }
    for d in 0..2 {
        shape[2 + d] = match border.sizes {
            Some(sizes) => sizes[d].into(),
            None => shape[2 + d].clone() - (border.before[d] + border.after[d]),
        };
    }
    cx.like_first(Some(shape))
}

fn crop(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let border = Border::new(call.attributes)?;
    if x.shape.len() != 4 {
        return Err(format!(
            "its input has sizes {:?}, not those of images",
            x.shape
        ));
    }
    let mut view = View::whole(&x.shape);
    for d in 0..2 {
        let size = x.shape[2 + d] as i64;
        let kept = match border.sizes {
            Some(sizes) => sizes[d],
            None => size - border.before[d] - border.after[d],
        };
        if kept < 0 || border.before[d] + kept > size {
            return Err(format!(
                "its border is larger than an image of sizes {:?}",
                &x.shape[2..]
            ));
        }
        view.shape[2 + d] = kept as usize;
        view.first += border.before[d] as usize * view.strides[2 + d] as usize;
    }
    Ok(vec![taken(x, &view)])
}
