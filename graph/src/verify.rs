//! The verifier: every rule a graph must keep, all violations at once.
//!
//! Rules that cannot be decided are decided towards refusal (two points of a map must *provably*
//! write different elements, or resolve the conflict), with two exceptions that cannot be seen in
//! the graph: an index that is data is taken to be inside the container and, in a write without
//! resolution, to differ between points; and an index that is not linear in the map parameters is
//! taken to be inside. The interpreter checks both. Meanings of operators are not checked here.

use crate::compact::visit_nodes;
use crate::dtype::DType;
use crate::expr::Expr;
use crate::graph::{
    Attr, Block, Container, ContainerId, Graph, Index, Library, Lifetime, Map, Memlet, Node,
    NodeKind, Origin, Tasklet,
};
use crate::layout::Storage;
use crate::problem::{Problem, VerifyError};
use crate::range::{Ranges, index_range, is_nonnegative, undetermined_params};
use crate::size::{SymExpr, Symbol};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Checks all rules (see [`Problem`]).
///
/// # Errors
/// Every violation, in the order of the graph.
pub fn verify(graph: &Graph) -> Result<(), Vec<VerifyError>> {
    let mut verifier = Verifier {
        graph,
        found: Vec::new(),
        origin: None,
        written: BTreeSet::new(),
        loops: Vec::new(),
        maps: Vec::new(),
        owners: find_owners(graph),
    };
    verifier.declarations();
    if verifier.ids_exist() {
        verifier.blocks(&graph.body);
        verifier.writers();
        verifier.locals();
        verifier.outputs();
    }
    match verifier.found.is_empty() {
        true => Ok(()),
        false => Err(verifier.found),
    }
}

struct Verifier<'g> {
    graph: &'g Graph,
    found: Vec<VerifyError>,
    origin: Option<Arc<Origin>>,
    /// Containers that hold something at this place.
    written: BTreeSet<ContainerId>,
    /// Symbols of enclosing loops.
    loops: Vec<Symbol>,
    /// Parameters of enclosing maps, one list for each.
    maps: Vec<Vec<(Symbol, SymExpr)>>,
    /// How many enclosing maps are shared by all accesses of a local container.
    owners: BTreeMap<ContainerId, usize>,
}

