//! A graph of maps as a CUDA program: kernels, launches, a memory plan.
//!
//! Contractions that reuse their operands go to the contraction generator, with the element-wise work
//! fused to them as an epilogue in registers; products that are used where they are made go to the
//! chain generator; all other maps go to the map emitter. Kernels of equal
//! text are kept once. Nothing here decides what is fused: each top-level map becomes the launches it
//! needs, in the graph's order.

mod call;
mod epilogue;
mod finish;
mod product;
mod windows;

use super::chain;
use super::contraction::{self, Buffers, EmittedContraction, Epilogue, Types, Unsupported};
use super::emit::{self, NAME, Printed};
use super::schedule;
use super::vendor::{Call, Choice, LibraryProduct, Products};
use super::{Kernel, LaunchOp, Param};
use graph::{ContainerId, DType, Graph, Map, Node, NodeKind, Origin, Schedule, Stage, Storage};
use kernels::contraction::NoFastForm;
use kernels::emit::body;
use kernels::emit::prepared;
use kernels::lower::LowerError;
use kernels::lowering::{Split, SplitReason, members, operations, operators, split_epilogue};
use kernels::plan::{self, Buffer, MemoryPlan, Touches};
use kernels::recognize::{Recognized, recognize_typed, refusal};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Blocks that a launch may have in x on every architecture.
const MOST_BLOCKS: u32 = i32::MAX as u32;

/// A fused graph as CUDA kernels.
#[derive(Clone, Debug)]
pub struct CudaProgram {
    /// Kernels, each text once.
    pub kernels: Vec<Kernel>,
    /// Products that cuBLASLt and convolutions that cuDNN computes, each description once.
    pub products: Vec<LibraryProduct>,
    /// What operators of PyTorch's compute, one for each launch.
    pub calls: Vec<Call>,
    /// Launches in order.
    pub launches: Vec<Placed>,
    /// Where containers and workspaces live.
    pub memory: MemoryPlan,
    /// Bytes of each [`Buffer::Workspace`].
    pub workspace_bytes: Vec<usize>,
    /// What the top-level maps became, in the launches' order. One whose product reaches memory
    /// before its other work has an entry for each.
    pub maps: Vec<MapInfo>,
}

impl CudaProgram {
    /// What a launch is given, in order.
    pub fn params(&self, work: LaunchOp) -> &[Param] {
        match work {
            LaunchOp::Kernel(n) => &self.kernels[n].params,
            LaunchOp::Product(n) => &self.products[n].params,
            LaunchOp::Call(n) => &self.calls[n].params,
        }
    }

    /// Bytes of dynamic shared memory that a launch needs of us.
    pub fn dynamic_shared_bytes(&self, work: LaunchOp) -> u32 {
        match work {
            LaunchOp::Kernel(n) => self.kernels[n].dynamic_shared_bytes(),
            LaunchOp::Product(_) | LaunchOp::Call(_) => 0,
        }
    }

    /// The name of what a launch runs.
    pub fn name(&self, work: LaunchOp) -> &str {
        match work {
            LaunchOp::Kernel(n) => &self.kernels[n].name,
            LaunchOp::Product(n) => &self.products[n].name,
            LaunchOp::Call(n) => &self.calls[n].name,
        }
    }
}

/// One launch: a kernel, a product or a call on buffers of the memory plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// What runs.
    pub work: LaunchOp,
    /// Blocks, in one direction; 1 for a product or a call.
    pub grid: u32,
    /// Its buffers, in the order of [`CudaProgram::params`].
    pub args: Vec<Buffer>,
    /// The pass it belongs to.
    pub stage: Stage,
    /// Position in [`CudaProgram::maps`].
    pub map: usize,
}

