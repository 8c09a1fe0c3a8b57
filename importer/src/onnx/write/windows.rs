//! Pooling.

use super::convolutions;
use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::rules::Written;
use graph::{DType, Scalar, SymExpr, Tensor};
use ops::Call;
use ops::average_pool::{Divisor, divisor_of};
use ops::window::Window;

fn window(c: &Call) -> Result<Vec<super::nodes::Attribute>, Refusal> {
    let kernel = c.ints("kernel")?;
    let n = kernel.len();
    let stride = c.ints_or("stride", vec![1; n])?;
    let pads = [
        c.ints_or("pad_low", vec![0; n])?,
        c.ints_or("pad_high", vec![0; n])?,
    ]
    .concat();
    let mut list = vec![
        int_list("kernel_shape", &kernel),
        int_list("strides", &stride),
        int_list("pads", &pads),
        int("ceil_mode", c.bool_or("ceil", false)?.into()),
    ];
    let dilation = c.ints_or("dilation", vec![1; n])?;
    if dilation.iter().any(|d| *d != 1) {
        list.push(int_list("dilations", &dilation));
    }
    Ok(list)
}

/// The second output of ONNX counts through batch and channels; the gradient uses that as it is.
pub(super) fn max_pool(n: &mut Nodes, c: &Call) -> Written {
    if c.output_id(1).is_some() {
        return Err(Refusal("positions of the maxima as a result".into()));
    }
    let x = n.input(c, 0)?;
    let mut made = n.nodes("MaxPool", &[&x], 2, window(c)?);
    if let (Some(index), Some(y)) = (made.pop(), made.pop()) {
        n.output(c, 0, y);
        n.output(c, 2, index);
    }
    Ok(())
}

pub(super) fn max_pool_gradient(n: &mut Nodes, c: &Call) -> Written {
    let (dy, index) = (n.input(c, 0)?, n.input(c, 1)?);
    let dtype = c.input(0)?.dtype;
    let shape = c.sizes("input_shape")?;
    let flat = n.ints(&[-1]);
    let (dy, index) = (
        n.of2("Reshape", &dy, &flat),
        n.of2("Reshape", &index, &flat),
    );
    let zero = n.number(Scalar::Float(0.0), dtype);
    let count = n.shape(&[SymExpr::product(&shape)])?;
    let zeros = n.of2("Expand", &zero, &count);
    let attributes = vec![int("axis", 0), text("reduction", "add")];
    let sums = n.node("ScatterElements", &[&zeros, &index, &dy], attributes);
    let dx = n.reshaped(&sums, &shape)?;
    n.output(c, 0, dx);
    Ok(())
}

/// Counts padding as the standard does. With a divisor of its own, padding counts and the mean is scaled.
pub(super) fn average_pool(n: &mut Nodes, c: &Call) -> Written {
    let mut attributes = window(c)?;
    let with_padding = c.bool_or("count_include_pad", true)?;
    let own = c.library.attrs.contains_key("divisor");
    attributes.push(int("count_include_pad", (with_padding || own).into()));
    let x = n.input(c, 0)?;
    let mut value = n.node("AveragePool", &[&x], attributes);
    if own {
        if c.bool_or("ceil", false)? {
            return Err(Refusal("a divisor of its own with sizes rounded up".into()));
        }
        let size = c.ints("kernel")?.iter().product::<i64>() as f64;
        let factor = Scalar::Float(size / c.int("divisor")? as f64);
        let factor = n.number(factor, c.input(0)?.dtype);
        value = n.of2("Mul", &value, &factor);
    }
    n.output(c, 0, value);
    Ok(())
}

/// The gradient of an average over larger windows is not written: its weights of ones would be 64 MiB.
const MOST_ONES: usize = 1 << 24;

