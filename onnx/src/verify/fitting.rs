//! Values for inputs that decide sizes: what a Reshape, a Resize or a Slice reads beside its data.
//!
//! Owns which values fit, by operator and position, from the sizes that the file declares. When they are tried is for
//! `samples.rs`. They are inputs like others: nothing is taken for granted from them.

use super::attempts::Integers;
use super::random::Random;
use crate::attributes::{Attributes, is_standard};
use crate::element::Element;
use crate::fact::MAX_ELEMENTS;
use crate::infer::{Facts, declared, is_unknown};
use crate::operators::{Unknowns, axis};
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::Tensor;
use graph::{Bindings, SymExpr};

/// An end of a slice beyond every size.
const BEHIND: i64 = 1 << 30;
/// The largest divisor.
const MOST_DIVISOR: u64 = 9;

/// What fits an input.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fitting {
    /// These elements.
    Integers(Vec<SymExpr>),
    /// Scales: sizes of a result divided by those of what it is made from.
    Scales(Vec<(SymExpr, SymExpr)>),
    /// Corners of a region: its starts, then its ends, as parts of the whole.
    Region(usize),
    /// Anything but 0.
    Divisors,
}

impl Fitting {
    /// What fits the input `name`: what the first node asks for that reads it and asks for something.
    pub fn new(graph: &GraphProto, facts: &Facts, name: &str, shape: &[SymExpr]) -> Option<Self> {
        let whole = Whole { graph, facts };
        let n = match shape {
            [] => Some(1),
            [n] => n.as_const().and_then(|n| usize::try_from(n).ok()),
            _ => None,
        };
        // A longer list decides no sizes, whatever the file declares.
        let Some(n) = n.filter(|n| *n <= MAX_ELEMENTS) else {
            return whole.divisors(name);
        };
        let mut readers = graph.node.iter().filter(|node| is_standard(node));
        let found = readers.find_map(|node| {
            let at = node.input.iter().position(|i| i == name)?;
            whole.asked(node, at, n)
        });
        found.or_else(|| whole.divisors(name))
    }

    /// The value; `None` if a size does not follow.
    pub fn tensor(
        &self,
        (element, sizes): (Element, &[usize]),
        bindings: &Bindings,
        integers: Integers,
        random: &mut Random,
    ) -> Option<Tensor> {
        let value = |n: &SymExpr| n.eval(bindings).ok();
        let n: usize = sizes.iter().product();
        let ints = |values: Vec<i64>| match element.is_float() {
            _ if values.len() != n => None,
            true => {
                let values: Vec<f64> = values.iter().map(|v| *v as f64).collect();
                Tensor::floats(element, sizes, &values)
            }
            false => Tensor::of_ints(element, sizes, &values),
        };
        match self {
            Fitting::Integers(values) => ints(values.iter().map(value).collect::<Option<_>>()?),
            Fitting::Scales(pairs) => {
                // A quarter is added, so that scale times size is never rounded to less than the result's size.
                let scale = |(to, from): &(SymExpr, SymExpr)| match (value(to)?, value(from)?) {
                    (to, from) if to == from => Some(1.0),
                    (_, 0) => None,
                    (to, from) => Some((to as f64 + 0.25) / from as f64),
                };
                let values: Vec<f64> = pairs.iter().map(scale).collect::<Option<_>>()?;
                Tensor::floats(element, sizes, &values).filter(|_| values.len() == n)
            }
            Fitting::Region(n_axes) => {
                let corner = |at: usize| if at < *n_axes { 0.25 } else { 0.75 };
                let values: Vec<f64> = (0..2 * n_axes).map(corner).collect();
                Tensor::floats(element, sizes, &values).filter(|_| values.len() == n)
            }
            Fitting::Divisors => {
                let is_unsigned = matches!(
                    element,
                    Element::U8 | Element::U16 | Element::U32 | Element::U64
                );
                let signed = integers == Integers::Signed && !is_unsigned;
                let mut divisor = || {
                    let divisor = 1 + random.below(MOST_DIVISOR) as i64;
                    let is_negative = signed && random.below(2) == 1;
                    if is_negative { -divisor } else { divisor }
                };
                ints((0..n).map(|_| divisor()).collect())
            }
        }
    }
}

