//! Padding as part of the window that reads it.
//!
//! Before: `p = Pad(x); y = Conv(p, W)`; after: `y = Conv(x, W)` with larger `pads`. The same for MaxPool, and for
//! AveragePool if its own padding counts or is none. Before: `Pad(Pad(x))`; after: one Pad.
//!
//! Legal if nobody else reads what is between, the Pad adds constants in spatial dimensions only and
//! takes nothing away, and the constant is what the window assumes outside: 0 for Conv and
//! AveragePool; for MaxPool -∞, or 0 where the input is never negative. Windows of pooling stay larger
//! than their padding and are not rounded up. Saves a node and a copy of the input.

use super::Rule;
use super::patch::{Patch, heir, int, ints};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::element::Element;
use crate::proto::NodeProto;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "fold-pad",
        at: into_window,
    },
    Rule {
        name: "merge-pads",
        at: merge,
    },
];

/// A Pad that adds one number.
struct Padding {
    /// Elements before each dimension, then after each.
    pads: Vec<i64>,
    value: f64,
}

impl Padding {
    fn new(scope: &Scope, n: usize) -> Option<Padding> {
        let a = Attributes::new(scope.node(n));
        let constant = matches!(a.text("mode"), None | Some("constant"));
        if !scope.is(n, "Pad") || !constant || scope.input(n, 3).is_some() {
            return None;
        }
        let (pads, value) = match a.ints("pads") {
            Some(pads) => (pads.to_vec(), f64::from(a.float("value").unwrap_or(0.0))),
            None => {
                let pads = scope.fact(scope.input(n, 1)?)?.known_ints()?;
                let value = scope.input(n, 2).map_or(Some(0.0), |v| scope.scalar(v))?;
                (pads, value)
            }
        };
        let adds = !pads.is_empty() && pads.len() % 2 == 0 && pads.iter().all(|p| *p >= 0);
        adds.then_some(Padding { pads, value })
    }

    /// Elements before each spatial dimension, then after each; `None` if other dimensions are padded.
    fn spatial(&self) -> Option<Vec<i64>> {
        let (before, after) = self.pads.split_at(self.pads.len() / 2);
        let outer = [before.get(..2)?, after.get(..2)?].concat();
        let inner = [&before[2..], &after[2..]].concat();
        (outer == [0; 4] && !inner.is_empty()).then_some(inner)
    }
}

fn into_window(scope: &Scope, n: usize) -> Option<Patch> {
    let window = scope.node(n);
    let p = scope.made_by(scope.input(n, 0)?, "Pad")?;
    if scope.sole_user(p) != Some(n) {
        return None;
    }
    let padding = Padding::new(scope, p)?;
    let x = scope.input(p, 0)?;
    let added = padding.spatial()?;
    let a = Attributes::new(window);
    let own = match a.text("auto_pad") {
        None | Some("NOTSET") => a.ints("pads").map_or(vec![0; added.len()], <[i64]>::to_vec),
        Some("VALID") => vec![0; added.len()],
        _ => return None,
    };
    if own.len() != added.len() || own.iter().any(|p| *p < 0) {
        return None;
    }
    let pads = sums(&own, &added)?;
    let mut wider = window.clone();
    wider.input[0] = x.to_string();
    wider
        .attribute
        .retain(|a| a.name != "pads" && a.name != "auto_pad");
    wider.attribute.push(ints("pads", &pads));
    if scope.is(n, "Conv") {
        return (padding.value == 0.0).then(|| exchanged(scope, [p, n], wider));
    }
    let kernel = a.ints("kernel_shape")?;
    let smaller = pads.iter().zip(kernel.iter().cycle()).all(|(p, k)| p < k);
    // A dilated window may meet nothing but padding.
    let dilated = a
        .ints("dilations")
        .is_some_and(|d| d.iter().any(|d| *d != 1));
    if dilated || !smaller || a.flag("ceil_mode") || pads.len() != 2 * kernel.len() {
        return None;
    }
    let legal = if scope.is(n, "AveragePool") && scope.opset() >= 7 {
        wider.attribute.retain(|a| a.name != "count_include_pad");
        wider.attribute.push(int("count_include_pad", 1));
        let counts = a.flag("count_include_pad") || own.iter().all(|p| *p == 0);
        padding.value == 0.0 && counts
    } else if scope.is(n, "MaxPool") {
        let positions = window.output.iter().skip(1).any(|o| scope.is_used(o));
        let below = padding.value == f64::NEG_INFINITY;
        let neutral = below || (padding.value == 0.0 && is_non_negative(scope, x));
        neutral && !positions
    } else {
        false
    };
    legal.then(|| exchanged(scope, [p, n], wider))
}

