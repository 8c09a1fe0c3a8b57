//! Values cut into pieces and put together again.
//!
//! - `join-slices`: `Slice(Slice(x, …), …)` → one Slice.
//! - `join-concats`: `Concat(Concat(a, b), c)` → `Concat(a, b, c)` on one axis; neighbouring Slices of x
//!   inside a Concat → one Slice, or x.
//! - `split-then-concat`: `Concat(Split(x))`, all parts in order → x; a Split of one part → x.
//! - `slice-of-concat`: a Slice of one part → that part, or a Slice of it.
//! - `slices-to-split`: Slices of x that cover an axis → one Split.
//! - `join-gathers`: `Gather(Gather(x, i), j)` of constants → `Gather(x, i[j])`.
//!
//! Legal where beginnings, ends and sizes on the axis are constants, steps are 1 (slices on other axes:
//! any) and parts follow each other without gap. Saves nodes and copies.

use super::Rule;
use super::patch::{Patch, heir, int, ints, node};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::operators::axis;
use crate::proto::NodeProto;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "join-slices",
        at: join_slices,
    },
    Rule {
        name: "join-concats",
        at: join_concats,
    },
    Rule {
        name: "join-concats",
        at: join_neighbours,
    },
    Rule {
        name: "split-then-concat",
        at: split_then_concat,
    },
    Rule {
        name: "slice-of-concat",
        at: slice_of_concat,
    },
    Rule {
        name: "slices-to-split",
        at: slices_to_split,
    },
    Rule {
        name: "join-gathers",
        at: join_gathers,
    },
];

/// A cut along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    axis: usize,
    start: i64,
    end: i64,
    step: i64,
}

/// The cuts of a Slice with constant bounds. If the size is known, bounds are in `0..=size`.
fn cuts(scope: &Scope, n: usize) -> Option<Vec<Cut>> {
    if !scope.is(n, "Slice") {
        return None;
    }
    let rank = scope.fact(scope.input(n, 0)?)?.rank()?;
    let a = Attributes::new(scope.node(n));
    let given = |name: &str, at: usize| match (a.ints(name), scope.input(n, at)) {
        (Some(ints), _) => Some(ints.to_vec()),
        (None, Some(input)) => scope.fact(input)?.known_ints(),
        (None, None) => None,
    };
    let (starts, ends) = (given("starts", 1)?, given("ends", 2)?);
    let is_given = |name: &str, at| a.get(name).is_some() || scope.input(n, at).is_some();
    let axes = match is_given("axes", 3) {
        true => given("axes", 3)?,
        false => (0..starts.len() as i64).collect(),
    };
    let steps = match scope.input(n, 4).is_some() {
        true => given("", 4)?,
        false => vec![1; starts.len()],
    };
    let mut cuts = Vec::new();
    for (k, d) in axes.iter().enumerate() {
        let cut = Cut {
            axis: axis(*d, rank)?,
            start: *starts.get(k)?,
            end: *ends.get(k)?,
            step: *steps.get(k)?,
        };
        cuts.push(normal(scope, scope.input(n, 0)?, cut));
    }
    Some(cuts)
}

/// The same cut, its bounds counted from the beginning if the size is known.
fn normal(scope: &Scope, x: &str, cut: Cut) -> Cut {
    let size = size_at(scope, x, cut.axis).filter(|size| *size >= 0 && cut.step == 1);
    let Some(size) = size else {
        return cut;
    };
    let from_start = |at: i64| (if at < 0 { at.saturating_add(size) } else { at }).clamp(0, size);
    let start = from_start(cut.start);
    Cut {
        start,
        end: from_start(cut.end).max(start),
        ..cut
    }
}

fn size_at(scope: &Scope, name: &str, axis: usize) -> Option<i64> {
    scope.fact(name)?.shape.as_deref()?.get(axis)?.as_const()
}

