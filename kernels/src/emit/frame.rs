//! C text of a whole kernel: buffers, the split over threads, the sequence of leaves.
//!
//! The modules below own the parts that only reductions need: the threads' parts, the identities
//! from which sums start, and the guards that skip an iteration.

mod identities;
mod parts;
mod skips;

use super::body::{Array, Body, Nest, Statement};
use super::index::Loop;
use super::leaf::{CutLoop, Leaf, Names};
use super::reduce::{Accumulation, Surroundings};
use super::scalar;
use super::schedule::Scheduled;
use super::text::CText;
use super::values::{Effect, Op, Values};
use super::widen;
use super::{Arg, EmittedFunction, NAME};
use crate::halves;
use graph::ContainerId;
use parts::ThreadPartial;
use skips::skippable;
use std::collections::BTreeSet;

/// Elements of the largest local array on the stack.
const STACK_ELEMENTS: i64 = 1024;
const ALIGN: i64 = 64;

fn aligned(bytes: i64) -> i64 {
    (bytes + ALIGN - 1) / ALIGN * ALIGN
}

/// Prints a scheduled kernel.
pub(crate) fn print(s: &Scheduled) -> super::Emitted {
    let mut frame = Frame::new(s);
    let widened;
    let unfinished = frame.halves_with_unfinished_sums();
    if !unfinished.is_empty() {
        widened = widen::in_single_precision(s, &unfinished);
        frame = Frame::new(&widened);
    }
    let body = frame.function();
    let mut functions = Vec::new();
    functions.extend(frame.fill_function());
    functions.push(body);
    functions.extend(frame.combine_function());
    functions.extend(widen::round_function(&frame.s.arrays, &frame.widened));
    super::Emitted {
        functions,
        workspace_bytes_shared: frame.shared as usize,
        workspace_bytes_per_thread: frame.workspace as usize,
        scratch_bytes: frame.scratch as usize,
    }
}

/// Recovers loop variables from their flat number.
pub(super) fn decode(t: &mut CText, flat: &str, loops: &[Loop]) {
    let mut rest = flat.to_string();
    for (n, l) in loops.iter().enumerate() {
        let inner: i64 = loops[n + 1..].iter().map(|l| l.size).product();
        if inner == 1 {
            t.line(&format!("const long {} = {rest};", l.var));
            // Loops after this one have a single point.
            rest = "0".to_string();
            continue;
        }
        t.line(&format!("const long {} = {rest} / {inner};", l.var));
        let next = format!("{flat}{n}");
        t.line(&format!("const long {next} = {rest} % {inner};"));
        rest = next;
    }
}

/// A leaf in the order of execution.
pub(super) struct LeafPlan {
    pub(super) values: Values,
    pub(super) accumulations: Vec<Accumulation>,
    skips: BTreeSet<super::body::Guard>,
}

pub(super) struct Frame<'a> {
    s: &'a Scheduled,
    pub(super) names: Names,
    pub(super) args: Vec<ContainerId>,
    /// Position of each argument among the function's buffers; an argument without an entry has its own position.
    pub(super) slots: Vec<usize>,
    parts: Vec<ThreadPartial>,
    pub(super) leaves: Vec<LeafPlan>,
    /// Local containers that some leaf loads; others need no storage.
    loaded: BTreeSet<ContainerId>,
    /// Containers that live in the workspace until they are rounded, with their byte offsets there.
    widened: Vec<(ContainerId, i64)>,
    /// Bytes of the workspace before the threads' parts.
    shared: i64,
    workspace: i64,
    scratch: i64,
    /// Declarations of local containers.
    pub(super) locals: Vec<String>,
    pub(super) cut: Option<CutLoop>,
}

impl<'a> Frame<'a> {
    pub(super) fn new(s: &'a Scheduled) -> Self {
        let mut frame = Frame {
            s,
            names: Names::default(),
            args: Vec::new(),
            slots: Vec::new(),
            parts: Vec::new(),
            leaves: Vec::new(),
            loaded: BTreeSet::new(),
            widened: Vec::new(),
            shared: 0,
            workspace: 0,
            scratch: 0,
            locals: Vec::new(),
            cut: s.strip.as_ref().map(|c| CutLoop {
                var: c.var.clone(),
                from: c.first.to_string(),
                to: format!("{}_1", c.var),
            }),
        };
        let mut tables = Vec::new();
        for nest in &s.phases {
            frame.collect_values(nest, &mut tables);
        }
        frame.name_arrays(&tables);
        frame.make_parts();
        frame.plan_leaves(&s.phases, &mut Vec::new(), &mut tables.into_iter());
        frame
    }

