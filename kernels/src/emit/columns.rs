//! C text of the sums of a contraction's columns: each block of the product is summed while it is in cache,
//! and a last launch adds the blocks up.
//!
//! Owns the condition under which maps are such sums, and both functions. Each block has its own place for its sums,
//! and they are added in the order of the blocks, so results do not depend on threads.
//! Within a block, a few rows at a time are summed in single precision; their sums are added in double precision.
//! A second moment is made about the mean of those rows, and moved to the mean of all (Chan, Golub, LeVeque 1983), so
//! that it does not cancel.

use super::body::{self, Body, Nest, Statement, Write};
use super::epilogue::{Buffers, ProductRoles, roles};
use super::frame::{Frame, decode};
use super::index::{self, Loop};
use super::leaf::CutLoop;
use super::merge::renamed;
use super::reduce::Accumulation;
use super::schedule::{self, Scheduled};
use super::text::CText;
use super::values::arithmetic;
use super::{NAME, scalar};
use crate::lower::LowerError;
use graph::{ContainerId, Expr, Graph, Node, Reduction, SymExpr};
use std::collections::BTreeSet;

/// Rows that are summed in the container's own precision.
const ROWS: i64 = 64;
/// Columns that the last launch adds up at a time.
const COLUMNS: i64 = 16;
/// Most columns of a sum that is called narrow.
const NARROW: i64 = 64;

/// The functions of a kernel's column sums.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Columns {
    /// The function for a block, with the signature of `contraction::Hooks::sums`; its name is
    /// [`super::NAME`].
    pub(crate) block: String,
    /// The last launch, `NAME_merge`.
    pub(crate) merge: String,
    /// What they read and write apart from the product, in the order of their buffers; a buffer for the
    /// blocks' sums follows.
    pub(crate) args: Vec<ContainerId>,
    /// Bytes of that buffer.
    pub(crate) bytes: i64,
}

/// The surroundings of column sums.
pub(crate) struct Around<'a> {
    /// The product, and the containers written beside it, element for element in its layout: a block of their rows is
    /// a block of the product's.
    pub(crate) made: &'a BTreeSet<ContainerId>,
    /// The container that lies where the product is: the product itself, or what took its place.
    pub(crate) product: ContainerId,
    pub(crate) buffers: Buffers,
    /// Blocks of rows.
    pub(crate) slots: i64,
}

/// A sum, and what it needs of the second moment about it.
struct Sum {
    target: ContainerId,
    /// Elements before the first column, as a function of the batch.
    base: SymExpr,
    /// The factor of the moment's terms, and its container.
    moment: Option<(f64, ContainerId)>,
}

