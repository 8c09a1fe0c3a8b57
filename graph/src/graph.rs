//! The graph: what there is. Containers hold data, nodes move and compute it.
//!
//! # Meaning
//! A [`Graph`] is a list of [`Block`]s executed in order. A [`State`] is a list of [`Node`]s whose
//! order is one valid execution order. Dependencies are derived from the containers that nodes
//! read and write, and are stored nowhere else. Every transient container is written by one node
//! (which may write it many times under a conflict resolution).
//!
//! A *library node* names an operator of the `ops` room; its meaning is that operator's `evaluate`.
//! A *map* runs its body for every point of its index space, in any order; a *tasklet* reads scalars
//! through memlets, computes expressions and writes scalars through memlets. Points of a map are
//! independent except for writes with a conflict resolution, which are combined in any order; a container
//! written under a resolution holds that resolution's identity before the first write. The nodes of
//! a map's body run in sequence at each point, so a body may hold maps that consume what earlier
//! ones made at the same point: this is how a fused kernel is written down.
//!
//! This file only holds data; text form, verification, interpretation and rewriting are elsewhere.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::Binary;
use crate::layout::{Layout, Storage};
use crate::scalar::Scalar;
use crate::size::{SymExpr, Symbol};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Identifies a container within its graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ContainerId(pub u32);

impl ContainerId {
    /// Position in [`Graph::containers`].
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}

/// What a container's data is to the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Lifetime {
    /// Given by the caller at every call.
    Input,
    /// Given by the caller, part of the model's state (parameters and buffers).
    Parameter,
    /// Known when the graph is made.
    Constant(Arc<Tensor>),
    /// Made inside; exists from its write to its last read.
    Transient,
}

/// A multidimensional array.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    /// Unique within the graph; an identifier (`[A-Za-z_][A-Za-z0-9_.]*`).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Logical sizes, outermost first.
    pub shape: Vec<SymExpr>,
    /// Order of dimensions in memory.
    pub layout: Layout,
    /// Where it lives.
    pub storage: Storage,
    /// The owner of its data.
    pub lifetime: Lifetime,
}

/// Where a node came from; errors, reports and emitted kernels name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Origin {
    /// Name in the model file or exported graph (`layer1.0.conv1`, `Conv_3`).
    pub node: String,
    /// Module path, if there is one.
    pub module: String,
    /// Source file and line, if known.
    pub source: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.node.is_empty() {
            "<unnamed>"
        } else {
            &self.node
        })?;
        if !self.module.is_empty() {
            write!(f, " in {}", self.module)?;
        }
        if !self.source.is_empty() {
            write!(f, " ({})", self.source)?;
        }
        Ok(())
    }
}

/// The part of a training step a node belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Stage {
    /// Computes the model's outputs.
    #[default]
    Forward,
    /// Computes gradients.
    Backward,
    /// Updates parameters.
    Optimizer,
}

/// One step of computation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it does.
    pub kind: NodeKind,
    /// Where it came from.
    pub origin: Arc<Origin>,
    /// Forward, backward or optimizer.
    pub stage: Stage,
}

/// What a node does.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeKind {
    /// An operator, not yet expanded.
    Library(Library),
    /// A parallel index space with its body.
    Map(Map),
    /// Scalar computation.
    Tasklet(Tasklet),
}

/// A value attached to an operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// Integer.
    Int(i64),
    /// Real number.
    Float(f64),
    /// Truth value.
    Bool(bool),
    /// Text.
    Str(String),
    /// Integers.
    Ints(Vec<i64>),
    /// Real numbers.
    Floats(Vec<f64>),
    /// Symbolic sizes.
    Sizes(Vec<SymExpr>),
    /// Element type.
    DType(DType),
    /// Scalar expression over the node's inputs.
    Expr(Expr),
}

/// Attributes by name, ordered.
pub type Attrs = BTreeMap<String, Attr>;

