//! For ONNX Runtime on CPUs: groups of convolutions as wide as its vectors.
//!
//! Before: `y = Conv(x, W [C, 8, …], group=C/8)`; after: `y = Conv(x, W' [C, 16, …], group=C/16)`, `W'`
//! being 0 between channels of different groups. Where C is no multiple of 16, channels of zeros are
//! added as far as elementwise steps, means over space and their products carry them: from the
//! convolutions without groups that compute the values to those that read them.
//!
//! Legal if each convolution's weights are a constant that nothing else reads, and no such value is an output; added
//! channels are read with weights of 0. An infinity makes its neighbours NaN, so verification has the last word.
//! ONNX Runtime computes groups in blocks of 16 channels, or else in a general, slower way with data rearranged
//! before and after; this is saved (28×28×104 in groups of 8: 0.54 against 0.37 ms).
//! The file grows by the zeros.

use super::patch::{Patch, heir};
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::{Attributes, is_standard};
use crate::element::Element;
use crate::proto::NodeProto;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

pub const RULES: &[Rule] = &[Rule {
    name: "widen-groups",
    at: widen,
}];

/// Channels of a block.
const BLOCK: usize = 16;
/// Most values that are given more channels with one convolution.
const MAX_VALUES: usize = 32;

/// A convolution of images whose weights are a constant of its own.
struct Convolution {
    weight: Vec<f64>,
    /// Output channels, input channels of a group.
    shape: [usize; 2],
    groups: usize,
    window: Vec<usize>,
}

impl Convolution {
    fn new(scope: &Scope, n: usize) -> Option<Convolution> {
        let name = scope.input(n, 1)?;
        let own = scope.is_initializer(name) && scope.sole_reader(name).is_some();
        if !scope.is(n, "Conv") || !own {
            return None;
        }
        let tensor = scope.constant(name)?;
        let groups = Attributes::new(scope.node(n)).int("group").unwrap_or(1);
        let bias = scope
            .input(n, 2)
            .is_none_or(|b| scope.constant(b).is_some());
        let fits = tensor.element() == Element::F32 && tensor.shape.len() == 4 && bias;
        fits.then_some(Convolution {
            weight: tensor.to_f64()?,
            shape: [tensor.shape[0], tensor.shape[1]],
            groups: usize::try_from(groups).ok()?,
            window: tensor.shape[2..].to_vec(),
        })
    }

    /// The width of its groups, if they are as many and as wide on both sides.
    fn width(&self) -> Option<usize> {
        let [out, width] = self.shape;
        (self.groups > 1 && out == self.groups * width).then_some(width)
    }

    /// The weights with `out` output channels and `inner` input channels in each of `groups` groups;
    /// what is new is 0.
    fn widened(&self, out: usize, inner: usize, groups: usize) -> Option<Tensor> {
        let window: usize = self.window.iter().product();
        let mut values = vec![0.0; out * inner * window];
        let [old_out, old_inner] = self.shape;
        for o in 0..old_out {
            for i in 0..old_inner {
                let channel = o / (old_out / self.groups) * old_inner + i;
                let at = channel.checked_sub(o / (out / groups) * inner)?;
                let from = &self.weight[(o * old_inner + i) * window..][..window];
                values.get_mut((o * inner + at) * window..)?[..window].copy_from_slice(from);
            }
        }
        let shape = [&[out, inner], self.window.as_slice()].concat();
        Tensor::floats(Element::F32, &shape, &values)
    }
}

fn widen(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.around().target != Target::OrtCpu {
        return None;
    }
    let conv = Convolution::new(scope, n)?;
    let width = conv.width().filter(|w| *w == 4 || *w == 8)?;
    let channels = conv.shape[0];
    let wider = channels.next_multiple_of(BLOCK);
    if wider * 4 > channels * 5 || width >= BLOCK {
        return None;
    }
    let mut values = BTreeMap::new();
    let mut nodes = BTreeSet::from([n]);
    if wider != channels {
        let mut reached = Reached::default();
        reached.from(scope, scope.input(n, 0)?, channels)?;
        nodes = reached.nodes;
        let named = reached.values.into_iter();
        values.extend(named.map(|v| (v.to_string(), scope.fresh(&format!("{v}_wide")))));
    }
    let mut patch = Patch {
        remove: nodes.iter().copied().collect(),
        ..Patch::default()
    };
    for m in nodes {
        let made = changed(scope, m, &values, [channels, wider], &mut patch)?;
        patch.insert.push(made);
    }
    Some(patch)
}

