//! The reference interpreter: the meaning of a graph, executed slowly and obviously.
//!
//! Everything else (fusion, emitted kernels) is tested against it. Nodes run in order, map points
//! in lexicographic order. A container some node writes under a conflict resolution holds that
//! resolution's identity until its first write; other elements are unset until written, and reading
//! an unset one is an error. Containers keep their contents over the iterations of a loop.
//! The meaning of library nodes comes from outside, through [`LibraryMeaning`].

use crate::bind::complete_bindings;
use crate::dtype::DType;
use crate::graph::{
    Block, Branch, ContainerId, Graph, Index, Library, Lifetime, Loop, Map, Memlet, Node, NodeKind,
    Origin, Reduction, Tasklet,
};
use crate::meaning::{InterpretError, LibraryMeaning};
use crate::scalar::Scalar;
use crate::size::{Bindings, SymExpr, Symbol};
use crate::tensor::{Tensor, Values};
use std::sync::Arc;

/// How floating-point values are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precision {
    /// Double precision throughout, whatever is declared.
    Double,
    /// Rounded to the declared type in every container. Partial results of a conflict resolution
    /// are held in double precision and rounded when read.
    Declared,
}

/// The outputs of `graph` for `inputs` (in the order of [`Graph::inputs`]), in the order of
/// [`Graph::outputs`]. Sizes not in `bindings` follow from the inputs' shapes.
///
/// # Errors
/// See [`InterpretError`].
pub fn interpret(
    graph: &Graph,
    inputs: &[Tensor],
    bindings: &Bindings,
    library: &dyn LibraryMeaning,
    precision: Precision,
) -> Result<Vec<Tensor>, InterpretError> {
    let shapes: Vec<_> = inputs.iter().map(|t| t.shape.clone()).collect();
    let bindings = complete_bindings(graph, &shapes, bindings)?;
    let graph = graph.bind(&bindings);
    let mut machine = Machine::new(&graph, inputs, library, precision)?;
    machine.blocks(&graph.body)?;
    machine.outputs()
}

/// A container's contents.
struct Cell {
    tensor: Tensor,
    /// Which elements hold a value; `None` if all do.
    set: Option<Vec<bool>>,
}

struct Machine<'g> {
    graph: &'g Graph,
    library: &'g dyn LibraryMeaning,
    precision: Precision,
    /// Contents by container; `None` before the first access.
    memory: Vec<Option<Cell>>,
    /// How a container's conflicts resolve, if any write has a resolution.
    reductions: Vec<Option<Reduction>>,
    /// Names of loop symbols and map parameters in scope, outermost first, and their values.
    names: Vec<Symbol>,
    values: Vec<i64>,
}

/// An index expression with symbols resolved to positions in scope.
enum Resolved {
    Affine(Vec<(usize, i64)>, i64),
    Other(SymExpr),
    Data(usize),
}

/// A tasklet ready to run at many points.
struct Ready<'g> {
    tasklet: &'g Tasklet,
    origin: &'g Arc<Origin>,
    inputs: Vec<Vec<Resolved>>,
    outputs: Vec<Vec<Resolved>>,
    /// Order of reading: an input comes after those that index it.
    order: Vec<usize>,
}

