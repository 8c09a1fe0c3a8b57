//! A whole CUDA program on host tensors, through the emulator.
//!
//! Owns which buffer of the emulator's memory each container is, and the order of elements that
//! layouts ask for. Each container has memory of its own, so the emulator sees every element that is
//! read before it was written. Never emits, never plans.

use super::emulate::{BATCH, EmulateError, Emulator, Fault, FaultKind, Memory, Settings, Traffic};
use super::lower::{CudaProgram, Placed};
use super::passes::{ALIGNMENT, positions};
use super::vendor::{self, Call, LibraryProduct};
use super::{Arg, Launch, LaunchOp, Param, ParamType};
use graph::{ContainerId, Graph, Lifetime, Tensor};
use kernels::plan::{self, Buffer};
use std::collections::BTreeMap;

/// Executes one launch in some way.
type OneLaunch<'f> = dyn FnMut(&Ready<'_>, &mut Memory, &Settings) -> Result<(), EmulateError> + 'f;

/// A launch with its buffers.
enum Ready<'a> {
    /// Launch of a kernel.
    Kernel(&'a Emulator, Launch),
    /// A product.
    Product(&'a LibraryProduct, Vec<usize>),
    /// A call of an operator.
    Call(&'a Call, Vec<usize>),
}

/// A program compiled for the host.
pub struct HostProgram<'p> {
    graph: &'p Graph,
    program: &'p CudaProgram,
    batches: Vec<Emulator>,
    /// Containers that reshapes made, each with the container whose bytes it is.
    roots: BTreeMap<ContainerId, ContainerId>,
}

/// Compiles a program for the host.
///
/// # Errors
/// No C++ compiler, or a text that it refuses.
pub fn compile<'p>(
    graph: &'p Graph,
    program: &'p CudaProgram,
) -> Result<HostProgram<'p>, EmulateError> {
    let batches = program.kernels.chunks(BATCH);
    let mut roots = BTreeMap::new();
    for node in graph.single_state().into_iter().flat_map(|s| &s.nodes) {
        if let Some((from, to)) = plan::alias(node) {
            let root = roots.get(&from).copied().unwrap_or(from);
            roots.insert(to, root);
        }
    }
    Ok(HostProgram {
        graph,
        program,
        batches: batches
            .map(Emulator::from_environment)
            .collect::<Result<_, _>>()?,
        roots,
    })
}