impl Verifier<'_> {
    fn report(&mut self, problem: Problem) {
        self.found.push(VerifyError {
            origin: self.origin.clone(),
            problem,
        });
    }

    fn name(&self, id: ContainerId) -> String {
        self.graph.container(id).name.clone()
    }

    /// Sizes, containers and the list of inputs.
    fn declarations(&mut self) {
        let g = self.graph;
        let mut names = BTreeSet::new();
        let containers = g.containers.iter().map(|c| c.name.as_str());
        for name in containers {
            if !names.insert(name) {
                self.report(Problem::DuplicateName(name.to_string()));
            }
        }
        let mut symbols = BTreeSet::new();
        for symbol in &g.symbols {
            if !symbols.insert(symbol) {
                self.report(Problem::DuplicateName(symbol.to_string()));
            }
        }
        for (i, c) in g.containers.iter().enumerate() {
            self.container(ContainerId(i as u32), c);
        }
        for id in &g.inputs {
            if id.idx() >= g.containers.len() {
                self.report(Problem::UnknownContainer(id.0));
            }
        }
    }

    fn container(&mut self, id: ContainerId, c: &Container) {
        if c.layout.order().len() != c.shape.len() {
            self.report(Problem::LayoutRank {
                container: c.name.clone(),
                rank: c.shape.len(),
                layout: c.layout.order().len(),
            });
        }
        c.shape.iter().for_each(|s| self.symbols(s));
        let listed = self.graph.inputs.iter().filter(|i| **i == id).count();
        let given = matches!(c.lifetime, Lifetime::Input | Lifetime::Parameter);
        if listed != usize::from(given) {
            self.report(Problem::InputList(c.name.clone()));
        }
        if let Lifetime::Constant(value) = &c.lifetime {
            let shape: Vec<SymExpr> = value.shape.iter().map(|n| (*n).into()).collect();
            if value.dtype != c.dtype || shape != c.shape {
                self.report(Problem::ConstantType(c.name.clone()));
            }
        }
        // Nothing has to write a container without elements.
        let is_empty = c.shape.iter().any(|size| size.as_const() == Some(0));
        if c.lifetime != Lifetime::Transient || is_empty {
            self.written.insert(id);
        }
    }

    /// Whether all ids used by nodes and outputs exist; nothing else can be checked if not.
    fn ids_exist(&mut self) -> bool {
        let n = self.graph.containers.len();
        let mut unknown = Vec::new();
        visit_nodes(&self.graph.body, &mut |node| {
            node.visit_containers(&mut |id, _| {
                if id.idx() >= n {
                    unknown.push((Some(node.origin.clone()), id));
                }
            });
        });
        visit_conditions(&self.graph.body, &mut |id| {
            if id.idx() >= n {
                unknown.push((None, id));
            }
        });
        for output in &self.graph.outputs {
            for id in std::iter::once(output.container).chain(output.updates) {
                if id.idx() >= n {
                    unknown.push((None, id));
                }
            }
        }
        let complete = unknown.is_empty();
        for (origin, id) in unknown {
            self.origin = origin;
            self.report(Problem::UnknownContainer(id.0));
        }
        self.origin = None;
        complete
    }

    fn blocks(&mut self, blocks: &[Block]) {
        for block in blocks {
            match block {
                Block::State(s) => s.nodes.iter().for_each(|n| self.node(n)),
                Block::Loop(l) => {
                    self.symbols(&l.count);
                    self.new_param(&l.symbol);
                    self.loops.push(l.symbol.clone());
                    self.blocks(&l.body);
                    self.loops.pop();
                }
                Block::Branch(b) => {
                    let c = self.graph.container(b.condition);
                    if c.dtype != DType::Bool || !c.shape.is_empty() {
                        self.report(Problem::Condition(c.name.clone()));
                    }
                    self.read(b.condition);
                    let before = self.written.clone();
                    self.blocks(&b.then);
                    let after_then = std::mem::replace(&mut self.written, before);
                    self.blocks(&b.otherwise);
                    self.written = &self.written & &after_then;
                }
            }
        }
    }

    fn node(&mut self, node: &Node) {
        let outside = self.origin.replace(node.origin.clone());
        match &node.kind {
            NodeKind::Library(l) => self.library(l),
            NodeKind::Map(m) => self.map(m),
            NodeKind::Tasklet(t) => self.tasklet(t),
        }
        self.origin = outside;
    }

    fn library(&mut self, l: &Library) {
        if !self.maps.is_empty() {
            self.report(Problem::LibraryInMap(l.op.clone()));
        }
        l.inputs.iter().flatten().for_each(|id| self.read(*id));
        for attr in l.attrs.values() {
            // Symbols in an `Attr::Expr` are the operator's own.
            if let Attr::Sizes(sizes) = attr {
                sizes.iter().for_each(|s| self.symbols(s));
            }
        }
        self.written.extend(l.outputs.iter().flatten());
    }

    fn map(&mut self, m: &Map) {
        self.maps.push(Vec::new());
        for param in &m.params {
            self.symbols(&param.size);
            self.new_param(&param.name);
            if let Some(innermost) = self.maps.last_mut() {
                innermost.push((param.name.clone(), param.size.clone()));
            }
        }
        m.body.iter().for_each(|n| self.node(n));
        self.maps.pop();
    }

    fn tasklet(&mut self, t: &Tasklet) {
        for memlet in &t.inputs {
            self.read(memlet.container);
            if memlet.conflict.is_some() {
                self.report(Problem::ConflictOnRead(self.name(memlet.container)));
            }
            self.memlet(t, memlet);
        }
        self.data_order(t);
        let dtypes: Vec<_> = t.inputs.iter().map(|m| self.dtype(m.container)).collect();
        for (memlet, e) in &t.outputs {
            self.memlet(t, memlet);
            self.expr_symbols(e);
            for used in e.inputs().into_iter().filter(|i| *i >= t.inputs.len()) {
                self.input_position(t, used);
            }
            let (value, dtype) = (e.dtype(&dtypes), self.dtype(memlet.container));
            if value.is_float() && !dtype.is_float() {
                self.report(Problem::DType {
                    container: self.name(memlet.container),
                    dtype,
                    value,
                });
            }
            self.write_once(memlet);
        }
        self.written
            .extend(t.outputs.iter().map(|(m, _)| m.container));
    }

    fn dtype(&self, id: ContainerId) -> DType {
        self.graph.container(id).dtype
    }

    fn input_position(&mut self, t: &Tasklet, used: usize) {
        self.report(Problem::InputPosition {
            inputs: t.inputs.len(),
            used,
        });
    }

    fn memlet(&mut self, t: &Tasklet, memlet: &Memlet) {
        let c = self.graph.container(memlet.container);
        if memlet.subset.len() != c.shape.len() {
            self.report(Problem::SubsetRank {
                container: c.name.clone(),
                rank: c.shape.len(),
                found: memlet.subset.len(),
            });
        }
        let ranges = self.ranges();
        for (dimension, index) in memlet.subset.iter().enumerate() {
            match index {
                Index::Data(i) => match t.inputs.get(*i) {
                    None => self.input_position(t, *i),
                    Some(m) if !self.dtype(m.container).is_int() => {
                        self.report(Problem::DataNotInteger(*i));
                    }
                    Some(_) => {}
                },
                Index::At(e) => {
                    self.symbols(e);
                    if let (None, Some(size)) = (memlet.fill, c.shape.get(dimension)) {
                        self.bounds(c, (dimension, size), e, &ranges);
                    }
                }
            }
        }
    }

    /// Reports an index that provably leaves the dimension for some point.
    fn bounds(
        &mut self,
        c: &Container,
        (dimension, size): (usize, &SymExpr),
        index: &SymExpr,
        ranges: &Ranges,
    ) {
        let no_points = ranges.values().any(|n| n.as_const().is_some_and(|n| n < 1));
        let Some((low, high)) = index_range(index, ranges).filter(|_| !no_points) else {
            return;
        };
        let below = is_nonnegative(&(-low.clone() - 1));
        let above = is_nonnegative(&(high.clone() - size.clone()));
        if below || above {
            self.report(Problem::OutOfBounds {
                container: c.name.clone(),
                dimension,
                size: size.clone(),
                index: index.clone(),
                reached: if below { low } else { high },
            });
        }
    }

    /// Parameters of all enclosing maps.
    fn ranges(&self) -> Ranges {
        self.maps.iter().flatten().cloned().collect()
    }

    /// Checks that no two points write one element, unless a resolution combines them.
    fn write_once(&mut self, memlet: &Memlet) {
        let c = self.graph.container(memlet.container);
        let affine: Vec<SymExpr> = memlet
            .subset
            .iter()
            .filter_map(|i| match i {
                Index::At(e) => Some(e.clone()),
                Index::Data(_) => None,
            })
            .collect();
        let has_data = affine.len() < memlet.subset.len();
        // A local container is another one at each point of the maps that own it.
        let owned = match c.storage {
            Storage::Local => self.owners.get(&memlet.container).copied().unwrap_or(0),
            Storage::Global => 0,
        };
        let among = |maps: &[Vec<(Symbol, SymExpr)>]| -> Ranges {
            maps.iter().flatten().cloned().collect()
        };
        let (owners, inner) = (among(&self.maps[..owned]), among(&self.maps[owned..]));
        let container = c.name.clone();
        if memlet.conflict.is_some() {
            if let Some(param) = undetermined_params(&affine, &owners).into_iter().next()
                && !has_data
            {
                self.report(Problem::LocalReduction { container, param });
            }
            return;
        }
        if let Some(param) = undetermined_params(&affine, &inner).into_iter().next()
            && !has_data
        {
            self.report(Problem::WriteConflict { container, param });
        }
    }

    /// Reports data indices that need each other.
    fn data_order(&mut self, t: &Tasklet) {
        let mut known = BTreeSet::new();
        loop {
            let ready = |m: &Memlet| {
                m.subset.iter().all(|i| match i {
                    Index::Data(d) => known.contains(d) || *d >= t.inputs.len(),
                    Index::At(_) => true,
                })
            };
            let next: Vec<usize> = (0..t.inputs.len())
                .filter(|i| !known.contains(i) && ready(&t.inputs[*i]))
                .collect();
            if next.is_empty() {
                break;
            }
            known.extend(next);
        }
        if known.len() < t.inputs.len() {
            self.report(Problem::DataCircle);
        }
    }

    fn read(&mut self, id: ContainerId) {
        if !self.written.contains(&id) {
            self.report(Problem::ReadBeforeWrite(self.name(id)));
        }
    }

    fn expr_symbols(&mut self, e: &Expr) {
        let mut sizes = Vec::new();
        e.visit(&mut |node| {
            if let Expr::Index(i) = node {
                sizes.push(i.clone());
            }
        });
        sizes.iter().for_each(|s| self.symbols(s));
    }

    fn in_scope(&self, s: &Symbol) -> bool {
        let param = |(name, _): &(Symbol, SymExpr)| name == s;
        self.graph.symbols.contains(s)
            || self.loops.contains(s)
            || self.maps.iter().flatten().any(param)
    }

    fn symbols(&mut self, e: &SymExpr) {
        for s in e.symbols() {
            if !self.in_scope(&s) {
                self.report(Problem::UnknownSymbol(s));
            }
        }
    }

    fn new_param(&mut self, name: &Symbol) {
        if self.in_scope(name) {
            self.report(Problem::ShadowedParam(name.clone()));
        }
    }

    /// Every transient has one writer, what the caller gives has none.
    fn writers(&mut self) {
        for (id, count) in count_writers(&self.graph.body) {
            let c = self.graph.container(id);
            if c.lifetime != Lifetime::Transient {
                self.report(Problem::WriteToInput(c.name.clone()));
            } else if count > 1 {
                self.report(Problem::SeveralWriters(c.name.clone()));
            }
        }
    }

    /// Local containers are used by one map, and not by the caller.
    fn locals(&mut self) {
        let mut users: BTreeMap<ContainerId, usize> = BTreeMap::new();
        visit_nodes(&self.graph.body, &mut |node| {
            let weight = match &node.kind {
                NodeKind::Map(_) => 1,
                _ => 2,
            };
            let used: BTreeSet<_> = node.reads().into_iter().chain(node.writes()).collect();
            for id in used {
                *users.entry(id).or_default() += weight;
            }
        });
        for output in &self.graph.outputs {
            *users.entry(output.container).or_default() += 2;
        }
        for (id, uses) in users {
            let c = self.graph.container(id);
            if c.storage == Storage::Local && uses > 1 {
                self.report(Problem::LocalEscapes(c.name.clone()));
            }
        }
    }

    fn outputs(&mut self) {
        for output in &self.graph.outputs {
            let c = self.graph.container(output.container);
            if !self.written.contains(&output.container) {
                self.report(Problem::OutputNotWritten(c.name.clone()));
            }
            let Some(id) = output.updates else { continue };
            let input = self.graph.container(id);
            let fits = input.dtype == c.dtype && input.shape == c.shape;
            if !fits || !self.graph.inputs.contains(&id) {
                self.report(Problem::Update {
                    output: c.name.clone(),
                    input: input.name.clone(),
                });
            }
        }
    }
}