/// The one cut of a Slice, of step 1, with bounds from the beginning.
fn plain_cut(scope: &Scope, n: usize) -> Option<Cut> {
    let cuts = cuts(scope, n)?;
    let [cut] = cuts.as_slice() else { return None };
    (cut.step == 1 && cut.start >= 0 && cut.end >= cut.start).then_some(*cut)
}

/// A Slice of `x`.
fn slice(scope: &Scope, patch: &mut Patch, base: &str, x: &str, cuts: &[Cut]) -> NodeProto {
    let list = |f: fn(&Cut) -> i64| cuts.iter().map(f).collect::<Vec<i64>>();
    let (starts, ends) = (list(|c| c.start), list(|c| c.end));
    let (axes, steps) = (list(|c| c.axis as i64), list(|c| c.step));
    if scope.opset() < 10 {
        let attributes = vec![
            ints("starts", &starts),
            ints("ends", &ends),
            ints("axes", &axes),
        ];
        return node("Slice", &[x], attributes);
    }
    let mut inputs = vec![x.to_string()];
    let named = [
        ("starts", starts),
        ("ends", ends),
        ("axes", axes),
        ("steps", steps),
    ];
    for (name, list) in named {
        if name != "steps" || list.iter().any(|s| *s != 1) {
            inputs.push(patch.constant(scope, &format!("{base}_{name}"), Tensor::ints(&list)));
        }
    }
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    node("Slice", &inputs, Vec::new())
}

fn join_slices(scope: &Scope, n: usize) -> Option<Patch> {
    let outer = cuts(scope, n)?;
    let middle = scope.input(n, 0)?;
    let first = scope.producer(middle)?;
    let mut joined = cuts(scope, first)?;
    if scope.sole_reader(middle) != Some(n) {
        return None;
    }
    for cut in outer {
        match joined.iter_mut().find(|c| c.axis == cut.axis) {
            None => joined.push(cut),
            Some(inner) => *inner = composed(*inner, cut)?,
        }
    }
    let mut patch = Patch {
        remove: vec![first, n],
        ..Patch::default()
    };
    let base = &scope.node(n).output[0];
    let both = slice(scope, &mut patch, base, scope.input(first, 0)?, &joined);
    patch.insert.push(heir(scope.node(n), both));
    Some(patch)
}

/// A cut of the result of a cut, if both count from the beginning in steps of 1.
fn composed(inner: Cut, outer: Cut) -> Option<Cut> {
    let plain = |c: Cut| c.step == 1 && c.start >= 0 && c.end >= 0;
    (plain(inner) && plain(outer)).then(|| Cut {
        start: inner.start.saturating_add(outer.start),
        end: inner.end.min(inner.start.saturating_add(outer.end)),
        ..inner
    })
}

/// The axis of a Concat or Split.
fn axis_of(scope: &Scope, n: usize, value: &str) -> Option<usize> {
    let rank = scope.fact(value)?.rank()?;
    axis(
        Attributes::new(scope.node(n)).int("axis").unwrap_or(0),
        rank,
    )
}

fn concat_axis(scope: &Scope, n: usize) -> Option<usize> {
    scope
        .is(n, "Concat")
        .then(|| axis_of(scope, n, &scope.node(n).output[0]))?
}

fn join_concats(scope: &Scope, n: usize) -> Option<Patch> {
    let at = concat_axis(scope, n)?;
    let inner = |name: &String| {
        let m = scope
            .producer(name)
            .filter(|m| concat_axis(scope, *m) == Some(at))?;
        (scope.sole_reader(name) == Some(n)).then_some(m)
    };
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let mut inputs = Vec::new();
    for name in &scope.node(n).input {
        match inner(name) {
            Some(m) => {
                patch.remove.push(m);
                inputs.extend(scope.node(m).input.iter().cloned());
            }
            None => inputs.push(name.clone()),
        }
    }
    if patch.remove.len() == 1 {
        return None;
    }
    let mut node = scope.node(n).clone();
    node.input = inputs;
    patch.insert.push(heir(scope.node(n), node));
    Some(patch)
}