/// How a map was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// Where its operators came from.
    pub origin: String,
    /// The operators that it was fused from, each once.
    pub operators: Vec<Arc<Origin>>,
    /// The pass it belongs to.
    pub stage: Stage,
    /// Which generator wrote it: `loops`; for contractions `simt` (register tiles of scalar
    /// multiply-adds), `mma` (warp products), `wgmma` (products of warpgroups), `cublaslt` or `cudnn`; for
    /// several in one kernel `chain`; for attention the PyTorch operator that computes it.
    pub path: &'static str,
    /// The widest type that it computes with.
    pub dtype: DType,
    /// Launches it takes.
    pub n_launches: usize,
    /// Arithmetic operations: multiplications and additions of a contraction, scalar functions of
    /// other work.
    pub flops: u64,
    /// Bytes of the containers it reads from memory, each once and whole; not of what it made itself.
    pub bytes_read: u64,
    /// Bytes of the containers it writes to memory, each once and whole.
    pub bytes_written: u64,
    /// Bytes moved in addition, to put the results of a foreign operator in their places.
    pub bytes_copied: u64,
    /// For a contraction: what else could compute it, and why this does.
    pub product: Option<Choice>,
    /// For loops that compute a contraction: why it has no kernel of tiles.
    pub scalar: Option<NoFastForm>,
    /// The splits by which one map became several entries, and why; on the first entry only.
    pub splits: Vec<Split>,
}

/// Lowers a graph of maps (and reshapes, which become aliases), all of it to our own kernels.
///
/// # Errors
/// See [`LowerError`].
pub fn lower(graph: &Graph) -> Result<CudaProgram, LowerError> {
    lower_with(graph, &Products::Own)
}

/// Like [`lower`], with products by cuBLASLt and convolutions by cuDNN where `products` chooses it.
///
/// # Errors
/// See [`LowerError`].
pub fn lower_with(graph: &Graph, products: &Products) -> Result<CudaProgram, LowerError> {
    let nodes = match graph.single_state() {
        Some(state) => state.nodes.clone(),
        None => return Err(LowerError::ControlFlow),
    };
    let mut lowering = Lowering {
        graph: graph.clone(),
        products: products.clone(),
        program: CudaProgram {
            kernels: Vec::new(),
            products: Vec::new(),
            calls: Vec::new(),
            launches: Vec::new(),
            memory: MemoryPlan::default(),
            workspace_bytes: Vec::new(),
            maps: Vec::new(),
        },
        known: BTreeMap::new(),
    };
    for node in nodes.iter().filter(|n| plan::alias(n).is_none()) {
        lowering.node(node)?;
    }
    lowering.finish()
}

struct Lowering {
    /// Products that reach memory lose their storage `Local` here.
    graph: Graph,
    products: Products,
    program: CudaProgram,
    /// Position among the kernels by maps of parameters and text.
    known: BTreeMap<String, usize>,
}

impl Lowering {
    fn node(&mut self, node: &Node) -> Result<(), LowerError> {
        let origin = || node.origin.to_string();
        let map = match &node.kind {
            NodeKind::Map(map) => map,
            NodeKind::Library(l) if l.computed_by().is_some() => return self.call(node, l),
            NodeKind::Library(l) => {
                return Err(LowerError::Library {
                    op: l.op.clone(),
                    origin: origin(),
                });
            }
            NodeKind::Tasklet(_) => return Err(LowerError::NotAMap { origin: origin() }),
        };
        if is_chain(&self.graph, map) {
            return self.chain(node, map);
        }
        if let Ok(Some(found)) = self.contraction(node)
            && let Ok(emitted) = emit_contraction(&self.graph, &found, None)
        {
            return self.alone(node, &found, emitted);
        }
        if let Some((first, rest)) = split_epilogue(node, map)
            && let Ok(Some(found)) = self.contraction(&first)
        {
            return self.contraction_and_rest(node, &first, &rest, &found);
        }
        self.loops(node)
    }

    /// One kernel; if the chain has no form that is known, one for each member, and what they pass on is in
    /// memory.
    fn chain(&mut self, node: &Node, map: &Map) -> Result<(), LowerError> {
        if let Some(emitted) = chain::emit(NAME, &self.graph, node)? {
            let printed = Printed {
                launches: vec![emitted.launch],
                ..Printed::default()
            };
            return self.place(node, "chain", emitted.flops, printed);
        }
        for id in node.writes() {
            self.graph.container_mut(id).storage = Storage::Global;
        }
        let first = self.program.maps.len();
        map.body.iter().try_for_each(|member| self.node(member))?;
        self.record_split(first, Split::new(&map.body, SplitReason::Chain));
        Ok(())
    }

    /// The contraction that a node is, if tiles serve it better than plain loops.
    ///
    /// # Errors
    /// Why a contraction that tiles would serve has no form for them.
    fn contraction(&self, node: &Node) -> Result<Option<Recognized>, NoFastForm> {
        let Some(found) = recognize_typed(&self.graph, node, &contraction::multiplies) else {
            // All types of floats multiply, so the index is the reason.
            return match refusal(&self.graph, node) {
                Some(_) => Err(NoFastForm::Index),
                None => Ok(None),
            };
        };
        match contraction::is_thin(&found.contraction) {
            Ok(thin) => Ok((!thin).then_some(found)),
            Err(unsupported) => match unsupported.no_fast_form() {
                Some(reason) => Err(reason),
                None => Ok(None),
            },
        }
    }

