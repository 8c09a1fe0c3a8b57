//! Text of the element-wise work of a sweep: what depends on the row only is computed before the
//! sweep, what depends on the column only once for both rows of a thread, all else at each number of the
//! tiles.

use super::form::Form;
use super::running::Running;
use super::store;
use super::sweep::{Sweep, Sweeps};
use crate::element_type;
use crate::value_text::{ValueText, cast, value_type};
use graph::{Binary, ContainerId, DType, Reduction, SymExpr};
use kernels::emit::body::Statement;
use kernels::emit::index::{Extents, Loop};
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::emit::values::{Address, Effect, Op, ValueId, Values};
use std::collections::{BTreeMap, BTreeSet};

/// Names that the text shares with the rest of the kernel.
pub(super) type Names = BTreeMap<ContainerId, String>;

/// The values of one sweep.
pub(super) struct Elements<'f> {
    form: &'f Form,
    sweeps: &'f Sweeps,
    /// Position of the sweep.
    at: usize,
    values: Values,
    /// Whether a value depends on the row, and on the column.
    scopes: Vec<(bool, bool)>,
    needed: BTreeSet<usize>,
    /// The running values, if the sweep goes along with the one before.
    running: Option<Running>,
}

/// Loops in the order that hash-consing asks for; depths are not used here.
fn loops(form: &Form) -> Vec<Loop> {
    let mut loops: Vec<Loop> = form.outer().cloned().collect();
    loops.extend([form.row.clone(), form.col.clone()]);
    loops
}

impl<'f> Elements<'f> {
    pub(super) fn new(form: &'f Form, sweeps: &'f Sweeps, at: usize) -> Self {
        let sweep = &sweeps.sweeps[at];
        let statements = sweep.statements.iter().map(|n| form.statements[*n].clone());
        let statements: Vec<Statement> = statements.collect();
        let values = Values::new(&loops(form), &statements, &form.arrays);
        let mut elements = Elements {
            form,
            sweeps,
            at,
            values,
            scopes: Vec::new(),
            needed: BTreeSet::new(),
            running: None,
        };
        for n in 0..elements.values.values.len() {
            let scope = elements.scope(n);
            elements.scopes.push(scope);
        }
        if sweep.is_joined {
            elements.running = Running::new(&elements);
        }
        let none = BTreeSet::new();
        let postponed = elements.running.as_ref().map_or(&none, |r| &r.postponed);
        elements.needed = elements.needed_without(postponed);
        elements
    }

    /// The values that the sinks are made of, without the divisors of postponed quotients.
    pub(super) fn needed_without(&self, postponed: &BTreeSet<usize>) -> BTreeSet<usize> {
        let mut needed = BTreeSet::new();
        let mut open: Vec<ValueId> = self.sinks().map(|(v, _)| v).collect();
        while let Some(v) = open.pop() {
            if needed.insert(v.0) {
                open.extend(self.used_by(v.0, postponed));
            }
        }
        needed
    }

    /// The operands that a value's text names.
    pub(super) fn used_by(&self, n: usize, postponed: &BTreeSet<usize>) -> Vec<ValueId> {
        let mut operands = self.values.values[n].op.operands();
        if postponed.contains(&n) {
            operands.truncate(1);
        }
        operands
    }

    /// How rows' numbers are corrected, in a sweep that goes along with the one before.
    pub(super) fn running(&self) -> Option<&Running> {
        self.running.as_ref()
    }

    fn is_postponed(&self, n: usize) -> bool {
        self.running
            .as_ref()
            .is_some_and(|r| r.postponed.contains(&n))
    }