/// Neighbouring Slices of one value inside a Concat.
fn join_neighbours(scope: &Scope, n: usize) -> Option<Patch> {
    let at = concat_axis(scope, n)?;
    let node = scope.node(n);
    let piece = |name: &String| {
        let m = scope.producer(name)?;
        let cut = plain_cut(scope, m).filter(|c| c.axis == at)?;
        Some((m, scope.input(m, 0)?, cut))
    };
    let pieces: Vec<_> = node.input.iter().map(piece).collect();
    let follows = |k: usize| match (pieces[k], pieces[k + 1]) {
        (Some((_, x, a)), Some((_, y, b))) => x == y && a.end == b.start,
        _ => false,
    };
    let first = (0..node.input.len().saturating_sub(1)).find(|k| follows(*k))?;
    let last = (first..node.input.len() - 1).find(|k| !follows(*k));
    let last = last.unwrap_or(node.input.len() - 1);
    let ((_, x, from), (_, _, to)) = (pieces[first]?, pieces[last]?);
    let joined = Cut {
        end: to.end,
        ..from
    };
    let whole = joined.start == 0 && size_at(scope, x, at) == Some(joined.end);
    // A new Slice must replace one that goes.
    let goes = |k: usize| scope.sole_reader(&node.input[k]) == Some(n);
    if !whole && !(first..=last).any(goes) {
        return None;
    }
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let name = if whole {
        x.to_string()
    } else {
        let base = node.input[first].clone();
        let slice = slice(scope, &mut patch, &base, x, &[joined]);
        patch.node(scope, &base, slice)
    };
    let mut node = node.clone();
    node.input.splice(first..=last, [name]);
    patch.insert.push(heir(scope.node(n), node));
    Some(patch)
}

fn split_then_concat(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if scope.is(n, "Split") && node.output.len() == 1 {
        return Patch::forward(scope, n, scope.input(n, 0)?);
    }
    let at = concat_axis(scope, n)?;
    let split = scope.made_by(node.input.first()?, "Split")?;
    let x = scope.input(split, 0)?;
    let same = node.input == scope.node(split).output && axis_of(scope, split, x) == Some(at);
    same.then(|| Patch::forward(scope, n, x))?
}

fn slice_of_concat(scope: &Scope, n: usize) -> Option<Patch> {
    let cut = plain_cut(scope, n)?;
    let joined = scope.input(n, 0)?;
    let concat = scope.made_by(joined, "Concat")?;
    if concat_axis(scope, concat)? != cut.axis {
        return None;
    }
    let mut start = 0;
    for part in &scope.node(concat).input {
        let size = size_at(scope, part, cut.axis)?;
        if cut.start >= start && cut.end <= start + size && cut.end > cut.start {
            let inside = Cut {
                start: cut.start - start,
                end: cut.end - start,
                ..cut
            };
            if inside.start == 0 && inside.end == size {
                return Patch::forward(scope, n, part);
            }
            let mut patch = Patch {
                remove: vec![n],
                ..Patch::default()
            };
            let of_part = slice(scope, &mut patch, &scope.node(n).output[0], part, &[inside]);
            patch.insert.push(heir(scope.node(n), of_part));
            return Some(patch);
        }
        start += size;
    }
    None
}

