//! C text of a contraction's epilogue: element-wise work on a block of the product that is final and
//! still in cache.
//!
//! Owns the condition under which a map can be one, and the function's frame. [`super::leaf`] writes
//! the computation of one point, and the contraction calls the function.
//!
//! A map is an epilogue if each of its points reads the product at one element, a different one for
//! each point, and writes without resolving conflicts. Then its points may run in any order and as
//! soon as their element is final, and the result may lie where the product lay.

use super::body::{self, Body, Kernel, Nest, Statement};
use super::frame::{Frame, decode};
use super::index::{self, Loop};
use super::leaf::CutLoop;
use super::schedule::{self, Scheduled};
use super::text::CText;
use super::{NAME, values};
use crate::lower::LowerError;
use graph::{ContainerId, Graph, Node, SymExpr};
use std::collections::BTreeSet;

/// A dimension of the product, as the contraction numbers its flat indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProductDim {
    /// Number of positions, at least 2.
    pub(crate) size: i64,
    /// Elements between neighbours.
    pub(crate) stride: i64,
}

/// The product's dimensions by role; each list from the largest stride to the smallest.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProductRoles {
    pub(crate) batch: Vec<ProductDim>,
    pub(crate) m: Vec<ProductDim>,
    pub(crate) n: Vec<ProductDim>,
}

/// A function with the signature of `contraction::Hooks::epilogue`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Epilogue {
    /// C text with [`super::NAME`] for the function's name.
    pub(crate) text: String,
    /// What it reads and writes apart from the product, in the order of its buffers from
    /// `first_buffer` on.
    pub(crate) args: Vec<ContainerId>,
    /// A container that may take the product's place in memory, because the product is read nowhere
    /// else and each element is replaced by the one made from it.
    pub(crate) in_place: Option<ContainerId>,
    /// Containers that it writes element for element where it reads the product, in the product's layout.
    pub(crate) alike: BTreeSet<ContainerId>,
}

/// Where an epilogue finds its buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    /// The product.
    pub(crate) product: usize,
    /// The first of its own.
    pub(crate) first: usize,
    /// Floats between the rows of the block, if the product's buffer holds only the block.
    pub(crate) pitch: Option<i64>,
}

/// The blocks of a product that an epilogue is called for.
struct Blocks<'a> {
    /// Loops of the flat index `batch`, outermost first.
    batch: &'a [Loop],
    /// Loops of the flat index that runs from `sh_m0` to `sh_m1`.
    rows: &'a [Loop],
    /// The loop that runs from `sh_n0` to `sh_n1`.
    columns: &'a Loop,
    product: ContainerId,
    /// Takes the product's place in memory.
    in_place: Option<ContainerId>,
    buffers: Buffers,
}

/// Emits the map `node` as an epilogue of what computes `product`; `None` if it cannot be one. With
/// `replace`, its result may take the product's place in memory.
///
/// # Errors
/// As for any map.
pub(crate) fn emit_epilogue(
    graph: &Graph,
    node: &Node,
    product: ContainerId,
    replace: bool,
    dims: &ProductRoles,
    buffers: Buffers,
) -> Result<Option<Epilogue>, LowerError> {
    let mut kernel = super::prepared(body::kernel_of(graph, node, true)?);
    // The contraction leaves its sums in single precision; nothing else reads them there.
    if let Some(array) = kernel.arrays.get_mut(&product) {
        array.dtype = values::arithmetic(array.dtype);
    }
    let Some((loops, mut statements)) = only_leaf(&mut kernel) else {
        return Ok(None);
    };
    let Some(read) = product_offset(&statements, product) else {
        return Ok(None);
    };
    let Some([batch, m, n]) = roles(&read, loops, dims) else {
        return Ok(None);
    };
    if let Some(pitch) = buffers.pitch {
        read_from_block(&mut statements, product, flat(&m) * pitch + flat(&n));
    }
    let in_place = (replace && buffers.pitch.is_none())
        .then(|| replacement(&kernel, &statements, &read, product))
        .flatten();
    let alike = alike(&statements, &read);
    let extents = &mut kernel.extents;
    let [batch, m, n] =
        [batch, m, n].map(|l| schedule::joined_in_order(l, &mut statements, extents));
    // The vector loop must be one loop: a block begins and ends anywhere in it.
    let [columns] = n.as_slice() else {
        return Ok(None);
    };
    let scheduled = Scheduled {
        parallel: [batch.clone(), m.clone()].concat(),
        strip: None,
        phases: vec![Nest {
            loops: vec![columns.clone()],
            body: Body::Leaf(statements),
        }],
        partial: BTreeSet::new(),
        arrays: kernel.arrays,
        extents: kernel.extents,
    };
    let blocks = Blocks {
        batch: &batch,
        rows: &m,
        columns,
        product,
        in_place,
        buffers,
    };
    let (text, args) = print_epilogue(&scheduled, &blocks);
    Ok(Some(Epilogue {
        text,
        args,
        in_place,
        alike,
    }))
}