/// An operator of the `ops` room.
#[derive(Clone, Debug, PartialEq)]
pub struct Library {
    /// The operator's name in the registry of `ops`.
    pub op: String,
    /// Attributes.
    pub attrs: Attrs,
    /// Inputs in the operator's order; `None` for an absent optional one.
    pub inputs: Vec<Option<ContainerId>>,
    /// Outputs in the operator's order; `None` for one nobody needs.
    pub outputs: Vec<Option<ContainerId>>,
}

/// How a map runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Schedule {
    /// Not decided.
    #[default]
    Default,
    /// One kernel: the outermost map of a fused group.
    Kernel,
    /// Inside a kernel, one thread.
    Sequential,
}

/// One dimension of a map: `name` in `[0, size)`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Param {
    /// Name, unique among enclosing maps.
    pub name: Symbol,
    /// Number of points.
    pub size: SymExpr,
}

/// A parallel index space that owns its body.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// Dimensions, outermost first; none for a plain group.
    pub params: Vec<Param>,
    /// Nodes run in sequence at every point.
    pub body: Vec<Node>,
    /// How it runs.
    pub schedule: Schedule,
}

/// Combines several writes to one element.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reduction {
    /// Sum, identity 0.
    Sum,
    /// Product, identity 1.
    Prod,
    /// Maximum, identity −∞ (or the smallest integer).
    Max,
    /// Minimum, identity +∞ (or the largest integer).
    Min,
}

impl Reduction {
    /// All of them.
    pub const ALL: [Reduction; 4] = [
        Reduction::Sum,
        Reduction::Prod,
        Reduction::Max,
        Reduction::Min,
    ];

    /// The name in text form.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "prod",
            Reduction::Max => "max",
            Reduction::Min => "min",
        }
    }

    /// The scalar function that combines two values.
    pub fn combine(self) -> Binary {
        match self {
            Reduction::Sum => Binary::Add,
            Reduction::Prod => Binary::Mul,
            Reduction::Max => Binary::Max,
            Reduction::Min => Binary::Min,
        }
    }

    /// The value that changes nothing.
    pub fn identity(self, dtype: DType) -> Scalar {
        let float = dtype.is_float();
        match self {
            Reduction::Sum if float => Scalar::Float(0.0),
            Reduction::Sum => Scalar::Int(0),
            Reduction::Prod if float => Scalar::Float(1.0),
            Reduction::Prod => Scalar::Int(1),
            Reduction::Max if float => Scalar::Float(f64::NEG_INFINITY),
            Reduction::Min if float => Scalar::Float(f64::INFINITY),
            Reduction::Max => Scalar::Int(int_bounds(dtype).0),
            Reduction::Min => Scalar::Int(int_bounds(dtype).1),
        }
    }
}

fn int_bounds(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::Bool => (0, 1),
        DType::U8 => (0, 255),
        DType::I8 => (-128, 127),
        DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    }
}

/// Position along one dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Index {
    /// An expression of map parameters and sizes.
    At(SymExpr),
    /// The integer value of another input of the same tasklet (gather, scatter).
    Data(usize),
}

impl From<SymExpr> for Index {
    fn from(e: SymExpr) -> Self {
        Index::At(e)
    }
}

/// One element of a container, as seen from inside a tasklet.
#[derive(Clone, Debug, PartialEq)]
pub struct Memlet {
    /// The container.
    pub container: ContainerId,
    /// One index per dimension.
    pub subset: Vec<Index>,
    /// If set, an index may fall outside the container: a read then gives this value and a write is
    /// dropped. If not set, every index is inside.
    pub fill: Option<Scalar>,
    /// For writes: how several writes of one element combine.
    pub conflict: Option<Reduction>,
}

