//! CUDA text of a scheduled kernel.
//!
//! Owns the text: a function's frame, the loops that threads share, where values are computed and how
//! reductions reach memory. Only names of the prelude are special to the device. Never chooses what
//! runs where; that is [`super::schedule`]'s.

use super::schedule::{Leaf, Phase, Scheduled, Spread, points};
use super::value_text::{self, ValueText};
use super::{Emitted, Kernel, Param, ParamType, element_type};
use crate::emit::body::Array;
use crate::emit::index::{Loop, mentions};
use crate::emit::scalar;
use crate::emit::text::CText;
use crate::emit::values::{Effect, Op, ValueId, Values, depth_of_address};
use crate::plan::Buffer;
use graph::{ContainerId, DType, Reduction};
use std::collections::{BTreeMap, BTreeSet};

/// Stands for the kernel's name in [`Kernel::text`] until it has one.
pub(super) const NAME: &str = "@NAME@";
/// Threads of a block that stores the identity of a reduction.
const FILL_THREADS: u32 = 256;

/// The launches of one map, in order, and the memory that only they use.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Printed {
    pub(super) launches: Vec<Emitted>,
    /// Bytes of each workspace; the launches count these from 0.
    pub(super) workspace_bytes: Vec<usize>,
}

/// How one effect reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Update {
    Store,
    /// Combined where it lies; the element holds the identity beforehand.
    Memory,
    /// In a register of the thread that owns the element; stored at the end, or combined.
    Thread {
        plain: bool,
    },
    /// In a register of each thread, added up through the block; stored at the end, or combined.
    Block {
        plain: bool,
    },
}

impl Printed {
    /// Adds the launches of a later part, whose workspaces are others.
    pub(super) fn append(&mut self, later: Printed) {
        let first = self.workspace_bytes.len();
        self.workspace_bytes.extend(later.workspace_bytes);
        for mut launch in later.launches {
            for buffer in &mut launch.args {
                if let Buffer::Workspace(n) = buffer {
                    *n += first;
                }
            }
            self.launches.push(launch);
        }
    }
}

/// Prints a kernel, preceded by launches that store the identity where its reductions need it.
/// Reductions in memory into half-precision containers go to single-precision workspaces, which a
/// launch after the kernel rounds.
pub(super) fn print(s: &Scheduled, origin: &str) -> Printed {
    let is_half = |id: &ContainerId| matches!(s.arrays[id].dtype, DType::F16 | DType::BF16);
    let combined = Printer::of(s).fills;
    let widened: Vec<ContainerId> = combined.into_keys().filter(is_half).collect();
    let mut wide = s.clone();
    for id in &widened {
        wide.arrays.insert(
            *id,
            Array {
                dtype: DType::F32,
                ..s.arrays[id].clone()
            },
        );
    }
    let buffer = |id: &ContainerId| match widened.iter().position(|w| w == id) {
        Some(n) => Buffer::Workspace(n),
        None => Buffer::Container(*id),
    };
    let mut printer = Printer::of(&wide);
    let mut t = CText::default();
    printer.body(&mut t);
    let mut launches: Vec<Emitted> = printer
        .fills
        .iter()
        .filter(|(id, _)| !s.arrays[id].local)
        .map(|(id, r)| fill(&wide.arrays[id], buffer(id), *r, origin))
        .collect();
    launches.push(printer.frame(&t.finish(), &buffer, origin));
    for id in &widened {
        launches.push(round(&s.arrays[id], buffer(id), *id, origin));
    }
    let bytes = |id: &ContainerId| s.arrays[id].len as usize * DType::F32.bytes();
    Printed {
        launches,
        workspace_bytes: widened.iter().map(bytes).collect(),
    }
}