/// Emits the maps of `node` as sums of the product's columns; `None` if they are not.
///
/// # Errors
/// As for any map.
pub(crate) fn emit_columns(
    graph: &Graph,
    node: &Node,
    dims: &ProductRoles,
    around: &Around,
) -> Result<Option<Columns>, LowerError> {
    let mut kernel = super::prepared(body::kernel_of(graph, node, true)?);
    let outer = std::mem::take(&mut kernel.outer);
    let mut common: Option<[Vec<Loop>; 3]> = None;
    let (mut plain, mut squares) = (Vec::new(), Vec::new());
    let phases = std::mem::take(&mut kernel.phases);
    let targets: BTreeSet<ContainerId> = phases.iter().flat_map(written).collect();
    for nest in phases {
        let Some((statements, found)) = leaf(nest, &outer, dims, around) else {
            return Ok(None);
        };
        let names: Vec<_> = match &common {
            None => Vec::new(),
            Some(known) => {
                let pairs = found.iter().flatten().zip(known.iter().flatten());
                if !found.iter().zip(known).all(|(a, b)| sizes(a) == sizes(b)) {
                    return Ok(None);
                }
                pairs.map(|(a, b)| (a.var.clone(), b.var.clone())).collect()
            }
        };
        common.get_or_insert(found);
        for statement in statements {
            let reads_sum = |s: &Statement| s.reads.iter().any(|r| targets.contains(&r.container));
            let statement = renamed(&statement, &names);
            match reads_sum(&statement) {
                true => squares.push(statement),
                false => plain.push(statement),
            }
        }
    }
    let Some([batch, m, n]) = common else {
        return Ok(None);
    };
    let n_plain = plain.len();
    let mut statements = [plain, squares].concat();
    let extents = &mut kernel.extents;
    let [batch, m, n] =
        [batch, m, n].map(|l| schedule::joined_in_order(l, &mut statements, extents));
    let [columns] = n.as_slice() else {
        return Ok(None);
    };
    let squares = statements.split_off(n_plain);
    let points: i64 = m.iter().map(|l| l.size).product();
    let sums = statements
        .iter()
        .map(|s| sum(s, &squares, points, (&batch, &m, columns)));
    let Some(sums) = sums.collect::<Option<Vec<Sum>>>() else {
        return Ok(None);
    };
    if sums.iter().filter(|s| s.moment.is_some()).count() != squares.len() {
        return Ok(None);
    }
    let nest = |statements| Nest {
        loops: vec![columns.clone()],
        body: Body::Leaf(statements),
    };
    let phases = [statements, squares].into_iter().filter(|s| !s.is_empty());
    let scheduled = Scheduled {
        parallel: [batch.clone(), m.clone()].concat(),
        strip: None,
        phases: phases.map(nest).collect(),
        partial: BTreeSet::new(),
        arrays: kernel.arrays,
        extents: kernel.extents,
    };
    Ok(Some(print(
        &scheduled,
        &sums,
        (&batch, &m, columns),
        around,
    )))
}

fn sizes(loops: &[Loop]) -> Vec<i64> {
    loops.iter().map(|l| l.size).collect()
}

fn written(nest: &Nest) -> Vec<ContainerId> {
    let mut found = Vec::new();
    super::merge::visit_places(nest, &mut |p, is_write| {
        found.extend(is_write.then_some(p.container));
    });
    found
}

/// Statements of one sum each, with their loops in the roles of the product's dimensions.
fn leaf(
    nest: Nest,
    outer: &[Loop],
    dims: &ProductRoles,
    around: &Around,
) -> Option<(Vec<Statement>, [Vec<Loop>; 3])> {
    let Body::Leaf(statements) = nest.body else {
        return None;
    };
    let is_sum = |s: &Statement| {
        let [w] = s.writes.as_slice() else {
            return false;
        };
        w.conflict == Some(Reduction::Sum) && w.place.guards.is_empty() && w.place.gather.is_empty()
    };
    let each = statements.into_iter().flat_map(|s| {
        let alone = |w: &Write| Statement {
            reads: s.reads.clone(),
            writes: vec![w.clone()],
        };
        s.writes.iter().map(alone).collect::<Vec<_>>()
    });
    let statements: Vec<Statement> = each.collect();
    if !statements.iter().all(is_sum) {
        return None;
    }
    let loops: Vec<Loop> = outer.iter().chain(&nest.loops).cloned().collect();
    let mut reads = statements.iter().flat_map(|s| &s.reads);
    let found = reads.find_map(|r| {
        let plain = r.gather.is_empty() && r.guards.is_empty();
        let made = around.made.contains(&r.container) && plain;
        made.then(|| roles(&r.offset, loops.clone(), dims))
            .flatten()
    })?;
    Some((statements, found))
}