fn slices_to_split(scope: &Scope, n: usize) -> Option<Patch> {
    let own = plain_cut(scope, n)?;
    let x = scope.input(n, 0)?;
    let size = size_at(scope, x, own.axis)?;
    let mut parts: Vec<(Cut, usize)> = Vec::new();
    for m in scope.readers(x) {
        let cut = plain_cut(scope, *m).filter(|c| c.axis == own.axis && c.end > c.start);
        // If cuts are equal, the first one stays until the others are gone.
        if let Some(cut) = cut.filter(|c| parts.iter().all(|(p, _)| p != c)) {
            parts.push((cut, *m));
        }
    }
    parts.sort_by_key(|(cut, m)| (cut.start, cut.end, *m));
    let gapless = parts.windows(2).all(|w| w[0].0.end == w[1].0.start);
    let (first, last) = (parts.first()?.0, parts.last()?.0);
    if parts.len() < 2 || !gapless || first.start != 0 || last.end != size || parts[0].1 != n {
        return None;
    }
    let mut patch = Patch::default();
    let sizes: Vec<i64> = parts.iter().map(|(c, _)| c.end - c.start).collect();
    let mut split = if scope.opset() < 13 {
        node(
            "Split",
            &[x],
            vec![int("axis", own.axis as i64), ints("split", &sizes)],
        )
    } else {
        let base = format!("{}_parts", scope.node(n).output[0]);
        let sizes = patch.constant(scope, &base, Tensor::ints(&sizes));
        node("Split", &[x, &sizes], vec![int("axis", own.axis as i64)])
    };
    split.output = parts
        .iter()
        .map(|(_, m)| scope.node(*m).output[0].clone())
        .collect();
    patch.remove = parts.iter().map(|(_, m)| *m).collect();
    patch.insert.push(heir(scope.node(n), split));
    Some(patch)
}

