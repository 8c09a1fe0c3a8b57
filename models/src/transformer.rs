//! Transformer layers without dropout: encoders as in BERT (arXiv 1810.04805), decoders as in GPT-2 with
//! heads of keys and values that several heads of queries share (arXiv 2305.13245).

use crate::net::{Net, sizes};
use graph::{Attr, ContainerId, DType, Expr, Graph};
use ops::{OpBuilder, OpError, attrs};

/// Sizes of an encoder layer.
#[derive(Clone, Copy, Debug)]
pub struct Encoder {
    /// Sequences.
    pub batch: i64,
    /// Positions in each.
    pub length: i64,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Attention heads.
    pub heads: i64,
    /// Width of the feed-forward part.
    pub inner: i64,
}

impl Encoder {
    /// A layer of BERT-large.
    pub fn bert_large(batch: i64, length: i64) -> Self {
        Encoder {
            batch,
            length,
            hidden: 1024,
            heads: 16,
            inner: 4096,
        }
    }
}

/// One post-normalization encoder layer: `[batch, length, hidden]` to the same.
///
/// # Errors
/// `hidden` is not divisible by `heads`.
pub fn encoder_layer(e: Encoder) -> Result<Graph, OpError> {
    encoder_layer_of(e, DType::F32)
}

/// Like [`encoder_layer`], with parameters and activations of `dtype`.
///
/// # Errors
/// `hidden` is not divisible by `heads`.
pub fn encoder_layer_of(e: Encoder, dtype: DType) -> Result<Graph, OpError> {
    let mut net = Net::new("encoder_layer");
    net.dtype = dtype;
    let x = net.input("x", dtype, &sizes(&[e.batch, e.length, e.hidden]));
    let context = attention(&mut net, x, e)?;
    let a = net.linear("attention.output.dense", context, e.hidden)?;
    let sum = || Expr::In(0).add(Expr::In(1));
    let a = net.apply("attention.output.add", sum(), &[a, x])?;
    let a = net.layer_norm("attention.output.LayerNorm", a)?;
    let u = net.linear("intermediate.dense", a, e.inner)?;
    let u = net.apply("intermediate.gelu", gelu(), &[u])?;
    let y = net.linear("output.dense", u, e.hidden)?;
    let y = net.apply("output.add", sum(), &[y, a])?;
    let y = net.layer_norm("output.LayerNorm", y)?;
    Ok(net.finish(&[y]))
}

/// Sizes of a decoder layer.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    /// Sequences.
    pub batch: i64,
    /// Positions in each.
    pub length: i64,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Heads of queries.
    pub heads: i64,
    /// Heads of keys and values; `heads / key_heads` heads of queries share each of them.
    pub key_heads: i64,
    /// Width of the feed-forward part.
    pub inner: i64,
}

/// One pre-normalization decoder layer with parameters and activations of `dtype`: `[batch, length,
/// hidden]` to the same, each position seeing those up to itself.
///
/// # Errors
/// `hidden` is not divisible by `heads`, or `heads` by `key_heads`.
pub fn decoder_layer(d: Decoder, dtype: DType) -> Result<Graph, OpError> {
    let mut net = Net::new("decoder_layer");
    net.dtype = dtype;
    let x = net.input("x", dtype, &sizes(&[d.batch, d.length, d.hidden]));
    let a = net.layer_norm("ln_1", x)?;
    let a = causal_attention(&mut net, a, d)?;
    let a = net.linear("attn.c_proj", a, d.hidden)?;
    let sum = || Expr::In(0).add(Expr::In(1));
    let x = net.apply("attn.add", sum(), &[a, x])?;
    let u = net.layer_norm("ln_2", x)?;
    let u = net.linear("mlp.c_fc", u, d.inner)?;
    let u = net.apply("mlp.gelu", gelu(), &[u])?;
    let u = net.linear("mlp.c_proj", u, d.hidden)?;
    let y = net.apply("mlp.add", sum(), &[u, x])?;
    Ok(net.finish(&[y]))
}

fn causal_attention(net: &mut Net, x: ContainerId, d: Decoder) -> Result<ContainerId, OpError> {
    let (width, shared) = (d.hidden / d.heads, d.heads / d.key_heads);
    let whole = sizes(&[d.batch, d.heads, d.length, width]);
    let mut parts = Vec::new();
    for (part, heads) in [("q", d.heads), ("k", d.key_heads), ("v", d.key_heads)] {
        let name = format!("attn.{part}_proj");
        let y = net.linear(&name, x, heads * width)?;
        let y = net.reshape(&name, y, &sizes(&[d.batch, d.length, heads, width]))?;
        let mut y = net.permute(&name, y, &[0, 2, 1, 3])?;
        if heads < d.heads {
            y = net.reshape(&name, y, &sizes(&[d.batch, heads, 1, d.length, width]))?;
            let wide = sizes(&[d.batch, heads, shared, d.length, width]);
            let shape = attrs([("shape", Attr::Sizes(wide))]);
            y = net.with(&name, |b| b.op1("expand", &[y], shape))?;
            y = net.reshape(&name, y, &whole)?;
        }
        parts.push(y);
    }
    let causal = attrs([("causal", Attr::Bool(true))]);
    let y = net.with("attn", |b| b.op1("attention", &parts, causal))?;
    let y = net.permute("attn", y, &[0, 2, 1, 3])?;
    net.reshape("attn", y, &sizes(&[d.batch, d.length, d.hidden]))
}

/// `x·Φ(x)` by the error function.
fn gelu() -> Expr {
    let scaled = Expr::In(0).mul(Expr::float(std::f64::consts::FRAC_1_SQRT_2));
    let half = Expr::In(0).mul(Expr::float(0.5));
    half.mul(Expr::float(1.0).add(scaled.erf()))
}

fn attention(net: &mut Net, x: ContainerId, e: Encoder) -> Result<ContainerId, OpError> {
    let mut heads = Vec::new();
    for part in ["query", "key", "value"] {
        let name = format!("attention.self.{part}");
        let y = net.linear(&name, x, e.hidden)?;
        let split = sizes(&[e.batch, e.length, e.heads, e.hidden / e.heads]);
        let y = net.reshape(&name, y, &split)?;
        heads.push(net.permute(&name, y, &[0, 2, 1, 3])?);
    }
    let scale = ((e.hidden / e.heads) as f64).sqrt().recip();
    let name = "attention.self";
    let equation = |s: &str| attrs([("equation", Attr::Str(s.into()))]);
    let scores = net.with(name, |b| {
        b.op1("einsum", &[heads[0], heads[1]], equation("bhid,bhjd->bhij"))
    })?;
    let scaled = Expr::In(0).mul(Expr::float(scale));
    let scores = net.apply(name, scaled, &[scores])?;
    let p = net.with(name, |b| {
        b.op1("softmax", &[scores], attrs([("axis", Attr::Int(-1))]))
    })?;
    let context = net.with(name, |b| {
        b.op1("einsum", &[p, heads[2]], equation("bhij,bhjd->bhid"))
    })?;
    let context = net.permute(name, context, &[0, 2, 1, 3])?;
    net.reshape(name, context, &sizes(&[e.batch, e.length, e.hidden]))
}