/// A graph and what is known of its values.
struct Whole<'g> {
    graph: &'g GraphProto,
    facts: &'g Facts,
}

impl Whole<'_> {
    /// [`Fitting::Divisors`], if integers are divided by `name`.
    fn divisors(&self, name: &str) -> Option<Fitting> {
        let divides = |node: &&NodeProto| {
            let is_division = matches!(node.op_type.as_str(), "Div" | "Mod");
            is_division && is_standard(node) && node.input.get(1).is_some_and(|i| i == name)
        };
        let element = self.facts.get(name)?.element?;
        let mut nodes = self.graph.node.iter();
        (element.is_int() && nodes.any(|node| divides(&node))).then_some(Fitting::Divisors)
    }

    /// What a node asks for at position `at`, where it reads `n` elements.
    fn asked(&self, node: &NodeProto, at: usize, n: usize) -> Option<Fitting> {
        let a = Attributes::new(node);
        let result = || self.sizes(node.output.first()?);
        let data = || self.sizes(node.input.first()?);
        let all = |sizes: Vec<SymExpr>| (sizes.len() == n).then_some(sizes);
        let ints = |values: Vec<SymExpr>| Some(Fitting::Integers(values));
        let constants = |values: &mut dyn Iterator<Item = i64>| {
            Some(Fitting::Integers(values.map(SymExpr::constant).collect()))
        };
        match (node.op_type.as_str(), at) {
            ("Reshape", 1) => ints(all(result()?)?),
            ("Expand", 1) => {
                let sizes = result()?;
                ints(sizes.get(sizes.len().checked_sub(n)?..)?.to_vec())
            }
            ("Resize", 3) => ints(all(self.along(&result()?, node)?)?),
            ("Upsample", 1) => self.scales(node, n),
            ("Resize", 1) if node.input.len() == 2 => self.scales(node, n),
            ("Resize", 2) => self.scales(node, n),
            ("Resize", 1) => n.is_multiple_of(2).then_some(Fitting::Region(n / 2)),
            ("Slice", 1 | 2) => self.bounds(node, at == 2, n),
            ("Slice", 3) | ("Unsqueeze", 1) => constants(&mut (0..n as i64)),
            ("Slice", 4) => constants(&mut std::iter::repeat_n(1, n)),
            ("Split", 1) => {
                let of = a.int("axis").unwrap_or(0);
                let part = |name: &String| {
                    let sizes = self.sizes(name)?;
                    sizes.get(axis(of, sizes.len())?).cloned()
                };
                ints(all(node.output.iter().map(part).collect::<Option<_>>()?)?)
            }
            ("OneHot", 1) => {
                let sizes = result()?;
                let at = axis(a.int("axis").unwrap_or(-1), sizes.len())?;
                ints(all(vec![sizes.get(at)?.clone()])?)
            }
            ("AffineGrid", 1) => {
                // [batch, spatial…, coordinates] of a result for images of one channel.
                let (sizes, transforms) = (result()?, data()?);
                let (batch, spatial) = sizes.split_last()?.1.split_first()?;
                let batch = if is_unknown(batch) {
                    transforms.first()?
                } else {
                    batch
                };
                let mut image = vec![batch.clone(), SymExpr::constant(1)];
                image.extend(spatial.iter().cloned());
                ints(all(image)?)
            }
            _ => None,
        }
    }

    /// Scales of a Resize or an Upsample.
    fn scales(&self, node: &NodeProto, n: usize) -> Option<Fitting> {
        let from = self.along(&self.sizes(node.input.first()?)?, node)?;
        let to = self.along(&self.sizes(node.output.first()?)?, node)?;
        let pairs: Vec<_> = to.into_iter().zip(from).collect();
        (pairs.len() == n).then_some(Fitting::Scales(pairs))
    }

    /// Starts or ends with which a Slice gives the declared sizes. If a dimension is not kept whole, its first element
    /// is left out.
    fn bounds(&self, node: &NodeProto, is_end: bool, n: usize) -> Option<Fitting> {
        let axes = match node.input.get(3).filter(|name| !name.is_empty()) {
            Some(name) => self.facts.get(name).and_then(|fact| fact.known_ints()),
            None => None,
        };
        let axes = axes.unwrap_or_else(|| (0..n as i64).collect());
        let (from, to) = (
            self.sizes(node.input.first()?),
            self.sizes(node.output.first()?),
        );
        let size = |of: &Option<Vec<SymExpr>>, at: i64| {
            let sizes = of.as_ref()?;
            sizes.get(axis(at, sizes.len())?).cloned()
        };
        let bound = |at: &i64| {
            let (from, to) = (size(&from, *at), size(&to, *at));
            let whole = to.is_some() && from == to;
            let start = SymExpr::constant(i64::from(!whole));
            match (is_end, to) {
                (false, _) => start,
                (true, Some(to)) => start + to,
                (true, None) => SymExpr::constant(BEHIND),
            }
        };
        (axes.len() == n).then(|| Fitting::Integers(axes.iter().map(bound).collect()))
    }

    /// The sizes that the attribute `axes` names; all sizes if it is absent.
    fn along(&self, sizes: &[SymExpr], node: &NodeProto) -> Option<Vec<SymExpr>> {
        match Attributes::new(node).ints("axes") {
            None => Some(sizes.to_vec()),
            Some(axes) => {
                let size = |at: &i64| sizes.get(axis(*at, sizes.len())?).cloned();
                axes.iter().map(size).collect()
            }
        }
    }

    /// The sizes of a value, inferred or declared.
    fn sizes(&self, name: &str) -> Option<Vec<SymExpr>> {
        let known = |shape: &Vec<SymExpr>| !shape.iter().any(is_unknown);
        let inferred = self.facts.get(name).and_then(|fact| fact.shape.clone());
        inferred.filter(known).or_else(|| {
            let infos = self.graph.output.iter().chain(&self.graph.value_info);
            let mut infos = infos.filter(|info| info.name == name);
            declared(infos.next()?, &Unknowns::default())
                .shape
                .filter(known)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::patch::int;
    use crate::rewrite::trial::{Trial, real};
    use crate::tensor::Values;
    use crate::verify::cuts::Cuts;
    use crate::verify::{Checker, Options};

    /// The values of an input in each run of a model.
    fn made_up(trial: &Trial, name: &str) -> Vec<Vec<f64>> {
        let model = trial.model();
        let checker = Checker::new(&model, &Options::default());
        let checker = checker.unwrap_or_else(|error| panic!("{name}: {error}"));
        let numbers = |feeds: &crate::evaluate::Values| feeds[name].to_f64().expect("numbers");
        checker.runs.iter().map(|run| numbers(&run.feeds)).collect()
    }

    fn integers(trial: Trial, name: &str, sizes: &str) -> Trial {
        trial.input_of(name, Element::I64, sizes)
    }

    #[test]
    fn inputs_that_decide_sizes_are_what_the_declared_sizes_ask_for() {
        let trial = || Trial::new(17);
        let reshaped = integers(trial().input("x", "n 4"), "s", "2");
        let reshaped = reshaped.node("y = Reshape(x, s)").output("y", "4 n");
        let expanded = integers(trial().input("x", "3 1"), "s", "1");
        let expanded = expanded.node("y = Expand(x, s)").output("y", "3 5");
        let scaled = trial().input("x", "1 2 2 4").input("s", "4");
        let scaled = scaled.node("y = Resize(x, , s)").output("y", "1 2 4 6");
        let resized = integers(trial().input("x", "1 2 2 4"), "s", "4");
        let resized = resized.node("y = Resize(x, , , s)").output("y", "1 2 3 6");
        let split = integers(trial().input("x", "6 3"), "s", "2");
        let split = split.node("y, z = Split(x, s)");
        let split = split.output("y", "2 3").output("z", "4 3");
        let unsqueezed = integers(trial().input("x", "3"), "s", "2");
        let unsqueezed = unsqueezed.node("y = Unsqueeze(x, s)").output("y", "1 1 3");
        let coded = integers(integers(trial(), "x", "3"), "s", "").input("v", "2");
        let coded = coded.node("y = OneHot(x, s, v)").output("y", "3 7");
        let cases: [(Trial, &[f64]); 7] = [
            (reshaped, &[4.0, 1.0]),
            (expanded, &[5.0]),
            (scaled, &[1.0, 1.0, 2.125, 1.5625]),
            (resized, &[1.0, 2.0, 3.0, 6.0]),
            (split, &[2.0, 4.0]),
            (unsqueezed, &[0.0, 1.0]),
            (coded, &[7.0]),
        ];
        for (trial, expected) in cases {
            let found = made_up(&trial, "s");
            assert_eq!(found[0], expected);
        }
    }

    #[test]
    fn a_slice_leaves_what_is_declared_and_not_the_first() {
        let mut trial = Trial::new(17).input("x", "6 3");
        for name in ["from", "to", "axes", "steps"] {
            trial = integers(trial, name, "1");
        }
        let trial = trial.node("y = Slice(x, from, to, axes, steps)");
        let trial = trial.output("y", "4 3");
        for (name, expected) in [("from", 1.0), ("to", 5.0), ("axes", 0.0), ("steps", 1.0)] {
            assert_eq!(made_up(&trial, name)[0], [expected], "{name}");
        }
    }

    #[test]
    fn a_list_that_is_declared_as_too_long_is_not_made() {
        let mut trial = Trial::new(17).input("x", "6 3");
        for (name, sizes) in [
            ("from", "1"),
            ("to", "1"),
            ("axes", "1"),
            ("steps", "2147483647"),
        ] {
            trial = integers(trial, name, sizes);
        }
        let trial = trial.node("y = Slice(x, from, to, axes, steps)");
        let model = trial.output("y", "4 3").model();
        assert!(Checker::new(&model, &Options::default()).is_err());
    }

    #[test]
    fn nothing_is_divided_by_zero() {
        for sizes in ["3 4", "n"] {
            let trial = integers(integers(Trial::new(17), "a", sizes), "b", sizes);
            let trial = trial.node("q = Div(a, b)");
            let trial = trial.with("y = Cast(q)", vec![int("to", 1)]);
            let divisors = made_up(&trial.output("y", sizes), "b");
            assert!(divisors.iter().flatten().all(|n| *n != 0.0), "{divisors:?}");
            // Values made up for masks would be 0 and 1.
            assert!(
                divisors.iter().flatten().any(|n| n.abs() > 1.0),
                "{divisors:?}"
            );
        }
    }

    #[test]
    fn a_dropout_that_may_drop_is_not_run() {
        let trial = || Trial::new(17).input("x", "n 4").constant("r", real(0.5));
        let run = |trial: Trial| {
            let trial = trial.node("y = Dropout(x, r, mode)").output("y", "n 4");
            let model = trial.model();
            let n_cuts = Cuts::new(&model.proto).nodes.len();
            Checker::new(&model, &Options::default()).map(|_| n_cuts)
        };
        let asked = trial().input_of("mode", Element::Bool, "");
        assert_eq!(run(asked), Ok(1));
        let mode = |drops| Tensor::new(&[], Values::Bool(vec![drops]));
        assert_eq!(run(trial().constant("mode", mode(true))), Ok(1));
        assert_eq!(run(trial().constant("mode", mode(false))), Ok(0));
    }
}
