//! What a scheduled kernel reads and writes, how each effect reaches memory, and the names of its containers.
//!
//! Owns these facts for the printers of all shapes. Never prints.

use crate::schedule::{Home, Leaf, Phase, Rows, Scheduled, Shape, loops::points, moved_by};
use crate::value_text::ValueText;
use graph::{ContainerId, DType, Reduction};
use kernels::emit::body::Array;
use kernels::emit::index::{Loop, mentions};
use kernels::emit::values::{Effect, Op, ValueId, Values, depth_of_address};
use std::collections::{BTreeMap, BTreeSet};

/// How one effect reaches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Update {
    Store,
    /// Combined where it lies; the element holds the identity beforehand.
    Memory,
    /// A register of the thread that owns the element; stored at the end, or combined.
    Thread {
        plain: bool,
    },
    /// A register of each thread, added up through the group; stored at the end, or combined.
    Group {
        plain: bool,
    },
    /// Registers over all points of a block; blocks leave their parts in a workspace.
    Part,
}

/// See the module.
pub(super) struct Survey<'s> {
    pub(super) s: &'s Scheduled,
    /// Containers that are read somewhere in the kernel.
    pub(super) loaded: BTreeSet<ContainerId>,
    pub(super) written: BTreeSet<ContainerId>,
    pub(super) names: BTreeMap<ContainerId, String>,
    /// How many reductions go to a container.
    n_conflicts: BTreeMap<ContainerId, usize>,
    /// Containers that must hold the identity beforehand.
    pub(super) fills: BTreeMap<ContainerId, Reduction>,
    /// Containers whose sums are left in parts, with the type of the sums.
    pub(super) parts: BTreeMap<ContainerId, (Reduction, DType)>,
}

impl<'s> Survey<'s> {
    pub(super) fn new(s: &'s Scheduled) -> Self {
        let mut survey = Survey {
            s,
            loaded: BTreeSet::new(),
            written: BTreeSet::new(),
            names: BTreeMap::new(),
            n_conflicts: BTreeMap::new(),
            fills: BTreeMap::new(),
            parts: BTreeMap::new(),
        };
        survey.find();
        let used = survey.loaded.union(&survey.written);
        let name = |(n, id): (usize, &ContainerId)| {
            let prefix = if s.arrays[id].local { "s" } else { "x" };
            (*id, format!("{prefix}{n}"))
        };
        survey.names = used.enumerate().map(name).collect();
        survey
    }

    fn find(&mut self) {
        let mut all: Vec<(Leaf, Vec<Loop>)> = Vec::new();
        visit_leaves(self.s, &mut |leaf, around| {
            all.push((leaf.clone(), around.to_vec()));
        });
        for (leaf, around) in &all {
            let values = self.values(leaf, around);
            self.loaded.extend(values.loaded.iter().copied());
            for e in &values.effects {
                let id = e.address.container;
                self.written.insert(id);
                if e.conflict.is_some() {
                    *self.n_conflicts.entry(id).or_insert(0) += 1;
                }
            }
        }
        for (leaf, around) in &all {
            let values = self.values(leaf, around);
            for e in &values.effects {
                let id = e.address.container;
                let Some(r) = e.conflict else { continue };
                match self.update(e, leaf, around, &values) {
                    Update::Memory
                    | Update::Thread { plain: false }
                    | Update::Group { plain: false } => {
                        self.fills.insert(id, r);
                    }
                    Update::Part => {
                        self.parts.insert(id, (r, values.get(e.value).dtype));
                    }
                    _ => {}
                }
            }
        }
    }

    pub(super) fn array(&self, id: ContainerId) -> &Array {
        &self.s.arrays[&id]
    }

