//! Convolutional networks for images: ResNet (arXiv 1512.03385) and MobileNetV2 (arXiv 1801.04381),
//! with the parameter names of torchvision.

use crate::net::{Net, Window, sizes};
use graph::{Attr, ContainerId, DType, Expr, Graph};
use ops::{OpBuilder, OpError, attrs};

/// The smallest residual block: `relu(bn(conv(x)) + x)` with a convolution of width 3, in training form.
/// Input `x` and the result are `[batch, channels, side, side]`.
///
/// # Errors
/// None for sizes above 0.
pub fn residual_block(batch: i64, channels: i64, side: i64) -> Result<Graph, OpError> {
    let mut net = Net::new("residual_block");
    let x = net.input("x", DType::F32, &sizes(&[batch, channels, side, side]));
    let y = net.conv("conv", x, channels, Window::new(3, 1, 1))?;
    let y = net.batch_norm("bn", y)?;
    let y = net.apply("add", Expr::In(0).add(Expr::In(1)), &[y, x])?;
    let y = net.relu("relu", y)?;
    Ok(net.finish(&[y]))
}

/// ResNet with bottleneck blocks; `layers` is `[3, 4, 6, 3]` for ResNet-50.
/// Input `x` is `[batch, 3, image, image]`, the result `[batch, 1000]`, in training form.
///
/// # Errors
/// An image too small for the strides.
pub fn resnet(batch: i64, image: i64, layers: [i64; 4]) -> Result<Graph, OpError> {
    resnet_with(batch, image, layers, None)
}

/// Like [`resnet`], under autocast to that type: input and parameters are `f32`; all activations except statistics of
/// batches have that type.
///
/// # Errors
/// An image too small for the strides.
pub fn resnet_with(
    batch: i64,
    image: i64,
    layers: [i64; 4],
    autocast: Option<DType>,
) -> Result<Graph, OpError> {
    let mut net = Net::new("resnet");
    net.autocast = autocast;
    let x = net.input("x", DType::F32, &sizes(&[batch, 3, image, image]));
    let x = net.conv("conv1", x, 64, Window::new(7, 2, 3))?;
    let x = net.batch_norm("bn1", x)?;
    let x = net.relu("relu", x)?;
    let mut x = max_pool(&mut net, "maxpool", x)?;
    for (stage, blocks) in layers.into_iter().enumerate() {
        let width = 64 << stage;
        for block in 0..blocks {
            let name = format!("layer{}.{block}", stage + 1);
            let stride = if block == 0 && stage > 0 { 2 } else { 1 };
            x = bottleneck(&mut net, &name, x, width, stride, block == 0)?;
        }
    }
    let y = head(&mut net, "fc", x, 1000)?;
    Ok(net.finish(&[y]))
}

fn bottleneck(
    net: &mut Net,
    name: &str,
    x: ContainerId,
    width: i64,
    stride: i64,
    project: bool,
) -> Result<ContainerId, OpError> {
    let mut y = x;
    let windows = [
        Window::new(1, 1, 0),
        Window::new(3, stride, 1),
        Window::new(1, 1, 0),
    ];
    for (i, window) in windows.into_iter().enumerate() {
        let out = if i == 2 { 4 * width } else { width };
        y = net.conv(&format!("{name}.conv{}", i + 1), y, out, window)?;
        y = net.batch_norm(&format!("{name}.bn{}", i + 1), y)?;
        if i < 2 {
            y = net.relu(&format!("{name}.relu{}", i + 1), y)?;
        }
    }
    let mut shortcut = x;
    if project {
        let window = Window::new(1, stride, 0);
        shortcut = net.conv(&format!("{name}.downsample.0"), x, 4 * width, window)?;
        shortcut = net.batch_norm(&format!("{name}.downsample.1"), shortcut)?;
    }
    let sum = Expr::In(0).add(Expr::In(1));
    let sum = net.apply(&format!("{name}.add"), sum, &[y, shortcut])?;
    net.relu(&format!("{name}.relu3"), sum)
}

