//! Networks over images and volumes: U-Nets in two and three dimensions, MLP-Mixer, a block of YOLOv4.
//!
//! Sizes and names of parameters are those of `shorthaul.models.grids` in the Python package.

use crate::net::{Net, Window, sizes};
use graph::{ContainerId, DType, Expr, Graph};
use ops::{OpError, activations};

fn sum() -> Expr {
    Expr::In(0).add(Expr::In(1))
}

/// Two convolutions of width 3, each with BatchNorm and ReLU: `[N, C, I…] → [N, out, I…]`.
fn twice(net: &mut Net, name: &str, x: ContainerId, out: i64) -> Result<ContainerId, OpError> {
    let mut y = x;
    for first in [0, 3] {
        y = net.conv(&format!("{name}.{first}"), y, out, Window::new(3, 1, 1))?;
        y = net.batch_norm(&format!("{name}.{}", first + 1), y)?;
        y = net.relu(&format!("{name}.{}", first + 2), y)?;
    }
    Ok(y)
}

/// The levels of a U-Net of that width and depth. `factors` divide each dimension on the way down and multiply it on
/// the way up. `[N, C, I…] → [N, width, I…]`.
fn levels(
    net: &mut Net,
    x: ContainerId,
    (width, depth): (i64, usize),
    factors: &[i64],
) -> Result<ContainerId, OpError> {
    let mut kept = vec![twice(net, "first", x, width)?];
    let mut y = kept[0];
    for level in 0..depth {
        let halved = net.max_pool(&format!("pool.{level}"), y, factors)?;
        y = twice(net, &format!("down.{level}"), halved, width << (level + 1))?;
        kept.push(y);
    }
    for (n, level) in (0..depth).rev().enumerate() {
        let doubled = net.upsample(&format!("up.{n}"), y, width << level, factors)?;
        let both = net.concat(&format!("join.{n}"), &[kept[level], doubled], 1)?;
        y = twice(net, &format!("join.{n}"), both, width << level)?;
    }
    Ok(y)
}

/// Sizes of a U-Net for images.
#[derive(Clone, Copy, Debug)]
pub struct UNet2d {
    /// Images.
    pub batch: i64,
    /// Height and width, a multiple of `2^depth`.
    pub side: i64,
    /// Channels of the images.
    pub n_in: i64,
    /// Classes of each pixel.
    pub n_classes: i64,
    /// Channels of the first level; each further one has twice as many.
    pub width: i64,
    /// How often images are halved.
    pub depth: usize,
}

/// U-Net (arXiv 1505.04597) with padded convolutions and BatchNorm in training form: `x`
/// `[batch, n_in, side, side]` to `[batch, n_classes, side, side]`.
///
/// # Errors
/// A side that cannot be halved so often.
pub fn unet_2d(u: UNet2d) -> Result<Graph, OpError> {
    let mut net = Net::new("unet_2d");
    let shape = sizes(&[u.batch, u.n_in, u.side, u.side]);
    let x = net.input("x", DType::F32, &shape);
    let y = levels(&mut net, x, (u.width, u.depth), &[2, 2])?;
    let y = net.conv_with_bias("out", y, u.n_classes, Window::new(1, 1, 0))?;
    Ok(net.finish(&[y]))
}

/// Sizes of a U-Net for ensembles of weather forecasts, as ENS-10 (arXiv 2206.14786) has them.
#[derive(Clone, Copy, Debug)]
pub struct Ensemble {
    /// Forecasts.
    pub batch: i64,
    /// Members of the ensemble.
    pub n_members: i64,
    /// Fields of each member.
    pub n_fields: i64,
    /// Levels of pressure.
    pub n_levels: i64,
    /// Latitudes, a multiple of `2^depth`.
    pub height: i64,
    /// Longitudes, a multiple of `2^depth`.
    pub width: i64,
    /// Channels of the first level of the network.
    pub channels: i64,
    /// How often the plane is halved.
    pub depth: usize,
}

/// A 3-D U-Net over levels, latitudes and longitudes, pooled in the plane only: `x`
/// `[batch, members · fields, levels, height, width]` to mean and spread `[batch, levels, height, width]`
/// of the first field. The mean corrects that of the members.
///
/// # Errors
/// A plane that cannot be halved so often.
pub fn ensemble_unet(e: Ensemble) -> Result<Graph, OpError> {
    let mut net = Net::new("ensemble_unet");
    let volume = [e.n_levels, e.height, e.width];
    let shape = sizes(&[&[e.batch, e.n_members * e.n_fields], &volume[..]].concat());
    let x = net.input("x", DType::F32, &shape);
    let y = levels(&mut net, x, (e.channels, e.depth), &[1, 2, 2])?;
    let y = net.conv_with_bias("out", y, 2, Window::new(1, 1, 0))?;
    let result = sizes(&[&[e.batch], &volume[..]].concat());
    let mut halves = Vec::new();
    for n in 0..2 {
        let half = net.slice("out", y, 1, (n, n + 1))?;
        halves.push(net.reshape("out", half, &result)?);
    }
    let members = sizes(&[&[e.batch, e.n_members, e.n_fields], &volume[..]].concat());
    let members = net.reshape("members", x, &members)?;
    let members = net.slice("members", members, 2, (0, 1))?;
    let mean = net.reduce("members", "mean", members, &[1, 2])?;
    let mean = net.apply("mean", sum(), &[mean, halves[0]])?;
    let positive = activations::softplus(Expr::In(0)).add(Expr::float(1e-3));
    let spread = net.apply("spread", positive, &[halves[1]])?;
    Ok(net.finish(&[mean, spread]))
}