    /// Why a contraction in a kernel of loops has no kernel of tiles, if there is such a contraction.
    fn scalar_reason(&self, node: &Node) -> Option<NoFastForm> {
        let members = members(node);
        members.iter().enumerate().find_map(|(n, member)| {
            let found = match self.contraction(member) {
                Ok(found) => found?,
                Err(reason) => return Some(reason),
            };
            match emit_contraction(&self.graph, &found, None) {
                Ok(_) => (n > 0).then_some(NoFastForm::NotFirst),
                Err(unsupported) => unsupported.no_fast_form(),
            }
        })
    }

    fn record_split(&mut self, map: usize, split: Split) {
        if let Some(info) = self.program.maps.get_mut(map) {
            info.splits.push(split);
        }
    }

    fn place_contraction(
        &mut self,
        node: &Node,
        emitted: EmittedContraction,
        more_flops: u64,
        choice: Choice,
    ) -> Result<(), LowerError> {
        let workspace = emitted.workspace_bytes as usize;
        let printed = Printed {
            launches: emitted.launches,
            workspace_bytes: (workspace > 0).then_some(workspace).into_iter().collect(),
        };
        let map = self.program.maps.len();
        self.place(node, emitted.path, emitted.flops + more_flops, printed)?;
        self.program.maps[map].product = Some(choice);
        Ok(())
    }

    fn loops(&mut self, node: &Node) -> Result<(), LowerError> {
        let phases = match windows::gathered(&self.graph, node) {
            Some(gathered) => emit_map(&self.graph, &gathered)?,
            None => emit_map(&self.graph, node)?,
        };
        let touched = phases.iter().map(Printed::containers);
        let split = Split::by_phases(node, &touched.collect::<Vec<_>>());
        for id in split.iter().flat_map(Split::written) {
            self.graph.container_mut(id).storage = Storage::Global;
        }
        let scalar = self.scalar_reason(node);
        let mut printed = Printed::default();
        phases.into_iter().for_each(|phase| printed.append(phase));
        let map = self.program.maps.len();
        self.place(node, "loops", operations(node, 1), printed)?;
        self.program.maps[map].scalar = scalar;
        self.program.maps[map].splits.extend(split);
        Ok(())
    }

    /// Adds launches, whose count of workspaces goes on from the program's.
    fn place(
        &mut self,
        node: &Node,
        path: &'static str,
        flops: u64,
        printed: Printed,
    ) -> Result<(), LowerError> {
        let info = self.info(node, path, flops, printed.launches.len())?;
        let origin = info.origin.clone();
        self.program.maps.push(info);
        let first = self.program.workspace_bytes.len();
        self.program.workspace_bytes.extend(printed.workspace_bytes);
        for e in printed.launches {
            let limit = MOST_BLOCKS;
            let grid = u32::try_from(e.grid).ok().filter(|n| *n <= limit);
            let Some(grid) = grid else {
                return Err(LowerError::Grid {
                    origin,
                    blocks: e.grid,
                    limit,
                });
            };
            let own = |b: &Buffer| match b {
                Buffer::Workspace(n) => Buffer::Workspace(first + n),
                container => *container,
            };
            let placed = Placed {
                grid,
                args: e.args.iter().map(own).collect(),
                stage: node.stage,
                map: self.program.maps.len() - 1,
                work: LaunchOp::Kernel(self.kernel(e.kernel, &origin)),
            };
            self.program.launches.push(placed);
        }
        Ok(())
    }

    /// The position of a kernel of this text and these maps.
    fn kernel(&mut self, mut kernel: Kernel, origin: &str) -> usize {
        let text = kernel.text.replace(&kernel.name, NAME);
        // What the copy engine is told is in the parameters, not in the text.
        let maps = kernel.params.iter().filter_map(|p| p.ty.map());
        let key = format!("{:?} {text}", maps.collect::<Vec<_>>());
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let n = self.program.kernels.len();
        kernel.name = format!("sh_k{n}");
        kernel.text = text.replace(NAME, &kernel.name);
        kernel.origin = origin.to_string();
        self.program.kernels.push(kernel);
        self.known.insert(key, n);
        n
    }