/// `s` as a sum of columns over `points` rows, with the second moment about its mean if that is among `squares`.
fn sum(
    s: &Statement,
    squares: &[Statement],
    points: i64,
    (batch, m, columns): (&[Loop], &[Loop], &Loop),
) -> Option<Sum> {
    let [write] = s.writes.as_slice() else {
        return None;
    };
    let offset = &write.place.offset;
    let each_its_own = index::coefficient(offset, &columns.var) == Some(1)
        && batch.iter().all(|l| index::mentions(offset, &l.var))
        && !m.iter().any(|l| index::mentions(offset, &l.var));
    let is_about = |q: &&Statement| {
        let mean = q
            .reads
            .iter()
            .position(|r| r.container == write.place.container);
        let same = |i: usize, j: usize| s.reads[i] == q.reads[j];
        mean.is_some_and(|at| {
            q.reads[at].offset == *offset
                && q.writes[0].place.offset == *offset
                && graph::is_second_moment(&write.expr, &q.writes[0].expr, at, points, &same)
        })
    };
    let factor = match &write.expr {
        Expr::Binary(_, _, k) => match &**k {
            Expr::Const(k) => k.as_f64(),
            _ => 1.0,
        },
        _ => 1.0,
    };
    let mut moments = squares.iter().filter(is_about);
    let moment = moments
        .next()
        .map(|q| (factor, q.writes[0].place.container));
    let is_one = moments.next().is_none();
    (each_its_own && is_one).then(|| Sum {
        target: write.place.container,
        base: index::replace(offset, &columns.var, &SymExpr::default()),
        moment,
    })
}

/// Names of a sum's arrays: where a block adds rows up, and where its sums are kept.
fn room(id: usize) -> [String; 2] {
    [format!("s{id}"), format!("w{id}")]
}

/// Positions of a sum and of its moment among all arrays of sums.
fn positions(sums: &[Sum]) -> Vec<(usize, Option<usize>)> {
    let mut next = 0;
    let mut take = || {
        next += 1;
        next - 1
    };
    let of = |s: &Sum| {
        let own = take();
        (own, s.moment.map(|_| take()))
    };
    sums.iter().map(of).collect()
}