/// Rounds sums to the container's type.
fn round(array: &Array, from: Buffer, to: ContainerId, origin: &str) -> Emitted {
    let (ctype, n) = (element_type(array.dtype), array.len);
    let text = format!(
        "SH_KERNEL({NAME}, {FILL_THREADS}, 1)(SH_IN(float) x0, SH_OUT({ctype}) x1) {{\n  const long p \
         = (long)SH_BID * {FILL_THREADS} + SH_TID;\n  if (p < {n}) x1[p] = \
         sh_from_float<{ctype}>(x0[p]);\n}}\n"
    );
    let params = vec![
        Param {
            name: "x0".to_string(),
            ty: ParamType::In(DType::F32),
        },
        Param {
            name: "x1".to_string(),
            ty: ParamType::Out(array.dtype),
        },
    ];
    each_element(text, params, n, vec![from, Buffer::Container(to)], origin)
}

/// A launch of a thread for each of `n` elements.
fn each_element(
    text: String,
    params: Vec<Param>,
    n: i64,
    args: Vec<Buffer>,
    origin: &str,
) -> Emitted {
    let kernel = Kernel {
        name: NAME.to_string(),
        text,
        params,
        threads: FILL_THREADS,
        min_blocks: 1,
        origin: origin.to_string(),
    };
    let grid = (n as u64).div_ceil(u64::from(FILL_THREADS));
    Emitted { kernel, grid, args }
}

fn fill(array: &Array, buffer: Buffer, reduction: Reduction, origin: &str) -> Emitted {
    let ctype = element_type(array.dtype);
    let identity = scalar::literal(reduction.identity(array.dtype), array.dtype);
    let n = array.len;
    let text = format!(
        "SH_KERNEL({NAME}, {FILL_THREADS}, 1)(SH_OUT({ctype}) x0) {{\n  const long p = \
         (long)SH_BID * {FILL_THREADS} + SH_TID;\n  if (p < {n}) x0[p] = {identity};\n}}\n"
    );
    let params = vec![Param {
        name: "x0".to_string(),
        ty: ParamType::Out(array.dtype),
    }];
    each_element(text, params, n, vec![buffer], origin)
}

struct Printer<'s> {
    s: &'s Scheduled,
    /// Containers that are read somewhere in the kernel.
    loaded: BTreeSet<ContainerId>,
    written: BTreeSet<ContainerId>,
    names: BTreeMap<ContainerId, String>,
    /// How many reductions go to a container.
    n_conflicts: BTreeMap<ContainerId, usize>,
    /// Containers that must hold the identity beforehand.
    fills: BTreeMap<ContainerId, Reduction>,
}

impl<'s> Printer<'s> {
    fn of(s: &'s Scheduled) -> Self {
        let mut p = Printer {
            s,
            loaded: BTreeSet::new(),
            written: BTreeSet::new(),
            names: BTreeMap::new(),
            n_conflicts: BTreeMap::new(),
            fills: BTreeMap::new(),
        };
        let mut around = s.blocks.clone();
        around.extend(s.serial.iter().cloned());
        p.survey(&s.phases, &around);
        let used: BTreeSet<ContainerId> = p.loaded.union(&p.written).copied().collect();
        for (n, id) in used.iter().enumerate() {
            let prefix = if s.arrays[id].local { "s" } else { "x" };
            p.names.insert(*id, format!("{prefix}{n}"));
        }
        p
    }

    /// Finds what is read and written, and which reductions need the identity beforehand.
    fn survey(&mut self, phases: &[Phase], around: &[Loop]) {
        visit_leaves(phases, around, &mut |leaf, around| {
            let values = self.values(leaf, around);
            self.loaded.extend(values.loaded.iter().copied());
            for e in &values.effects {
                let id = e.address.container;
                self.written.insert(id);
                if e.conflict.is_some() {
                    *self.n_conflicts.entry(id).or_insert(0) += 1;
                }
            }
        });
        visit_leaves(phases, around, &mut |leaf, around| {
            let values = self.values(leaf, around);
            for e in &values.effects {
                let update = self.update(e, leaf, around, &values);
                let plain = [
                    Update::Store,
                    Update::Thread { plain: true },
                    Update::Block { plain: true },
                ];
                if let Some(r) = e.conflict
                    && !plain.contains(&update)
                {
                    self.fills.insert(e.address.container, r);
                }
            }
        });
    }