/// The sums of two lists of pads; `None` if one is beyond what a file can hold.
fn sums(a: &[i64], b: &[i64]) -> Option<Vec<i64>> {
    a.iter().zip(b).map(|(a, b)| a.checked_add(*b)).collect()
}

fn exchanged(scope: &Scope, remove: [usize; 2], node: NodeProto) -> Patch {
    Patch {
        insert: vec![heir(scope.node(remove[1]), node)],
        remove: remove.to_vec(),
        ..Patch::default()
    }
}

fn merge(scope: &Scope, n: usize) -> Option<Patch> {
    let second = Padding::new(scope, n)?;
    let p = scope.made_by(scope.input(n, 0)?, "Pad")?;
    let first = Padding::new(scope, p)?;
    let same = first.value == second.value && first.pads.len() == second.pads.len();
    if scope.sole_user(p) != Some(n) || !same {
        return None;
    }
    let pads = sums(&first.pads, &second.pads)?;
    let mut patch = Patch {
        remove: vec![p, n],
        ..Patch::default()
    };
    let mut one = scope.node(n).clone();
    one.input[0] = scope.input(p, 0)?.to_string();
    if Attributes::new(&one).ints("pads").is_some() {
        one.attribute.retain(|a| a.name != "pads");
        one.attribute.push(ints("pads", &pads));
    } else {
        one.input[1] = patch.constant(scope, scope.input(n, 1)?, Tensor::ints(&pads));
    }
    patch.insert.push(one);
    Some(patch)
}

/// Nodes that are looked through for the sign of a value, at most.
const MAX_DEPTH: usize = 16;