impl Memlet {
    /// Access of one element by affine indices.
    pub fn new(container: ContainerId, subset: impl IntoIterator<Item = SymExpr>) -> Self {
        Memlet {
            container,
            subset: subset.into_iter().map(Index::At).collect(),
            fill: None,
            conflict: None,
        }
    }
    /// Returns the memlet with a value for reads outside of the container (writes outside are dropped).
    pub fn or_fill(mut self, value: f64) -> Self {
        self.fill = Some(Scalar::Float(value));
        self
    }
    /// Returns the memlet with a conflict resolution.
    pub fn reduce(mut self, reduction: Reduction) -> Self {
        self.conflict = Some(reduction);
        self
    }
}

/// Scalar computation: `outputs[i] := expression(inputs)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tasklet {
    /// What `In(i)` reads.
    pub inputs: Vec<Memlet>,
    /// Where results go. All expressions are evaluated before any result is written.
    pub outputs: Vec<(Memlet, Expr)>,
}

/// Nodes in execution order.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct State {
    /// Nodes in a valid execution order.
    pub nodes: Vec<Node>,
}

/// Structured control flow.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// Dataflow.
    State(State),
    /// Repetition.
    Loop(Loop),
    /// Choice.
    Branch(Branch),
}

/// `for symbol in 0..count { body }`.
#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    /// The iteration's number, usable in memlets of the body.
    pub symbol: Symbol,
    /// Number of iterations.
    pub count: SymExpr,
    /// What is repeated.
    pub body: Vec<Block>,
}

/// `if condition { then } else { otherwise }`.
#[derive(Clone, Debug, PartialEq)]
pub struct Branch {
    /// A scalar `bool` container.
    pub condition: ContainerId,
    /// Taken when true.
    pub then: Vec<Block>,
    /// Taken when false.
    pub otherwise: Vec<Block>,
}

/// A value the graph returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Where it is.
    pub container: ContainerId,
    /// The input it replaces after the call (a buffer the model mutates), if any.
    pub updates: Option<ContainerId>,
}

/// A stateful dataflow graph.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    /// Sizes unknown until a kernel is specialized; each at least 1.
    pub symbols: Vec<Symbol>,
    /// Containers by [`ContainerId`].
    pub containers: Vec<Container>,
    /// What happens.
    pub body: Vec<Block>,
    /// Inputs and parameters in the caller's order.
    pub inputs: Vec<ContainerId>,
    /// Results in the caller's order.
    pub outputs: Vec<Output>,
}

impl Graph {
    /// An empty graph with one empty state.
    pub fn new(name: impl Into<String>) -> Self {
        Graph {
            name: name.into(),
            body: vec![Block::State(State::default())],
            ..Graph::default()
        }
    }

    /// The container.
    pub fn container(&self, id: ContainerId) -> &Container {
        &self.containers[id.idx()]
    }

    /// The container, to change.
    pub fn container_mut(&mut self, id: ContainerId) -> &mut Container {
        &mut self.containers[id.idx()]
    }

    /// All ids, in order.
    pub fn container_ids(&self) -> impl Iterator<Item = ContainerId> + use<> {
        (0..self.containers.len() as u32).map(ContainerId)
    }

    /// The container of that name.
    pub fn find(&self, name: &str) -> Option<ContainerId> {
        self.container_ids()
            .find(|id| self.container(*id).name == name)
    }

    /// Adds a container; its name is made unique by a number if taken.
    pub fn add_container(&mut self, mut container: Container) -> ContainerId {
        container.name = self.unique_name(&container.name);
        self.containers.push(container);
        ContainerId(self.containers.len() as u32 - 1)
    }

    fn unique_name(&self, wanted: &str) -> String {
        if self.find(wanted).is_none() {
            return wanted.to_string();
        }
        (1..)
            .map(|n| format!("{wanted}_{n}"))
            .find(|name| self.find(name).is_none())
            .unwrap_or_default()
    }

    /// Adds a row-major container made inside the graph.
    pub fn add_transient(&mut self, name: &str, dtype: DType, shape: Vec<SymExpr>) -> ContainerId {
        self.add_container(Container {
            name: name.to_string(),
            dtype,
            layout: Layout::row_major(shape.len()),
            shape,
            storage: Storage::default(),
            lifetime: Lifetime::Transient,
        })
    }