/// Containers that are written where the product is read.
fn alike(statements: &[Statement], read: &SymExpr) -> BTreeSet<ContainerId> {
    let writes = statements.iter().flat_map(|s| &s.writes);
    let same = writes.filter(|w| w.place.offset == *read && w.place.gather.is_empty());
    same.map(|w| w.place.container).collect()
}

/// Prints an epilogue; returns the containers of its own buffers, in order.
fn print_epilogue(s: &Scheduled, blocks: &Blocks) -> (String, Vec<ContainerId>) {
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

/// The loops and statements of a kernel that is one nest without conflicts.
pub(super) fn only_leaf(kernel: &mut Kernel) -> Option<(Vec<Loop>, Vec<Statement>)> {
    let [nest] = kernel.phases.as_mut_slice() else {
        return None;
    };
    let Body::Leaf(statements) = &mut nest.body else {
        return None;
    };
    let writes = || statements.iter().flat_map(|s| &s.writes);
    if writes().any(|w| w.conflict.is_some() || !w.place.guards.is_empty()) {
        return None;
    }
    let loops = kernel.outer.iter().chain(&nest.loops).cloned().collect();
    Some((loops, std::mem::take(statements)))
}

/// The offset at which the product is read, if there is only one.
fn product_offset(statements: &[Statement], product: ContainerId) -> Option<SymExpr> {
    let reads = statements.iter().flat_map(|s| &s.reads);
    let writes = statements.iter().flat_map(|s| &s.writes);
    let mut offset = None;
    for p in reads.filter(|p| p.container == product) {
        let plain = p.gather.is_empty() && p.guards.is_empty();
        if !plain || offset.as_ref().is_some_and(|known| *known != p.offset) {
            return None;
        }
        offset = Some(p.offset.clone());
    }
    let written = writes.clone().any(|w| w.place.container == product);
    offset.filter(|_| !written)
}

/// The flat index over loops, the last one innermost.
fn flat(loops: &[Loop]) -> SymExpr {
    let of = |at: SymExpr, l: &Loop| at * l.size + SymExpr::from(&l.var);
    loops.iter().fold(SymExpr::default(), of)
}

/// Reads the product at `offset` of its buffer.
fn read_from_block(statements: &mut [Statement], product: ContainerId, offset: SymExpr) {
    let reads = statements.iter_mut().flat_map(|s| &mut s.reads);
    for read in reads.filter(|r| r.container == product) {
        read.offset = offset.clone();
    }
}

/// The loops as dimensions of the product, if they are in one-to-one correspondence.
pub(super) fn roles(
    read: &SymExpr,
    mut loops: Vec<Loop>,
    dims: &ProductRoles,
) -> Option<[Vec<Loop>; 3]> {
    let known = loops.iter().map(|l| index::coefficient(read, &l.var));
    let known: Vec<i64> = known.collect::<Option<_>>()?;
    let sum = loops
        .iter()
        .zip(&known)
        .fold(SymExpr::default(), |sum, (l, c)| {
            sum + SymExpr::from(&l.var) * *c
        });
    if sum != *read {
        return None;
    }
    let mut of = |dims: &[ProductDim]| -> Option<Vec<Loop>> {
        let each = dims.iter().map(|dim| digits(read, &mut loops, *dim));
        Some(each.collect::<Option<Vec<_>>>()?.concat())
    };
    let found = [of(&dims.batch)?, of(&dims.m)?, of(&dims.n)?];
    loops.is_empty().then_some(found)
}

/// Takes the loops that together run through a dimension: one, or one for each digit of its position,
/// from the highest to the lowest.
fn digits(read: &SymExpr, loops: &mut Vec<Loop>, dim: ProductDim) -> Option<Vec<Loop>> {
    let mut taken = Vec::new();
    let mut reached = 1;
    while reached < dim.size {
        let step = Some(dim.stride * reached);
        let fits = |l: &Loop| {
            l.size > 1
                && dim.size % (reached * l.size) == 0
                && index::coefficient(read, &l.var) == step
        };
        let next = loops.remove(loops.iter().position(fits)?);
        reached *= next.size;
        taken.push(next);
    }
    taken.reverse();
    Some(taken)
}

/// A container that the map writes element for element where it reads the product.
fn replacement(
    kernel: &Kernel,
    statements: &[Statement],
    read: &SymExpr,
    product: ContainerId,
) -> Option<ContainerId> {
    let [statement] = statements else {
        return None;
    };
    let of = &kernel.arrays[&product];
    let fits = |id: &ContainerId| {
        let array = &kernel.arrays[id];
        array.dtype == of.dtype && array.len == of.len
    };
    let writes = statement.writes.iter();
    let mut same = writes.filter(|w| w.place.offset == *read && w.place.gather.is_empty());
    let container = same.next()?.place.container;
    fits(&container).then_some(container)
}