/// Whether no element of a value is below 0.
pub fn is_non_negative(scope: &Scope, name: &str) -> bool {
    let mut name = name;
    for _ in 0..MAX_DEPTH {
        let Some(p) = scope.producer(name) else {
            return false;
        };
        if !crate::attributes::is_standard(scope.node(p)) {
            return false;
        }
        match scope.node(p).op_type.as_str() {
            "Relu" | "Sigmoid" | "Exp" | "Softmax" | "HardSigmoid" => return true,
            // The magnitude of the least integer is itself.
            "Abs" => {
                let element = scope.fact(name).and_then(|f| f.element);
                return element.is_some_and(Element::is_float);
            }
            "Identity" | "Reshape" | "Transpose" | "Squeeze" | "Unsqueeze" | "Flatten"
            | "Slice" | "MaxPool" | "GlobalMaxPool" | "GlobalAveragePool" | "Sqrt" => {
                match scope.input(p, 0) {
                    Some(x) => name = x,
                    None => return false,
                }
            }
            _ => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::patch::{int, ints, text};
    use super::super::trial::{Trial, real, reals};
    use super::sums;

    fn trial(value: f32, pads: &[i64]) -> Trial {
        Trial::new(13)
            .input("x", "N 3 6 6")
            .output("y", "N C H W")
            .constant("w", reals(&[2, 3, 3, 3]))
            .constant("v", real(value))
            .ints("pads", pads)
            .node("r = Relu(x)")
    }

    const SPATIAL: [i64; 8] = [0, 0, 1, 1, 0, 0, 1, 0];

    fn conv(value: f32, pads: &[i64]) -> Trial {
        trial(value, pads)
            .node("p = Pad(r, pads, v)")
            .with("y = Conv(p, w)", vec![ints("pads", &[0, 1, 0, 1])])
    }

    #[test]
    fn zeros_in_space_become_the_convolutions() {
        let expected = ["r = Relu(x)", "y = Conv(r, w) {pads=[1, 2, 1, 1]}"];
        conv(0.0, &SPATIAL).gives(&expected);
        conv(1.0, &SPATIAL).stays();
        conv(0.0, &[0, 0, 2, 2, 0, 0, -1, 0]).stays();
    }

    #[test]
    fn sums_are_what_a_file_can_hold() {
        assert_eq!(sums(&[1, 2], &[3, -2]), Some(vec![4, 0]));
        assert_eq!(sums(&[1, 2], &[3, i64::MAX]), None);
    }

    #[test]
    fn not_of_channels() {
        let model = |channel: i64| {
            Trial::new(13)
                .input("x", "N 2 6 6")
                .output("y", "N C H W")
                .constant("w", reals(&[2, 2 + channel as usize, 3, 3]))
                .ints("pads", &[0, channel, 1, 1, 0, 0, 1, 1])
                .node("p = Pad(x, pads)")
                .node("y = Conv(p, w)")
        };
        assert_eq!(model(0).run().1.len(), 1);
        model(1).stays();
    }

    #[test]
    fn not_if_read_elsewhere_or_not_constant() {
        conv(0.0, &SPATIAL).output("p", "N 3 H W").stays();
        let reflected = vec![text("mode", "reflect")];
        trial(0.0, &SPATIAL)
            .with("p = Pad(r, pads)", reflected)
            .node("y = Conv(p, w)")
            .stays();
    }

    fn pool(op: &str, value: f32, x: &str, more: Vec<crate::proto::AttributeProto>) -> Trial {
        let mut attributes = vec![ints("kernel_shape", &[3, 3])];
        attributes.extend(more);
        trial(value, &SPATIAL)
            .node(&format!("p = Pad({x}, pads, v)"))
            .with(&format!("y = {op}(p)"), attributes)
            .only(&["fold-pad"])
    }

    #[test]
    fn averages_count_the_padding() {
        let own = || ints("pads", &[0, 1, 0, 0]);
        assert_eq!(pool("AveragePool", 0.0, "r", vec![]).run().0.len(), 1);
        let counted = vec![own(), int("count_include_pad", 1)];
        assert_eq!(pool("AveragePool", 0.0, "r", counted).run().0.len(), 1);
        pool("AveragePool", 0.0, "r", vec![own()]).stays();
        pool("AveragePool", 1.0, "r", vec![]).stays();
        pool("AveragePool", 0.0, "r", vec![int("ceil_mode", 1)]).stays();
    }

    #[test]
    fn maxima_ignore_what_is_never_larger() {
        let lowest = f32::NEG_INFINITY;
        assert_eq!(pool("MaxPool", lowest, "x", vec![]).run().0.len(), 1);
        assert_eq!(pool("MaxPool", 0.0, "r", vec![]).run().0.len(), 1);
        pool("MaxPool", 0.0, "x", vec![]).stays();
        pool("MaxPool", 1.0, "r", vec![]).stays();
        let narrow = vec![ints("kernel_shape", &[1, 1])];
        trial(0.0, &SPATIAL)
            .node("p = Pad(r, pads, v)")
            .with("y = MaxPool(p)", narrow)
            .stays();
    }

    #[test]
    fn two_pads_of_one_value_are_one() {
        let model = |value: f32| {
            trial(value, &SPATIAL)
                .node("p = Pad(r, pads, v)")
                .ints("more", &[0, 0, 0, 2, 1, 0, 0, 0])
                .node("y = Pad(p, more)")
        };
        model(0.0).gives(&["r = Relu(x)", "y = Pad(r, [0, 0, 1, 3, 1, 0, 1, 0])"]);
        model(1.0).stays();
    }
}