/// Values that get more channels together, and the nodes that compute or read them.
#[derive(Default)]
struct Reached<'a> {
    values: BTreeSet<&'a str>,
    nodes: BTreeSet<usize>,
}

impl<'a> Reached<'a> {
    /// Adds a value and all that must get more channels with it; `None` if one of them cannot.
    fn from(&mut self, scope: &Scope<'a>, value: &'a str, channels: usize) -> Option<()> {
        let mut waiting = vec![value];
        while let Some(value) = waiting.pop() {
            if !self.values.insert(value) {
                continue;
            }
            let producer = scope.producer(value)?;
            if scope.is_output(value) || self.values.len() > MAX_VALUES {
                return None;
            }
            self.nodes.insert(producer);
            if !is_plain(scope, producer) {
                waiting.extend(carried(scope, producer, channels)?);
            }
            for reader in scope.readers(value) {
                self.nodes.insert(*reader);
                let first = scope.node(*reader).input.iter().skip(1).all(|i| i != value);
                if !(is_plain(scope, *reader) && first) {
                    waiting.extend(carried(scope, *reader, channels)?);
                }
            }
        }
        Some(())
    }
}

/// Whether a node is a convolution without groups whose weights can change.
fn is_plain(scope: &Scope, n: usize) -> bool {
    Convolution::new(scope, n).is_some_and(|c| c.groups == 1)
}

/// The values of a node, inputs and output, that have the same channels and keep them apart. `None` if the
/// node mixes channels or depends on their number.
fn carried<'a>(scope: &Scope<'a>, n: usize, channels: usize) -> Option<Vec<&'a str>> {
    let node = scope.node(n);
    let output = node.output.first()?.as_str();
    let others = node.output.iter().skip(1).any(|o| scope.is_used(o));
    if !is_standard(node) || others {
        return None;
    }
    let mut values = vec![output, scope.input(n, 0)?];
    match node.op_type.as_str() {
        "Relu" | "LeakyRelu" | "Sigmoid" | "HardSigmoid" | "HardSwish" | "Tanh" | "Elu"
        | "Clip" | "GlobalAveragePool" | "GlobalMaxPool" | "AveragePool" | "MaxPool" => {}
        "Add" | "Mul" => values.push(scope.input(n, 1)?),
        "Conv" => {
            let width = Convolution::new(scope, n)?.width()?;
            matches!(width, 1 | 4 | 8).then_some(())?;
        }
        _ => return None,
    }
    let fits = |name: &&str| {
        let shape = scope.fact(name).and_then(|f| f.shape.clone());
        let second = shape.filter(|s| s.len() == 4).and_then(|s| s[1].as_const());
        second == i64::try_from(channels).ok() && second.is_some()
    };
    values.iter().all(fits).then_some(values)
}

/// A node with `wider` channels where it had `channels`, reading and computing the renamed values.
fn changed(
    scope: &Scope,
    n: usize,
    values: &BTreeMap<String, String>,
    [channels, wider]: [usize; 2],
    patch: &mut Patch,
) -> Option<NodeProto> {
    let old = scope.node(n);
    let mut node = old.clone();
    for name in node.input.iter_mut().chain(&mut node.output) {
        if let Some(new) = values.get(name.as_str()) {
            name.clone_from(new);
        }
    }
    if !scope.is(n, "Conv") {
        return Some(heir(old, node));
    }
    let conv = Convolution::new(scope, n)?;
    let reads = node.input[0] != old.input[0];
    let gives = node.output != old.output;
    let out = if gives { wider } else { conv.shape[0] };
    let (inner, groups) = match conv.width() {
        Some(1) => (1, wider),
        Some(_) => (BLOCK, wider / BLOCK),
        None if reads && conv.shape[1] == channels => (wider, 1),
        None if reads => return None,
        None => (conv.shape[1], 1),
    };
    let weight = conv.widened(out, inner, groups)?;
    node.input[1] = patch.constant(scope, &old.input[1], weight);
    node.attribute.retain(|a| a.name != "group");
    node.attribute
        .push(super::patch::int("group", groups as i64));
    if let Some(bias) = scope.input(n, 2).filter(|_| gives) {
        let mut values = scope.constant(bias)?.to_f64()?;
        values.resize(out, 0.0);
        let tensor = Tensor::floats(Element::F32, &[out], &values)?;
        node.input[2] = patch.constant(scope, bias, tensor);
    }
    Some(heir(old, node))
}

