//! C text of a whole kernel: buffers, the split over threads, the sequence of leaves, and the
//! launches before and after it that reductions need.

use super::body::{Array, Body, Nest, Statement};
use super::index::Loop;
use super::leaf::{CutLoop, Leaf, Names};
use super::merge::visit_statements;
use super::reduce::{Accumulation, Start, Surroundings};
use super::scalar;
use super::schedule::Scheduled;
use super::text::CText;
use super::values::{Effect, Op, Values, arithmetic};
use super::widen;
use super::{Arg, EmittedFunction, NAME};
use crate::halves;
use graph::{Binary, ContainerId, DType, Expr, Reduction, Scalar, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// Parallel points after which a thread's single-precision row sums go into double precision.
const BLOCK_POINTS: i64 = 32;
/// Elements of the largest local array on the stack.
const STACK_ELEMENTS: i64 = 1024;
const ALIGN: i64 = 64;

fn aligned(bytes: i64) -> i64 {
    (bytes + ALIGN - 1) / ALIGN * ALIGN
}

/// A thread's part of a container that is reduced over parallel points.
#[derive(Clone, Debug)]
struct ThreadPartial {
    container: ContainerId,
    reduction: Reduction,
    /// Byte offset within the thread's part of the workspace.
    offset: i64,
    /// Byte offset in scratch of the block's sums; `None` if values go to the part at once.
    block: Option<i64>,
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

/// The blocks of a product that an epilogue is called for.
pub(crate) struct Blocks<'a> {
    /// Loops of the flat index `batch`, outermost first.
    pub(crate) batch: &'a [Loop],
    /// Loops of the flat index that runs from `sh_m0` to `sh_m1`.
    pub(crate) rows: &'a [Loop],
    /// The loop that runs from `sh_n0` to `sh_n1`.
    pub(crate) columns: &'a Loop,
    pub(crate) product: ContainerId,
    /// Takes the product's place in memory.
    pub(crate) in_place: Option<ContainerId>,
    pub(crate) buffers: super::Buffers,
}

/// Prints an epilogue; gives the containers of its own buffers, in order.
pub(crate) fn print_epilogue(s: &Scheduled, blocks: &Blocks) -> (String, Vec<ContainerId>) {
    let mut frame = Frame::new(s);
    frame.cut = Some(CutLoop {
        var: blocks.columns.var.clone(),
        from: "sh_n0".to_string(),
        to: "sh_n1".to_string(),
    });
    let at_product = |id: &ContainerId| *id == blocks.product || Some(*id) == blocks.in_place;
    let mut own = Vec::new();
    frame.slots = Vec::new();
    for id in &frame.args {
        if at_product(id) {
            frame.slots.push(blocks.buffers.product);
        } else {
            frame.slots.push(blocks.buffers.first + own.len());
            own.push(*id);
        }
    }
    let mut t = CText::default();
    t.open(&format!(
        "static inline void {NAME}(void *const *buf, long tid, long sh_batch, \
         long sh_m0, long sh_m1, long sh_n0, long sh_n1)"
    ));
    t.line("(void)tid; (void)sh_batch;");
    frame.declare_buffers(&mut t);
    decode(&mut t, "sh_batch", blocks.batch);
    t.open("for (long sh_row = sh_m0; sh_row < sh_m1; ++sh_row)");
    decode(&mut t, "sh_row", blocks.rows);
    for local in &frame.locals {
        t.line(local);
    }
    let mut leaves = frame.leaves.iter();
    for nest in &s.phases {
        frame.print_nest(nest, &mut leaves, &mut t);
    }
    t.close();
    t.close();
    (t.finish(), own)
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
    /// Position of each argument among the function's buffers; its own position where none is given.
    pub(super) slots: Vec<usize>,
    parts: Vec<ThreadPartial>,
    pub(super) leaves: Vec<LeafPlan>,
    /// Local containers that are loaded somewhere; others need no storage.
    loaded: BTreeSet<ContainerId>,
    /// Containers that live in the workspace until they are rounded, with their byte offsets there.
    widened: Vec<(ContainerId, i64)>,
    /// Bytes of the workspace before the threads' parts.
    shared: i64,
    workspace: i64,
    scratch: i64,
    /// Declarations of local containers.
    locals: Vec<String>,
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

    fn make_parts(&mut self) {
        let points: BTreeSet<_> = self.s.parallel.iter().map(|l| l.var.clone()).collect();
        for nest in &self.s.phases {
            let mut found = Vec::new();
            visit_statements(nest, &mut |s| {
                for w in &s.writes {
                    if let Some(reduction) = w.conflict
                        && self.s.partial.contains(&w.place.container)
                    {
                        let moves =
                            points
                                .iter()
                                .any(|v| super::index::mentions(&w.place.offset, v))
                                || self.s.strip.as_ref().is_some_and(|c| {
                                    super::index::mentions(&w.place.offset, &c.var)
                                });
                        found.push((w.place.container, reduction, moves));
                    }
                }
            });
            for (container, reduction, moves) in found {
                self.make_part(container, reduction, moves);
            }
        }
    }

    fn make_part(&mut self, container: ContainerId, reduction: Reduction, moves: bool) {
        if self.parts.iter().any(|p| p.container == container) {
            return;
        }
        let array = self.array(container);
        let summed = arithmetic(array.dtype);
        let wide = scalar::wide_type(summed, reduction);
        // Where each point touches only some of the elements, adding up blocks costs more than it saves.
        let blocked = wide != summed && !moves && array.len > 1;
        let block = blocked.then_some(self.scratch);
        if blocked {
            self.scratch += aligned(array.len * summed.bytes() as i64);
        }
        self.parts.push(ThreadPartial {
            container,
            reduction,
            offset: self.workspace,
            block,
        });
        self.workspace += aligned(array.len * wide.bytes() as i64);
    }

    fn part_names(&self, id: ContainerId) -> Option<(String, String)> {
        let part = self.parts.iter().find(|p| p.container == id)?;
        let n = &self.names.arrays.get(&id)?[1..];
        let wide = format!("w{n}");
        Some(match part.block {
            Some(_) => (format!("s{n}"), wide),
            None => (wide.clone(), wide),
        })
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

    /// Containers in half precision that would hold sums before all terms are added, which rounds often.
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
        for part in &self.parts {
            let (block, wide) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let summed = arithmetic(array.dtype);
            let dtype = scalar::wide_type(summed, part.reduction);
            let ctype = scalar::c_type(dtype);
            t.line(&format!(
                "{ctype} *{wide} = ({ctype} *)((char *)buf[{}] + tid * {} + {});",
                self.args.len(),
                self.workspace,
                self.shared + part.offset
            ));
            if let Some(offset) = part.block {
                let ctype = scalar::c_type(summed);
                t.line(&format!(
                    "{ctype} *{block} = ({ctype} *)((char *)scratch + {offset});"
                ));
            }
            let identity = scalar::literal(part.reduction.identity(dtype), dtype);
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {wide}[i] = {identity};",
                array.len
            ));
        }
    }

    fn open_blocks(&self, t: &mut CText) {
        t.open(&format!(
            "for (long p_b = p_lo; p_b < p_hi; p_b += {BLOCK_POINTS})"
        ));
        t.line(&format!(
            "const long p_e = ix_min(p_b + {BLOCK_POINTS}, p_hi);"
        ));
        for part in self.parts.iter().filter(|p| p.block.is_some()) {
            let (block, _) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let summed = arithmetic(array.dtype);
            let identity = scalar::literal(part.reduction.identity(summed), summed);
            t.line("#pragma omp simd");
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {block}[i] = {identity};",
                array.len
            ));
        }
        t.open("for (long p = p_b; p < p_e; ++p)");
    }

    fn close_blocks(&self, t: &mut CText) {
        for part in self.parts.iter().filter(|p| p.block.is_some()) {
            let (block, wide) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let dtype = scalar::wide_type(arithmetic(array.dtype), part.reduction);
            let sum = scalar::binary(
                part.reduction.combine(),
                &format!("{wide}[i]"),
                &format!("{block}[i]"),
                dtype,
            );
            t.line("#pragma omp simd");
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {wide}[i] = {sum};",
                array.len
            ));
        }
        t.close();
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

    /// Gives local containers their identity before a phase that needs it.
    fn fill_locals(&self, nest: &Nest, leaves: &mut dyn Iterator<Item = &LeafPlan>, t: &mut CText) {
        match &nest.body {
            Body::Phases(inner) => {
                for n in inner {
                    self.fill_locals(n, leaves, t);
                }
            }
            Body::Leaf(_) => {
                let Some(plan) = leaves.next() else { return };
                for (e, acc) in plan.values.effects.iter().zip(&plan.accumulations) {
                    let array = self.array(e.address.container);
                    if acc.start != Start::Whole || !array.local {
                        continue;
                    }
                    let name = &self.names.arrays[&e.address.container];
                    if array.len == 1 {
                        t.line(&acc.reset(name));
                    } else {
                        let reset = acc.reset(&format!("{name}[i]"));
                        t.line(&format!("for (long i = 0; i < {}; ++i) {reset}", array.len));
                    }
                }
            }
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
                    // Boxed to keep one instance of this function for every depth.
                    let mut dynamic: &mut dyn Iterator<Item = &'p LeafPlan> = leaves;
                    self.print_nest(n, &mut dynamic, t);
                }
                nest.loops.iter().for_each(|_| t.close());
            }
        }
    }

    /// A launch that fills shared containers with their identity.
    fn fill_function(&self) -> Option<EmittedFunction> {
        let mut filled: BTreeMap<ContainerId, Reduction> = BTreeMap::new();
        for plan in &self.leaves {
            for (e, acc) in plan.values.effects.iter().zip(&plan.accumulations) {
                let id = e.address.container;
                if acc.start == Start::Whole && !self.array(id).local {
                    filled.extend(e.conflict.map(|r| (id, r)));
                }
            }
        }
        if filled.is_empty() {
            return None;
        }
        let mut t = CText::default();
        t.open(&format!(
            "void {NAME}_fill(void *const *buf, void *scratch, long tid, long nt)"
        ));
        for (n, (id, reduction)) in filled.iter().enumerate() {
            let array = self.array(*id);
            let ctype = scalar::c_type(array.dtype);
            let identity = scalar::literal(reduction.identity(array.dtype), array.dtype);
            let mut name = format!("x{n}");
            if let Some(at) = self.widened.iter().position(|(w, _)| w == id) {
                name = self.names.arrays[id].clone();
                t.line(&widen::declaration(at, n, self.widened[at].1));
            } else {
                t.line(&format!("{ctype} *x{n} = buf[{n}];"));
            }
            t.line(&format!(
                "for (long i = {0} * tid / nt; i < {0} * (tid + 1) / nt; ++i) {name}[i] = {identity};",
                array.len
            ));
        }
        t.close();
        let arg = |id: &ContainerId| match self.array(*id).rounded_to {
            Some(_) => Arg::Workspace,
            None => Arg::Container(*id),
        };
        Some(EmittedFunction {
            suffix: "_fill",
            text: t.finish(),
            args: filled.keys().map(arg).collect(),
        })
    }

    /// A launch that combines the threads' parts.
    fn combine_function(&self) -> Option<EmittedFunction> {
        if self.parts.is_empty() {
            return None;
        }
        let mut t = CText::default();
        t.open(&format!(
            "void {NAME}_combine(void *const *buf, void *scratch, long tid, long nt)"
        ));
        let n_args = self.parts.len();
        for (n, part) in self.parts.iter().enumerate() {
            let array = self.array(part.container);
            let dtype = scalar::wide_type(arithmetic(array.dtype), part.reduction);
            let (ctype, wide) = (scalar::c_type(array.dtype), scalar::c_type(dtype));
            t.line(&format!("{ctype} *x{n} = buf[{n}];"));
            t.line(&format!(
                "const char *w{n} = (const char *)buf[{n_args}] + {};",
                self.shared + part.offset
            ));
            t.open(&format!(
                "for (long i = {0} * tid / nt; i < {0} * (tid + 1) / nt; ++i)",
                array.len
            ));
            let identity = scalar::literal(part.reduction.identity(dtype), dtype);
            t.line(&format!("{wide} sum = {identity};"));
            let next = format!("((const {wide} *)(w{n} + k * {}))[i]", self.workspace);
            let sum = scalar::binary(part.reduction.combine(), "sum", &next, dtype);
            t.line(&format!("for (long k = 0; k < nt; ++k) sum = {sum};"));
            t.line(&match array.dtype {
                half @ (DType::F16 | DType::BF16) => {
                    format!("x{n}[i] = {};", scalar::cast("sum", dtype, half))
                }
                _ => format!("x{n}[i] = ({ctype})sum;"),
            });
            t.close();
        }
        t.close();
        let mut args: Vec<Arg> = self
            .parts
            .iter()
            .map(|p| Arg::Container(p.container))
            .collect();
        args.push(Arg::Workspace);
        Some(EmittedFunction {
            suffix: "_combine",
            text: t.finish(),
            args,
        })
    }
}

