//! From scatter form to gather form: `out[st*i + dil*r + off] += ..` becomes, for each output phase
//! `h = st*i + ph`, a contraction that reads its operand at a shifted, guarded position
//! (the data gradient of a convolution, arXiv 1808.05567 section II-H). Emits no text.

use super::NoFastForm;
use super::access::{Access, Coord, Problem};

/// Positions of the output that no term reaches.
#[derive(Clone, Debug)]
pub struct ZeroFill {
    /// Position of the first element.
    pub base: i64,
    /// Size and stride of each axis.
    pub axes: Vec<(i64, i64)>,
}

/// Contractions with plain outputs that together write every output position once.
#[derive(Clone, Debug, Default)]
pub struct GatherForm {
    /// The contractions.
    pub parts: Vec<Problem>,
    /// What no contraction writes.
    pub zeros: Vec<ZeroFill>,
}

/// An axis with larger steps would have a problem of its own, or a fill with zeros, for each of very many offsets.
const MOST_PHASES: i64 = 64;

/// Splits `p` by output phases.
pub fn gather_form(mut p: Problem) -> Result<GatherForm, NoFastForm> {
    let mut form = GatherForm::default();
    p.tidy();
    // Each coordinate may cover its axis, and yet nothing is written beside a diagonal.
    let n_coords = |dim: usize| p.out.coords.iter().filter(|c| c.coeff(dim) != 0).count();
    if (0..p.dims.len()).any(|dim| n_coords(dim) > 1) {
        return Err(NoFastForm::RepeatedOutputDim);
    }
    let guard_a = a_has_more_positions(&p);
    let mut open = vec![p];
    while let Some(mut p) = open.pop() {
        p.tidy();
        match p.out.coords.iter().position(|c| !c.covers(&p.dims)) {
            None => form.parts.push(p),
            Some(x) => split(&p, x, guard_a, &mut open, &mut form.zeros)?,
        }
    }
    form.parts.reverse();
    Ok(form)
}

/// The operand side of a dim that is about to be replaced: exactly one plain coordinate somewhere.
fn plain_in<'a>(p: &'a mut Problem, dim: usize) -> Result<(&'a mut Access, usize), NoFastForm> {
    let in_a = p.a.has(dim);
    if in_a == p.b.has(dim) {
        return Err(NoFastForm::SharedOutputDim);
    }
    let side: &'a mut Access = if in_a { &mut p.a } else { &mut p.b };
    side.simplify_read(false);
    let mut with_dim = side
        .coords
        .iter()
        .enumerate()
        .filter(|(_, c)| c.coeff(dim) != 0);
    match (with_dim.next(), with_dim.next()) {
        (Some((i, c)), None) if c.is_plain() => Ok((side, i)),
        _ => Err(NoFastForm::CompositeOutputDim),
    }
}

/// Whether `a` is the operand with more positions along composite output axes: it gets the guards, the
/// other one is the kernel. All axes must agree, or both operands end up guarded.
fn a_has_more_positions(p: &Problem) -> bool {
    let positions = |x: &Access| -> i64 {
        let composite = p
            .out
            .coords
            .iter()
            .filter(|c| c.terms.len() == 2)
            .flat_map(|c| &c.terms);
        composite
            .filter(|t| x.has(t.0))
            .map(|t| p.dims[t.0])
            .product()
    };
    positions(&p.a) >= positions(&p.b)
}

fn split(
    p: &Problem,
    x: usize,
    guard_a: bool,
    open: &mut Vec<Problem>,
    zeros: &mut Vec<ZeroFill>,
) -> Result<(), NoFastForm> {
    let axis = &p.out.coords[x];
    let mut terms = axis.terms.clone();
    if terms.is_empty() || terms.len() > 2 || terms.iter().any(|t| t.1 < 1) {
        return Err(NoFastForm::OutputAxis);
    }
    if terms.iter().any(|t| {
        p.out
            .coords
            .iter()
            .enumerate()
            .any(|(i, c)| i != x && c.coeff(t.0) != 0)
    }) {
        return Err(NoFastForm::RepeatedOutputDim);
    }
    terms.sort_by_key(|t| p.a.has(t.0) != guard_a);
    let (moved, st) = terms[0];
    if st > MOST_PHASES {
        return Err(NoFastForm::ManyPhases);
    }
    let tap = terms.get(1).copied();
    for ph in 0..st {
        let n_positions = (axis.size - ph + st - 1) / st;
        if n_positions < 1 {
            continue;
        }
        match taps_of_phase(p, axis, ph, st, tap) {
            Some(t) => open.push(one_phase(p, x, ph, n_positions, (moved, st), tap, &t)?),
            None => zeros.push(zero_phase(p, x, ph, n_positions, st)),
        }
    }
    Ok(())
}

/// The taps `r = first - step*j` (j counts down from the last) that reach a phase.
struct Taps {
    last: i64,
    step: i64,
    count: i64,
}

fn taps_of_phase(
    p: &Problem,
    axis: &Coord,
    ph: i64,
    st: i64,
    tap: Option<(usize, i64)>,
) -> Option<Taps> {
    let (size, dil) = tap.map_or((1, 0), |(d, dil)| (p.dims[d], dil));
    let hits: Vec<i64> = (0..size)
        .filter(|r| (ph - axis.offset - dil * r).rem_euclid(st) == 0)
        .collect();
    let last = *hits.last()?;
    let step = if hits.len() > 1 { hits[1] - hits[0] } else { 1 };
    Some(Taps {
        last,
        step,
        count: hits.len() as i64,
    })
}

fn one_phase(
    p: &Problem,
    x: usize,
    ph: i64,
    n_positions: i64,
    (moved, st): (usize, i64),
    tap: Option<(usize, i64)>,
    taps: &Taps,
) -> Result<Problem, NoFastForm> {
    let mut q = p.clone();
    let dil = tap.map_or(0, |t| t.1);
    let moved_size = p.dims[moved];
    let out_offset = p.out.coords[x].offset;
    if let Some((r, _)) = tap {
        // r = last - step*j
        let (side, i) = plain_in(&mut q, r)?;
        side.base += taps.last * side.coords[i].stride;
        side.coords[i].stride *= -taps.step;
        side.coords[i].size = i64::MAX;
        q.dims[r] = taps.count;
    }
    let (side, i) = plain_in(&mut q, moved)?;
    let c = &mut side.coords[i];
    c.size = moved_size;
    c.guarded = true;
    c.offset = (ph - out_offset - dil * taps.last) / st;
    if let Some((r, _)) = tap {
        c.terms.push((r, dil * taps.step / st));
    }
    q.dims[moved] = n_positions;
    let o = &mut q.out.coords[x];
    *o = Coord {
        terms: vec![(moved, 1)],
        offset: 0,
        stride: o.stride * st,
        size: n_positions,
        guarded: false,
    };
    q.out.base += ph * p.out.coords[x].stride;
    if n_positions == 1 {
        q.out.coords[x].terms.clear();
    }
    q.tidy();
    Ok(q)
}

fn zero_phase(p: &Problem, x: usize, ph: i64, n_positions: i64, st: i64) -> ZeroFill {
    let axes = p.out.coords.iter().enumerate();
    let axes = axes.map(|(i, c)| {
        if i == x {
            (n_positions, c.stride * st)
        } else {
            (c.size, c.stride)
        }
    });
    ZeroFill {
        base: p.out.base + ph * p.out.coords[x].stride,
        axes: axes.collect(),
    }
}
