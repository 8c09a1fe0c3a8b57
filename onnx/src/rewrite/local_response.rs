//! For ONNX Runtime on CPUs: local response normalization as a convolution and elementwise steps.
//!
//! Before: `y = LRN(x)`; after: `s = Conv(x · x, band) + bias; y = x / (√s · √√s)`, the band being
//! α/size for channels of a window and 0 elsewhere: `x / (bias + α/size · Σ x²)^¾`. The band [C, C] is
//! cut out of one repeated row when the file is loaded, so the file holds 2C numbers of it.
//!
//! Legal for β = ¾ or ½ and a known number of channels; an infinity in one channel makes the sums of
//! all channels NaN, not only those of its window, so verification has the last word. ONNX Runtime computes LRN with
//! one `pow` per element on one thread of scalar code, ten times slower than this (56×56×192: 46 against 4 ms).

use super::patch::{Patch, ints, node};
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::tensor::{Tensor, Values};

pub const RULES: &[Rule] = &[Rule {
    name: "lrn-as-convolution",
    at: as_convolution,
}];

/// Channels up to which the dense band is worth its arithmetic.
const MAX_CHANNELS: i64 = 512;

fn as_convolution(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.around().target != Target::OrtCpu || !scope.is(n, "LRN") || scope.opset() < 7 {
        return None;
    }
    let old = scope.node(n);
    let a = Attributes::new(old);
    let x = scope.input(n, 0)?;
    let fact = scope.fact(x)?;
    let channels = fact.shape.as_ref()?.get(1)?.as_const()?;
    let size = a.int("size")?;
    let beta = a.float("beta").unwrap_or(0.75);
    let fits = fact.element == Some(Element::F32)
        && fact.rank() == Some(4)
        && (1..=MAX_CHANNELS).contains(&channels)
        && (1..=channels).contains(&size);
    if !fits || (beta != 0.75 && beta != 0.5) {
        return None;
    }
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let base = old.output.first()?;
    let add = |patch: &mut Patch, op: &str, inputs: &[&str]| {
        patch.node(
            scope,
            &format!("{base}_{}", op.to_lowercase()),
            node(op, inputs, Vec::new()),
        )
    };
    let squares = add(&mut patch, "Mul", &[x, x]);
    let alpha = a.float("alpha").unwrap_or(1e-4) / size as f32;
    let band = band(scope, &mut patch, base, (channels, size, alpha));
    let bias = Values::F32(vec![a.float("bias").unwrap_or(1.0); channels as usize]);
    let bias = Tensor::new(&[channels as usize], bias);
    let bias = patch.constant(scope, &format!("{base}_bias"), bias);
    let sum = add(&mut patch, "Conv", &[&squares, &band, &bias]);
    let root = add(&mut patch, "Sqrt", &[&sum]);
    let power = if beta == 0.5 {
        root
    } else {
        let fourth = add(&mut patch, "Sqrt", &[&root]);
        add(&mut patch, "Mul", &[&root, &fourth])
    };
    let quotient = node("Div", &[x, &power], Vec::new());
    patch.insert.push(super::patch::heir(old, quotient));
    Some(patch)
}

/// Weights [C, C, 1, 1] that are `value` where the input's channel is in the window of the output's: a
/// row of 2C elements, repeated, in lines of one element less, so that each line starts one later.
fn band(
    scope: &Scope,
    patch: &mut Patch,
    base: &str,
    (channels, size, value): (i64, i64, f32),
) -> String {
    let (below, above, period) = ((size - 1) / 2, size / 2, 2 * channels);
    let inside = |d: i64| d <= above || d >= period - below;
    let row = (0..period).map(|d| if inside(d) { value } else { 0.0 });
    let row = Tensor::new(&[period as usize], Values::F32(row.collect()));
    let row = patch.constant(scope, &format!("{base}_window"), row);
    let list = |patch: &mut Patch, what: &str, values: &[i64]| {
        patch.constant(scope, &format!("{base}_{what}"), Tensor::ints(values))
    };
    let times = list(patch, "times", &[period - 1]);
    let tile = node("Tile", &[&row, &times], Vec::new());
    let rows = patch.node(scope, &format!("{base}_rows"), tile);
    let shape = list(patch, "lines_shape", &[period, period - 1, 1, 1]);
    let lines = node("Reshape", &[&rows, &shape], Vec::new());
    let lines = patch.node(scope, &format!("{base}_lines"), lines);
    let (first, end) = ([0, 0], [channels, channels]);
    let cut = if scope.opset() < 10 {
        let bounds = vec![ints("starts", &first), ints("ends", &end)];
        node("Slice", &[&lines], bounds)
    } else {
        let first = list(patch, "first", &first);
        let end = list(patch, "end", &end);
        node("Slice", &[&lines, &first, &end], Vec::new())
    };
    patch.node(scope, &format!("{base}_weights"), cut)
}

#[cfg(test)]
mod tests {
    use super::super::patch::{float, int};
    use super::super::trial::{Trial, reals};
    use super::Target;

    fn trial(opset: i64, channels: usize, size: i64, beta: f32) -> Trial {
        let attributes = vec![
            int("size", size),
            float("alpha", 0.5),
            float("beta", beta),
            float("bias", 2.0),
        ];
        Trial::new(opset)
            .input("x", "N 3 3 2")
            .output("y", "N C 3 2")
            .constant("w", reals(&[channels, 3, 1, 1]))
            .node("a = Conv(x, w)")
            .with("y = LRN(a)", attributes)
    }

    #[test]
    fn windows_of_odd_and_even_size() {
        for (opset, size) in [(9, 5), (13, 4), (13, 1), (13, 6)] {
            let model = trial(opset, 6, size, 0.75).target(Target::OrtCpu);
            let (_, nodes) = model.run();
            assert!(nodes.iter().all(|n| !n.contains("LRN")), "{nodes:?}");
        }
        assert_eq!(trial(9, 6, 5, 0.5).target(Target::OrtCpu).run().1.len(), 5);
    }

    #[test]
    fn not_for_other_targets() {
        trial(13, 6, 5, 0.75).stays();
    }

    #[test]
    fn not_for_other_powers() {
        trial(13, 6, 5, 0.7).target(Target::OrtCpu).stays();
    }

    #[test]
    fn not_for_unknown_channels() {
        let model = |sizes: &str| {
            Trial::new(13)
                .input("x", sizes)
                .output("y", sizes)
                .with("y = LRN(x)", vec![int("size", 3)])
                .target(Target::OrtCpu)
        };
        assert!(model("N 4 3 2").unverified().len() > 1);
        assert_eq!(model("N C 3 2").unverified().len(), 1);
    }
}