    /// Adds an input (or parameter) and lists it in [`Graph::inputs`].
    pub fn add_input(
        &mut self,
        name: &str,
        dtype: DType,
        shape: Vec<SymExpr>,
        lifetime: Lifetime,
    ) -> ContainerId {
        let id = self.add_transient(name, dtype, shape);
        self.container_mut(id).lifetime = lifetime;
        self.inputs.push(id);
        id
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, name: &str, value: Tensor) -> ContainerId {
        let shape = value.shape.iter().map(|n| SymExpr::from(*n)).collect();
        let id = self.add_transient(name, value.dtype, shape);
        self.container_mut(id).lifetime = Lifetime::Constant(Arc::new(value));
        id
    }

    /// Lists a container as a result.
    pub fn add_output(&mut self, container: ContainerId) {
        self.outputs.push(Output {
            container,
            updates: None,
        });
    }

    /// The last state, made if there is none: where builders append.
    pub fn last_state(&mut self) -> &mut State {
        if !matches!(self.body.last(), Some(Block::State(_))) {
            self.body.push(Block::State(State::default()));
        }
        match self.body.last_mut() {
            Some(Block::State(s)) => s,
            _ => unreachable!("a state was just pushed"),
        }
    }

    /// The only state of a graph without control flow; `None` if there is control flow.
    pub fn single_state(&self) -> Option<&State> {
        match self.body.as_slice() {
            [Block::State(s)] => Some(s),
            _ => None,
        }
    }

    /// Like [`Graph::single_state`], to change.
    pub fn single_state_mut(&mut self) -> Option<&mut State> {
        match self.body.as_mut_slice() {
            [Block::State(s)] => Some(s),
            _ => None,
        }
    }
}

impl Node {
    /// Containers read, each once, in order of first occurrence.
    pub fn reads(&self) -> Vec<ContainerId> {
        let mut found = Vec::new();
        self.visit_containers(&mut |id, write| {
            if !write && !found.contains(&id) {
                found.push(id);
            }
        });
        found
    }

    /// Containers written, each once, in order of first occurrence.
    pub fn writes(&self) -> Vec<ContainerId> {
        let mut found = Vec::new();
        self.visit_containers(&mut |id, write| {
            if write && !found.contains(&id) {
                found.push(id);
            }
        });
        found
    }

    /// Calls `f(container, is_write)` for every access.
    pub fn visit_containers(&self, f: &mut dyn FnMut(ContainerId, bool)) {
        match &self.kind {
            NodeKind::Library(l) => {
                l.inputs.iter().flatten().for_each(|id| f(*id, false));
                l.outputs.iter().flatten().for_each(|id| f(*id, true));
            }
            NodeKind::Map(m) => m.body.iter().for_each(|n| n.visit_containers(f)),
            NodeKind::Tasklet(t) => {
                t.inputs.iter().for_each(|m| f(m.container, false));
                t.outputs.iter().for_each(|(m, _)| f(m.container, true));
            }
        }
    }

    /// Calls `f` on every tasklet inside.
    pub fn visit_tasklets<'a>(&'a self, f: &mut dyn FnMut(&'a Tasklet)) {
        match &self.kind {
            NodeKind::Library(_) => {}
            NodeKind::Map(m) => m.body.iter().for_each(|n| n.visit_tasklets(f)),
            NodeKind::Tasklet(t) => f(t),
        }
    }

    /// Calls `f` on every tasklet inside, to change it.
    pub fn visit_tasklets_mut(&mut self, f: &mut dyn FnMut(&mut Tasklet)) {
        match &mut self.kind {
            NodeKind::Library(_) => {}
            NodeKind::Map(m) => m.body.iter_mut().for_each(|n| n.visit_tasklets_mut(f)),
            NodeKind::Tasklet(t) => f(t),
        }
    }
}
