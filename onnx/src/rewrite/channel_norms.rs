//! Normalizations over the positions of channels that exporters took apart, as one operator.
//!
//! - `instance-normalization`: `d = x - mean(x); y = d / sqrt(mean(d²) + ε) · g + b` over all dimensions
//!   but the first two, g and b constant by channel → InstanceNormalization.
//! - `group-normalization` (operator set 21; not for ONNX Runtime on CPUs, which has no kernel of it
//!   and takes it apart otherwise): `Reshape(InstanceNormalization(Reshape(x, [n, groups, …]), 1, 0)) · g + b`
//!   → GroupNormalization.
//!
//! Legal where nothing else reads a step, ε is positive, and g and b are one number or one for each of a
//! known number of channels. Not in `f64`, where the operators would count in `f32`. Saves up to seven passes
//! over memory.

use super::matching::{Taken, is_closed, reduced_axes, take};
use super::normalizations::core;
use super::patch::{Patch, float, heir, int, node};
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "instance-normalization",
        at: instance_normalization,
    },
    Rule {
        name: "group-normalization",
        at: group_normalization,
    },
];

/// A normalized value, and the scale and shift of each channel that follow it.
struct Scaled {
    last: usize,
    scale: Tensor,
    shift: Tensor,
}

/// The one number, or the numbers by channel, of a constant beside a value `[n, channels, …]` of rank
/// `rank`.
fn by_channel(scope: &Scope, name: &str, channels: usize, rank: usize) -> Option<Vec<f64>> {
    let tensor = scope.constant(name)?;
    let own = tensor.shape.len();
    let at = (own + 1).checked_sub(rank);
    let fits = |(d, size): (usize, &usize)| *size == 1 || (Some(d) == at && *size == channels);
    let values = tensor.to_f64()?;
    let is = own <= rank && tensor.shape.iter().enumerate().all(fits);
    match values.as_slice() {
        [one] if is => Some(vec![*one; channels]),
        _ => is.then_some(values),
    }
}

/// What follows node `n`, which gives a value `[n, channels, …]` normalized.
fn followed(
    scope: &Scope,
    n: usize,
    element: Element,
    channels: usize,
    rank: usize,
    taken: &mut Taken,
) -> Option<Scaled> {
    let mut last = n;
    let mut vectors = [vec![1.0; channels], vec![0.0; channels]];
    for (op, values) in ["Mul", "Add"].into_iter().zip(&mut vectors) {
        let Some(reader) = scope.sole_user(last).filter(|m| scope.is(*m, op)) else {
            continue;
        };
        let value = scope.node(last).output.first()?;
        let (a, b) = (scope.input(reader, 0)?, scope.input(reader, 1)?);
        let other = if a == value { b } else { a };
        let Some(found) = by_channel(scope, other, channels, rank) else {
            continue;
        };
        *values = found;
        taken.insert(reader);
        last = reader;
    }
    let vector = |values: &[f64]| Tensor::floats(element, &[channels], values);
    let [scale, shift] = &vectors;
    let (scale, shift) = (vector(scale)?, vector(shift)?);
    let fits = scale.n_bytes() + shift.n_bytes() <= scope.around().fold_limit;
    fits.then_some(Scaled { last, scale, shift })
}

/// Element type, channels and rank of a value `[n, channels, …]` that the operators normalize.
fn normalizable(scope: &Scope, x: &str) -> Option<(Element, usize, usize)> {
    let fact = scope.fact(x)?;
    let (element, rank) = (fact.element?, fact.rank()?);
    let channels = fact.shape.as_ref()?.get(1)?.as_const()?;
    let fits = element.is_float() && element != Element::F64 && rank > 2 && channels > 0;
    fits.then_some((element, usize::try_from(channels).ok()?, rank))
}

/// The operator that stands for `taken`.
fn instead(
    scope: &Scope,
    x: &str,
    scaled: Scaled,
    taken: Taken,
    made: impl Fn(&[&str]) -> crate::proto::NodeProto,
) -> Option<Patch> {
    if !is_closed(scope, &taken, scaled.last) {
        return None;
    }
    let mut patch = Patch {
        remove: taken.into_iter().collect(),
        ..Patch::default()
    };
    let old = scope.node(scaled.last);
    let base = old.output.first()?;
    let scale = patch.constant(scope, &format!("{base}_scale"), scaled.scale);
    let shift = patch.constant(scope, &format!("{base}_shift"), scaled.shift);
    patch.insert.push(heir(old, made(&[x, &scale, &shift])));
    Some(patch)
}

fn instance_normalization(scope: &Scope, n: usize) -> Option<Patch> {
    let mut core = core(scope, n)?;
    let difference = take(scope, core.x, "Sub", &mut core.taken)?;
    let (x, mean) = (scope.input(difference, 0)?, scope.input(difference, 1)?);
    let mean = take(scope, mean, "ReduceMean", &mut core.taken)?;
    let same = scope.input(mean, 0) == Some(x) && reduced_axes(scope, mean)? == core.axes;
    let (element, channels, rank) = normalizable(scope, x)?;
    let is_known = element != Element::BF16 || scope.opset() >= 22;
    if !same || !is_known || !core.axes.iter().copied().eq(2..rank) {
        return None;
    }
    let mut taken = core.taken;
    let scaled = followed(scope, n, element, channels, rank, &mut taken)?;
    instead(scope, x, scaled, taken, |inputs| {
        let epsilon = float("epsilon", core.epsilon as f32);
        node("InstanceNormalization", inputs, vec![epsilon])
    })
}