#[cfg(test)]
mod tests {
    use super::super::patch::{int, ints};
    use super::super::trial::{Trial, reals};
    use super::Target;

    fn trial(channels: usize, width: usize) -> Trial {
        let groups = vec![
            int("group", (channels / width) as i64),
            ints("pads", &[1, 1, 1, 1]),
        ];
        Trial::new(13)
            .input("x", "N 3 4 4")
            .output("y", "N 5 4 4")
            .constant("mixed", reals(&[8, 3, 1, 1]))
            .constant("a", reals(&[channels, 8, 1, 1]))
            .constant("b", reals(&[channels]))
            .constant("w", reals(&[channels, width, 3, 3]))
            .constant("d", reals(&[5, channels, 1, 1]))
            // With two products on the way, an infinite element makes every channel NaN.
            .node("o = Conv(x, mixed)")
            .node("p = Conv(o, a, b)")
            .node("q = Relu(p)")
            .with("r = Conv(q, w)", groups)
            .target(Target::OrtCpu)
            .only(&["widen-groups"])
    }

    #[test]
    fn groups_are_joined() {
        let (_, nodes) = trial(32, 8).node("y = Conv(r, d)").run();
        assert_eq!(nodes[3], "r = Conv(q, w_1) {pads=[1, 1, 1, 1], group=2}");
        let (_, nodes) = trial(16, 4).node("y = Conv(r, d)").run();
        assert_eq!(nodes[3], "r = Conv(q, w_1) {pads=[1, 1, 1, 1], group=1}");
    }

    #[test]
    fn channels_are_added_on_both_sides_and_beside() {
        let model = trial(40, 8)
            .constant("e", reals(&[4, 40, 1, 1]))
            .constant("f", reals(&[40, 4, 1, 1]))
            .node("m = GlobalAveragePool(r)")
            .node("s = Conv(m, e)")
            .node("t = Conv(s, f)")
            .node("u = Sigmoid(t)")
            .node("v = Mul(r, u)")
            .node("y = Conv(v, d)");
        model.gives(&[
            "o = Conv(x, mixed)",
            "p_wide = Conv(o, a_1, b_1) {group=1}",
            "q_wide = Relu(p_wide)",
            "r_wide = Conv(q_wide, w_1) {pads=[1, 1, 1, 1], group=3}",
            "m_wide = GlobalAveragePool(r_wide)",
            "s = Conv(m_wide, e_1) {group=1}",
            "t_wide = Conv(s, f_1) {group=1}",
            "u_wide = Sigmoid(t_wide)",
            "v_wide = Mul(r_wide, u_wide)",
            "y = Conv(v_wide, d_1) {group=1}",
        ]);
    }

    #[test]
    fn not_for_other_targets_or_widths() {
        trial(32, 8)
            .node("y = Conv(r, d)")
            .target(Target::Standard)
            .stays();
        trial(32, 16).node("y = Conv(r, d)").stays();
        trial(32, 1).node("y = Conv(r, d)").stays();
        // A third more channels would not pay.
        trial(24, 8).node("y = Conv(r, d)").stays();
    }

    #[test]
    fn not_where_the_channels_are_seen() {
        let seen = trial(40, 8).node("y = Conv(r, d)").output("z", "N 40 4 4");
        seen.node("z = Softmax(r)").stays();
        trial(40, 8)
            .output("r", "N 40 4 4")
            .node("y = Conv(r, d)")
            .stays();
    }

    #[test]
    fn not_with_weights_that_others_read() {
        let shared = trial(32, 8).node("y = Conv(r, d)").output("z", "N 32 4 4");
        shared.with("z = Conv(q, w)", vec![int("group", 4)]).stays();
    }
}
