//! Lowering of a contraction that sums its columns: its blocks are summed by a function that the contraction
//! calls, and a last launch adds them up.
//!
//! Owns which members of a kernel are sums. If the contraction's blocks do not become final one by one, each sum
//! is a kernel of its own, and is counted as one.

use super::members::members;
use super::split::{Split, SplitReason, Stop, refused, split_reason};
use super::work::{KernelCost, work};
use super::{Lowering, PLACEHOLDER, operations, product_dims};
use crate::contraction::Hooks;
use crate::emit::{self, ProductRoles};
use crate::lower::LowerError;
use crate::plan::Buffer;
use crate::recognize::Recognized;
use graph::{ContainerId, Map, Node, NodeKind, Schedule, Storage};
use std::collections::BTreeSet;

/// First buffer after the contraction's own.
const FIRST: usize = 4;

/// What follows a contraction in its kernel.
pub(super) struct Followers {
    /// What runs point by point.
    pub(super) points: Option<Node>,
    /// Sums of columns, in order.
    pub(super) sums: Vec<Node>,
}

/// Separates sums from the rest of what follows a kernel's contraction.
pub(super) fn followers(rest: &Node) -> Followers {
    let members = members(rest).iter().cloned();
    let (sums, points): (Vec<Node>, Vec<Node>) = members.partition(is_sum);
    Followers {
        points: kernel_of(rest, points),
        sums,
    }
}

fn is_sum(node: &Node) -> bool {
    let mut found = false;
    node.visit_tasklets(&mut |t| found |= t.outputs.iter().any(|(m, _)| m.conflict.is_some()));
    found
}

/// Members as one kernel; a single one as it is.
fn kernel_of(like: &Node, mut members: Vec<Node>) -> Option<Node> {
    match members.len() {
        0 => None,
        1 => members.pop(),
        _ => Some(Node {
            kind: NodeKind::Map(Map {
                params: Vec::new(),
                body: members,
                schedule: Schedule::Kernel,
            }),
            ..like.clone()
        }),
    }
}