/// Guards whose failure leaves the effect without effect; what is combined there has type `dtype`.
fn skippable(e: &Effect, s: &Statement, dtype: DType) -> BTreeSet<super::body::Guard> {
    let mut skips: BTreeSet<_> = e.address.guards.iter().cloned().collect();
    let Some(reduction) = e.conflict else {
        return skips;
    };
    let identity = reduction.identity(dtype);
    for guard in s.reads.iter().flat_map(|read| &read.guards) {
        let filled = s.reads.iter().enumerate();
        let filled = filled.filter(|(_, read)| read.guards.contains(guard));
        let fills = filled
            .map(|(i, read)| (i, read.fill.map_or(f64::NAN, Scalar::as_f64)))
            .collect();
        if vanishes(&e.write.expr, &fills, identity) {
            skips.insert(guard.clone());
        }
    }
    skips
}

/// Whether the expression is the identity where the inputs are what `fills` gives for them.
fn vanishes(e: &Expr, fills: &BTreeMap<usize, f64>, identity: Scalar) -> bool {
    let go = |e: &Expr| vanishes(e, fills, identity);
    let (real, whole) = (identity.as_f64(), identity.as_i64());
    match e {
        Expr::In(n) => fills.get(n) == Some(&real),
        Expr::Const(number) => number.as_f64() == real && number.as_i64() == whole,
        Expr::Cast(_, a) => go(a),
        Expr::Unary(Unary::Neg, a) => real == 0.0 && go(a),
        // The padding of a convolution is absent, not a number times zero.
        Expr::Binary(Binary::Mul, a, b) => real == 0.0 && (go(a) || go(b)),
        Expr::Binary(Binary::Div, a, _) => real == 0.0 && go(a),
        Expr::Select(c, a, b) => match truth(c, fills) {
            Some(true) => go(a),
            Some(false) => go(b),
            None => go(a) && go(b),
        },
        _ => false,
    }
}