    fn info(
        &self,
        node: &Node,
        path: &'static str,
        flops: u64,
        n_launches: usize,
    ) -> Result<MapInfo, LowerError> {
        let in_memory = |id: &ContainerId| self.graph.container(*id).storage != Storage::Local;
        let written: Vec<_> = node.writes().into_iter().filter(in_memory).collect();
        let needed = |id: &ContainerId| in_memory(id) && !written.contains(id);
        let read: Vec<_> = node.reads().into_iter().filter(needed).collect();
        let bytes = |ids: &[ContainerId]| -> Result<u64, LowerError> {
            let each = ids.iter().map(|id| plan::container_bytes(&self.graph, *id));
            Ok(each.sum::<Result<usize, _>>()? as u64)
        };
        let dtypes = read.iter().chain(&written);
        let dtypes = dtypes.map(|id| self.graph.container(*id).dtype);
        let width = |t: &DType| (t.is_float(), t.bytes());
        Ok(MapInfo {
            origin: node.origin.to_string(),
            operators: operators(node),
            stage: node.stage,
            path,
            dtype: dtypes.max_by_key(width).unwrap_or(DType::F32),
            n_launches,
            flops,
            bytes_read: bytes(&read)?,
            bytes_written: bytes(&written)?,
            bytes_copied: 0,
            product: None,
            scalar: None,
            splits: Vec::new(),
        })
    }

    fn finish(mut self) -> Result<CudaProgram, LowerError> {
        let touches = self.program.launches.iter().map(|l| Touches {
            stage: l.stage,
            buffers: l.args.clone(),
        });
        let touches: Vec<Touches> = touches.collect();
        let workspaces = &self.program.workspace_bytes;
        self.program.memory = plan::plan_memory(&self.graph, &touches, workspaces)?;
        Ok(self.program)
    }
}

/// Whether a product or a reduction follows a product in a kernel, as only in chains.
fn is_chain(graph: &Graph, map: &Map) -> bool {
    let is_product = |n: &Node| recognize_typed(graph, n, &contraction::multiplies).is_some();
    let mut after = map.body.iter().skip_while(|n| !is_product(n)).skip(1);
    map.schedule == Schedule::Kernel
        && map.params.is_empty()
        && after.any(|n| is_product(n) || resolves(n))
}

/// Whether writes of a node are combined.
fn resolves(node: &Node) -> bool {
    let mut found = false;
    node.visit_tasklets(&mut |t| found |= t.outputs.iter().any(|(m, _)| m.conflict.is_some()));
    found
}

/// The contraction's launches, if it has a form that its generator knows.
fn emit_contraction(
    graph: &Graph,
    found: &Recognized,
    epilogue: Option<&Epilogue>,
) -> Result<EmittedContraction, Unsupported> {
    let types = types(graph, found);
    contraction::emit(NAME, &found.contraction, types, buffers(found), epilogue)
}

fn buffers(found: &Recognized) -> Buffers {
    Buffers {
        a: Buffer::Container(found.a),
        b: Buffer::Container(found.b),
        out: Buffer::Container(found.out),
    }
}

fn types(graph: &Graph, found: &Recognized) -> Types {
    let dtype = |id| graph.container(id).dtype;
    Types {
        a: dtype(found.a),
        b: dtype(found.b),
        out: dtype(found.out),
    }
}

/// One kernel for a map where its meaning allows, else one for each phase.
fn emit_map(graph: &Graph, node: &Node) -> Result<Vec<Printed>, LowerError> {
    let origin = node.origin.to_string();
    let kernel = prepared(body::kernel_of(graph, node, false)?);
    if let Some(scheduled) = schedule::schedule(kernel, false) {
        return Ok(vec![emit::print(&scheduled, &origin)]);
    }
    let kernel = prepared(body::kernel_of(graph, node, true)?);
    let mut all = Vec::new();
    for phase in &kernel.phases {
        let part = prepared(body::Kernel {
            phases: vec![phase.clone()],
            ..kernel.clone()
        });
        let unsplit = || LowerError::Unsplit {
            origin: origin.clone(),
        };
        let scheduled = schedule::schedule(part, true).ok_or_else(unsplit)?;
        all.push(emit::print(&scheduled, &origin));
    }
    Ok(all)
}
