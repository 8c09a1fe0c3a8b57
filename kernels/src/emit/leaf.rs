//! C text of one leaf: loops around statements.
//!
//! Owns where each value is computed (as far out as it can be), how conflicting writes are
//! accumulated, and how accesses that may fall outside are guarded. What runs around the leaf is
//! [`super::frame`]'s.

use super::body::Guard;
use super::index::{Extents, Loop, coefficient, mentions};
use super::reduce::{Accumulation, Update};
use super::rows::Row;
use super::scalar;
use super::text::CText;
use super::values::{Address, Op, Value, ValueId, Values, depth_of_address, depth_of_index};
use graph::{ContainerId, DType, SymExpr};
use std::collections::{BTreeMap, BTreeSet};

/// Random numbers drawn at a time; they stay in the first-level cache.
const STREAM_NUMBERS: i64 = 512;

/// Elements of the widest vector.
const WIDEST_VECTOR: i64 = 16;

/// Most elements after the last whole vector that are worth a loop of their own.
const FEW_LEFT: i64 = 5;

/// Names of containers in the C text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    pub(crate) arrays: BTreeMap<ContainerId, String>,
    /// Containers that are a plain C variable.
    pub(crate) variables: BTreeSet<ContainerId>,
}

/// Bounds of the loop that is cut into blocks, as C text.
#[derive(Clone, Debug)]
pub(crate) struct CutLoop {
    pub(crate) var: graph::Symbol,
    pub(crate) from: String,
    pub(crate) to: String,
}

/// A leaf with all that its text depends on.
pub(crate) struct Leaf<'a> {
    pub(crate) loops: &'a [Loop],
    pub(crate) values: &'a Values,
    pub(crate) extents: &'a Extents,
    pub(crate) names: &'a Names,
    pub(crate) cut: Option<&'a CutLoop>,
    /// One for each effect.
    pub(crate) accumulations: &'a [Accumulation],
    /// Guards whose failure makes the whole iteration do nothing.
    pub(crate) skips: BTreeSet<Guard>,
}

/// The part of the vector loop in which a value is printed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoopRegion {
    /// Guards hold.
    Interior,
    /// Guards are tested.
    Border,
}