/// Sizes of MLP-Mixer.
#[derive(Clone, Copy, Debug)]
pub struct Mixer {
    /// Images.
    pub batch: i64,
    /// Height and width, a multiple of `patch`.
    pub side: i64,
    /// Height and width of a patch.
    pub patch: i64,
    /// Width of the residual stream.
    pub width: i64,
    /// Blocks.
    pub n_layers: i64,
    /// Width of the feed-forward networks over patches.
    pub n_token_inner: i64,
    /// Width of the feed-forward networks over channels.
    pub n_channel_inner: i64,
    /// Classes.
    pub n_classes: i64,
}

/// MLP-Mixer (arXiv 2105.01601): `x` `[batch, 3, side, side]` to `[batch, n_classes]`.
///
/// # Errors
/// A side that is no multiple of the patch.
pub fn mixer(m: Mixer) -> Result<Graph, OpError> {
    let mut net = Net::new("mixer");
    let x = net.input("x", DType::F32, &sizes(&[m.batch, 3, m.side, m.side]));
    let x = net.conv_with_bias("patches", x, m.width, Window::new(m.patch, m.patch, 0))?;
    let n_patches = (m.side / m.patch) * (m.side / m.patch);
    let x = net.reshape("patches", x, &sizes(&[m.batch, m.width, n_patches]))?;
    let mut x = net.permute("patches", x, &[0, 2, 1])?;
    for block in 0..m.n_layers {
        let name = |part: &str| format!("blocks.{block}.{part}");
        let y = net.layer_norm_with(&name("before_tokens"), x, 1e-5)?;
        let y = net.permute(&name("tokens"), y, &[0, 2, 1])?;
        let y = mlp(&mut net, &name("tokens"), y, m.n_token_inner)?;
        let y = net.permute(&name("tokens"), y, &[0, 2, 1])?;
        x = net.apply(&name("add_tokens"), sum(), &[x, y])?;
        let y = net.layer_norm_with(&name("before_channels"), x, 1e-5)?;
        let y = mlp(&mut net, &name("channels"), y, m.n_channel_inner)?;
        x = net.apply(&name("add_channels"), sum(), &[x, y])?;
    }
    let x = net.layer_norm_with("norm", x, 1e-5)?;
    let x = net.reduce("pool", "mean", x, &[1])?;
    let y = net.linear("head", x, m.n_classes)?;
    Ok(net.finish(&[y]))
}

/// Two linear layers with GELU between, over the last dimension, which keeps its size.
fn mlp(net: &mut Net, name: &str, x: ContainerId, inner: i64) -> Result<ContainerId, OpError> {
    let last = net.graph.container(x).shape.len() - 1;
    let width = net.size(x, last);
    let y = net.linear(&format!("{name}.0"), x, inner)?;
    let y = net.apply(&format!("{name}.1"), activations::gelu(Expr::In(0)), &[y])?;
    net.linear(&format!("{name}.2"), y, width)
}

/// Sizes of a block of YOLOv4.
#[derive(Clone, Copy, Debug)]
pub struct YoloBlock {
    /// Images.
    pub batch: i64,
    /// Height and width.
    pub side: i64,
    /// Channels, an even number.
    pub width: i64,
    /// Residual layers.
    pub n_layers: i64,
}

/// A cross-stage block of YOLOv4 (arXiv 2004.10934) with Mish (arXiv 1908.08681), in training form: `x`
/// `[batch, width, side, side]` to the same. Half of the channels go around the layers.
///
/// # Errors
/// None for sizes above 0.
pub fn yolo_block(b: YoloBlock) -> Result<Graph, OpError> {
    let mut net = Net::new("yolo_block");
    let shape = sizes(&[b.batch, b.width, b.side, b.side]);
    let x = net.input("x", DType::F32, &shape);
    let half = b.width / 2;
    let around = conv_mish(&mut net, "around", x, (half, 1))?;
    let mut y = conv_mish(&mut net, "into", x, (half, 1))?;
    for layer in 0..b.n_layers {
        let name = format!("layers.{layer}");
        let z = conv_mish(&mut net, &format!("{name}.0"), y, (half, 1))?;
        let z = conv_mish(&mut net, &format!("{name}.1"), z, (half, 3))?;
        y = net.apply(&format!("{name}.add"), sum(), &[y, z])?;
    }
    let y = conv_mish(&mut net, "leave", y, (half, 1))?;
    let y = net.concat("join", &[y, around], 1)?;
    let y = conv_mish(&mut net, "join", y, (b.width, 1))?;
    Ok(net.finish(&[y]))
}

/// A convolution with that many result channels and that kernel size, with BatchNorm and Mish.
fn conv_mish(
    net: &mut Net,
    name: &str,
    x: ContainerId,
    (out, size): (i64, i64),
) -> Result<ContainerId, OpError> {
    let window = Window::new(size, 1, size / 2);
    let y = net.conv(&format!("{name}.0"), x, out, window)?;
    let y = net.batch_norm(&format!("{name}.1"), y)?;
    net.apply(&format!("{name}.2"), activations::mish(Expr::In(0)), &[y])
}
