//! Cut-outs: single kernels of a plan, compiled and timed in buffers of their own.
//!
//! A cut-out is a graph of one kernel whose reads are inputs and whose writes are outputs, so it takes the same way
//! to C as the whole step. Its key is its text: two kernels with one key take the same time, in whatever network
//! they are. Decides nothing about what is faster.

use crate::error::CompileError;
use crate::plan::Plan;
use crate::predict::On;
use graph::{Blocking, ContainerId, DType, Graph, Lifetime, Node, Recipe, State, Storage};
use kernels::assemble::assemble;
use kernels::compile::{CompileOptions, compile};
use kernels::features::CpuTarget;
use kernels::lowering::{KernelInfo, Lowered, LoweringOptions, lower_as};
use kernels::memory::{AlignedBuffer, Buffer};
use kernels::pool::Pool;
use kernels::progress::Progress;
use kernels::run::Program;
use std::collections::BTreeSet;
use std::time::Instant;

/// Bytes written between two runs, so that a kernel finds its data where another kernel left it: not in the cache
/// of its core.
const BETWEEN_BYTES: usize = 8 << 20;

/// The plan's kernels, ready to be cut out.
#[derive(Debug)]
pub struct Cutouts {
    plan: Plan,
    target: CpuTarget,
    threads: usize,
    /// How each kernel of the whole step is made, with other ways to cut contractions.
    pub kernels: Vec<KernelInfo>,
}

/// One kernel alone.
#[derive(Debug)]
pub struct Cutout {
    graph: Graph,
    lowered: Lowered,
    /// What it is, whatever its names.
    pub key: String,
}

impl Cutouts {
    /// The kernels of a plan; of each contraction, `n_others` other ways to cut it.
    ///
    /// # Errors
    /// As for lowering.
    pub fn new(
        plan: Plan,
        on: &On,
        target: &CpuTarget,
        n_others: usize,
    ) -> Result<Cutouts, CompileError> {
        let target = target.clone().with_machine(Some(on.machine));
        let wanted = LoweringOptions {
            recipe: Some(&plan.recipe),
            n_others,
            ..LoweringOptions::default()
        };
        let kernels = lower_as(&plan.graph, &target, on.threads, &wanted)?.kernels;
        Ok(Cutouts {
            plan,
            target,
            threads: on.threads,
            kernels,
        })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// A kernel alone, cut as told. `None` for one that writes nothing, or that is lowered together with another.
    ///
    /// # Errors
    /// As for lowering.
    pub fn cut(
        &self,
        kernel: usize,
        blocking: Option<&Blocking>,
    ) -> Result<Option<Cutout>, CompileError> {
        let Some(node) = self.kernels.get(kernel).and_then(|info| self.node(info)) else {
            return Ok(None);
        };
        let graph = alone(&self.plan.graph, node);
        let mut recipe = self.plan.recipe.clone();
        let cuts = &self.kernels[kernel].cuts;
        if let (Some(blocking), Some(cuts)) = (blocking, cuts) {
            recipe.cut(cuts.place.clone(), blocking.clone());
        }
        let wanted = LoweringOptions {
            recipe: Some(&recipe),
            ..LoweringOptions::default()
        };
        let lowered = lower_as(&graph, &self.target, self.threads, &wanted)?;
        let key = lowered.structure();
        Ok((lowered.kernels.len() == 1).then_some(Cutout {
            graph,
            lowered,
            key,
        }))
    }

    fn node(&self, info: &KernelInfo) -> Option<&Node> {
        let first = info.writes.first()?;
        let nodes = &self.plan.graph.single_state()?.nodes;
        let found = nodes.iter().find(|n| n.writes().contains(first));
        found.filter(|n| n.stage == info.stage && n.origin.to_string() == info.origin)
    }

    /// A recipe that says what this plan's does.
    pub fn recipe(&self) -> &Recipe {
        &self.plan.recipe
    }
}

/// A graph of one kernel.
fn alone(graph: &Graph, node: &Node) -> Graph {
    let mut own = Graph {
        body: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        ..graph.clone()
    };
    let in_memory = |id: &ContainerId| graph.container(*id).storage != Storage::Local;
    let writes: BTreeSet<ContainerId> = node.writes().into_iter().filter(in_memory).collect();
    let reads = node.reads().into_iter().filter(in_memory);
    let reads: BTreeSet<ContainerId> = reads.filter(|id| !writes.contains(id)).collect();
    for id in reads {
        let container = own.container_mut(id);
        if !matches!(container.lifetime, Lifetime::Constant(_)) {
            container.lifetime = Lifetime::Input;
            own.inputs.push(id);
        }
    }
    for id in writes {
        own.add_output(id);
    }
    let state: &mut State = own.last_state();
    state.nodes.push(node.clone());
    own
}

/// A compiled cut-out with its buffers.
struct Loaded {
    program: Program,
    buffers: Vec<AlignedBuffer>,
    arena: AlignedBuffer,
    saved: AlignedBuffer,
}

/// Compiles cut-outs and runs them in turns for so many seconds, at least three rounds: for each, the seconds of
/// each round. What disturbs the machine meanwhile disturbs all of them.
///
/// # Errors
/// What compiling raises, and an interruption.
pub fn time(
    cutouts: &[Cutout],
    threads: usize,
    options: &CompileOptions,
    seconds: f64,
    progress: &mut dyn Progress,
) -> Result<Vec<Vec<f64>>, CompileError> {
    let mut loaded = load(cutouts, options, progress)?;
    let pool = Pool::global();
    if pool.threads() < threads {
        pool.set_threads(threads);
    }
    let mut between = vec![1_u8; BETWEEN_BYTES];
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); loaded.len()];
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < 4 || start.elapsed().as_secs_f64() < seconds {
        for (one, times) in loaded.iter_mut().zip(&mut times) {
            between.fill(rounds as u8);
            std::hint::black_box(&between);
            let buffers: Vec<Buffer<'_>> = one
                .buffers
                .iter_mut()
                .map(AlignedBuffer::as_buffer)
                .collect();
            let run =
                one.program
                    .run_timed(&buffers, one.arena.as_buffer(), one.saved.as_buffer(), pool);
            let run = run.map_err(|e| CompileError::Cutout(e.to_string()))?;
            if rounds > 0 {
                times.push(run.iter().map(|t| t.time.as_secs_f64()).sum());
            }
        }
        rounds += 1;
        if progress.is_interrupted() {
            return Err(kernels::compile::CompileError::Interrupted.into());
        }
    }
    Ok(times)
}