impl HostProgram<'_> {
    /// Runs every launch on the graph's inputs, in row-major order, and gives the graph's outputs;
    /// `seed` decides the order of blocks and threads.
    ///
    /// # Errors
    /// Another number of inputs; faults of a kernel, each with its name, block and thread, and with the
    /// part of the model that its launch computes; elements of outputs that no launch wrote.
    pub fn run(&self, inputs: &[Tensor], seed: u64) -> Result<Vec<Tensor>, EmulateError> {
        self.execute(inputs, seed, &mut |ready, memory, settings| match ready {
            Ready::Kernel(emulator, launch) => emulator.run(launch, memory, settings),
            Ready::Product(product, buffers) => vendor::run(product, memory, buffers),
            Ready::Call(call, buffers) => vendor::attend(call, memory, buffers),
        })
    }

    /// What each launch moves, in order, on the graph's inputs.
    ///
    /// # Errors
    /// As [`HostProgram::run`].
    pub fn traffic(&self, inputs: &[Tensor]) -> Result<Vec<Traffic>, EmulateError> {
        let mut traffic = Vec::new();
        self.execute(inputs, 0, &mut |ready, memory, settings| {
            traffic.push(match ready {
                Ready::Kernel(emulator, launch) => emulator.count(launch, memory, settings)?,
                Ready::Product(product, buffers) => {
                    vendor::run(product, memory, buffers)?;
                    vendor::traffic(&product.operation)
                }
                Ready::Call(call, buffers) => {
                    vendor::attend(call, memory, buffers)?;
                    vendor::call_traffic(call)
                }
            });
            Ok(())
        })?;
        Ok(traffic)
    }

    fn execute(
        &self,
        inputs: &[Tensor],
        seed: u64,
        one: &mut OneLaunch,
    ) -> Result<Vec<Tensor>, EmulateError> {
        if inputs.len() != self.graph.inputs.len() {
            return Err(EmulateError::Inputs {
                given: inputs.len(),
                wanted: self.graph.inputs.len(),
            });
        }
        let mut memory = Memory::default();
        let mut buffers = BTreeMap::new();
        for (id, tensor) in self.graph.inputs.iter().zip(inputs) {
            let buffer = memory.add(&self.name(*id), &self.laid_out(*id, tensor));
            // No kernel may need a higher alignment than launches promise.
            memory.place(buffer, ALIGNMENT as usize);
            buffers.insert(Buffer::Container(self.root(*id)), buffer);
        }
        let settings = Settings {
            partial_outputs: true,
            ..Settings::of_seed(seed)
        };
        for placed in &self.program.launches {
            let ready = self.ready(placed, &mut memory, &mut buffers);
            let done = one(&ready, &mut memory, &settings);
            done.map_err(|error| error.of_launch(self.origin(placed)))?;
        }
        let outputs = self.graph.outputs.iter().map(|o| {
            let id = o.container;
            let ty = ParamType::In(self.graph.container(id).dtype);
            let place = Buffer::Container(id);
            (id, self.buffer(place, ty, &mut memory, &mut buffers))
        });
        let outputs: Vec<(ContainerId, usize)> = outputs.collect();
        let unwritten = outputs
            .iter()
            .filter_map(|(id, buffer)| Some(self.unwritten(*id, memory.unwritten(*buffer)?)));
        let faults: Vec<Fault> = unwritten.collect();
        if !faults.is_empty() {
            return Err(EmulateError::Faults(faults));
        }
        let tensors = outputs.into_iter();
        Ok(tensors
            .map(|(id, buffer)| self.row_major(id, &memory, buffer))
            .collect())
    }

    fn ready(
        &self,
        placed: &Placed,
        memory: &mut Memory,
        buffers: &mut BTreeMap<Buffer, usize>,
    ) -> Ready<'_> {
        let args = placed.args.iter().zip(self.program.params(placed.work));
        let mut buffer = |b: &Buffer, p: &Param| self.buffer(*b, p.ty, memory, buffers);
        match placed.work {
            LaunchOp::Kernel(n) => {
                let launch = Launch {
                    kernel: n % BATCH,
                    grid: [placed.grid, 1, 1],
                    dynamic_shared_bytes: self.program.dynamic_shared_bytes(placed.work),
                    args: args.map(|(b, p)| Arg::Buffer(buffer(b, p))).collect(),
                };
                Ready::Kernel(&self.batches[n / BATCH], launch)
            }
            LaunchOp::Product(n) => {
                let given = args.filter(|(b, _)| matches!(b, Buffer::Container(_)));
                let given = given.map(|(b, p)| buffer(b, p)).collect();
                Ready::Product(&self.program.products[n], given)
            }
            LaunchOp::Call(n) => {
                let given = args.map(|(b, p)| buffer(b, p)).collect();
                Ready::Call(&self.program.calls[n], given)
            }
        }
    }

    /// The fault for elements of one of the graph's outputs that no launch wrote: their number and the first.
    /// Blames the last launch that could have written them.
    fn unwritten(&self, id: ContainerId, (n, first): (usize, usize)) -> Fault {
        let place = self.rooted(Buffer::Container(id));
        let writes = |placed: &&Placed| {
            let mut args = placed.args.iter().zip(self.program.params(placed.work));
            args.any(|(b, p)| self.rooted(*b) == place && p.ty.is_written())
        };
        let placed = self.program.launches.iter().rev().find(writes);
        let (kernel, origin) = match placed {
            Some(placed) => {
                let name = self.program.name(placed.work).to_string();
                (name, self.origin(placed).to_string())
            }
            None => ("none".to_string(), "nothing that is launched".to_string()),
        };
        Fault {
            kernel,
            origin,
            block: 0,
            thread: 0,
            kind: FaultKind::Unwritten {
                array: self.name(id),
                n,
                first,
            },
        }
    }

    fn origin(&self, placed: &Placed) -> &str {
        &self.program.maps[placed.map].origin
    }

    fn name(&self, id: ContainerId) -> String {
        self.graph.container(id).name.clone()
    }

    fn root(&self, id: ContainerId) -> ContainerId {
        self.roots.get(&id).copied().unwrap_or(id)
    }

    fn rooted(&self, place: Buffer) -> Buffer {
        match place {
            Buffer::Container(id) => Buffer::Container(self.root(id)),
            workspace => workspace,
        }
    }

    /// The buffer of a container or workspace, made when it is first met. A workspace has the element type of
    /// its first parameter.
    fn buffer(
        &self,
        place: Buffer,
        ty: ParamType,
        memory: &mut Memory,
        buffers: &mut BTreeMap<Buffer, usize>,
    ) -> usize {
        let place = self.rooted(place);
        if let Some(known) = buffers.get(&place) {
            return *known;
        }
        let buffer = match place {
            Buffer::Container(root) => {
                let c = self.graph.container(root);
                match &c.lifetime {
                    Lifetime::Constant(t) => memory.add(&c.name, &self.laid_out(root, t)),
                    _ => memory.add_unwritten(&c.name, c.dtype, positions(self.graph, root).len()),
                }
            }
            Buffer::Workspace(n) => {
                let dtype = ty.dtype();
                let n_elements = self.program.workspace_bytes[n] / dtype.bytes();
                memory.add_unwritten("workspace", dtype, n_elements)
            }
        };
        memory.place(buffer, ALIGNMENT as usize);
        buffers.insert(place, buffer);
        buffer
    }

    fn laid_out(&self, id: ContainerId, t: &Tensor) -> Tensor {
        let positions = positions(self.graph, id);
        let shape = [positions.len()];
        if t.dtype.is_float() {
            let mut data = vec![0.0; positions.len()];
            let elements = t.to_f64();
            positions
                .iter()
                .zip(elements)
                .for_each(|(p, x)| data[*p] = x);
            Tensor::from_f64(t.dtype, &shape, data)
        } else {
            let mut data = vec![0; positions.len()];
            let elements = t.to_i64();
            positions
                .iter()
                .zip(elements)
                .for_each(|(p, x)| data[*p] = x);
            Tensor::from_i64(t.dtype, &shape, data)
        }
    }

    fn row_major(&self, id: ContainerId, memory: &Memory, buffer: usize) -> Tensor {
        let c = self.graph.container(id);
        let sizes = c.shape.iter().filter_map(|s| s.as_const());
        let shape: Vec<usize> = sizes.map(|n| n as usize).collect();
        let positions = positions(self.graph, id);
        if c.dtype.is_float() {
            let all = memory.values(buffer);
            let data = positions.iter().map(|p| all[*p]).collect();
            Tensor::from_f64(c.dtype, &shape, data)
        } else {
            let all = memory.integers(buffer);
            let data = positions.iter().map(|p| all[*p]).collect();
            Tensor::from_i64(c.dtype, &shape, data)
        }
    }
}
