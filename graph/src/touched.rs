//! Which elements of each container in memory a node touches, as far as its indices tell.
//!
//! Sizes are numbers. Nothing here knows of caches: an element counts once, however often it is read.

use crate::graph::{ContainerId, Graph, Index, Map, Memlet, Node, NodeKind, Param};
use crate::layout::Storage;
use crate::size::SymExpr;
use std::collections::{BTreeMap, BTreeSet};

/// What a node reads from and writes to memory, by container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// What it reads.
    pub reads: BTreeMap<ContainerId, Touched>,
    /// What it writes.
    pub writes: BTreeMap<ContainerId, Touched>,
}

/// The elements of one container that are touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Elements that any schedule of the node touches.
    least: i64,
    /// Elements of the container.
    whole: i64,
    /// Bytes of an element.
    element: i64,
    parts: BTreeSet<Vec<Extent>>,
}

/// The positions along one dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Extent {
    /// The first and the last one, if they are known, and how many there are at most.
    At(Option<(i64, i64)>, i64),
    /// The values of a container, and how many there are at most.
    Data(ContainerId, i64),
}

impl Extent {
    fn most(&self) -> i64 {
        match self {
            Extent::At(_, n) | Extent::Data(_, n) => *n,
        }
    }
}

impl Touched {
    /// Bytes that are touched whatever the data is; an index that is not affine counts as one position.
    pub fn least_bytes(&self) -> i64 {
        self.least * self.element
    }

    /// Bytes that are touched at most; parts that overlap count twice, but never more than the container.
    pub fn most_bytes(&self) -> i64 {
        self.sum(|_| true)
    }

    /// Like [`Touched::most_bytes`], without what data decides.
    pub fn sure_bytes(&self) -> i64 {
        self.sum(|part| !part.iter().any(|e| matches!(e, Extent::Data(..))))
    }

    /// Whether data decides what is touched.
    pub fn depends_on_data(&self) -> bool {
        let mut extents = self.parts.iter().flatten();
        extents.any(|e| matches!(e, Extent::Data(..)))
    }

    /// Adds what another node touches of the container.
    pub fn add(&mut self, other: &Touched) {
        self.least = self.least.max(other.least);
        (self.whole, self.element) = (other.whole, other.element);
        self.parts.extend(other.parts.iter().cloned());
    }

    fn sum(&self, counts: impl Fn(&[Extent]) -> bool) -> i64 {
        let parts = self.parts.iter().filter(|part| counts(part));
        let elements = parts.map(|part| {
            let extents = part.iter().map(Extent::most);
            extents.fold(1, i64::saturating_mul)
        });
        let sum = elements.fold(0, i64::saturating_add);
        sum.min(self.whole) * self.element
    }
}

/// What a node, with all that is inside it, reads from and writes to memory.
pub fn traffic(graph: &Graph, node: &Node) -> Traffic {
    let mut found = Traffic::default();
    collect(graph, node, &mut Vec::new(), &mut found);
    found
}

fn collect<'a>(graph: &Graph, node: &'a Node, params: &mut Vec<&'a Param>, found: &mut Traffic) {
    match &node.kind {
        NodeKind::Map(Map {
            params: own, body, ..
        }) => {
            let before = params.len();
            params.extend(own);
            for inner in body {
                collect(graph, inner, params, found);
            }
            params.truncate(before);
        }
        NodeKind::Tasklet(tasklet) => {
            let written = tasklet.outputs.iter().map(|(memlet, _)| memlet);
            let read = tasklet.inputs.iter().map(|memlet| (memlet, false));
            for (memlet, is_write) in read.chain(written.map(|memlet| (memlet, true))) {
                if graph.container(memlet.container).storage != Storage::Local {
                    let touched = touched(graph, memlet, &tasklet.inputs, params);
                    let of = match is_write {
                        true => &mut found.writes,
                        false => &mut found.reads,
                    };
                    of.entry(memlet.container).or_default().add(&touched);
                }
            }
        }
        NodeKind::Library(_) => {
            for id in node.reads() {
                found.reads.entry(id).or_default().add(&whole(graph, id));
            }
            for id in node.writes() {
                found.writes.entry(id).or_default().add(&whole(graph, id));
            }
        }
    }
}

