//! Signals: Fourier transforms as products with matrices of cosines and sines, windows, and filters of mel bins.

use super::contraction::contract;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::tensor::dtype_of;
use crate::onnx::value::Value;
use graph::{ContainerId, DType, Expr, SymExpr, Tensor};
use std::f64::consts::{LN_10, TAU};
use std::sync::Arc;

pub static RULES: Rules = &[
    ("BlackmanWindow", |cx| window(cx, &[0.42, -0.5, 0.08])),
    ("DFT", dft),
    ("HammingWindow", |cx| {
        window(cx, &[25.0 / 46.0, -21.0 / 46.0])
    }),
    ("HannWindow", |cx| window(cx, &[0.5, -0.5])),
    ("MelWeightMatrix", mel_weights),
    ("STFT", stft),
];

/// Most elements of a matrix.
const MOST_ELEMENTS: usize = 1 << 22;

/// What a transform reads and gives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Complex or real numbers to as many complex ones.
    Forward,
    /// The same, the first half and the middle of the results alone.
    OneSided,
    /// Back to complex numbers.
    Inverse,
    /// Back from the first half and the middle to real numbers.
    InverseOneSided,
}

/// A Fourier transform of `n` numbers.
struct Transform {
    n: usize,
    form: Form,
}

impl Transform {
    fn half(&self) -> usize {
        self.n / 2 + 1
    }

    /// `[complex parts of x, numbers, results, parts of a result]`.
    fn matrix(&self, parts: usize, dtype: DType) -> Result<Tensor, Refusal> {
        let (numbers, results, parts_of_result) = match self.form {
            Form::Forward | Form::Inverse => (self.n, self.n, 2),
            Form::OneSided => (self.n, self.half(), 2),
            Form::InverseOneSided => (self.half(), self.n, 1),
        };
        let count = parts.saturating_mul(numbers).saturating_mul(results);
        if count > MOST_ELEMENTS / 2 {
            return Err(Refusal(format!(
                "a transform of {} numbers is not supported",
                self.n
            )));
        }
        let (sign, factor) = match self.form {
            Form::Forward | Form::OneSided => (-1.0, 1.0),
            Form::Inverse | Form::InverseOneSided => (1.0, 1.0 / self.n as f64),
        };
        let mut values = Vec::with_capacity(parts_of_result * count);
        for part in 0..parts {
            for i in 0..numbers {
                // Only one of two conjugate numbers is given.
                let stands_for_two = self.form == Form::InverseOneSided && i > 0 && 2 * i < self.n;
                let factor = if stands_for_two { 2.0 * factor } else { factor };
                for k in 0..results {
                    // The angle stays small, so that it is exact.
                    let angle = TAU * ((i * k) % self.n) as f64 / self.n as f64;
                    let (cos, sin) = (angle.cos() * factor, sign * angle.sin() * factor);
                    let both = if part == 0 { [cos, sin] } else { [-sin, cos] };
                    values.extend_from_slice(&both[..parts_of_result]);
                }
            }
        }
        let shape = [parts, numbers, results, parts_of_result];
        Ok(Tensor::from_f64(dtype, &shape, values))
    }

    /// The transform of `x` along `axis`; the last dimension is that of real and imaginary parts.
    fn applied(
        &self,
        cx: &mut NodeCx,
        x: ContainerId,
        axis: usize,
    ) -> Result<ContainerId, Refusal> {
        let rank = cx.rank(x);
        let parts = cx.shape(x)[rank - 1].as_const();
        let parts = parts.filter(|n| *n == 1 || *n == 2);
        let parts = parts.ok_or("its last dimension is not of real and imaginary parts")?;
        let matrix = self.matrix(parts as usize, cx.dtype(x))?;
        let matrix = cx.constant(matrix);
        let letters: Vec<char> = ('a'..='w').take(rank).collect();
        let mut result = letters.clone();
        (result[axis], result[rank - 1]) = ('y', 'z');
        let text = |letters: &[char]| letters.iter().collect::<String>();
        let of_matrix = text(&[letters[rank - 1], letters[axis], 'y', 'z']);
        let equation = format!("{},{of_matrix}->{}", text(&letters), text(&result));
        contract(cx, equation, &[x, matrix])
    }
}

/// `x` cut, or zeros added at its end, so that a dimension has `n` elements.
fn with_length(
    cx: &mut NodeCx,
    x: ContainerId,
    axis: usize,
    n: i64,
) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    let own = shape[axis]
        .as_const()
        .ok_or("the transformed dimension is dynamic")?;
    if n <= own {
        return cx.part(x, axis, 0.into(), n.into());
    }
    let mut more = shape;
    more[axis] = SymExpr::constant(n - own);
    let dtype = cx.dtype(x);
    let zeros = cx.filled(more, dtype, 0.0)?;
    cx.along("concat", &[x, zeros], axis)
}

fn dft(cx: &mut NodeCx) -> Values {
    let mut x = cx.input(0)?;
    let rank = cx.rank(x);
    let axis = match cx.scalar(2)? {
        Some(axis) => axis as i64,
        None if cx.opset() >= 20 => -2,
        None => cx.int("axis", 1)?,
    };
    let axis = cx.axis(axis, rank)?;
    if axis + 1 >= rank {
        return Err("its axis is that of real and imaginary parts".into());
    }
    let form = match (cx.int("inverse", 0)? != 0, cx.int("onesided", 0)? != 0) {
        (false, false) => Form::Forward,
        (false, true) => Form::OneSided,
        (true, false) => Form::Inverse,
        (true, true) => Form::InverseOneSided,
    };
    let own = cx.shape(x)[axis]
        .as_const()
        .ok_or("the transformed dimension is dynamic")?;
    let length = match (cx.scalar(1)?, form) {
        (Some(length), _) => length as i64,
        (None, Form::InverseOneSided) => own.saturating_sub(1).saturating_mul(2),
        (None, _) => own,
    };
    let n = usize::try_from(length).ok().filter(|n| *n > 0);
    let n = n.ok_or("the transformed dimension is empty")?;
    let transform = Transform { n, form };
    let given = match form {
        Form::InverseOneSided => transform.half() as i64,
        _ => length,
    };
    x = with_length(cx, x, axis, given)?;
    single(transform.applied(cx, x, axis)?)
}