fn visit_conditions(blocks: &[Block], f: &mut dyn FnMut(ContainerId)) {
    for block in blocks {
        match block {
            Block::State(_) => {}
            Block::Loop(l) => visit_conditions(&l.body, f),
            Block::Branch(b) => {
                f(b.condition);
                visit_conditions(&b.then, f);
                visit_conditions(&b.otherwise, f);
            }
        }
    }
}

/// Nodes that write each container. Of a branch's two sides only one runs; a loop may carry on
/// what was written once before it.
fn count_writers(blocks: &[Block]) -> BTreeMap<ContainerId, usize> {
    let mut count: BTreeMap<ContainerId, usize> = BTreeMap::new();
    for block in blocks {
        match block {
            Block::State(s) => {
                for id in s.nodes.iter().flat_map(Node::writes) {
                    *count.entry(id).or_default() += 1;
                }
            }
            Block::Loop(l) => {
                for (id, n) in count_writers(&l.body) {
                    let all = count.entry(id).or_default();
                    *all = (*all).max(n);
                }
            }
            Block::Branch(b) => {
                let mut either = count_writers(&b.then);
                for (id, n) in count_writers(&b.otherwise) {
                    let most = either.entry(id).or_default();
                    *most = (*most).max(n);
                }
                for (id, n) in either {
                    *count.entry(id).or_default() += n;
                }
            }
        }
    }
    count
}

/// The number of enclosing maps that all accesses of a container share, for each container.
fn find_owners(graph: &Graph) -> BTreeMap<ContainerId, usize> {
    let mut paths: BTreeMap<ContainerId, Vec<usize>> = BTreeMap::new();
    let mut numbered = 0;
    visit_nodes(&graph.body, &mut |node| {
        shared_paths(node, &mut Vec::new(), &mut numbered, &mut paths);
    });
    paths.into_iter().map(|(id, p)| (id, p.len())).collect()
}

fn shared_paths(
    node: &Node,
    path: &mut Vec<usize>,
    numbered: &mut usize,
    paths: &mut BTreeMap<ContainerId, Vec<usize>>,
) {
    if let NodeKind::Map(m) = &node.kind {
        *numbered += 1;
        path.push(*numbered);
        for inner in &m.body {
            shared_paths(inner, path, numbered, paths);
        }
        path.pop();
        return;
    }
    node.visit_containers(&mut |id, _| {
        let shared = paths.entry(id).or_insert_with(|| path.clone());
        let same = shared.iter().zip(path.iter()).take_while(|(a, b)| a == b);
        let same = same.count();
        shared.truncate(same);
    });
}