    fn collect_values(&mut self, nest: &Nest, tables: &mut Vec<Values>) {
        match &nest.body {
            Body::Leaf(statements) => {
                let table = Values::new(&nest.loops, statements, &self.s.arrays);
                self.loaded.extend(table.loaded.iter().copied());
                tables.push(table);
            }
            Body::Phases(inner) => inner.iter().for_each(|n| self.collect_values(n, tables)),
        }
    }

    fn array(&self, id: ContainerId) -> &'a Array {
        &self.s.arrays[&id]
    }

    /// Names buffers in order of first access, and gives local containers storage.
    fn name_arrays(&mut self, tables: &[Values]) {
        let mut seen = Vec::new();
        let mut see = |id: ContainerId| {
            if !seen.contains(&id) {
                seen.push(id);
            }
        };
        for table in tables {
            for v in &table.values {
                if let Op::Load(a) = &v.op {
                    see(a.container);
                }
            }
            table.effects.iter().for_each(|e| see(e.address.container));
        }
        for id in seen {
            let array = self.array(id);
            if array.rounded_to.is_some() {
                let name = format!("h{}", self.widened.len());
                self.names.arrays.insert(id, name);
                self.widened.push((id, self.shared));
                self.shared += aligned(array.len * array.dtype.bytes() as i64);
                continue;
            }
            if !array.local {
                self.names
                    .arrays
                    .insert(id, format!("x{}", self.args.len()));
                self.args.push(id);
                continue;
            }
            if !self.loaded.contains(&id) {
                continue;
            }
            let name = format!("l{}", self.locals.len());
            self.names.arrays.insert(id, name.clone());
            self.declare_local(id, &name);
        }
    }

    fn declare_local(&mut self, id: ContainerId, name: &str) {
        let array = self.array(id);
        let ctype = scalar::c_type(array.dtype);
        if array.len == 1 {
            self.names.variables.insert(id);
            self.locals.push(format!("{ctype} {name} = 0;"));
        } else if array.len <= STACK_ELEMENTS {
            self.locals.push(format!(
                "{ctype} {name}[{}] __attribute__((aligned(64)));",
                array.len
            ));
        } else {
            self.locals.push(format!(
                "{ctype} *{name} = ({ctype} *)((char *)scratch + {});",
                self.scratch
            ));
            self.scratch += aligned(array.len * array.dtype.bytes() as i64);
        }
    }

    fn plan_leaves(
        &mut self,
        nests: &[Nest],
        enclosing: &mut Vec<Loop>,
        tables: &mut dyn Iterator<Item = Values>,
    ) {
        for nest in nests {
            match &nest.body {
                Body::Leaf(statements) => {
                    let Some(mut values) = tables.next() else {
                        return;
                    };
                    values.effects.retain(|e| self.is_needed(e));
                    let plan = self.plan_leaf(nest, statements, enclosing, values);
                    self.leaves.push(plan);
                }
                Body::Phases(inner) => {
                    enclosing.extend(nest.loops.iter().cloned());
                    self.plan_leaves(inner, enclosing, tables);
                    enclosing.truncate(enclosing.len() - nest.loops.len());
                }
            }
        }
    }

    fn is_needed(&self, e: &Effect) -> bool {
        let id = e.address.container;
        !self.array(id).local || self.loaded.contains(&id)
    }

    fn plan_leaf(
        &self,
        nest: &Nest,
        statements: &[Statement],
        enclosing: &[Loop],
        values: Values,
    ) -> LeafPlan {
        let mut accumulations = Vec::new();
        let run = nest.loops.last().map_or(0, |v| match &self.s.strip {
            Some(s) if s.var == v.var => s.block,
            _ => v.size,
        });
        for (n, e) in values.effects.iter().enumerate() {
            let around = Surroundings {
                loops: &nest.loops,
                enclosing,
                covers: self.covers(e, &nest.loops, enclosing),
                part: self.part_names(e.address.container),
                stored: self.array(e.address.container).dtype,
                run,
            };
            accumulations.push(Accumulation::new(n, e, &values, &around));
        }
        let skips = match (values.effects.as_slice(), statements) {
            ([e], [s]) => skippable(e, s, self.array(e.address.container).dtype),
            _ => BTreeSet::new(),
        };
        LeafPlan {
            values,
            accumulations,
            skips,
        }
    }

    /// Whether the effect's loops reach every element of the container.
    fn covers(&self, e: &Effect, loops: &[Loop], enclosing: &[Loop]) -> bool {
        let array = self.array(e.address.container);
        let strip = self.s.strip.as_ref();
        let size = |l: &Loop| match strip {
            Some(s) if s.var == l.var && array.local => s.block,
            _ => l.size,
        };
        let reached: i64 = self
            .s
            .parallel
            .iter()
            .filter(|_| !array.local)
            .chain(loops)
            .chain(enclosing)
            .filter(|l| {
                e.write.owned.contains(&l.var) && super::index::mentions(&e.address.offset, &l.var)
            })
            .map(size)
            .product();
        reached == array.len && e.address.gather.is_empty()
    }

    fn function(&mut self) -> EmittedFunction {
        let mut t = CText::default();
        t.open(&format!(
            "void {NAME}(void *const *buf, void *scratch, long tid, long nt)"
        ));
        self.declare_buffers(&mut t);
        let n_points: i64 = self.s.parallel.iter().map(|l| l.size).product();
        t.line(&format!(
            "const long p_lo = {n_points} * tid / nt, p_hi = {n_points} * (tid + 1) / nt;"
        ));
        let blocked = self.parts.iter().any(|p| p.block.is_some());
        if blocked {
            self.open_blocks(&mut t);
        } else {
            t.open("for (long p = p_lo; p < p_hi; ++p)");
        }
        self.decode_point(&mut t);
        for local in &self.locals {
            t.line(local);
        }
        let mut leaves = self.leaves.iter();
        for nest in &self.s.phases {
            self.fill_locals(nest, &mut leaves.clone(), &mut t);
            self.print_nest(nest, &mut leaves, &mut t);
        }
        t.close();
        if blocked {
            self.close_blocks(&mut t);
        }
        t.close();
        let mut args: Vec<Arg> = self.args.iter().map(|id| Arg::Container(*id)).collect();
        if !self.parts.is_empty() || !self.widened.is_empty() {
            args.push(Arg::Workspace);
        }
        EmittedFunction {
            suffix: "",
            text: t.finish(),
            args,
        }
    }

    /// Containers in half precision that would hold partial sums, which would be rounded many times.
    fn halves_with_unfinished_sums(&self) -> BTreeSet<ContainerId> {
        let mut found = BTreeSet::new();
        for plan in &self.leaves {
            for (e, acc) in plan.values.effects.iter().zip(&plan.accumulations) {
                let id = e.address.container;
                if acc.holds_unfinished_sums(e) && halves::is_half(self.array(id).dtype) {
                    found.insert(id);
                }
            }
        }
        found
    }

    fn written(&self, id: ContainerId) -> bool {
        self.leaves
            .iter()
            .any(|l| l.values.effects.iter().any(|e| e.address.container == id))
    }

    pub(super) fn declare_buffers(&self, t: &mut CText) {
        for (n, id) in self.args.iter().enumerate() {
            let ctype = scalar::c_type(self.array(*id).dtype);
            let constness = if self.written(*id) { "" } else { "const " };
            let slot = self.slots.get(n).unwrap_or(&n);
            t.line(&format!("{constness}{ctype} *x{n} = buf[{slot}];"));
        }
        for (n, (_, offset)) in self.widened.iter().enumerate() {
            let workspace = self.args.len();
            t.line(&widen::declaration(n, workspace, *offset));
        }
        self.declare_parts(t);
    }

    /// Recovers the parallel loops' variables from the flat point number.
    fn decode_point(&self, t: &mut CText) {
        decode(t, "p", &self.s.parallel);
        if let Some(s) = &self.s.strip {
            t.line(&format!(
                "const long {0} = {1}_b * {2}, {1}_1 = ix_min({0} + {2}, {3});",
                s.first, s.var, s.block, s.size
            ));
        }
    }

    pub(super) fn print_nest<'p>(
        &self,
        nest: &Nest,
        leaves: &mut impl Iterator<Item = &'p LeafPlan>,
        t: &mut CText,
    ) {
        match &nest.body {
            Body::Leaf(_) => {
                let Some(plan) = leaves.next() else { return };
                let leaf = Leaf {
                    loops: &nest.loops,
                    values: &plan.values,
                    extents: &self.s.extents,
                    names: &self.names,
                    cut: self.cut.as_ref(),
                    accumulations: &plan.accumulations,
                    skips: plan.skips.clone(),
                };
                leaf.print_starts(t);
                leaf.print(t);
            }
            Body::Phases(inner) => {
                for l in &nest.loops {
                    t.open(&format!(
                        "for (long {0} = 0; {0} < {1}; ++{0})",
                        l.var, l.size
                    ));
                }
                for n in inner {
                    // A dynamic iterator keeps one instance of this function for every depth.
                    let mut dynamic: &mut dyn Iterator<Item = &'p LeafPlan> = leaves;
                    self.print_nest(n, &mut dynamic, t);
                }
                nest.loops.iter().for_each(|_| t.close());
            }
        }
    }
}
