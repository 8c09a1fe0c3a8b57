//! Networks over time: a classifier with an LSTM, and WaveNet.
//!
//! Sizes and names of parameters are those of `shorthaul.models.sequences` in the Python package.

use crate::net::{Net, Window, sizes};
use graph::{Attr, ContainerId, DType, Expr, Graph};
use ops::recurrence::cells;
use ops::{OpBuilder, OpError, attrs};

/// Sizes of a classifier with LSTM layers.
#[derive(Clone, Copy, Debug)]
pub struct LstmClassifier {
    /// Sequences.
    pub batch: i64,
    /// Steps of each.
    pub length: i64,
    /// Numbers of a step.
    pub n_inputs: i64,
    /// Width of the states.
    pub width: i64,
    /// Layers.
    pub n_layers: i64,
    /// Classes.
    pub n_out: i64,
}

/// LSTM layers (`torch.nn.LSTM`) over `x` `[batch, length, n_inputs]`, and a linear layer on the last
/// state: `[batch, n_out]`.
///
/// # Errors
/// No step.
pub fn lstm_classifier(l: LstmClassifier) -> Result<Graph, OpError> {
    let mut net = Net::new("lstm_classifier");
    let x = net.input("x", DType::F32, &sizes(&[l.batch, l.length, l.n_inputs]));
    let mut x = net.permute("lstm", x, &[1, 0, 2])?;
    for layer in 0..l.n_layers {
        x = lstm_layer(&mut net, layer, x, l)?;
    }
    let last = net.slice("lstm", x, 0, (l.length - 1, l.length))?;
    let last = net.reshape("lstm", last, &sizes(&[l.batch, l.width]))?;
    let y = net.linear("head", last, l.n_out)?;
    Ok(net.finish(&[y]))
}

/// One layer over all steps: `[length, batch, n]` to `[length, batch, width]`.
fn lstm_layer(
    net: &mut Net,
    layer: i64,
    x: ContainerId,
    l: LstmClassifier,
) -> Result<ContainerId, OpError> {
    let n_inputs = net.size(x, 2);
    let named = |part: &str| format!("lstm.{part}_l{layer}");
    let gates = 4 * l.width;
    let own = net.parameter(&named("weight_ih"), &[gates, n_inputs]);
    let before = net.parameter(&named("weight_hh"), &[gates, l.width]);
    let own_bias = net.parameter(&named("bias_ih"), &[gates]);
    let before_bias = net.parameter(&named("bias_hh"), &[gates]);
    let x = net.einsum("lstm", "tbn,kn->tbk", &[x, own])?;
    let sum = Expr::In(0).add(Expr::In(1)).add(Expr::In(2));
    let x = net.apply("lstm", sum, &[x, own_bias, before_bias])?;
    let dtype = net.dtype;
    net.with("lstm", |b| {
        let zeros = attrs([
            ("shape", Attr::Sizes(sizes(&[l.batch, l.width]))),
            ("value", Attr::Float(0.0)),
            ("dtype", Attr::DType(dtype)),
        ]);
        let first = b.op1("full", &[], zeros)?;
        let inputs = [Some(x), Some(before), None, Some(first), Some(first)];
        Ok(b.op("recurrence", &inputs, cells::lstm().attrs())?[0])
    })
}

/// Sizes of WaveNet.
#[derive(Clone, Copy, Debug)]
pub struct WaveNet {
    /// Sequences.
    pub batch: i64,
    /// Samples of each.
    pub length: i64,
    /// Levels of a sample.
    pub n_levels: i64,
    /// Width of the residual stream.
    pub width: i64,
    /// Width of the sum of the layers' results.
    pub n_skip: i64,
    /// Stacks of layers.
    pub n_stacks: usize,
    /// Layers of a stack; the dilation of each is twice that of the one before.
    pub n_dilations: usize,
}

/// WaveNet (arXiv 1609.03499): levels `x` `[batch, length]` to scores of the next ones
/// `[batch, length, n_levels]`, each seeing its past only.
///
/// # Errors
/// No layer.
pub fn wavenet(w: WaveNet) -> Result<Graph, OpError> {
    let mut net = Net::new("wavenet");
    let levels = net.input("x", DType::I64, &sizes(&[w.batch, w.length]));
    let table = net.parameter("levels.weight", &[w.n_levels, w.width]);
    let x = net.gather("levels", table, levels, 0)?;
    let mut x = net.permute("levels", x, &[0, 2, 1])?;
    let mut out: Option<ContainerId> = None;
    let sum = || Expr::In(0).add(Expr::In(1));
    let point = Window::new(1, 1, 0);
    for layer in 0..w.n_stacks * w.n_dilations {
        let y = gated(&mut net, layer, x, 1 << (layer % w.n_dilations))?;
        let skip = net.conv_with_bias(&format!("skip.{layer}"), y, w.n_skip, point)?;
        out = Some(match out {
            None => skip,
            Some(before) => net.apply(&format!("add_skip.{layer}"), sum(), &[before, skip])?,
        });
        let y = net.conv_with_bias(&format!("residual.{layer}"), y, w.width, point)?;
        x = net.apply(&format!("add.{layer}"), sum(), &[x, y])?;
    }
    // Without a layer, the scores come from the samples themselves.
    let y = net.relu("head.0", out.unwrap_or(x))?;
    let y = net.conv_with_bias("head.1", y, w.n_skip, point)?;
    let y = net.relu("head.2", y)?;
    let y = net.conv_with_bias("head.3", y, w.n_levels, point)?;
    let y = net.permute("head", y, &[0, 2, 1])?;
    Ok(net.finish(&[y]))
}

/// A convolution over a sample and the one `dilation` before it. Half of its results gate the other half.
fn gated(
    net: &mut Net,
    layer: usize,
    x: ContainerId,
    dilation: i64,
) -> Result<ContainerId, OpError> {
    let name = format!("gated.{layer}");
    let width = net.size(x, 1);
    let padding = attrs([
        ("low", Attr::Sizes(sizes(&[0, 0, dilation]))),
        ("high", Attr::Sizes(sizes(&[0, 0, 0]))),
    ]);
    let x = net.with(&name, |b| b.op1("pad", &[x], padding))?;
    let window = Window {
        dilation,
        ..Window::new(2, 1, 0)
    };
    let y = net.conv_with_bias(&name, x, 2 * width, window)?;
    let filtered = net.slice(&name, y, 1, (0, width))?;
    let gate = net.slice(&name, y, 1, (width, 2 * width))?;
    let product = Expr::In(0).tanh().mul(Expr::In(1).sigmoid());
    net.apply(&name, product, &[filtered, gate])
}