/// MobileNetV2 of width 1, in training form without the classifier's dropout.
///
/// # Errors
/// An image too small for the strides.
pub fn mobilenet_v2(batch: i64, image: i64) -> Result<Graph, OpError> {
    mobilenet_v2_with(batch, image, None)
}

/// Like [`mobilenet_v2`], under autocast to that type, as [`resnet_with`].
///
/// # Errors
/// An image too small for the strides.
pub fn mobilenet_v2_with(
    batch: i64,
    image: i64,
    autocast: Option<DType>,
) -> Result<Graph, OpError> {
    let mut net = Net::new("mobilenet_v2");
    net.autocast = autocast;
    let x = net.input("x", DType::F32, &sizes(&[batch, 3, image, image]));
    let mut x = conv_norm_relu6(&mut net, "features.0", x, 32, Window::new(3, 2, 1))?;
    // Expansion, channels, repeats, stride of the first.
    let table = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ];
    let mut number = 1;
    for (expansion, channels, repeats, first_stride) in table {
        for repeat in 0..repeats {
            let stride = if repeat == 0 { first_stride } else { 1 };
            let name = format!("features.{number}.conv");
            x = inverted_residual(&mut net, &name, x, (expansion, channels, stride))?;
            number += 1;
        }
    }
    let x = conv_norm_relu6(&mut net, "features.18", x, 1280, Window::new(1, 1, 0))?;
    let y = head(&mut net, "classifier.1", x, 1000)?;
    Ok(net.finish(&[y]))
}

fn conv_norm_relu6(
    net: &mut Net,
    name: &str,
    x: ContainerId,
    out: i64,
    window: Window,
) -> Result<ContainerId, OpError> {
    let y = net.conv(&format!("{name}.0"), x, out, window)?;
    let y = net.batch_norm(&format!("{name}.1"), y)?;
    let clamp = Expr::In(0).max(Expr::float(0.0)).min(Expr::float(6.0));
    net.apply(&format!("{name}.2"), clamp, &[y])
}

fn inverted_residual(
    net: &mut Net,
    name: &str,
    x: ContainerId,
    (expansion, channels, stride): (i64, i64, i64),
) -> Result<ContainerId, OpError> {
    let c = net.graph.container(x).shape[1].as_const().unwrap_or(0);
    let hidden = c * expansion;
    // Without expansion, the depthwise convolution is layer 0 of the block.
    let mut y = x;
    let mut layer = 0;
    if expansion > 1 {
        y = conv_norm_relu6(net, &format!("{name}.0"), y, hidden, Window::new(1, 1, 0))?;
        layer += 1;
    }
    let depthwise = Window {
        groups: hidden,
        ..Window::new(3, stride, 1)
    };
    y = conv_norm_relu6(net, &format!("{name}.{layer}"), y, hidden, depthwise)?;
    let point = Window::new(1, 1, 0);
    y = net.conv(&format!("{name}.{}", layer + 1), y, channels, point)?;
    y = net.batch_norm(&format!("{name}.{}", layer + 2), y)?;
    if stride == 1 && c == channels {
        let sum = Expr::In(0).add(Expr::In(1));
        y = net.apply(&format!("{name}.add"), sum, &[x, y])?;
    }
    Ok(y)
}

fn max_pool(net: &mut Net, name: &str, x: ContainerId) -> Result<ContainerId, OpError> {
    let pair = |n: i64| Attr::Ints(vec![n, n]);
    let a = attrs([
        ("kernel", pair(3)),
        ("stride", pair(2)),
        ("pad_low", pair(1)),
        ("pad_high", pair(1)),
        ("dilation", pair(1)),
        ("ceil", Attr::Bool(false)),
    ]);
    net.with(name, |b| Ok(b.op("max_pool", &[Some(x)], a)?[0]))
}

/// Global average and a linear layer: `[N, C, H, W] → [N, out]`.
fn head(net: &mut Net, name: &str, x: ContainerId, out: i64) -> Result<ContainerId, OpError> {
    let pooled = net.reduce("avgpool", "mean", x, &[2, 3])?;
    net.linear(name, pooled, out)
}
