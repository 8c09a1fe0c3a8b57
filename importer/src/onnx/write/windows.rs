//! Pooling.

use super::nodes::{Nodes, Refusal, int, int_list, text};
use super::rules::Written;
use graph::{Scalar, SymExpr};
use ops::Call;

fn window(c: &Call) -> Result<Vec<super::nodes::Attribute>, Refusal> {
    let (kernel, stride) = (c.ints("kernel")?, c.ints("stride")?);
    let n = kernel.len();
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

pub(super) fn average_pool(n: &mut Nodes, c: &Call) -> Written {
    if c.library.attrs.contains_key("divisor") {
        return Err(Refusal("a divisor other than the window's size".into()));
    }
    let mut attributes = window(c)?;
    let with_padding = c.bool_or("count_include_pad", true)?;
    attributes.push(int("count_include_pad", with_padding.into()));
    let x = n.input(c, 0)?;
    let value = n.node("AveragePool", &[&x], attributes);
    n.output(c, 0, value);
    Ok(())
}