    pub(super) fn rows(&self) -> Option<&'s Rows> {
        match &self.s.shape {
            Shape::Rows(rows) => Some(rows),
            _ => None,
        }
    }

    pub(super) fn home(&self, id: ContainerId) -> Option<Home> {
        self.rows().and_then(|r| r.homes.get(&id).copied())
    }

    pub(super) fn values(&self, leaf: &Leaf, around: &[Loop]) -> Values {
        Values::new(&loops_of(leaf, around), &leaf.statements, &self.s.arrays)
    }

    pub(super) fn text<'a>(&'a self, values: &'a Values) -> ValueText<'a> {
        ValueText {
            values,
            extents: &self.s.extents,
            names: &self.names,
        }
    }

    pub(super) fn update(
        &self,
        e: &Effect,
        leaf: &Leaf,
        around: &[Loop],
        values: &Values,
    ) -> Update {
        if e.conflict.is_none() {
            return Update::Store;
        }
        let array = self.array(e.address.container);
        let owned = |l: &Loop| e.write.owned.contains(&l.var);
        let rows = self.rows();
        if let Some(rows) = rows
            && !array.local
        {
            let shared = !rows.points.iter().all(owned);
            if shared || rows.points.is_empty() && rows.parts > 1 {
                return Update::Part;
            }
        }
        let loops = loops_of(leaf, around);
        let scattered = !e.address.gather.is_empty() || !e.address.guards.is_empty();
        // A local container is another one at each outer point.
        let outer = match rows {
            Some(r) if array.local => r.blocks.len() + r.points.len() + r.serial.len(),
            _ => 0,
        };
        let repeats_owned = around[outer.min(around.len())..].iter().all(owned);
        let moving = loops[outer.min(loops.len())..].iter();
        let written: i64 = moving
            .filter(|l| mentions(&e.address.offset, &l.var))
            .map(|l| l.size)
            .product();
        let alone = self.n_conflicts.get(&e.address.container) == Some(&1);
        let plain = alone && repeats_owned && written == array.len;
        let own = &loops[around.len()..];
        if scattered {
            Update::Memory
        } else if rows.is_some() && !leaf.spread.is_empty() && !moved_by(&e.address.offset, own) {
            Update::Group { plain }
        } else if depth_of_address(&e.address, &loops, values) <= around.len() + leaf.spread.len() {
            Update::Thread { plain }
        } else {
            Update::Memory
        }
    }
}

/// Calls `f` on every leaf with the loops around it; shapes of one nest are one leaf.
pub(super) fn visit_leaves(s: &Scheduled, f: &mut dyn FnMut(&Leaf, &[Loop])) {
    let one = |spread: Vec<Loop>, inner: Vec<Loop>, statements| Leaf {
        spread,
        inner,
        statements,
        vector: 1,
        class: None,
    };
    match &s.shape {
        Shape::Flat(leaf) => f(leaf, &[]),
        Shape::Tiles(t) => {
            let mut spread = t.blocks.clone();
            spread.extend([t.rows.clone(), t.columns.clone()]);
            f(&one(spread, Vec::new(), t.statements.clone()), &[]);
        }
        Shape::Scatter(c) => {
            let (row, sources) = (c.row.clone(), c.sources.clone());
            f(&one(row, sources, c.statements.clone()), &[]);
        }
        Shape::Rows(rows) => visit_phases(&rows.phases, &around(rows), f),
    }
}

/// The loops around the phases of a row.
pub(super) fn around(rows: &Rows) -> Vec<Loop> {
    let all = rows.blocks.iter().chain(&rows.points).chain(&rows.serial);
    all.cloned().collect()
}

fn visit_phases(phases: &[Phase], around: &[Loop], f: &mut dyn FnMut(&Leaf, &[Loop])) {
    for phase in phases {
        match phase {
            Phase::Leaf(leaf) => f(leaf, around),
            Phase::Repeat(loops, inner) => {
                let around: Vec<Loop> = around.iter().chain(loops).cloned().collect();
                visit_phases(inner, &around, f);
            }
        }
    }
}

pub(super) fn loops_of(leaf: &Leaf, around: &[Loop]) -> Vec<Loop> {
    let all = around.iter().chain(&leaf.spread).chain(&leaf.inner);
    all.cloned().collect()
}

/// Lines that take a flat index apart, outermost loop first: the variable and its value.
pub(super) fn decoded(loops: &[Loop], flat: &str) -> Vec<(String, String)> {
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
        lines.push((l.var.to_string(), text));
    }
    lines
}

/// Whether an identifier occurs in a text.
pub(super) fn occurs(name: &str, text: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c: char| !part(c)).any(|word| word == name)
}

/// Which values differ between the elements of a vector.
pub(super) fn varies(leaf: &Leaf, values: &Values) -> Vec<bool> {
    let Some(last) = leaf.spread.last().filter(|_| leaf.vector > 1) else {
        return vec![false; values.values.len()];
    };
    let mut varies: Vec<bool> = Vec::new();
    for value in &values.values {
        let of = |v: &ValueId| varies[v.0];
        let own = match &value.op {
            Op::Const(_) => false,
            Op::Load(a) => {
                mentions(&a.offset, &last.var)
                    || a.guards.iter().any(|g| mentions(&g.index, &last.var))
                    || a.gather.iter().any(|(v, ..)| of(v))
            }
            Op::Index(e) => mentions(e, &last.var),
            Op::Unary(_, a) | Op::Cast(a) => of(a),
            Op::Binary(_, _, a, b) | Op::Uniform(a, b) => of(a) || of(b),
            Op::Select(a, b, c) => of(a) || of(b) || of(c),
        };
        varies.push(own);
    }
    varies
}