fn print(
    s: &Scheduled,
    sums: &[Sum],
    (batch, m, columns): (&[Loop], &[Loop], &Loop),
    around: &Around,
) -> Columns {
    let mut frame = Frame::new(s);
    frame.cut = Some(CutLoop {
        var: columns.var.clone(),
        from: "sh_n0".to_string(),
        to: "sh_n1".to_string(),
    });
    let places = positions(sums);
    let mut own: Vec<ContainerId> = Vec::new();
    frame.slots = Vec::new();
    for id in &frame.args {
        if *id == around.product {
            frame.slots.push(around.buffers.product);
        } else {
            frame.slots.push(around.buffers.first + own.len());
            own.push(*id);
        }
    }
    let buffer = |id: ContainerId| {
        let at = own.iter().position(|o| *o == id).unwrap_or_default();
        around.buffers.first + at
    };
    let array = |sum: &Sum| {
        let array = &s.arrays[&sum.target];
        (array.len, scalar::c_type(arithmetic(array.dtype)))
    };
    // The blocks' sums: the numbers of each array, then how many rows each block has.
    let mut starts = Vec::new();
    let mut doubles = 0;
    for (sum, place) in sums.iter().zip(&places) {
        starts.push(doubles);
        doubles += around.slots * array(sum).0 * (1 + i64::from(place.1.is_some()));
    }
    let rows_at = doubles;
    doubles += around.slots;
    let workspace = around.buffers.first + own.len();
    let mut last = CText::default();
    last.open(&format!(
        "void {NAME}_merge(void *const *buf, void *scratch, long tid, long nt)"
    ));
    last.line("(void)scratch;");
    last.line(&format!("const double *W = buf[{workspace}];"));
    for (at, sum) in sums.iter().enumerate() {
        let (len, number) = array(sum);
        last.open("");
        last.line(&format!("{number} *x = buf[{}];", buffer(sum.target)));
        if let Some((_, id)) = sum.moment {
            last.line(&format!("{number} *y = buf[{}];", buffer(id)));
        }
        print_merge(
            &mut last,
            sum,
            (len, number),
            (starts[at], rows_at),
            around.slots,
        );
        last.close();
    }
    last.close();

    // In the leaves, the arrays of sums take the place of the containers.
    let mut named: Vec<(ContainerId, String)> = Vec::new();
    for (sum, (own, moment)) in sums.iter().zip(&places) {
        named.push((sum.target, room(*own)[0].clone()));
        if let (Some((_, id)), Some(at)) = (sum.moment, moment) {
            named.push((id, room(*at)[0].clone()));
            frame.names.arrays.insert(sum.target, format!("a{own}"));
        }
    }
    for leaf in &mut frame.leaves {
        let effects = leaf.values.effects.iter().enumerate();
        let of = effects.map(|(n, e)| {
            let name = named.iter().find(|x| x.0 == e.address.container);
            let name = name.map_or(String::new(), |x| x.1.clone());
            Accumulation::into_room(n, e, &leaf.values, name)
        });
        leaf.accumulations = of.collect();
    }
    let mut t = CText::default();
    // A compiler that sees how few columns there are needs no loop over them.
    let is_narrow = sums.iter().any(|sum| array(sum).0 <= NARROW);
    let inline = if is_narrow { "inline " } else { "" };
    t.open(&format!(
        "static {inline}void {NAME}(void *const *buf, long tid, long sh_slot, long sh_batch, \
         long sh_m0, long sh_m1, long sh_n0, long sh_n1)"
    ));
    t.line("(void)tid; (void)sh_batch;");
    frame.declare_buffers(&mut t);
    decode(&mut t, "sh_batch", batch);
    t.line(&format!("double *W = buf[{workspace}];"));
    let arrays: Vec<Arrays> = sums
        .iter()
        .zip(&places)
        .map(|(sum, place)| Arrays {
            own: place.0,
            moment: place.1.zip(sum.moment.map(|m| m.0)),
            number: array(sum).1,
        })
        .collect();
    for ((sum, a), start) in sums.iter().zip(&arrays).zip(&starts) {
        let (len, number) = array(sum);
        let base = s.extents.c_text(&sum.base);
        let k = a.own;
        t.line(&format!(
            "const long lo{k} = {base} + sh_n0, hi{k} = {base} + sh_n1;"
        ));
        t.line(&format!("double *w{k} = W + {start} + sh_slot * {len};"));
        t.line(&format!(
            "{number} s{k}[{len}] __attribute__((aligned(64)));"
        ));
        a.each(&mut t, &format!("w{k}[i] = 0;"));
        if let Some((q, _)) = a.moment {
            t.line(&format!(
                "double *w{q} = W + {} + sh_slot * {len};",
                start + around.slots * len
            ));
            for name in [format!("s{q}"), format!("a{k}")] {
                t.line(&format!(
                    "{number} {name}[{len}] __attribute__((aligned(64)));"
                ));
            }
            a.each(&mut t, &format!("w{q}[i] = 0;"));
        }
    }
    t.line(&format!(
        "if (sh_batch == 0 && sh_n0 == 0) W[{rows_at} + sh_slot] = sh_m1 - sh_m0;"
    ));
    t.open(&format!(
        "for (long sh_b = sh_m0; sh_b < sh_m1; sh_b += {ROWS})"
    ));
    t.line(&format!("const long sh_e = ix_min(sh_b + {ROWS}, sh_m1);"));
    let mut leaves = frame.leaves.iter();
    for (phase, nest) in s.phases.iter().enumerate() {
        for a in &arrays {
            a.open_phase(&mut t, phase);
        }
        t.open("for (long sh_row = sh_b; sh_row < sh_e; ++sh_row)");
        decode(&mut t, "sh_row", m);
        frame.print_nest(nest, &mut leaves, &mut t);
        t.close();
    }
    for a in &arrays {
        a.keep(&mut t);
    }
    t.close();
    t.close();
    Columns {
        block: t.finish(),
        merge: last.finish(),
        args: own,
        bytes: doubles * 8,
    }
}

/// A sum's arrays in the function of a block.
struct Arrays {
    own: usize,
    /// The moment's array and factor.
    moment: Option<(usize, f64)>,
    number: &'static str,
}

