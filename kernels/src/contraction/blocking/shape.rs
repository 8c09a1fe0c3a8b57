//! Gives each dim of a problem its role in the micro-kernel (batch, `m`, `n` or `k`), and joins dims that lie
//! behind each other in every operand. Owns the choice of the vector operand.

use super::*;

/// Sorts dims into roles, joins dims that walk together, and orients the operands.
pub fn shape(p: &Problem) -> Result<Shape, NoFastForm> {
    let mut p = p.clone();
    p.tidy();
    p.a.simplify_read(false);
    p.b.simplify_read(false);
    p.out.simplify_read(true);
    let swapped = choose_swap(&p);
    if swapped {
        std::mem::swap(&mut p.a, &mut p.b);
    }
    p.b.simplify_read(true);
    if p.b.any_guard() {
        return Err(NoFastForm::TwoGuardedOperands);
    }
    if p.a.repeats_a_dim(p.dims.len()) {
        p.a.simplify_read(true);
        if p.a.repeats_a_dim(p.dims.len()) {
            return Err(NoFastForm::RepeatedGuardedDim);
        }
    }
    if p.a
        .coords
        .iter()
        .any(|c| c.stride <= 0 || c.terms.is_empty() || c.terms.iter().any(|t| t.1 < 0))
    {
        return Err(NoFastForm::RunsBackwards);
    }
    assign_roles(p, swapped)
}

/// Guarded and composite axes belong to the broadcast operand; else the operand whose dims hold the
/// output's contiguous run should be the vector one.
fn choose_swap(p: &Problem) -> bool {
    let rank = |x: &Access| i32::from(x.any_guard()) * 2 + i32::from(x.any_composite());
    if rank(&p.a) != rank(&p.b) {
        return rank(&p.b) > rank(&p.a);
    }
    let run = |x: &Access, y: &Access| {
        (0..p.dims.len()).any(|d| p.dims[d] > 1 && p.out.stride(d) == 1 && x.has(d) && !y.has(d))
    };
    if run(&p.a, &p.b) != run(&p.b, &p.a) {
        return run(&p.a, &p.b);
    }
    let free = |x: &Access, y: &Access| -> i64 {
        (0..p.dims.len())
            .filter(|&d| x.has(d) && !y.has(d) && p.out.has(d))
            .map(|d| p.dims[d])
            .product()
    };
    free(&p.b, &p.a) < 8 && free(&p.a, &p.b) > free(&p.b, &p.a)
}

fn assign_roles(mut p: Problem, swapped: bool) -> Result<Shape, NoFastForm> {
    let mut s = Shape {
        batch: Vec::new(),
        m: Vec::new(),
        n: Vec::new(),
        k: Vec::new(),
        a: p.a.clone(),
        b_base: p.b.base,
        o_base: p.out.base,
        swapped,
        diagonal: None,
    };
    for id in 0..p.dims.len() {
        if p.dims[id] == 1 {
            continue;
        }
        let dim = Dim {
            id,
            size: p.dims[id],
            a: p.a.stride(id),
            b: p.b.stride(id),
            o: p.out.stride(id),
        };
        match (p.out.has(id), p.a.has(id), p.b.has(id)) {
            (true, true, true) => s.batch.push(dim),
            (true, false, true) => s.n.push(dim),
            (true, _, false) => s.m.push(dim),
            (false, ..) => s.k.push(dim),
        }
    }
    let plain = |id: usize| p.a.coords.iter().all(|c| c.coeff(id) == 0 || c.is_plain());
    if s.batch.iter().any(|d| !plain(d.id)) {
        return Err(NoFastForm::GuardedBatch);
    }
    s.a.coords
        .retain(|c| s.batch.iter().all(|d| c.coeff(d.id) == 0));
    s.batch.sort_by_key(|d| std::cmp::Reverse(d.o));
    s.n.sort_by_key(|d| std::cmp::Reverse(d.o));
    let direct = s.n.last().is_none_or(|d| d.o == 1);
    s.m.sort_by_key(|d| std::cmp::Reverse(if direct { d.o } else { d.a }));
    s.k.sort_by_key(|d| std::cmp::Reverse((d.a, d.b)));
    // Without a vector dim each row has a single column, which counts as contiguous.
    for (role, o) in [
        (&mut s.batch, 0),
        (&mut s.m, 0),
        (&mut s.n, 1),
        (&mut s.k, 0),
    ] {
        join(role, &mut s.a, &mut p.dims);
        if role.is_empty() {
            p.dims.push(1);
            role.push(Dim {
                id: p.dims.len() - 1,
                size: 1,
                a: 0,
                b: 0,
                o,
            });
        }
    }
    Ok(s)
}

/// Joins neighbours `(x, y)` where stepping `x` equals running through `y` in all three operands.
fn join(role: &mut Vec<Dim>, a: &mut Access, dims: &mut [i64]) {
    let mut i = 0;
    while i + 1 < role.len() {
        let (x, y) = (role[i].clone(), role[i + 1].clone());
        let walks = x.a == y.a * y.size && x.b == y.b * y.size && x.o == y.o * y.size;
        let plain = |id: usize| a.coords.iter().all(|c| c.coeff(id) == 0 || c.is_plain());
        if walks && plain(x.id) && plain(y.id) {
            a.coords.retain(|c| c.coeff(x.id) == 0);
            dims[y.id] = x.size * y.size;
            role[i + 1].size = x.size * y.size;
            role.remove(i);
        } else {
            i += 1;
        }
    }
}