fn load(
    cutouts: &[Cutout],
    options: &CompileOptions,
    progress: &mut dyn Progress,
) -> Result<Vec<Loaded>, CompileError> {
    // One file for each, so that one that is known is found in the cache of compiled files.
    let units: Vec<_> = cutouts
        .iter()
        .flat_map(|c| c.lowered.units.clone())
        .collect();
    let modules = compile(&units, options, progress)?;
    let mut first = 0;
    let mut loaded = Vec::new();
    for cutout in cutouts {
        let own = &modules[first..first + cutout.lowered.units.len()];
        first += own.len();
        let programs = assemble(&cutout.graph, &cutout.lowered, own)?;
        let with_launches = |p: &Program| !p.parts().launches.is_empty();
        let Some(program) = programs.into_iter().find(with_launches) else {
            return Err(CompileError::Cutout("a kernel has no launches".into()));
        };
        let zeroed = |bytes: usize| {
            let refused = || CompileError::Cutout(format!("there is no memory for {bytes} bytes"));
            AlignedBuffer::zeroed(bytes).ok_or_else(refused)
        };
        let graph = &cutout.graph;
        let outputs = graph.outputs.iter().map(|o| o.container);
        let ids = graph.inputs.iter().copied().chain(outputs);
        let mut buffers = Vec::new();
        for (id, spec) in ids.zip(&program.parts().externals) {
            let mut buffer = zeroed(spec.bytes)?;
            if graph.container(id).dtype == DType::F32 {
                // Small numbers of both signs, none of them denormal.
                for (n, x) in buffer.as_mut_slice::<f32>().iter_mut().enumerate() {
                    *x = ((n % 251) as f32 - 125.0) / 1024.0;
                }
            }
            buffers.push(buffer);
        }
        let parts = program.parts();
        loaded.push(Loaded {
            arena: zeroed(parts.arena_bytes)?,
            saved: zeroed(parts.saved_bytes)?,
            buffers,
            program,
        });
    }
    Ok(loaded)
}