/// A node of a map's body ready to run.
enum Step<'g> {
    Tasklet(Ready<'g>),
    Map(&'g Map, &'g Arc<Origin>, Vec<Step<'g>>),
}

impl<'g> Machine<'g> {
    fn new(
        graph: &'g Graph,
        inputs: &[Tensor],
        library: &'g dyn LibraryMeaning,
        precision: Precision,
    ) -> Result<Self, InterpretError> {
        let mut machine = Machine {
            graph,
            library,
            precision,
            memory: graph.containers.iter().map(|_| None).collect(),
            reductions: vec![None; graph.containers.len()],
            names: Vec::new(),
            values: Vec::new(),
        };
        machine.find_reductions(&graph.body);
        for (id, tensor) in graph.inputs.iter().zip(inputs) {
            let c = graph.container(*id);
            if c.dtype != tensor.dtype {
                return Err(InterpretError::InputType {
                    input: c.name.clone(),
                    expected: c.dtype,
                    found: tensor.dtype,
                });
            }
            machine.store(*id, tensor.clone());
        }
        for id in graph.container_ids() {
            if let Lifetime::Constant(value) = &graph.container(id).lifetime {
                machine.store(id, value.as_ref().clone());
            }
        }
        Ok(machine)
    }

    fn find_reductions(&mut self, blocks: &[Block]) {
        let mut note = |t: &Tasklet| {
            for (memlet, _) in &t.outputs {
                if memlet.conflict.is_some() {
                    self.reductions[memlet.container.idx()] = memlet.conflict;
                }
            }
        };
        for block in blocks {
            if let Block::State(s) = block {
                s.nodes.iter().for_each(|n| n.visit_tasklets(&mut note));
            }
        }
        for block in blocks {
            match block {
                Block::State(_) => {}
                Block::Loop(l) => self.find_reductions(&l.body),
                Block::Branch(b) => {
                    self.find_reductions(&b.then);
                    self.find_reductions(&b.otherwise);
                }
            }
        }
    }

    fn store(&mut self, id: ContainerId, mut tensor: Tensor) {
        if self.precision == Precision::Declared {
            tensor.round_to_dtype();
        }
        self.memory[id.idx()] = Some(Cell { tensor, set: None });
    }

    fn size(&self, size: &SymExpr, origin: &Arc<Origin>) -> Result<i64, InterpretError> {
        size.eval_with(&|s| self.value_of(s))
            .map_err(|error| InterpretError::Size {
                origin: origin.clone(),
                error,
            })
    }

    fn value_of(&self, symbol: &Symbol) -> Option<i64> {
        let at = self.names.iter().rposition(|n| n == symbol)?;
        self.values.get(at).copied()
    }

    fn shape(&self, id: ContainerId, origin: &Arc<Origin>) -> Result<Vec<usize>, InterpretError> {
        let sizes = &self.graph.container(id).shape;
        sizes
            .iter()
            .map(|s| Ok(self.size(s, origin)?.max(0) as usize))
            .collect()
    }

    /// The container's contents, made if this is the first access.
    fn cell(&mut self, id: ContainerId, origin: &Arc<Origin>) -> Result<&mut Cell, InterpretError> {
        if self.memory[id.idx()].is_none() {
            let shape = self.shape(id, origin)?;
            let dtype = self.graph.container(id).dtype;
            let cell = match self.reductions[id.idx()] {
                Some(r) => Cell {
                    tensor: Tensor::filled(dtype, &shape, r.identity(dtype)),
                    set: None,
                },
                None => Cell {
                    tensor: Tensor::zeros(dtype, &shape),
                    set: Some(vec![false; shape.iter().product()]),
                },
            };
            self.memory[id.idx()] = Some(cell);
        }
        match &mut self.memory[id.idx()] {
            Some(cell) => Ok(cell),
            None => unreachable!("the cell was just made"),
        }
    }

    fn blocks(&mut self, blocks: &'g [Block]) -> Result<(), InterpretError> {
        for block in blocks {
            match block {
                Block::State(s) => s.nodes.iter().try_for_each(|n| self.node(n))?,
                Block::Loop(l) => self.repeat(l)?,
                Block::Branch(b) => self.choose(b)?,
            }
        }
        Ok(())
    }

    fn repeat(&mut self, l: &'g Loop) -> Result<(), InterpretError> {
        let count = self.size(&l.count, &Arc::default())?;
        self.names.push(l.symbol.clone());
        for i in 0..count {
            self.values.push(i);
            let done = self.blocks(&l.body);
            self.values.pop();
            done?;
        }
        self.names.pop();
        Ok(())
    }

    fn choose(&mut self, b: &'g Branch) -> Result<(), InterpretError> {
        let origin = Arc::default();
        let condition = self.complete(b.condition, &origin)?;
        let taken = match condition.is_empty() {
            true => return Err(malformed(&origin, "the condition of a branch is empty")),
            false => condition.at(0).as_bool(),
        };
        self.blocks(if taken { &b.then } else { &b.otherwise })
    }

    /// A container's contents, every element of which must be set.
    fn complete(
        &mut self,
        id: ContainerId,
        origin: &Arc<Origin>,
    ) -> Result<&Tensor, InterpretError> {
        let name = &self.graph.container(id).name;
        let cell = self.cell(id, origin)?;
        let unset = cell.set.as_ref().and_then(|s| s.iter().position(|s| !s));
        match unset {
            Some(offset) => Err(InterpretError::Unset {
                origin: origin.clone(),
                container: name.clone(),
                index: unravel(offset, &cell.tensor.shape),
            }),
            None => Ok(&cell.tensor),
        }
    }

    fn node(&mut self, node: &'g Node) -> Result<(), InterpretError> {
        if let NodeKind::Library(library) = &node.kind {
            return self.library(library, &node.origin);
        }
        let step = self.prepare(node)?;
        self.step(&step)?;
        if self.precision == Precision::Declared {
            for id in node.writes() {
                if let Some(cell) = &mut self.memory[id.idx()] {
                    cell.tensor.round_to_dtype();
                }
            }
        }
        Ok(())
    }

    fn library(&mut self, library: &Library, origin: &Arc<Origin>) -> Result<(), InterpretError> {
        for id in library.inputs.iter().flatten() {
            self.complete(*id, origin)?;
        }
        let inputs: Vec<Option<&Tensor>> = library
            .inputs
            .iter()
            .map(|id| {
                id.and_then(|id| self.memory[id.idx()].as_ref())
                    .map(|c| &c.tensor)
            })
            .collect();
        let results =
            self.library
                .evaluate(library, &inputs)
                .map_err(|error| InterpretError::Library {
                    origin: origin.clone(),
                    op: library.op.clone(),
                    error,
                })?;
        if results.len() < library.outputs.len() {
            let what = format!("operator `{}` has fewer outputs", library.op);
            return Err(malformed(origin, &what));
        }
        for (id, tensor) in library.outputs.iter().zip(results) {
            let Some(id) = id else { continue };
            let (dtype, shape) = (self.graph.container(*id).dtype, self.shape(*id, origin)?);
            if tensor.dtype != dtype || tensor.shape != shape {
                return Err(InterpretError::LibraryResult {
                    origin: origin.clone(),
                    op: library.op.clone(),
                    container: self.graph.container(*id).name.clone(),
                    expected: format!("{dtype} {shape:?}"),
                    found: format!("{} {:?}", tensor.dtype, tensor.shape),
                });
            }
            self.store(*id, tensor);
        }
        Ok(())
    }

    fn prepare(&mut self, node: &'g Node) -> Result<Step<'g>, InterpretError> {
        match &node.kind {
            NodeKind::Library(l) => {
                let what = format!("operator `{}` inside a map", l.op);
                Err(malformed(&node.origin, &what))
            }
            NodeKind::Tasklet(t) => {
                let resolve = |m: &Memlet| m.subset.iter().map(|i| self.resolve(i)).collect();
                Ok(Step::Tasklet(Ready {
                    tasklet: t,
                    origin: &node.origin,
                    inputs: t.inputs.iter().map(resolve).collect(),
                    outputs: t.outputs.iter().map(|(m, _)| resolve(m)).collect(),
                    order: reading_order(t, &node.origin)?,
                }))
            }
            NodeKind::Map(m) => {
                let outside = self.names.len();
                self.names.extend(m.params.iter().map(|p| p.name.clone()));
                let body: Result<_, _> = m.body.iter().map(|n| self.prepare(n)).collect();
                self.names.truncate(outside);
                Ok(Step::Map(m, &node.origin, body?))
            }
        }
    }

    fn resolve(&self, index: &Index) -> Resolved {
        let e = match index {
            Index::Data(i) => return Resolved::Data(*i),
            Index::At(e) => e,
        };
        let position = |s: &Symbol| self.names.iter().rposition(|n| n == s);
        let affine = e.as_affine().and_then(|(linear, constant)| {
            let terms: Option<Vec<_>> = linear
                .iter()
                .map(|(s, c)| Some((position(s)?, *c)))
                .collect();
            Some(Resolved::Affine(terms?, constant))
        });
        affine.unwrap_or_else(|| Resolved::Other(e.clone()))
    }

    fn step(&mut self, step: &Step<'g>) -> Result<(), InterpretError> {
        match step {
            Step::Tasklet(ready) => self.tasklet(ready),
            Step::Map(map, origin, body) => {
                self.names.extend(map.params.iter().map(|p| p.name.clone()));
                let done = self.points(map, origin, body, 0);
                self.names.truncate(self.names.len() - map.params.len());
                done
            }
        }
    }

    /// Runs the body for all values of the map's parameters from number `from` on.
    fn points(
        &mut self,
        map: &'g Map,
        origin: &'g Arc<Origin>,
        body: &[Step<'g>],
        from: usize,
    ) -> Result<(), InterpretError> {
        let Some(param) = map.params.get(from) else {
            return body.iter().try_for_each(|step| self.step(step));
        };
        for i in 0..self.size(&param.size, origin)? {
            self.values.push(i);
            let done = self.points(map, origin, body, from + 1);
            self.values.pop();
            done?;
        }
        Ok(())
    }

    fn tasklet(&mut self, ready: &Ready<'g>) -> Result<(), InterpretError> {
        let tasklet = ready.tasklet;
        let mut inputs = vec![Scalar::Int(0); tasklet.inputs.len()];
        for i in &ready.order {
            let index = self.index(&ready.inputs[*i], &inputs, ready.origin)?;
            inputs[*i] = self.read(&tasklet.inputs[*i], &index, ready.origin)?;
        }
        let mut results = Vec::with_capacity(tasklet.outputs.len());
        for (_, e) in &tasklet.outputs {
            let value = e.eval(&inputs, &|s| self.value_of(s));
            results.push(value.map_err(|error| InterpretError::Size {
                origin: ready.origin.clone(),
                error,
            })?);
        }
        for (k, value) in results.into_iter().enumerate() {
            let index = self.index(&ready.outputs[k], &inputs, ready.origin)?;
            self.write(&tasklet.outputs[k].0, &index, value, ready.origin)?;
        }
        Ok(())
    }

    fn index(
        &self,
        subset: &[Resolved],
        inputs: &[Scalar],
        origin: &Arc<Origin>,
    ) -> Result<Vec<i64>, InterpretError> {
        let value = |r: &Resolved| match r {
            Resolved::Affine(terms, c) => Ok(terms
                .iter()
                .map(|(at, f)| self.values[*at] * f)
                .sum::<i64>()
                + c),
            Resolved::Other(e) => self.size(e, origin),
            Resolved::Data(i) => Ok(inputs[*i].as_i64()),
        };
        subset.iter().map(value).collect()
    }

    fn read(
        &mut self,
        memlet: &Memlet,
        index: &[i64],
        origin: &Arc<Origin>,
    ) -> Result<Scalar, InterpretError> {
        let container = self.graph.container(memlet.container);
        let precision = self.precision;
        let cell = self.cell(memlet.container, origin)?;
        let offset = match (cell.offset(index), memlet.fill) {
            (Some(offset), _) => offset,
            (None, Some(fill)) => return Ok(held(fill, container.dtype, precision)),
            (None, None) => return Err(cell.outside(&container.name, index, origin)),
        };
        if cell.set.as_ref().is_some_and(|set| !set[offset]) {
            return Err(InterpretError::Unset {
                origin: origin.clone(),
                container: container.name.clone(),
                index: index.to_vec(),
            });
        }
        Ok(held(cell.tensor.at(offset), container.dtype, precision))
    }

    fn write(
        &mut self,
        memlet: &Memlet,
        index: &[i64],
        value: Scalar,
        origin: &Arc<Origin>,
    ) -> Result<(), InterpretError> {
        let container = self.graph.container(memlet.container);
        let precision = self.precision;
        let cell = self.cell(memlet.container, origin)?;
        let offset = match (cell.offset(index), memlet.fill) {
            (Some(offset), _) => offset,
            (None, Some(_)) => return Ok(()),
            (None, None) => return Err(cell.outside(&container.name, index, origin)),
        };
        let stored = match memlet.conflict {
            None => held(value, container.dtype, precision),
            Some(r) => {
                let both = r.combine().eval(cell.tensor.at(offset), value);
                held(both, container.dtype, Precision::Double)
            }
        };
        cell.tensor.set(offset, stored);
        if let Some(set) = &mut cell.set {
            set[offset] = true;
        }
        Ok(())
    }

    fn outputs(mut self) -> Result<Vec<Tensor>, InterpretError> {
        let origin = Arc::new(Origin {
            node: "graph outputs".into(),
            ..Origin::default()
        });
        let ids: Vec<_> = self.graph.outputs.iter().map(|o| o.container).collect();
        ids.into_iter()
            .map(|id| self.complete(id, &origin).cloned())
            .collect()
    }
}

impl Cell {
    fn offset(&self, index: &[i64]) -> Option<usize> {
        let fits = index.len() == self.tensor.shape.len();
        fits.then(|| self.tensor.offset(index)).flatten()
    }

    fn outside(&self, name: &str, index: &[i64], origin: &Arc<Origin>) -> InterpretError {
        InterpretError::OutOfBounds {
            origin: origin.clone(),
            container: name.to_string(),
            index: index.to_vec(),
            shape: self.tensor.shape.clone(),
        }
    }
}

impl Tensor {
    /// Rounds every element to the declared type, or wraps it to the width of the type.
    pub fn round_to_dtype(&mut self) {
        match &mut self.values {
            _ if matches!(self.dtype, DType::F64 | DType::I64) => {}
            Values::Float(values) => values.iter_mut().for_each(|v| *v = self.dtype.round(*v)),
            Values::Int(values) => values
                .iter_mut()
                .for_each(|v| *v = Scalar::Int(*v).cast(self.dtype).as_i64()),
        }
    }
}

/// The value as a container of that type holds it.
fn held(value: Scalar, dtype: DType, precision: Precision) -> Scalar {
    if dtype.is_float() && precision == Precision::Double {
        return Scalar::Float(value.as_f64());
    }
    value.cast(dtype)
}

/// An order in which each input comes after the inputs its indices use.
fn reading_order(t: &Tasklet, origin: &Arc<Origin>) -> Result<Vec<usize>, InterpretError> {
    let mut order: Vec<usize> = Vec::new();
    while order.len() < t.inputs.len() {
        let ready = |m: &Memlet, order: &[usize]| {
            m.subset.iter().all(|i| match i {
                Index::Data(d) => order.contains(d),
                Index::At(_) => true,
            })
        };
        let next = (0..t.inputs.len())
            .find(|i| !order.contains(i) && ready(&t.inputs[*i], &order))
            .ok_or_else(|| malformed(origin, "inputs of a tasklet index each other in a circle"))?;
        order.push(next);
    }
    let in_range = |i: &usize| *i < t.inputs.len();
    let mut used = t.outputs.iter().flat_map(|(m, e)| {
        let data = m.subset.iter().filter_map(|i| match i {
            Index::Data(d) => Some(*d),
            Index::At(_) => None,
        });
        e.inputs().into_iter().chain(data).collect::<Vec<_>>()
    });
    if used.any(|i| !in_range(&i)) {
        return Err(malformed(
            origin,
            "a tasklet uses an input it does not have",
        ));
    }
    Ok(order)
}

fn malformed(origin: &Arc<Origin>, what: &str) -> InterpretError {
    InterpretError::Malformed {
        origin: origin.clone(),
        what: what.to_string(),
    }
}

fn unravel(mut offset: usize, shape: &[usize]) -> Vec<i64> {
    let mut index = vec![0; shape.len()];
    for (d, n) in shape.iter().enumerate().rev() {
        index[d] = (offset % n) as i64;
        offset /= n;
    }
    index
}