    pub(super) fn sweeps(&self) -> &'f Sweeps {
        self.sweeps
    }

    pub(super) fn form(&self) -> &'f Form {
        self.form
    }

    /// Whether a value is true or false.
    pub(super) fn is_truth(&self, v: ValueId) -> bool {
        self.values.get(v).dtype == DType::Bool
    }

    pub(super) fn op(&self, v: ValueId) -> &Op {
        &self.values.get(v).op
    }

    /// The value that a number of rows sums up in this sweep.
    pub(super) fn reduced(&self, scalar: usize) -> Option<ValueId> {
        let mut sinks = self.sinks().filter_map(|(v, sink)| match sink {
            Sink::Scalar(s) if s == scalar => Some(v),
            _ => None,
        });
        sinks.next()
    }

    /// How many products out of tiles the sweep sums up.
    pub(super) fn n_out(&self) -> usize {
        match self.sweep().is_last {
            true => self.form.out_products.len(),
            false => 0,
        }
    }

    /// The left factors of products out of tiles that are computed, not tiles' products as they are.
    pub(super) fn factors(&self) -> Vec<ValueId> {
        let sinks = self.sinks().filter(|(_, sink)| sink.factor().is_some());
        sinks.map(|(v, _)| v).collect()
    }

    /// The value and all it is made of.
    pub(super) fn values_of(&self, v: ValueId) -> BTreeSet<usize> {
        self.values.needed(v)
    }

    /// Numbers of rows that a value is made of.
    pub(super) fn scalars_of(&self, v: ValueId) -> BTreeSet<usize> {
        let made_of = self.values_of(v).into_iter();
        let scalars = made_of.filter_map(|n| match &self.values.values[n].op {
            Op::Load(a) => self.scalar(a.container),
            _ => None,
        });
        scalars.collect()
    }

    /// Whether a value is made of nothing but numbers of rows that are reduced here.
    pub(super) fn is_function_of_scalars(&self, v: ValueId) -> bool {
        self.values_of(v)
            .iter()
            .all(|n| match &self.values.values[*n].op {
                Op::Load(a) => self.scalar(a.container).is_some(),
                Op::Index(_) | Op::Uniform(..) => false,
                _ => true,
            })
    }

    pub(super) fn is_of_row(&self, v: ValueId) -> bool {
        self.scopes[v.0] == (true, false)
    }

    pub(super) fn is_zero(&self, v: ValueId) -> bool {
        matches!(self.op(v), Op::Const(s) if s.as_f64() == 0.0)
    }

    pub(super) fn is_float(&self, v: ValueId) -> bool {
        self.values.get(v).dtype.is_float()
    }

    /// Declares values of rows and all they are made of.
    pub(super) fn declare_all(&self, t: &mut CText, names: &Names, wanted: &[ValueId]) {
        self.row(t);
        let text = self.text(names);
        let all: BTreeSet<usize> = wanted.iter().flat_map(|v| self.values_of(*v)).collect();
        for n in all {
            if !matches!(self.values.values[n].op, Op::Const(_)) {
                self.declare(t, &text, n);
            }
        }
    }

    fn sweep(&self) -> &Sweep {
        &self.sweeps.sweeps[self.at]
    }

    /// Whether random numbers are made.
    pub(super) fn draws(&self) -> bool {
        let mut needed = self.needed.iter().map(|n| &self.values.values[*n].op);
        needed.any(|op| matches!(op, Op::Uniform(..)))
    }

    /// Containers that are read from memory in the sweep.
    pub(super) fn loaded(&self) -> BTreeSet<ContainerId> {
        let postponed = self.running.iter().flat_map(Running::divisors);
        let postponed = postponed.flat_map(|v| self.values_of(v));
        let all: BTreeSet<usize> = self.needed.iter().copied().chain(postponed).collect();
        let loads = all.iter().filter_map(|n| match &self.values.values[*n].op {
            Op::Load(a) => Some(a.container),
            _ => None,
        });
        loads.filter(|id| !self.is_in_registers(*id)).collect()
    }

    fn is_in_registers(&self, id: ContainerId) -> bool {
        self.form.tiles.contains(&id) || self.scalar(id).is_some()
    }

    fn scalar(&self, id: ContainerId) -> Option<usize> {
        self.sweeps.scalars.iter().position(|s| s.container == id)
    }

    /// Values that a reduction or a product out of tiles takes, with the text that takes them.
    fn sinks(&self) -> impl Iterator<Item = (ValueId, Sink)> {
        let reduced = self.values.effects.iter().filter_map(|e| {
            e.conflict?;
            Some((e.value, Sink::Scalar(self.scalar(e.address.container)?)))
        });
        let out = self.form.out_products.iter().enumerate();
        let out = out.filter(|_| self.sweep().is_last).filter_map(|(q, p)| {
            let made = self.values.effects.iter().filter(|e| e.conflict.is_none());
            let mut made = made.filter(|e| e.address.container == p.tile);
            Some((made.next()?.value, Sink::Factor(q)))
        });
        let stored = self.stored().map(|(n, e)| (e.value, Sink::Store(n)));
        reduced.chain(out).chain(stored)
    }

    /// Values that change numbers of rows or products out of tiles, with how they do.
    pub(super) fn taken(&self) -> Vec<(ValueId, Reduction)> {
        let reduction = |sink| match sink {
            Sink::Scalar(s) => self.sweeps.scalars[s].reduction,
            Sink::Factor(_) | Sink::Store(_) => Reduction::Sum,
        };
        self.sinks().map(|(v, sink)| (v, reduction(sink))).collect()
    }

    /// How many values there are, each behind those that it is made of.
    pub(super) fn n_values(&self) -> usize {
        self.values.values.len()
    }

    /// Tiles that are stored in this sweep, with their positions.
    pub(super) fn stored(&self) -> impl Iterator<Item = (usize, &Effect)> {
        let all = self.form.stored.iter().enumerate();
        all.filter(|_| self.sweep().is_last).filter_map(|(n, id)| {
            let mut made = self.values.effects.iter();
            Some((n, made.find(|e| e.address.container == *id)?))
        })
    }

    /// Whether tiles are stored.
    pub(super) fn stores(&self) -> bool {
        self.stored().next().is_some()
    }

    fn scope(&self, n: usize) -> (bool, bool) {
        let own = match &self.values.values[n].op {
            Op::Load(a) if self.form.tiles.contains(&a.container) => (true, true),
            Op::Load(a) if self.scalar(a.container).is_some() => (true, false),
            Op::Load(a) => {
                let indices = a.guards.iter().map(|g| &g.index);
                let mut all = indices.chain([&a.offset]).map(|e| self.mentioned(e));
                all.by_ref().fold((false, false), both)
            }
            Op::Index(e) => self.mentioned(e),
            _ => (false, false),
        };
        let operands = self.values.values[n].op.operands();
        let operands = operands.iter().map(|v| self.scopes[v.0]);
        operands.fold(own, both)
    }

    fn mentioned(&self, e: &SymExpr) -> (bool, bool) {
        let (row, col) = (&self.form.row.var, &self.form.col.var);
        (e.mentions(row), e.mentions(col))
    }

    fn in_scope(&self, scope: (bool, bool)) -> impl Iterator<Item = usize> {
        let all = self.needed.iter().copied();
        all.filter(move |n| self.scopes[*n] == scope)
            .filter(|n| !matches!(self.values.values[*n].op, Op::Const(_)))
    }

    fn declare(&self, t: &mut CText, text: &ValueText<'_>, n: usize) {
        let value = &self.values.values[n];
        let ctype = value_type(value.dtype);
        let made = match &value.op {
            Op::Load(a) => self.load(a, value.dtype),
            Op::Binary(_, _, a, _) if self.is_postponed(n) => Some(text.operand(*a)),
            Op::Binary(Binary::Div, DType::F32, a, b) if self.has_reciprocal(n, *b) => {
                Some(format!("({} * reciprocal{})", text.operand(*a), b.0))
            }
            _ => None,
        };
        let made = made.unwrap_or_else(|| text.computation(n));
        t.line(&format!("const {ctype} t{n} = {made};"));
    }

    /// Whether the elements of a tile are multiplied by a reciprocal that is computed once for their row or column,
    /// instead of being divided. That rounds once more, but a division takes longer than the rest of most elements.
    fn has_reciprocal(&self, n: usize, divisor: ValueId) -> bool {
        let is_const = matches!(self.values.get(divisor).op, Op::Const(_));
        let shared = matches!(self.scopes[divisor.0], (true, false) | (false, true));
        self.scopes[n] == (true, true) && shared && !is_const && !self.is_postponed(n)
    }

    /// Divisors of `scope` whose reciprocals are used.
    fn divisors(&self, scope: (bool, bool)) -> BTreeSet<usize> {
        let quotients =
            self.in_scope((true, true))
                .filter_map(|n| match &self.values.values[n].op {
                    Op::Binary(Binary::Div, DType::F32, _, b) if self.has_reciprocal(n, *b) => {
                        Some(b.0)
                    }
                    _ => None,
                });
        quotients.filter(|b| self.scopes[*b] == scope).collect()
    }

    /// A value that is in registers already, rounded as if it had been to memory.
    fn load(&self, a: &Address, dtype: DType) -> Option<String> {
        if let Some(scalar) = self.scalar(a.container) {
            return Some(cast(&format!("scalar{scalar}[h]"), DType::F32, dtype));
        }
        let products = &self.form.tile_products;
        let p = products.iter().position(|p| p.tile == a.container)?;
        Some(cast(&format!("sums{p}[j][h*2 + k]"), DType::F32, dtype))
    }

    /// Writes, before the sweep, what its columns share, in arrays of the thread's two rows.
    pub(super) fn before(&self, t: &mut CText, names: &Names) {
        let text = self.text(names);
        for n in self.in_scope((false, false)) {
            self.declare(t, &text, n);
        }
        let rows: Vec<usize> = self.in_scope((true, false)).collect();
        if rows.is_empty() {
            return;
        }
        let shared = self.shared_rows();
        for n in &shared {
            let ctype = value_type(self.values.values[*n].dtype);
            t.line(&format!("{ctype} of_row{n}[2];"));
        }
        let divisors = self.divisors((true, false));
        for n in &divisors {
            t.line(&format!("float reciprocal_of_row{n}[2];"));
        }
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        self.row(t);
        for n in rows {
            self.declare(t, &text, n);
            if shared.contains(&n) {
                t.line(&self.kept(n));
            }
            if divisors.contains(&n) {
                t.line(&format!("reciprocal_of_row{n}[h] = 1.0f / t{n};"));
            }
        }
        t.close();
    }

    /// A row's value for its numbers of tiles. Powers against −∞ are 0 until there is a larger number.
    fn kept(&self, n: usize) -> String {
        match &self.running {
            Some(r) if r.shift.0 == n => format!("of_row{n}[h] = t{n} == -SH_INF ? 0.0f : t{n};"),
            _ => format!("of_row{n}[h] = t{n};"),
        }
    }

    /// Values of rows that are used at numbers of tiles.
    fn shared_rows(&self) -> BTreeSet<usize> {
        let used = self.in_scope((true, true));
        let used = used.flat_map(|n| self.named_by(n));
        let used = used.chain(self.sinks().map(|(v, _)| v)).map(|v| v.0);
        let is_row = |n: &usize| {
            let is_const = matches!(self.values.values[*n].op, Op::Const(_));
            self.scopes[*n] == (true, false) && !is_const
        };
        used.filter(is_row).collect()
    }

    /// The values that a value's text names; for a quotient with a reciprocal, only the dividend.
    fn named_by(&self, n: usize) -> Vec<ValueId> {
        let mut operands = self.values.values[n].op.operands();
        let one = match &self.values.values[n].op {
            Op::Binary(Binary::Div, DType::F32, _, b) => self.has_reciprocal(n, *b),
            _ => false,
        };
        if one || self.is_postponed(n) {
            operands.truncate(1);
        }
        operands
    }

    pub(super) fn row(&self, t: &mut CText) {
        t.line(&format!(
            "const {} row = row_at[h]; (void)row;",
            self.index_type()
        ));
    }

    /// Writes the work at each number of the tiles, whose `n_cols` columns begin at `first`.
    pub(super) fn at_each(&self, t: &mut CText, names: &Names, n_cols: i64) {
        let text = self.text(names);
        let size = self.form.col.size;
        let is_ragged = size % n_cols != 0;
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j++)", n_cols / 8));
        let factors: Vec<usize> = self.sinks().filter_map(|(_, s)| s.factor()).collect();
        for q in &factors {
            t.line(&format!("float factor{q}_at[2][2];"));
        }
        for (n, _) in self.stored() {
            t.line(&format!("float stored{n}_at[2][2];"));
        }
        t.line("SH_UNROLL");
        t.open("for (int k = 0; k < 2; k++)");
        self.column(t, is_ragged);
        for n in self.in_scope((false, true)) {
            self.declare(t, &text, n);
        }
        for n in self.divisors((false, true)) {
            t.line(&format!("const float reciprocal{n} = 1.0f / t{n};"));
        }
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        self.row(t);
        for n in self.shared_rows() {
            let ctype = value_type(self.values.values[n].dtype);
            t.line(&format!("const {ctype} t{n} = of_row{n}[h];"));
        }
        for n in self.divisors((true, false)) {
            t.line(&format!(
                "const float reciprocal{n} = reciprocal_of_row{n}[h];"
            ));
        }
        for n in self.in_scope((true, true)) {
            self.declare(t, &text, n);
        }
        for (v, sink) in self.sinks() {
            let value = cast(&text.operand(v), self.values.get(v).dtype, DType::F32);
            let line = self.sunk(sink, &value, is_ragged);
            t.line(&line);
        }
        t.close();
        t.close();
        self.pack(t, &factors);
        for (n, effect) in self.stored() {
            store::tile(self, t, names, n, effect);
        }
        t.close();
    }

    /// Which column a number of a tile is in.
    fn column(&self, t: &mut CText, is_ragged: bool) {
        let size = self.form.col.size;
        let index = self.index_type();
        match is_ragged {
            true => {
                t.line("const int place = first + j*8 + lane_col + k;");
                t.line(&format!("const bool within = place < {size};"));
                t.line(&format!(
                    "const {index} col = within ? place : 0; (void)col;"
                ));
            }
            false => t.line(&format!(
                "const {index} col = first + j*8 + lane_col + k; (void)col;"
            )),
        }
    }

    /// A column of both rows' left factors, as warp products take them.
    fn pack(&self, t: &mut CText, factors: &[usize]) {
        let ctype = element_type(self.form.dtype);
        for q in factors {
            let half =
                |h: usize, k: usize| format!("sh_from_float<{ctype}>(factor{q}_at[{h}][{k}])");
            for h in 0..2 {
                t.line(&format!(
                    "factor{q}[j/2][j%2*2 + {h}] = sh_pack({}, {});",
                    half(h, 0),
                    half(h, 1)
                ));
            }
        }
    }

    fn sunk(&self, sink: Sink, value: &str, is_ragged: bool) -> String {
        let (to, made, otherwise) = match sink {
            Sink::Scalar(s) => {
                let to = format!("scalar{s}[h]");
                let combine = self.sweeps.scalars[s].reduction.combine();
                let made = scalar::binary(combine, &to, value, DType::F32);
                (to.clone(), made, to)
            }
            Sink::Factor(q) => {
                let to = format!("factor{q}_at[h][k]");
                (to, value.to_string(), "0.0f".to_string())
            }
            Sink::Store(n) => return format!("stored{n}_at[h][k] = {value};"),
        };
        match is_ragged {
            true => format!("{to} = within ? {made} : {otherwise};"),
            false => format!("{to} = {made};"),
        }
    }

    /// Products out of tiles whose left factor is a product into tiles as it is.
    pub(super) fn plain_factors(&self) -> Vec<(usize, usize)> {
        let products = &self.form.tile_products;
        let out = self.form.out_products.iter().enumerate();
        out.filter_map(|(q, o)| Some((q, products.iter().position(|p| p.tile == o.tile)?)))
            .collect()
    }

    fn text<'a>(&'a self, names: &'a Names) -> ValueText<'a> {
        ValueText {
            values: &self.values,
            extents: &self.form.extents,
            names,
        }
    }

    /// The type that holds every index.
    pub(super) fn index_type(&self) -> &'static str {
        let extents = &self.form.extents;
        let small = |e: &SymExpr| is_small(extents, e);
        let fits = |a: &Address| {
            small(&a.offset) && a.guards.iter().all(|g| small(&g.index)) && a.gather.is_empty()
        };
        let mut made = self
            .needed
            .iter()
            .map(|n| match &self.values.values[*n].op {
                Op::Load(a) => self.form.tiles.contains(&a.container) || fits(a),
                Op::Index(e) => small(e),
                _ => true,
            });
        let stored = self.stored().all(|(_, e)| small(&e.address.offset));
        if stored && made.all(|fits| fits) {
            "int"
        } else {
            "long"
        }
    }
}

/// Whether 32 bits hold the number and all that is computed on the way to it.
pub(super) fn is_small(extents: &Extents, e: &SymExpr) -> bool {
    const MOST: i64 = 1 << 30;
    let (lo, hi) = extents.interval(e);
    lo > -MOST && hi < MOST
}

fn both(a: (bool, bool), b: (bool, bool)) -> (bool, bool) {
    (a.0 || b.0, a.1 || b.1)
}

/// Where a value goes.
#[derive(Clone, Copy)]
enum Sink {
    /// A number of the row, by its position.
    Scalar(usize),
    /// The left factor of a product out of tiles, by its position.
    Factor(usize),
    /// Memory, by the position among stored tiles.
    Store(usize),
}

impl Sink {
    fn factor(self) -> Option<usize> {
        match self {
            Sink::Factor(q) => Some(q),
            Sink::Scalar(_) | Sink::Store(_) => None,
        }
    }
}