/// What a condition is where `fills` says so: a NaN equals nothing.
fn truth(condition: &Expr, fills: &BTreeMap<usize, f64>) -> Option<bool> {
    let fill = |e: &Expr| match e {
        Expr::In(i) => fills.get(i).copied(),
        _ => None,
    };
    match condition {
        Expr::Unary(Unary::IsNan, a) => fill(a).map(f64::is_nan),
        Expr::Binary(Binary::Eq, a, b) => {
            let is_nan = |e: &Expr| fill(e).is_some_and(f64::is_nan);
            (is_nan(a) || is_nan(b)).then_some(false)
        }
        _ => None,
    }
}

impl Leaf<'_> {
    /// Stores identities along the loops that each accumulating effect writes.
    pub(crate) fn print_starts(&self, t: &mut CText) {
        for (e, acc) in self.values.effects.iter().zip(self.accumulations) {
            if acc.start != Start::Loops {
                continue;
            }
            let written: Vec<&Loop> = self
                .loops
                .iter()
                .filter(|l| super::index::mentions(&e.address.offset, &l.var))
                .collect();
            for l in &written {
                let (from, to) = self.loop_bounds(l);
                t.open(&format!(
                    "for (long {0} = {from}; {0} < {to}; ++{0})",
                    l.var
                ));
            }
            let name = self.names.arrays[&e.address.container].clone();
            t.line(&acc.reset(&self.element(&e.address, name)));
            written.iter().for_each(|_| t.close());
        }
    }
}