impl Lowering<'_> {
    /// Lowers a kernel of a contraction and what follows it, some of it sums.
    pub(super) fn summed_contraction(
        &mut self,
        node: &Node,
        first: &Node,
        followers: &Followers,
        found: &Recognized,
    ) -> Result<(), LowerError> {
        for sum in &followers.sums {
            for id in sum.writes() {
                self.graph.container_mut(id).storage = Storage::Global;
            }
        }
        let written = self.with_sums(node, followers, found);
        let Some(reason) = split_reason(written)? else {
            return Ok(());
        };
        // The sums read what the kernel makes, and they read it from memory.
        let made = self.made(followers, found);
        for id in followers.sums.iter().flat_map(Node::reads) {
            if made.contains(&id) {
                self.graph.container_mut(id).storage = Storage::Global;
            }
        }
        let points = followers.points.iter().cloned();
        let product: Vec<Node> = std::iter::once(first.clone()).chain(points).collect();
        let kernel = self.kernels.len();
        let product = kernel_of(node, product);
        product.iter().try_for_each(|product| self.node(product))?;
        followers.sums.iter().try_for_each(|sum| self.loops(sum))?;
        let parts = product.iter().chain(&followers.sums);
        self.record_split(kernel, Split::new(parts, reason));
        Ok(())
    }

    /// The product and what is written beside it.
    fn made(&self, followers: &Followers, found: &Recognized) -> BTreeSet<ContainerId> {
        let points = followers.points.iter().flat_map(Node::writes);
        points.chain([found.out]).collect()
    }

    /// Writes the kernel as one. Adds nothing if it returns a [`Stop`].
    fn with_sums(
        &mut self,
        node: &Node,
        followers: &Followers,
        found: &Recognized,
    ) -> Result<(), Stop> {
        if self.has_halves(found) {
            return Err(SplitReason::Halves.into());
        }
        let (epilogue_name, sums_name) = (
            format!("{PLACEHOLDER}_epilogue"),
            format!("{PLACEHOLDER}_sums"),
        );
        let hooks = Hooks {
            epilogue: followers.points.as_ref().map(|_| epilogue_name.clone()),
            sums: Some(sums_name.clone()),
            ..self.before.hooks()
        };
        let c = &found.contraction;
        let place = self.requested(node, found);
        let emitted = self.emitted(c, &hooks).map_err(|e| refused(node, e))?;
        let dims = product_dims(c, &emitted.roles).filter(|_| emitted.sum_slots > 0);
        let dims = dims.ok_or(SplitReason::Blocks)?;
        let points = self.points(followers, found, &dims, &epilogue_name)?;
        let emit::Epilogue {
            text: epilogue_text,
            args: epilogue_args,
            in_place,
            mut alike,
        } = points.ok_or(SplitReason::Elements)?;
        alike.insert(found.out);
        let around = emit::Around {
            made: &alike,
            product: in_place.unwrap_or(found.out),
            buffers: emit::Buffers {
                product: 2,
                first: FIRST + self.before.args.len() + epilogue_args.len(),
                pitch: None,
            },
            slots: emitted.sum_slots,
        };
        let sums = Node {
            kind: NodeKind::Map(Map {
                params: Vec::new(),
                body: followers.sums.clone(),
                schedule: Schedule::Kernel,
            }),
            ..node.clone()
        };
        let columns = emit::emit_columns(&self.graph, &sums, &dims, &around)?;
        let columns = columns.ok_or(SplitReason::Elements)?;
        if in_place.is_none() {
            self.graph.container_mut(found.out).storage = Storage::Global;
        }
        for id in &columns.args {
            self.graph.container_mut(*id).storage = match self.graph.container(*id).storage {
                Storage::Local => Storage::Global,
                other => other,
            };
        }
        self.note(&emitted.choices);
        let followed = || followers.points.iter().chain(&followers.sums);
        let flops = emitted.flops + followed().map(|n| operations(n, 1)).sum::<u64>();
        let n_launches = emitted.launches.len() + 1;
        let kernel = self.kernel(node, emitted.generator(), flops, n_launches);
        let product = KernelCost {
            product_ns: emitted.predicted_ns,
            ..KernelCost::default()
        };
        let all = followed().map(|n| work(n, 1));
        self.kernels[kernel].work = all.fold(product, KernelCost::plus);
        self.kernels[kernel].cuts = self.placed(place, &emitted);
        let launches = emitted.launches.iter().map(|l| l.symbol.clone());
        let symbols = launches.chain([format!("{sums_name}_merge")]).collect();
        let text = self.before.text.clone()
            + &epilogue_text
            + &columns.block.replace(emit::NAME, &sums_name)
            + &emitted.source
            + &columns.merge.replace(emit::NAME, &sums_name);
        let source = self.source(node, text, symbols);
        let workspace = self.workspace(emitted.shared_scratch_bytes);
        self.scratch = self.scratch.max(emitted.thread_scratch_bytes);
        let product = Buffer::Container(in_place.unwrap_or(found.out));
        let [a, b] = self.before.operands(found);
        // A kernel without shared scratch does not read the fourth buffer.
        let mut args = vec![a, b, product, workspace.unwrap_or(product)];
        args.extend(self.before.buffers());
        let own = epilogue_args.iter().chain(&columns.args);
        args.extend(own.map(|id| Buffer::Container(*id)));
        args.extend(self.workspace(columns.bytes as usize));
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
        Ok(())
    }

    /// What runs point by point, as a function; `None` if it cannot run on blocks.
    fn points(
        &self,
        followers: &Followers,
        found: &Recognized,
        dims: &ProductRoles,
        name: &str,
    ) -> Result<Option<emit::Epilogue>, LowerError> {
        let Some(points) = &followers.points else {
            return Ok(Some(emit::Epilogue::default()));
        };
        let read = followers
            .sums
            .iter()
            .any(|s| s.reads().contains(&found.out));
        let escapes = self.graph.container(found.out).storage != Storage::Local;
        let buffers = emit::Buffers {
            product: 2,
            first: FIRST + self.before.args.len(),
            pitch: None,
        };
        let replace = !escapes && !read;
        let epilogue = emit::emit_epilogue(&self.graph, points, found.out, replace, dims, buffers)?;
        Ok(epilogue.map(|e| emit::Epilogue {
            text: e.text.replace(emit::NAME, name),
            ..e
        }))
    }
}