fn group_normalization(scope: &Scope, n: usize) -> Option<Patch> {
    let may = scope.opset() >= 21 && scope.around().target != Target::OrtCpu;
    if !may || !scope.is(n, "InstanceNormalization") {
        return None;
    }
    let split = scope.made_by(scope.input(n, 0)?, "Reshape")?;
    let x = scope.input(split, 0)?;
    let (element, channels, rank) = normalizable(scope, x)?;
    let (_, groups, _) = normalizable(scope, scope.input(n, 0)?)?;
    let joined = scope.sole_user(n).filter(|m| scope.is(*m, "Reshape"))?;
    let sizes = |name: &str| scope.fact(name)?.shape.as_deref();
    let (before, inside) = (sizes(x)?, sizes(scope.input(n, 0)?)?);
    let whole = Some(before) == sizes(scope.node(joined).output.first()?)
        && before[0] == inside[0]
        && channels.is_multiple_of(groups);
    let all = |at: usize, value: f64| Some(scope.all_equal(scope.input(n, at)?)? == value);
    if !whole || all(1, 1.0) != Some(true) || all(2, 0.0) != Some(true) {
        return None;
    }
    let mut taken = Taken::from([split, n, joined]);
    let scaled = followed(scope, joined, element, channels, rank, &mut taken)?;
    let epsilon = Attributes::new(scope.node(n)).float("epsilon");
    instead(scope, x, scaled, taken, |inputs| {
        let attributes = vec![
            int("num_groups", groups as i64),
            float("epsilon", epsilon.unwrap_or(1e-5)),
        ];
        node("GroupNormalization", inputs, attributes)
    })
}

#[cfg(test)]
mod tests {
    use super::super::patch::ints;
    use super::super::trial::{Trial, real, reals};
    use crate::rewrite::Target;
    use crate::tensor::{Tensor, Values};

    fn instance(axes: &[i64], scale: &[usize], others: &str) -> Trial {
        let over = || vec![ints("axes", axes)];
        let mut trial = Trial::new(17)
            .input("x", "N 6 5 5")
            .output("y", "N 6 5 5")
            .constant("two", real(2.0))
            .constant("eps", real(1e-5))
            .constant("g", reals(scale))
            .constant("b", reals(&[6, 1, 1]))
            .with("m = ReduceMean(x)", over())
            .node("d = Sub(x, m)")
            .node("p = Pow(d, two)")
            .with("v = ReduceMean(p)", over())
            .node("ve = Add(v, eps)")
            .node("sd = Sqrt(ve)")
            .node("n = Div(d, sd)")
            .node("ng = Mul(g, n)")
            .node("y = Add(ng, b)");
        if !others.is_empty() {
            trial = trial.output(others, "N 6 1 1");
        }
        trial.only(&["instance-normalization"])
    }

    #[test]
    fn an_instance_normalization_is_one_operator() {
        let expected = "y = InstanceNormalization(x, y_scale, y_shift) {epsilon=0.00001}";
        instance(&[2, 3], &[6, 1, 1], "").gives(&[expected]);
        instance(&[-1, -2], &[1, 6, 1, 1], "").gives(&[expected]);
        instance(&[2, 3], &[], "").gives(&[expected]);
    }

    #[test]
    fn it_is_over_all_positions_of_a_channel() {
        instance(&[3], &[6, 1, 1], "").stays();
        instance(&[1, 2, 3], &[6, 1, 1], "").stays();
    }

    #[test]
    fn steps_that_others_read_stay() {
        instance(&[2, 3], &[6, 1, 1], "sd").stays();
    }

    #[test]
    fn a_scale_by_position_stays_outside() {
        let (_, nodes) = instance(&[2, 3], &[5], "").run();
        assert_eq!(nodes.len(), 3, "{nodes:?}");
    }

    fn group(opset: i64, scale: f32) -> Trial {
        let vector = |value: f32| Tensor::new(&[2], Values::F32(vec![value; 2]));
        Trial::new(opset)
            .input("x", "N 6 5 5")
            .output("y", "N 6 5 5")
            .ints("groups", &[0, 2, -1])
            .ints("back", &[0, 6, 5, 5])
            .constant("ones", vector(scale))
            .constant("zeros", vector(0.0))
            .constant("g", reals(&[6, 1, 1]))
            .constant("b", reals(&[6, 1, 1]))
            .node("r = Reshape(x, groups)")
            .node("i = InstanceNormalization(r, ones, zeros)")
            .node("q = Reshape(i, back)")
            .node("m = Mul(q, g)")
            .node("y = Add(m, b)")
            .only(&["group-normalization"])
    }

    #[test]
    fn a_group_normalization_is_one_operator() {
        let expected =
            "y = GroupNormalization(x, y_scale, y_shift) {num_groups=2, epsilon=0.00001}";
        group(21, 1.0).gives(&[expected]);
        group(21, 1.0).target(Target::OrtCuda).run();
    }

    #[test]
    fn a_group_normalization_needs_its_operator_set_and_target() {
        group(20, 1.0).stays();
        group(21, 1.0).target(Target::OrtCpu).stays();
    }

    #[test]
    fn groups_with_a_scale_of_their_own_stay() {
        group(21, 0.5).stays();
    }
}