/// The whole container, all of which an operator that is not expanded may touch.
fn whole(graph: &Graph, id: ContainerId) -> Touched {
    let container = graph.container(id);
    let sizes = container.shape.iter().map(|n| n.as_const().unwrap_or(0));
    let part: Vec<Extent> = sizes.map(|n| Extent::At(Some((0, n - 1)), n)).collect();
    let whole = part.iter().map(Extent::most).fold(1, i64::saturating_mul);
    Touched {
        least: whole,
        whole,
        element: container.dtype.bytes() as i64,
        parts: BTreeSet::from([part]),
    }
}

/// What a memlet touches in all points of the maps around it.
fn touched(graph: &Graph, memlet: &Memlet, inputs: &[Memlet], params: &[&Param]) -> Touched {
    let container = graph.container(memlet.container);
    let sizes = || container.shape.iter().map(|n| n.as_const().unwrap_or(0));
    let mut part = Vec::new();
    let mut least: i64 = 1;
    for (index, size) in memlet.subset.iter().zip(sizes()) {
        let extent = match index {
            Index::At(index) => {
                least = least.saturating_mul(positions(index, params).min(size));
                Extent::At(range(index, params), most(index, params).min(size))
            }
            Index::Data(n) => {
                least = 0;
                let values = inputs.get(*n).map_or(size, |of| {
                    let touched = touched_values(graph, of, params);
                    touched.min(size)
                });
                let index = inputs.get(*n).map_or(memlet.container, |of| of.container);
                Extent::Data(index, values)
            }
        };
        part.push(extent);
    }
    Touched {
        least,
        whole: sizes().fold(1, i64::saturating_mul),
        element: container.dtype.bytes() as i64,
        parts: BTreeSet::from([part]),
    }
}

/// How many values an index that data gives can have.
fn touched_values(graph: &Graph, memlet: &Memlet, params: &[&Param]) -> i64 {
    let shape = &graph.container(memlet.container).shape;
    let each = memlet.subset.iter().zip(shape).map(|(index, size)| {
        let size = size.as_const().unwrap_or(0);
        match index {
            Index::At(index) => most(index, params).min(size),
            Index::Data(_) => size,
        }
    });
    each.fold(1, i64::saturating_mul)
}

/// Sizes of the maps' dimensions that an index depends on.
fn sizes(index: &SymExpr, params: &[&Param]) -> impl Iterator<Item = i64> {
    let mentioned = params.iter().filter(|p| index.mentions(&p.name));
    let sizes: Vec<i64> = mentioned.filter_map(|p| p.size.as_const()).collect();
    sizes.into_iter()
}

/// The first and the last value of an affine index.
fn range(index: &SymExpr, params: &[&Param]) -> Option<(i64, i64)> {
    let (terms, constant) = index.as_affine()?;
    let (mut low, mut high) = (constant, constant);
    for (name, step) in &terms {
        let size = params.iter().find(|p| p.name == *name)?.size.as_const()?;
        let reach = step.saturating_mul((size - 1).max(0));
        match reach < 0 {
            true => low = low.saturating_add(reach),
            false => high = high.saturating_add(reach),
        }
    }
    Some((low, high))
}

/// Most values that an index can have.
fn most(index: &SymExpr, params: &[&Param]) -> i64 {
    let points = sizes(index, params).fold(1, i64::saturating_mul);
    match range(index, params) {
        Some((low, high)) => points.min(high.saturating_sub(low).saturating_add(1)),
        None => points,
    }
}

/// The number of values of an index: for an affine one as [`most`] counts them, for any other 1.
fn positions(index: &SymExpr, params: &[&Param]) -> i64 {
    // The steps of one part of a window may leave gaps between those of the other. Quotients and remainders
    // have at least one value.
    index.as_affine().map_or(1, |_| most(index, params))
}