impl Leaf<'_> {
    /// Prints the leaf.
    pub(crate) fn print(&self, t: &mut CText) {
        if self.values.effects.is_empty() {
            return;
        }
        t.open("");
        self.level(0, t);
        t.close();
    }

    fn depth(&self) -> usize {
        self.loops.len()
    }

    /// Everything inside the loop at `depth`.
    fn level(&self, depth: usize, t: &mut CText) {
        if depth == self.depth() {
            self.innermost(LoopRegion::Border, t);
            return;
        }
        self.values_at(depth, LoopRegion::Border, t);
        for acc in self.accumulations.iter().filter(|a| a.opens_at(depth)) {
            t.line(&acc.declaration());
        }
        for row in self.rows().filter(|r| r.opens_at(depth)) {
            row.declare(t);
        }
        let conditions = self.conditions_before(depth + 1);
        if !conditions.is_empty() {
            t.open(&format!("if ({})", conditions.join(" & ")));
        }
        if depth + 1 == self.depth() {
            self.vector_loop(t);
        } else {
            let l = &self.loops[depth];
            let (mut from, mut to) = self.loop_bounds(l);
            let block = super::rows::cut(self.loops).filter(|c| c.0 == depth);
            let block = block.filter(|_| self.rows().next().is_some());
            if let Some((_, iterations)) = block {
                t.open(&format!(
                    "for (long {0}_c = {from}; {0}_c < {to}; {0}_c += {iterations})",
                    l.var
                ));
                self.rows().for_each(|r| r.open_block(t));
                to = format!("ix_min({to}, {}_c + {iterations})", l.var);
                from = format!("{}_c", l.var);
            }
            t.open(&format!(
                "for (long {0} = {from}; {0} < {to}; ++{0})",
                l.var
            ));
            self.level(depth + 1, t);
            t.close();
            if block.is_some() {
                self.rows().for_each(|r| r.close_block(t));
                t.close();
            }
        }
        if !conditions.is_empty() {
            t.close();
        }
        for (effect, acc) in self.values.effects.iter().zip(self.accumulations) {
            if acc.opens_at(depth) {
                let place = self.element(
                    &effect.address,
                    acc.target(&self.name(effect.address.container)),
                );
                t.line(&acc.flush(&place));
            }
            if let Some(row) = acc.row.as_ref().filter(|r| r.opens_at(depth)) {
                let place = self.element(&effect.address, self.name(effect.address.container));
                let v = &self.loops[self.depth() - 1];
                let (from, to) = self.loop_bounds(v);
                row.flush(v, (&from, &to), &place, t);
            }
        }
    }

    fn rows(&self) -> impl Iterator<Item = &Row> {
        self.accumulations.iter().filter_map(|a| a.row.as_ref())
    }

    pub(crate) fn loop_bounds(&self, l: &Loop) -> (String, String) {
        match self.cut {
            Some(c) if c.var == l.var => (c.from.clone(), c.to.clone()),
            _ => ("0".to_string(), l.size.to_string()),
        }
    }

    /// Skip guards tested right before the loop at position `depth` (counted from 1).
    fn conditions_before(&self, depth: usize) -> Vec<String> {
        // An accumulator that is stored, not added, must be stored whatever the guards say.
        let floor = self
            .accumulations
            .iter()
            .filter_map(Accumulation::plain_depth)
            .max()
            .unwrap_or(0);
        self.skips
            .iter()
            .filter(|g| {
                let own = depth_of_index(&g.index, self.loops);
                own.max(floor) + 1 == depth && own < self.depth()
            })
            .map(|g| self.condition(g))
            .collect()
    }

    fn condition(&self, g: &Guard) -> String {
        format!(
            "((unsigned long){} < {}UL)",
            self.extents.c_text(&g.index),
            g.size
        )
    }

    fn vector_loop(&self, t: &mut CText) {
        let depth = self.depth();
        let v = &self.loops[depth - 1];
        let (from, to) = self.loop_bounds(v);
        let streams = self.streams();
        let sums = self.accumulations.iter().filter_map(|a| a.chunk);
        let chunk = sums
            .chain((!streams.is_empty()).then_some(STREAM_NUMBERS))
            .min();
        let (from, to) = match chunk.filter(|c| *c < v.size) {
            Some(chunk) => {
                t.open(&format!(
                    "for (long {0}_c = {from}; {0}_c < {to}; {0}_c += {chunk})",
                    v.var
                ));
                let from = format!("{}_c", v.var);
                let to = format!("ix_min({to}, {}_c + {chunk})", v.var);
                t.line(&format!("const long {}_e = {to};", v.var));
                (from, format!("{}_e", v.var))
            }
            None => (from, to),
        };
        for acc in self.accumulations {
            acc.open_inner(t);
        }
        for id in &streams {
            self.fill_stream(*id, v, (&from, &to), t);
        }
        self.ranges(v, &from, &to, t);
        for acc in self.accumulations {
            acc.close_inner(t);
        }
        if chunk.is_some_and(|c| c < v.size) {
            t.close();
        }
    }

    /// Random numbers that lie side by side along the vector loop. They are drawn before it, four to
    /// a counter; drawing each alone would throw three of four away.
    fn streams(&self) -> Vec<ValueId> {
        let Some(v) = self.loops.last() else {
            return Vec::new();
        };
        let is_stream = |value: &Value| match value.op {
            Op::Uniform(key, n) => {
                let outside = self.values.depth_of(key) < self.depth();
                let next = match &self.values.get(n).op {
                    Op::Index(e) => coefficient(e, &v.var) == Some(1),
                    _ => false,
                };
                outside && next
            }
            _ => false,
        };
        let values = self.values.values.iter().enumerate();
        values
            .filter(|(_, value)| is_stream(value))
            .map(|(n, _)| ValueId(n))
            .collect()
    }

    fn fill_stream(&self, id: ValueId, v: &Loop, (from, to): (&str, &str), t: &mut CText) {
        let Op::Uniform(key, n) = self.values.get(id).op else {
            return;
        };
        let Op::Index(e) = &self.values.get(n).op else {
            return;
        };
        let rest = super::index::replace(e, &v.var, &SymExpr::default());
        let (stream, room) = (format!("u{}", id.0), v.size.min(STREAM_NUMBERS));
        t.line(&format!(
            "float {stream}_room[SH_PHILOX_ROOM({room})] __attribute__((aligned(64)));"
        ));
        t.line(&format!("const long {stream}_from = {from};"));
        t.line(&format!(
            "const float *const {stream} = sh_philox_fill({stream}_room, (unsigned long){}, \
             (unsigned long)({} + {stream}_from), {to} - {stream}_from);",
            self.operand(key, LoopRegion::Border),
            self.extents.c_text(&rest),
        ));
    }

    /// The vector loop's ranges: all of it, or interior and border where guards depend on it.
    fn ranges(&self, v: &Loop, from: &str, to: &str, t: &mut CText) {
        let skip_ranges: Vec<&Guard> = self
            .skips
            .iter()
            .filter(|g| mentions(&g.index, &v.var) && self.is_range(g))
            .collect();
        let guards = self.border_guards();
        if guards.is_empty() && skip_ranges.is_empty() {
            match self.whole_vectors(v, from, to) {
                Some(end) => {
                    self.simd_loop(v, from, &end, LoopRegion::Interior, t);
                    self.plain_loop(v, &end, to, LoopRegion::Interior, t);
                }
                None => self.simd_loop(v, from, to, LoopRegion::Interior, t),
            }
            return;
        }
        t.line(&format!("long {0}_lo = {from}, {0}_hi = {to};", v.var));
        let range_of = skip_ranges.iter().copied().chain(guards.iter());
        for g in range_of {
            self.narrow(v, g, t);
        }
        // Where a block lies in another part of a concatenation, a guard may begin to hold only after the end.
        t.line(&format!("if ({0}_lo > {to}) {0}_lo = {to};", v.var));
        t.line(&format!("if ({0}_hi < {0}_lo) {0}_hi = {0}_lo;", v.var));
        if !guards.is_empty() {
            // Skipped iterations do nothing in the border either: their guards are tested there.
            t.open("for (int side = 0; side < 2; ++side)");
            t.line(&format!(
                "const long {0}_s = side ? {0}_hi : {from}, {0}_t = side ? {to} : {0}_lo;",
                v.var
            ));
            let (side_from, side_to) = (format!("{}_s", v.var), format!("{}_t", v.var));
            self.simd_loop(v, &side_from, &side_to, LoopRegion::Border, t);
            t.close();
        }
        let (lo, hi) = (format!("{}_lo", v.var), format!("{}_hi", v.var));
        self.simd_loop(v, &lo, &hi, LoopRegion::Interior, t);
    }

    /// Restricts the interior to where the guard holds.
    fn narrow(&self, v: &Loop, g: &Guard, t: &mut CText) {
        let (lo, hi) = (format!("{}_lo", v.var), format!("{}_hi", v.var));
        if depth_of_index(&g.index, self.loops) < self.depth() {
            t.line(&format!("if (!{}) {hi} = {lo};", self.condition(g)));
            return;
        }
        let c = coefficient(&g.index, &v.var).unwrap_or(1);
        let rest = super::index::replace(&g.index, &v.var, &SymExpr::default());
        let text = |e: SymExpr| self.extents.c_text(&e);
        let (first, end) = if c > 0 {
            let up = |e: String| {
                if c == 1 {
                    e
                } else {
                    format!("ix_ceildiv({e}, {c})")
                }
            };
            (
                up(text(SymExpr::default() - rest.clone())),
                up(text(SymExpr::from(g.size) - rest)),
            )
        } else {
            let down = |e: String| format!("ix_floordiv({e}, {}) + 1", -c);
            (
                down(text(rest.clone() - SymExpr::from(g.size))),
                down(text(rest)),
            )
        };
        t.line(&format!("{lo} = ix_max({lo}, {first});"));
        t.line(&format!("{hi} = ix_min({hi}, {end});"));
    }

    /// Guards of innermost accesses that may be tested once for a range of the vector loop.
    fn border_guards(&self) -> Vec<Guard> {
        let mut guards = BTreeSet::new();
        for address in self.innermost_addresses() {
            for g in &address.guards {
                if self.is_range(g) && !self.skips.contains(g) {
                    guards.insert(g.clone());
                }
            }
        }
        guards.into_iter().collect()
    }

    fn innermost_addresses(&self) -> Vec<&Address> {
        let mut found = Vec::new();
        for (n, value) in self.values.values.iter().enumerate() {
            if let Op::Load(a) = &value.op
                && self.values.depth[n] == self.depth()
            {
                found.push(a);
            }
        }
        found.extend(self.values.effects.iter().map(|e| &e.address));
        found
    }

    /// Whether the guard holds on one interval of the vector loop.
    fn is_range(&self, g: &Guard) -> bool {
        self.loops
            .last()
            .is_some_and(|v| coefficient(&g.index, &v.var).is_some())
    }

    fn simd_loop(&self, v: &Loop, from: &str, to: &str, part: LoopRegion, t: &mut CText) {
        if self.runs_in_order(v) {
            t.line("/* iterations may meet: in order */");
        } else {
            let clauses: String = self
                .accumulations
                .iter()
                .filter_map(Accumulation::clause)
                .collect();
            t.line(&format!("#pragma omp simd{clauses}"));
        }
        self.plain_loop(v, from, to, part, t);
    }

    fn plain_loop(&self, v: &Loop, from: &str, to: &str, part: LoopRegion, t: &mut CText) {
        t.open(&format!(
            "for (long {0} = {from}; {0} < {to}; ++{0})",
            v.var
        ));
        self.innermost(part, t);
        t.close();
    }

    /// Where the last whole vector of a reduction over the whole loop ends, if few elements are left: compilers keep
    /// the lanes of such a reduction in memory if they see the rest in the same loop.
    fn whole_vectors(&self, v: &Loop, from: &str, to: &str) -> Option<String> {
        let rest = v.size % WIDEST_VECTOR;
        let is_whole = from == "0" && *to == v.size.to_string();
        let reduces = self.accumulations.iter().any(|a| a.clause().is_some());
        let pays = v.size > WIDEST_VECTOR && (1..=FEW_LEFT).contains(&rest);
        (is_whole && reduces && pays && !self.runs_in_order(v)).then(|| (v.size - rest).to_string())
    }

    /// Whether two iterations of the vector loop may update one element of memory.
    fn runs_in_order(&self, v: &Loop) -> bool {
        self.values
            .effects
            .iter()
            .zip(self.accumulations)
            .any(|(e, a)| matches!(a.update, Update::Memory) && !e.write.owned.contains(&v.var))
    }

    /// The body of the innermost loop.
    fn innermost(&self, part: LoopRegion, t: &mut CText) {
        self.values_at(self.depth(), part, t);
        for (effect, acc) in self.values.effects.iter().zip(self.accumulations) {
            let value = self.operand(effect.value, part);
            let mut conditions = self.tested_guards(&effect.address, part);
            if part == LoopRegion::Border && self.depth() == 0 {
                conditions.extend(self.skips.iter().map(|g| self.condition(g)));
            }
            conditions.sort();
            conditions.dedup();
            let place = match (&acc.row, self.loops.last()) {
                (Some(row), Some(v)) => row.element(v, &self.loop_bounds(v).0),
                _ => self.element(
                    &effect.address,
                    acc.target(&self.name(effect.address.container)),
                ),
            };
            let line = acc.apply(&place, &value);
            if conditions.is_empty() {
                t.line(&line);
            } else {
                t.line(&format!("if ({}) {line}", conditions.join(" & ")));
            }
        }
    }

    /// Conditions that must be tested where the access is printed.
    fn tested_guards(&self, a: &Address, part: LoopRegion) -> Vec<String> {
        let depth = depth_of_address(a, self.loops, self.values);
        let mut conditions = Vec::new();
        for g in &a.guards {
            let outside = depth_of_index(&g.index, self.loops) < self.depth();
            let narrowed = part == LoopRegion::Interior && self.is_range(g);
            let skipped = self.skips.contains(g) && (outside || narrowed);
            let ranged = part == LoopRegion::Interior && depth == self.depth() && self.is_range(g);
            if !skipped && !ranged {
                conditions.push(self.condition(g));
            }
        }
        if a.fill.is_some() {
            for (index, _, size) in &a.gather {
                let index = self.operand(*index, part);
                conditions.push(format!("((unsigned long){index} < {size}UL)"));
            }
        }
        conditions
    }

    fn name(&self, id: ContainerId) -> String {
        self.names.arrays.get(&id).cloned().unwrap_or_default()
    }

    /// The element in C: `x0[i*64 + j]`.
    pub(crate) fn element(&self, a: &Address, array: String) -> String {
        if self.names.variables.contains(&a.container) {
            return array;
        }
        let mut offset = self.extents.c_text(&a.offset);
        for (index, stride, _) in &a.gather {
            offset.push_str(&format!(
                " + {}*{stride}",
                self.operand(*index, LoopRegion::Border)
            ));
        }
        let bare = offset
            .strip_prefix('(')
            .and_then(|o| o.strip_suffix(')'))
            .filter(|o| !o.contains(['(', ')']));
        format!("{array}[{}]", bare.unwrap_or(&offset))
    }

    fn values_at(&self, depth: usize, part: LoopRegion, t: &mut CText) {
        for n in 0..self.values.values.len() {
            let id = ValueId(n);
            if self.values.depth[n] != depth || self.is_inline(id) || !self.is_used(id) {
                continue;
            }
            let value = self.values.get(id);
            let ctype = scalar::value_type(value.dtype);
            t.line(&format!(
                "const {ctype} t{n} = {};",
                self.computation(id, part)
            ));
        }
    }

    /// The depths of the values and effects that use a value.
    fn uses(&self, id: ValueId) -> Vec<usize> {
        let mut uses = Vec::new();
        for (n, value) in self.values.values.iter().enumerate() {
            let count = operands(&value.op).iter().filter(|o| **o == id).count();
            uses.extend(std::iter::repeat_n(self.values.depth[n], count));
        }
        for e in &self.values.effects {
            uses.extend((e.value == id).then_some(self.depth()));
            uses.extend(
                e.address
                    .gather
                    .iter()
                    .filter(|g| g.0 == id)
                    .map(|_| usize::MAX),
            );
        }
        uses
    }

    fn is_used(&self, id: ValueId) -> bool {
        !self.uses(id).is_empty()
    }

    /// Whether the value is written into its only use instead of being named.
    fn is_inline(&self, id: ValueId) -> bool {
        match &self.values.get(id).op {
            Op::Const(_) => true,
            Op::Load(_) => false,
            _ => self.uses(id) == [self.values.depth_of(id)],
        }
    }

    fn operand(&self, id: ValueId, part: LoopRegion) -> String {
        if self.is_inline(id) {
            self.computation(id, part)
        } else {
            format!("t{}", id.0)
        }
    }

    fn computation(&self, id: ValueId, part: LoopRegion) -> String {
        let value = self.values.get(id);
        let of = |v: &ValueId| self.operand(*v, part);
        let dtype = |v: &ValueId| self.values.get(*v).dtype;
        match &value.op {
            Op::Const(s) => scalar::literal(*s, value.dtype),
            Op::Load(a) => self.load(a, value.dtype, part),
            Op::Index(e) => self.extents.c_text(e),
            Op::Unary(f, a) => scalar::unary(*f, &of(a), dtype(a)),
            Op::Binary(f, d, a, b) => scalar::binary(*f, &of(a), &of(b), *d),
            Op::Select(c, a, b) => format!("({} ? {} : {})", of(c), of(a), of(b)),
            Op::Cast(a) => {
                let text = scalar::cast(&of(a), dtype(a), value.dtype);
                format!("({text})")
            }
            Op::Uniform(..) if self.streams().contains(&id) => {
                let v = &self.loops[self.depth() - 1].var;
                format!("u{0}[{v} - u{0}_from]", id.0)
            }
            Op::Uniform(k, n) => format!(
                "sh_philox_uniform((unsigned long){}, (unsigned long){})",
                of(k),
                of(n)
            ),
        }
    }

    fn load(&self, a: &Address, dtype: DType, part: LoopRegion) -> String {
        let place = self.element(a, self.name(a.container));
        let conditions = self.tested_guards(a, part);
        match a.fill {
            Some(fill) if !conditions.is_empty() => format!(
                "{} ? {place} : {}",
                conditions.join(" & "),
                scalar::literal(fill, dtype)
            ),
            _ => place,
        }
    }
}

fn operands(op: &Op) -> Vec<ValueId> {
    match op {
        Op::Const(_) | Op::Index(_) => Vec::new(),
        Op::Load(a) => a.gather.iter().map(|g| g.0).collect(),
        Op::Unary(_, a) | Op::Cast(a) => vec![*a],
        Op::Binary(_, _, a, b) | Op::Uniform(a, b) => vec![*a, *b],
        Op::Select(a, b, c) => vec![*a, *b, *c],
    }
}