    fn values(&self, leaf: &Leaf, around: &[Loop]) -> Values {
        Values::of(&loops_of(leaf, around), &leaf.statements, &self.s.arrays)
    }

    fn update(&self, e: &Effect, leaf: &Leaf, around: &[Loop], values: &Values) -> Update {
        if e.conflict.is_none() {
            return Update::Store;
        }
        let loops = loops_of(leaf, around);
        let depth = depth_of_address(&e.address, &loops, values);
        let scattered = !e.address.gather.is_empty() || !e.address.guards.is_empty();
        let array = &self.s.arrays[&e.address.container];
        let alone = self.n_conflicts.get(&e.address.container) == Some(&1);
        // A local container is another one at each outer point.
        let outer = if array.local {
            self.s.blocks.len() + self.s.serial.len()
        } else {
            0
        };
        let owned = |l: &Loop| e.write.owned.contains(&l.var);
        let repeats_owned = around[outer.min(around.len())..].iter().all(owned);
        let moving = loops[outer.min(loops.len())..].iter();
        let written: i64 = moving
            .filter(|l| mentions(&e.address.offset, &l.var))
            .map(|l| l.size)
            .product();
        let plain = alone && repeats_owned && written == array.len;
        match leaf.how {
            _ if scattered => Update::Memory,
            Spread::Reduced => Update::Block { plain },
            _ if depth <= around.len() + leaf.spread.len() => Update::Thread { plain },
            _ => Update::Memory,
        }
    }

    fn body(&mut self, t: &mut CText) {
        for l in decoded(&self.s.blocks, "(long)SH_BID") {
            t.line(&l);
        }
        for l in &self.s.serial {
            t.open(&for_loop(l));
        }
        self.fill_locals(t);
        let mut around = self.s.blocks.clone();
        around.extend(self.s.serial.iter().cloned());
        self.phases(&self.s.phases, &around, t);
        for _ in &self.s.serial {
            t.close();
        }
    }

    fn fill_locals(&self, t: &mut CText) {
        let locals = self.fills.iter().filter(|(id, _)| self.s.arrays[id].local);
        for (n, (id, reduction)) in locals.enumerate() {
            let array = &self.s.arrays[id];
            if n == 0 && !self.s.serial.is_empty() {
                t.line("SH_SYNC();");
            }
            let identity = scalar::literal(reduction.identity(array.dtype), array.dtype);
            t.line(&format!(
                "for (long p0 = SH_TID; p0 < {}; p0 += {}) {}[p0] = {identity};",
                array.len, self.s.threads, self.names[id]
            ));
        }
    }

    fn phases(&self, phases: &[Phase], around: &[Loop], t: &mut CText) {
        for phase in phases {
            match phase {
                Phase::Leaf(leaf) => {
                    if leaf.how != Spread::Grid && !self.is_lone_leaf() {
                        t.line("SH_SYNC();");
                    }
                    self.leaf(leaf, around, t);
                }
                Phase::Repeat(loops, inner) => {
                    let mut around = around.to_vec();
                    around.extend(loops.iter().cloned());
                    loops.iter().for_each(|l| t.open(&for_loop(l)));
                    self.phases(inner, &around, t);
                    loops.iter().for_each(|_| t.close());
                }
            }
        }
    }

    fn is_lone_leaf(&self) -> bool {
        self.s.serial.is_empty() && matches!(self.s.phases.as_slice(), [Phase::Leaf(_)])
    }

    fn leaf(&self, leaf: &Leaf, around: &[Loop], t: &mut CText) {
        let values = self.values(leaf, around);
        let updates: Vec<Update> = values
            .effects
            .iter()
            .map(|e| self.update(e, leaf, around, &values))
            .collect();
        let text = LeafText {
            printer: self,
            leaf,
            n_around: around.len(),
            values: &values,
            updates: &updates,
        };
        t.open("");
        text.print(t);
        t.close();
    }

