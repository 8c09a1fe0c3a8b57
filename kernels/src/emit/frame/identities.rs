//! How elements get the identity of their reduction before the first value is combined into them: by a
//! launch of its own, before a phase, or by the loops that write them.

use super::{Frame, LeafPlan};
use crate::emit::body::{Body, Nest};
use crate::emit::index::{self, Loop};
use crate::emit::leaf::Leaf;
use crate::emit::reduce::Start;
use crate::emit::text::CText;
use crate::emit::{Arg, EmittedFunction, NAME, scalar, widen};
use graph::{ContainerId, Reduction};
use std::collections::BTreeMap;

impl Frame<'_> {
    /// A launch that fills shared containers with their identity.
    pub(super) fn fill_function(&self) -> Option<EmittedFunction> {
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

    /// Gives local containers their identity before a phase that needs it.
    pub(super) fn fill_locals(
        &self,
        nest: &Nest,
        leaves: &mut dyn Iterator<Item = &LeafPlan>,
        t: &mut CText,
    ) {
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
}

impl Leaf<'_> {
    /// Stores identities along the loops that each accumulating effect writes.
    pub(super) fn print_starts(&self, t: &mut CText) {
        for (e, acc) in self.values.effects.iter().zip(self.accumulations) {
            if acc.start != Start::Loops {
                continue;
            }
            let written: Vec<&Loop> = self
                .loops
                .iter()
                .filter(|l| index::mentions(&e.address.offset, &l.var))
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