fn join_gathers(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "Gather") {
        return None;
    }
    let middle = scope.input(n, 0)?;
    let first = scope.made_by(middle, "Gather")?;
    let inner = scope.fact(scope.input(first, 1)?)?;
    let rank = scope.fact(middle)?.rank()?;
    let at = |m| {
        axis(
            Attributes::new(scope.node(m)).int("axis").unwrap_or(0),
            rank,
        )
    };
    if inner.rank()? != 1 || at(n)? != at(first)? || scope.sole_reader(middle) != Some(n) {
        return None;
    }
    let indices = inner.known_ints()?;
    let outer = scope.fact(scope.input(n, 1)?)?.small()?;
    let pick = |j: &i64| indices.get(axis(*j, indices.len())?).copied();
    let both: Option<Vec<i64>> = outer.to_i64()?.iter().map(pick).collect();
    let tensor = Tensor::of_ints(crate::element::Element::I64, &outer.shape, &both?)?;
    let mut patch = Patch {
        remove: vec![first, n],
        ..Patch::default()
    };
    let mut node = scope.node(n).clone();
    node.input[0] = scope.input(first, 0)?.to_string();
    node.input[1] = patch.constant(scope, &format!("{}_indices", node.output[0]), tensor);
    patch.insert.push(heir(scope.node(n), node));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::trial::Trial;
    use super::*;

    /// `y = Slice(x, start..end on axis)` with constants of its own.
    fn cut(trial: Trial, y: &str, x: &str, axis: i64, start: i64, end: i64) -> Trial {
        trial
            .ints(&format!("{y}_s"), &[start])
            .ints(&format!("{y}_e"), &[end])
            .ints(&format!("{y}_a"), &[axis])
            .node(&format!("{y} = Slice({x}, {y}_s, {y}_e, {y}_a)"))
    }

    fn along(axis: i64) -> Vec<crate::proto::AttributeProto> {
        vec![int("axis", axis)]
    }

    #[test]
    fn slices_on_two_axes_are_one() {
        let t = Trial::new(13)
            .input("x", "N 6")
            .output("z", "A 3")
            .only(&["join-slices"]);
        let t = cut(t, "y", "x", 0, 0, -1);
        cut(t, "z", "y", 1, 2, 5).gives(&["z = Slice(x, [0, 2], [-1, 5], [0, 1])"]);
    }

    #[test]
    fn slices_on_one_axis_add_up() {
        let two = |sizes: &str, end: i64| {
            let t = Trial::new(13)
                .input("x", sizes)
                .output("z", "A")
                .only(&["join-slices"]);
            let t = cut(t, "y", "x", 0, 1, end);
            cut(t, "z", "y", 0, 2, 4)
        };
        two("9", -1).gives(&["z = Slice(x, [3], [5], [0])"]);
        two("N", 7).gives(&["z = Slice(x, [3], [5], [0])"]);
        // How much is left depends on N.
        two("N", -1).stays();
    }

    #[test]
    fn a_slice_that_others_read_stays() {
        let t = Trial::new(13)
            .input("x", "9")
            .output("z", "2")
            .output("y", "7");
        let t = cut(t.only(&["join-slices"]), "y", "x", 0, 1, -1);
        cut(t, "z", "y", 0, 2, 4).stays();
    }

    #[test]
    fn concats_on_one_axis_are_one() {
        let two = |axis: i64, to: &str| {
            Trial::new(13)
                .input("x", "N 2")
                .input("y", "N 2")
                .input("w", "N 4")
                .output("v", to)
                .with("z = Concat(x, y)", along(1))
                .with("v = Concat(w, z)", along(axis))
                .only(&["join-concats"])
        };
        two(-1, "N 8").gives(&["v = Concat(w, x, y) {axis=-1}"]);
        two(0, "M 4").stays();
        two(-1, "N 8").output("z", "N 4").stays();
    }

    #[test]
    fn neighbours_of_one_value_are_one_slice() {
        let joined = |second: i64| {
            let t = Trial::new(13)
                .input("x", "N 9")
                .input("w", "N 1")
                .output("v", "N A");
            let t = cut(t.only(&["join-concats"]), "y", "x", 1, 1, 3);
            let t = cut(t, "z", "x", 1, second, 6);
            t.with("v = Concat(w, y, z)", along(1))
        };
        joined(3).gives(&[
            "y_1 = Slice(x, [1], [6], [1])",
            "v = Concat(w, y_1) {axis=1}",
        ]);
        joined(4).stays();
    }

    #[test]
    fn a_split_put_together_is_the_value() {
        let parts = |list: &str, axis: i64| {
            Trial::new(13)
                .input("x", "4 4")
                .output("v", "4 4")
                .ints("sizes", &[2, 2])
                .with("a, b = Split(x, sizes)", along(1))
                .with(&format!("u = Concat({list})"), along(axis))
                .node("v = Relu(u)")
                .only(&["split-then-concat"])
        };
        parts("a, b", 1).gives(&["v = Relu(x)"]);
        parts("b, a", 1).stays();
        assert_eq!(parts("a, b", 0).unverified().len(), 3);
    }

    #[test]
    fn a_slice_of_one_part_reads_that_part() {
        let sliced = |start: i64, end: i64| {
            let t = Trial::new(13)
                .input("x", "N 2")
                .input("y", "N 3")
                .output("v", "N A");
            let t = t
                .only(&["slice-of-concat"])
                .with("j = Concat(x, y)", along(1));
            cut(t, "z", "j", 1, start, end).node("v = Relu(z)")
        };
        sliced(2, 5).gives(&["v = Relu(y)"]);
        sliced(3, 5).gives(&["z = Slice(y, [1], [3], [1])", "v = Relu(z)"]);
        sliced(1, 3).stays();
    }

    #[test]
    fn slices_that_cover_an_axis_are_a_split() {
        let two = |second: i64, axes: (i64, i64)| {
            let t = Trial::new(13)
                .input("x", "6 6")
                .output("y", "A B")
                .output("z", "C D");
            let t = cut(t.only(&["slices-to-split"]), "y", "x", axes.0, 0, 2);
            cut(t, "z", "x", axes.1, second, 6)
        };
        two(2, (1, 1)).gives(&["y, z = Split(x, [2, 4]) {axis=1}"]);
        two(3, (1, 1)).stays();
        two(1, (1, 1)).stays();
        two(2, (1, 0)).stays();
    }

    #[test]
    fn lookups_of_lookups_are_one() {
        let two = |axis: i64, to: &str| {
            Trial::new(13)
                .input("x", "4 4")
                .output("z", to)
                .ints("i", &[3, 1, 0])
                .ints("j", &[-1, 1])
                .with("y = Gather(x, i)", along(0))
                .with("z = Gather(y, j)", along(axis))
                .only(&["join-gathers"])
        };
        two(0, "2 4").gives(&["z = Gather(x, [0, 1]) {axis=0}"]);
        two(1, "3 2").stays();
    }
}