    fn frame(&self, body: &str, buffer: &dyn Fn(&ContainerId) -> Buffer, origin: &str) -> Emitted {
        let mut params = Vec::new();
        let mut args = Vec::new();
        let mut signature = Vec::new();
        let mut shared = String::new();
        for (id, name) in &self.names {
            let array = &self.s.arrays[id];
            let ctype = element_type(array.dtype);
            if array.local {
                if self.loaded.contains(id) {
                    let line = format!("  SH_SHARED({ctype}, {name}, {});\n", array.len);
                    shared.push_str(&line);
                }
                continue;
            }
            let out = self.written.contains(id);
            let (kind, ty) = if out {
                ("SH_OUT", ParamType::Out(array.dtype))
            } else {
                ("SH_IN", ParamType::In(array.dtype))
            };
            signature.push(format!("{kind}({ctype}) {name}"));
            params.push(Param {
                name: name.clone(),
                ty,
            });
            args.push(buffer(id));
        }
        let threads = self.s.threads;
        let text = format!(
            "SH_KERNEL({NAME}, {threads}, 1)({}) {{\n{shared}{body}}}\n",
            signature.join(", ")
        );
        Emitted {
            kernel: Kernel {
                name: NAME.to_string(),
                text,
                params,
                threads: threads as u32,
                min_blocks: 1,
                origin: origin.to_string(),
            },
            grid: self.s.grid as u64,
            args,
        }
    }
}

fn visit_leaves(phases: &[Phase], around: &[Loop], f: &mut dyn FnMut(&Leaf, &[Loop])) {
    for phase in phases {
        match phase {
            Phase::Leaf(leaf) => f(leaf, around),
            Phase::Repeat(loops, inner) => {
                let around: Vec<Loop> = around.iter().chain(loops).cloned().collect();
                visit_leaves(inner, &around, f);
            }
        }
    }
}

fn loops_of(leaf: &Leaf, around: &[Loop]) -> Vec<Loop> {
    let all = around.iter().chain(&leaf.spread).chain(&leaf.inner);
    all.cloned().collect()
}

fn for_loop(l: &Loop) -> String {
    format!("for (long {0} = 0; {0} < {1}; ++{0})", l.var, l.size)
}

/// Lines that take a flat index apart, outermost loop first.
fn decoded(loops: &[Loop], flat: &str) -> Vec<String> {
    let mut weight = points(loops);
    let mut lines = Vec::new();
    for (n, l) in loops.iter().enumerate() {
        weight /= l.size;
        let quotient = match weight {
            1 => flat.to_string(),
            w => format!("{flat} / {w}"),
        };
        let text = if n == 0 {
            quotient
        } else {
            format!("{quotient} % {}", l.size)
        };
        lines.push(format!("const long {} = {text};", l.var));
    }
    lines
}

struct LeafText<'a> {
    printer: &'a Printer<'a>,
    leaf: &'a Leaf,
    n_around: usize,
    values: &'a Values,
    updates: &'a [Update],
}

