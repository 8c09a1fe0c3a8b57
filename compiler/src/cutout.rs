//! Cut-outs: single kernels of a plan, compiled and timed in buffers of their own.
//!
//! A cut-out is a graph of one kernel whose reads are inputs and whose writes are outputs, so it takes the same way
//! to C as the whole step. Its key is made of its text, its number of threads and its compiler with the flags: on one
//! machine, kernels with one key take the same time, in whatever network they are. Whole steps are timed in the same
//! way. Decides nothing about what is faster.

use crate::error::CompileError;
use crate::executable::Executable;
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
use kernels::run::{Program, Threads};
use std::collections::BTreeSet;
use std::time::Instant;

/// Bytes written between two runs, so that a kernel finds its data where another kernel left it: not in the cache
/// of its core.
const BETWEEN_BYTES: usize = 8 << 20;

/// Rounds in which kernels are compared, at least.
const KERNEL_ROUNDS: usize = 3;
/// Rounds in which whole steps are compared, at least.
const STEP_ROUNDS: usize = 12;

/// The plan's kernels, ready to be cut out.
#[derive(Debug)]
pub struct Cutouts {
    plan: Plan,
    target: CpuTarget,
    toolchain: String,
    threads: usize,
    /// How each kernel of the whole step is made, with other ways to cut contractions.
    pub kernels: Vec<KernelInfo>,
}

/// One kernel alone.
#[derive(Debug)]
pub struct Cutout {
    graph: Graph,
    lowered: Lowered,
    /// What it is, whatever its names: its text, its number of threads, and what compiles it.
    pub key: String,
}

impl Cutouts {
    /// The kernels of a plan, for a target and the identity of a compiler. Each contraction comes with `n_others` other
    /// ways to cut it.
    ///
    /// # Errors
    /// As for lowering.
    pub fn new(
        plan: Plan,
        on: &On,
        (target, toolchain): (&CpuTarget, &str),
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
            toolchain: toolchain.to_string(),
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
        let key = lowered.structure(&[&self.toolchain, &self.target.cflags.join(" ")]);
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

/// Compiled kernels with their buffers: a cut-out, or both passes of a step.
struct Loaded {
    programs: Vec<Program>,
    buffers: Vec<AlignedBuffer>,
    /// The arena of each program.
    arenas: Vec<AlignedBuffer>,
    saved: AlignedBuffer,
}

/// Compiles cut-outs and runs them in turns for `seconds`, at least three rounds: returns the seconds of each
/// round, for each. What disturbs the machine meanwhile disturbs all of them.
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
    let loaded = load(cutouts, options, progress)?;
    run_in_turns(loaded, threads, (seconds, KERNEL_ROUNDS), progress)
}

/// Runs whole steps in turns, forward and backward pass, on made-up numbers, for `seconds` and at least twelve
/// rounds. Returns the seconds of each round, for each.
///
/// # Errors
/// There is no memory for their buffers; an interruption.
pub fn time_steps(
    steps: Vec<Executable>,
    threads: usize,
    seconds: f64,
    progress: &mut dyn Progress,
) -> Result<Vec<Vec<f64>>, CompileError> {
    let loaded = steps
        .into_iter()
        .map(|step| Loaded::new(&step.plan.graph, vec![step.forward, step.backward]));
    let loaded: Result<Vec<Loaded>, CompileError> = loaded.collect();
    run_in_turns(loaded?, threads, (seconds, STEP_ROUNDS), progress)
}

fn run_in_turns(
    mut loaded: Vec<Loaded>,
    threads: usize,
    (seconds, least_rounds): (f64, usize),
    progress: &mut dyn Progress,
) -> Result<Vec<Vec<f64>>, CompileError> {
    let pool = Pool::global();
    if pool.threads() < threads {
        pool.set_threads(threads);
    }
    let mut between = vec![1_u8; BETWEEN_BYTES];
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); loaded.len()];
    let start = Instant::now();
    let mut rounds = 0;
    // The first round only fills caches.
    while rounds <= least_rounds || start.elapsed().as_secs_f64() < seconds {
        for (one, times) in loaded.iter_mut().zip(&mut times) {
            between.fill(rounds as u8);
            std::hint::black_box(&between);
            let time = one.run(pool)?;
            if rounds > 0 {
                times.push(time);
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
        loaded.push(Loaded::new(&cutout.graph, vec![program])?);
    }
    Ok(loaded)
}

impl Loaded {
    /// Programs of a graph with buffers for them.
    fn new(graph: &Graph, programs: Vec<Program>) -> Result<Loaded, CompileError> {
        let zeroed = |bytes: usize| {
            let refused = || CompileError::Cutout(format!("there is no memory for {bytes} bytes"));
            AlignedBuffer::zeroed(bytes).ok_or_else(refused)
        };
        let outputs = graph.outputs.iter().map(|o| o.container);
        let ids = graph.inputs.iter().copied().chain(outputs);
        let mut buffers = Vec::new();
        for (at, id) in ids.enumerate() {
            let specs = programs.iter().filter_map(|p| p.parts().externals.get(at));
            let mut buffer = zeroed(specs.map(|spec| spec.bytes).max().unwrap_or(0))?;
            if graph.container(id).dtype == DType::F32 {
                // Small numbers of both signs, none of them denormal.
                for (n, x) in buffer.as_mut_slice::<f32>().iter_mut().enumerate() {
                    *x = ((n % 251) as f32 - 125.0) / 1024.0;
                }
            }
            buffers.push(buffer);
        }
        let arenas = programs.iter().map(|p| zeroed(p.parts().arena_bytes));
        let saved = programs.iter().map(|p| p.parts().saved_bytes).max();
        Ok(Loaded {
            arenas: arenas.collect::<Result<_, _>>()?,
            saved: zeroed(saved.unwrap_or(0))?,
            buffers,
            programs,
        })
    }

    /// The seconds of one run.
    fn run(&mut self, pool: &Pool) -> Result<f64, CompileError> {
        let buffers: Vec<Buffer<'_>> = self
            .buffers
            .iter_mut()
            .map(AlignedBuffer::as_buffer)
            .collect();
        let mut seconds = 0.0;
        for (program, arena) in self.programs.iter().zip(&mut self.arenas) {
            let run = program.run_timed(
                &buffers,
                arena.as_buffer(),
                self.saved.as_buffer(),
                Threads::of(pool),
            );
            let run = run.map_err(|e| CompileError::Cutout(e.to_string()))?;
            seconds += run.iter().map(|t| t.time.as_secs_f64()).sum::<f64>();
        }
        Ok(seconds)
    }
}