/// `dx[x(o, r)] += dy[o]/divisor(o)`: windows that tile x are copies side by side, others a
/// transposed convolution of each channel by ones.
pub(super) fn average_pool_gradient(n: &mut Nodes, c: &Call) -> Written {
    let (dy, shape) = (c.input(0)?.clone(), c.sizes("input_shape")?);
    let pool = Window::new(c, c.ints("kernel")?)?;
    let share = match divisor_of(c, &shape)? {
        Divisor::Number(number) => {
            Tensor::filled(dy.dtype, &[], Scalar::Float(1.0 / number as f64))
        }
        Divisor::Extents(along) => shares(&along, dy.dtype),
    };
    let (name, share) = (n.input(c, 0)?, n.constant(&share));
    let shared = n.of2("Mul", &name, &share);
    if pool.tiles(&shape[2..], &dy.shape[2..]) {
        let (mut split, mut wide) = (dy.shape[..2].to_vec(), dy.shape[..2].to_vec());
        for (size, k) in dy.shape[2..].iter().zip(&pool.kernel) {
            split.extend([size.clone(), SymExpr::constant(1)]);
            wide.extend([size.clone(), SymExpr::constant(*k)]);
        }
        let split = n.reshaped(&shared, &split)?;
        let wide = n.shape(&wide)?;
        let wide = n.of2("Expand", &split, &wide);
        let dx = n.reshaped(&wide, &shape)?;
        n.output(c, 0, dx);
        return Ok(());
    }
    let planes = |sizes: &[SymExpr]| -> Vec<SymExpr> {
        let count = sizes[0].clone() * sizes[1].clone();
        [count, SymExpr::constant(1)]
            .into_iter()
            .chain(sizes[2..].iter().cloned())
            .collect()
    };
    let shared = n.reshaped(&shared, &planes(&dy.shape))?;
    let kernel = pool.kernel.iter().map(|k| usize::try_from(*k).ok());
    let ones: Option<Vec<usize>> = [Some(1), Some(1)].into_iter().chain(kernel).collect();
    let n_ones = |ones: &Vec<usize>| ones.iter().try_fold(1usize, |p, k| p.checked_mul(*k));
    let ones = ones.filter(|ones| n_ones(ones).is_some_and(|n| n <= MOST_ONES));
    let Some(ones) = ones else {
        return Err(Refusal(format!("windows of sizes {:?}", pool.kernel)));
    };
    let ones = n.constant(&Tensor::filled(dy.dtype, &ones, Scalar::Float(1.0)));
    let sizes = (&dy.shape[2..], &shape[2..]);
    let dx = convolutions::conv_transposed(n, (&shared, &ones), (&pool, 1), sizes)?;
    let dx = n.reshaped(&dx, &shape)?;
    n.output(c, 0, dx);
    Ok(())
}

/// One over the product of the extents, which broadcasts to `[N, C, O…]`.
fn shares(along: &[Vec<i64>], dtype: DType) -> Tensor {
    let shape: Vec<usize> = along.iter().map(Vec::len).collect();
    let products = along.iter().fold(vec![1], |all: Vec<i64>, extents| {
        let times = |p: &i64| extents.iter().map(|e| p * e).collect::<Vec<_>>();
        all.iter().flat_map(times).collect()
    });
    let shares = products.iter().map(|p| 1.0 / *p as f64).collect();
    Tensor::from_f64(dtype, &shape, shares)
}

/// Windows of one size only.
pub(super) fn adaptive_average_pool(n: &mut Nodes, c: &Call) -> Written {
    let x = c.input(0)?;
    let output = c.ints("output")?;
    let even = x.shape[2..].iter().zip(&output).map(|(size, out)| {
        let size = size.as_const()?;
        (size % out == 0).then_some(size / out)
    });
    let Some(kernel) = even.collect::<Option<Vec<i64>>>() else {
        return Err(Refusal("windows of different sizes".into()));
    };
    let attributes = vec![
        int_list("kernel_shape", &kernel),
        int_list("strides", &kernel),
    ];
    let x = n.input(c, 0)?;
    let value = n.node("AveragePool", &[&x], attributes);
    n.output(c, 0, value);
    Ok(())
}