/// Transforms of windows of a signal `[batch, length, 1 or 2]`. Inputs: the signal, the step, a window, its length.
fn stft(cx: &mut NodeCx) -> Values {
    let signal = cx.input(0)?;
    let shape = cx.shape(signal);
    let [_, length, _] = shape.as_slice() else {
        return Err("its signal must have 3 dimensions".into());
    };
    let length = length.as_const().ok_or("its signal has a dynamic length")?;
    let step = cx.scalar(1)?.ok_or("its step is absent")? as i64;
    let window = cx.optional(2)?;
    let frame = match (cx.scalar(3)?, window) {
        (Some(n), _) => Some(n as i64),
        (None, Some(window)) => cx.shape(window).first().and_then(SymExpr::as_const),
        (None, None) => None,
    };
    let frame = frame.ok_or("it has neither a window nor a length of frames")?;
    if step < 1 || frame < 1 || frame > length {
        return Err("its frames do not fit its signal".into());
    }
    let count = (length - frame) / step + 1;
    if count.saturating_mul(frame) > MOST_ELEMENTS as i64 {
        return Err("its frames have too many elements".into());
    }
    let places: Vec<i64> = (0..count)
        .flat_map(|n| (0..frame).map(move |i| n * step + i))
        .collect();
    let places = Tensor::from_i64(DType::I64, &[count as usize, frame as usize], places);
    let places = cx.constant(places);
    let mut frames = cx.along("gather", &[signal, places], 1)?;
    if let Some(window) = window {
        let window = cx.reshape(window, vec![frame.into(), 1.into()])?;
        frames = cx.elementwise(Expr::In(0).mul(Expr::In(1)), &[frames, window])?;
    }
    let form = match cx.int("onesided", 1)? {
        0 => Form::Forward,
        _ => Form::OneSided,
    };
    let n = frame as usize;
    let transform = Transform { n, form };
    single(transform.applied(cx, frames, 2)?)
}

fn output_dtype(cx: &NodeCx) -> Result<DType, Refusal> {
    Ok(dtype_of(cx.int("output_datatype", 1)? as i32)?)
}

/// A sum of cosines whose factors are given, over a number of elements that the file gives.
fn window(cx: &mut NodeCx, factors: &[f64]) -> Values {
    let size = cx.scalar(0)?.ok_or("its size is absent")?;
    if !(0.0..=MOST_ELEMENTS as f64).contains(&size) {
        return Err(Refusal(format!(
            "a window of {size} elements is not supported"
        )));
    }
    let period = match cx.int("periodic", 1)? {
        0 => size - 1.0,
        _ => size,
    };
    let at = |n: usize| {
        let angle = TAU * n as f64 / period;
        let terms = (0..).zip(factors);
        terms
            .map(|(k, factor)| factor * (f64::from(k) * angle).cos())
            .sum::<f64>()
    };
    let values: Vec<f64> = (0..size as usize).map(at).collect();
    let tensor = Tensor::from_f64(output_dtype(cx)?, &[values.len()], values);
    Ok(vec![Value::Constant(Arc::new(tensor))])
}

/// Triangles over the frequencies of a transform, equally wide in mels: `[frequencies, bins]`.
fn mel_weights(cx: &mut NodeCx) -> Values {
    let mut given = [0.0; 5];
    for (position, number) in given.iter_mut().enumerate() {
        *number = cx.scalar(position)?.ok_or("one of its inputs is absent")?;
    }
    let [bins, length, rate, lowest, highest] = given;
    let (n_bins, rows) = (bins as usize, (length / 2.0).floor() as usize + 1);
    if !(bins >= 0.0 && length >= 0.0 && rate > 0.0) || n_bins.saturating_mul(rows) > MOST_ELEMENTS
    {
        return Err("its sizes are not supported".into());
    }
    let mel = |hertz: f64| 2595.0 * (hertz / 700.0).ln_1p() / LN_10;
    let step = (mel(highest) - mel(lowest)) / (bins + 2.0);
    let row = |n: usize| {
        let mels = n as f64 * step + mel(lowest);
        let hertz = 700.0 * (mels / 2595.0 * LN_10).exp_m1();
        (((length + 1.0) * hertz) / rate).floor().max(0.0) as usize
    };
    let mut values = vec![0.0; rows * n_bins];
    let mut set = |row: usize, bin: usize, value: f64| {
        if let Some(element) = values.get_mut(row * n_bins + bin) {
            *element = value;
        }
    };
    for bin in 0..n_bins {
        let (left, center, right) = (row(bin), row(bin + 1), row(bin + 2));
        if left == center {
            set(center, bin, 1.0);
        } else {
            for at in left..=center.min(rows) {
                set(at, bin, (at - left) as f64 / (center - left) as f64);
            }
        }
        for at in center..right.min(rows) {
            set(at, bin, (right - at) as f64 / (right - center) as f64);
        }
    }
    let tensor = Tensor::from_f64(output_dtype(cx)?, &[rows, n_bins], values);
    Ok(vec![Value::Constant(Arc::new(tensor))])
}