impl LeafText<'_> {
    fn print(&self, t: &mut CText) {
        let accumulators = || self.values.effects.iter().zip(self.updates).enumerate();
        for (n, (e, u)) in accumulators() {
            if matches!(u, Update::Block { .. }) {
                t.line(&self.declaration(n, e));
            }
        }
        let n = points(&self.leaf.spread);
        let threads = self.printer.s.threads;
        match self.leaf.how {
            Spread::Grid => {
                t.line(&format!(
                    "const long p0 = (long)SH_BID * {threads} + SH_TID;"
                ));
                t.open(&format!("if (p0 < {n})"));
            }
            _ => t.open(&format!(
                "for (long p0 = SH_TID; p0 < {n}; p0 += {threads})"
            )),
        }
        for line in decoded(&self.leaf.spread, "p0") {
            t.line(&line);
        }
        let shared_out = self.n_around + self.leaf.spread.len();
        (0..=shared_out).for_each(|depth| self.values_at(depth, t));
        for (n, (e, u)) in accumulators() {
            if matches!(u, Update::Thread { .. }) {
                t.line(&self.declaration(n, e));
            }
        }
        for (n, l) in self.leaf.inner.iter().enumerate() {
            t.open(&for_loop(l));
            self.values_at(shared_out + n + 1, t);
        }
        for (n, (e, u)) in accumulators() {
            self.apply(n, e, *u, t);
        }
        self.leaf.inner.iter().for_each(|_| t.close());
        for (n, (e, u)) in accumulators() {
            if let Update::Thread { plain } = u {
                t.line(&self.flush(e, &format!("a{n}"), *plain));
            }
        }
        t.close();
        for (n, (e, u)) in accumulators() {
            if let Update::Block { plain } = u {
                t.line(&self.block_combined(n, e));
                t.line(&format!(
                    "if (SH_TID == 0) {}",
                    self.flush(e, &format!("b{n}"), *plain)
                ));
            }
        }
    }

    fn text(&self) -> ValueText<'_> {
        ValueText {
            values: self.values,
            extents: &self.printer.s.extents,
            names: &self.printer.names,
        }
    }

    fn dtype(&self, id: ValueId) -> DType {
        self.values.get(id).dtype
    }

    fn reduction(e: &Effect) -> Reduction {
        e.conflict.unwrap_or(Reduction::Sum)
    }

    fn declaration(&self, n: usize, e: &Effect) -> String {
        let dtype = self.dtype(e.value);
        let identity = scalar::literal(Self::reduction(e).identity(dtype), dtype);
        format!("{} a{n} = {identity};", scalar::value_type(dtype))
    }

    fn block_combined(&self, n: usize, e: &Effect) -> String {
        let f = match Self::reduction(e) {
            Reduction::Sum => "sum",
            Reduction::Prod => "prod",
            Reduction::Max => "max",
            Reduction::Min => "min",
        };
        let ctype = scalar::value_type(self.dtype(e.value));
        let threads = self.printer.s.threads;
        format!("const {ctype} b{n} = sh_block_{f}<{threads}>(a{n});")
    }

    fn combined(&self, e: &Effect, a: &str, b: &str) -> String {
        scalar::binary(Self::reduction(e).combine(), a, b, self.dtype(e.value))
    }

    fn flush(&self, e: &Effect, register: &str, plain: bool) -> String {
        let place = self.text().element(&e.address);
        if plain {
            let to = self.printer.s.arrays[&e.address.container].dtype;
            let value = value_text::cast(register, self.dtype(e.value), to);
            format!("{place} = {value};")
        } else {
            format!("{place} = {};", self.combined(e, &place, register))
        }
    }

    fn apply(&self, n: usize, e: &Effect, update: Update, t: &mut CText) {
        let id = e.address.container;
        // What only this iteration reads has been handed on in a register.
        if self.printer.s.arrays[&id].local && !self.printer.loaded.contains(&id) {
            return;
        }
        let value = self.text().operand(e.value);
        let place = self.text().element(&e.address);
        let line = match update {
            Update::Store => format!("{place} = {value};"),
            Update::Memory => format!("{place} = {};", self.combined(e, &place, &value)),
            Update::Thread { .. } | Update::Block { .. } => {
                let register = format!("a{n}");
                format!("{register} = {};", self.combined(e, &register, &value))
            }
        };
        let conditions = self.text().conditions(&e.address);
        if conditions.is_empty() {
            t.line(&line);
        } else {
            t.line(&format!("if ({}) {line}", conditions.join(" & ")));
        }
    }

    fn values_at(&self, depth: usize, t: &mut CText) {
        for (n, value) in self.values.values.iter().enumerate() {
            let constant = matches!(value.op, Op::Const(_));
            if self.values.depth[n] == depth && !constant {
                let ctype = value_text::value_type(value.dtype);
                t.line(&format!(
                    "const {ctype} t{n} = {};",
                    self.text().computation(n)
                ));
            }
        }
    }
}