impl Arrays {
    /// Writes `line` for each of the block's columns; the column is element `i` of the sum.
    fn each(&self, t: &mut CText, line: &str) {
        t.line("#pragma omp simd");
        t.line(&format!(
            "for (long i = lo{0}; i < hi{0}; ++i) {line}",
            self.own
        ));
    }

    /// Writes zeros before the rows are summed. Before the squares are summed, writes the rows' mean, too.
    fn open_phase(&self, t: &mut CText, phase: usize) {
        let k = self.own;
        match (phase, self.moment) {
            (0, _) => self.each(t, &format!("s{k}[i] = 0;")),
            (_, Some((q, factor))) => {
                t.line(&format!(
                    "const {0} r{k} = ({0})(1.0 / ((sh_e - sh_b) * {factor:?}));",
                    self.number
                ));
                self.each(t, &format!("a{k}[i] = s{k}[i] * r{k}, s{q}[i] = 0;"));
            }
            _ => {}
        }
    }

    /// Adds the sums of the rows to the block's sums.
    fn keep(&self, t: &mut CText) {
        let k = self.own;
        let Some((q, factor)) = self.moment else {
            self.each(t, &format!("w{k}[i] += s{k}[i];"));
            return;
        };
        t.open("");
        t.line("const double before = sh_b - sh_m0, now = sh_e - sh_b;");
        t.line(&format!(
            "const double share = now / (before + now), weight = before * share * {factor:?};"
        ));
        t.line(&format!("const double one = 1.0 / (now * {factor:?});"));
        t.line("#pragma omp simd");
        t.open(&format!("for (long i = lo{k}; i < hi{k}; ++i)"));
        t.line(&format!("const double d = s{k}[i] * one - w{k}[i];"));
        t.line(&format!("w{k}[i] += d * share;"));
        t.line(&format!("w{q}[i] += s{q}[i] + d * d * weight;"));
        t.close();
        t.close();
    }
}

/// Adds up the blocks' sums of some columns at a time.
fn print_merge(
    t: &mut CText,
    sum: &Sum,
    (len, number): (i64, &str),
    (start, rows_at): (i64, i64),
    slots: i64,
) {
    let groups = (len + COLUMNS - 1) / COLUMNS;
    t.open(&format!(
        "for (long g = {groups} * tid / nt; g < {groups} * (tid + 1) / nt; ++g)"
    ));
    t.line(&format!(
        "const long from = g * {COLUMNS}, n = ix_min({COLUMNS}, {len} - from);"
    ));
    t.line(&format!("double sum[{COLUMNS}] = {{0}};"));
    let Some((factor, _)) = sum.moment else {
        t.open(&format!("for (long slot = 0; slot < {slots}; ++slot)"));
        t.line(&format!(
            "const double *w = W + {start} + slot * {len} + from;"
        ));
        t.line("for (long i = 0; i < n; ++i) sum[i] += w[i];");
        t.close();
        t.line(&format!(
            "for (long i = 0; i < n; ++i) x[from + i] = ({number})sum[i];"
        ));
        t.close();
        return;
    };
    t.line(&format!("double square[{COLUMNS}] = {{0}}, before = 0;"));
    t.open(&format!("for (long slot = 0; slot < {slots}; ++slot)"));
    t.line(&format!(
        "const double *w = W + {start} + slot * {len} + from;"
    ));
    t.line(&format!("const double *q = w + {};", slots * len));
    t.line(&format!("const double now = W[{rows_at} + slot];"));
    t.line(&format!(
        "const double share = now / (before + now), weight = before * share * {factor:?};"
    ));
    t.open("for (long i = 0; i < n; ++i)");
    t.line("const double d = w[i] - sum[i];");
    t.line("sum[i] += d * share;");
    t.line("square[i] += q[i] + d * d * weight;");
    t.close();
    t.line("before += now;");
    t.close();
    t.open("for (long i = 0; i < n; ++i)");
    t.line(&format!(
        "x[from + i] = ({number})(sum[i] * (before * {factor:?}));"
    ));
    t.line(&format!("y[from + i] = ({number})square[i];"));
    t.close();
    t.close();
}
