//! The end of the straight line: a plan lowered, compiled, loaded, ready to run.

use crate::error::CompileError;
use crate::plan::{OneThread, Plan};
use crate::predict::On;
use crate::report::{bytes, notes};
use crate::torch::locked;
use crate::undone::undone;
use graph::{Graph, Machine, Stage};
use kernels::assemble::assemble;
use kernels::compile::{CompileOptions, compile};
use kernels::contraction::PriorPlans;
use kernels::lowering::{KernelInfo, Lowered, LoweredLaunch, LoweringOptions, lower_as};
use kernels::plan::Dependences;
use kernels::progress::Progress;
use kernels::run::Program;
use kernels::templates::Templates;
use std::sync::Mutex;

/// A step that runs: a forward program and, for training, a backward one.
///
/// The external buffers of both are, in order: the model's inputs, the gradients of the seeded
/// outputs, the model's outputs, the gradients of the inputs. Each program needs only those it
/// touches.
#[derive(Debug)]
pub struct Executable {
    /// What was decided.
    pub plan: Plan,
    /// Computes the outputs and the saved block.
    pub forward: Program,
    /// Computes the gradients from the saved block.
    pub backward: Program,
    /// How each kernel was made, in order.
    pub kernels: Vec<KernelInfo>,
    /// What they are for.
    pub on: On,
    /// The position in `kernels` of each launch, for the forward and for the backward program.
    pub launch_kernels: [Vec<usize>; 2],
    /// What each kernel touches and writes.
    pub dependences: Dependences,
}

impl Executable {
    /// Lowers, emits and compiles a plan for a number of threads, or for one where the step is so small
    /// that threads would wait for each other longer than they work.
    ///
    /// # Errors
    /// A graph that has no kernels yet, no C compiler, a full disk.
    pub fn build(
        plan: Plan,
        options: &CompileOptions,
        threads: usize,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        Executable::build_sharing(plan, options, threads, None, progress)
    }

    /// Like [`Executable::build`], but reuses kernels that earlier sizes of the same model compiled where only
    /// constants differ, and prepares kernels for later sizes.
    ///
    /// # Errors
    /// As for [`Executable::build`].
    pub fn build_sharing(
        mut plan: Plan,
        options: &CompileOptions,
        threads: usize,
        templates: Option<&Mutex<Templates>>,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        let (mut lowered, one_thread) = lower_for(&plan, options, threads, templates)?;
        plan.one_thread = one_thread;
        let undone = undone(&plan, &lowered.kernels);
        let notes = notes(&plan, &lowered.kernels, &undone);
        plan.notes.extend(notes);
        if let Some(templates) = templates {
            lowered.share(&mut locked(templates));
        }
        let modules = compile(&lowered.units, options, progress)?;
        let [forward, backward] = assemble(&plan.graph, &lowered, &modules)?;
        let kernels_of = |backward: bool| {
            let is_own = |l: &&LoweredLaunch| (l.stage != Stage::Forward) == backward;
            let own = lowered.launches.iter().filter(is_own);
            own.map(|l| l.kernel).collect()
        };
        Ok(Executable {
            launch_kernels: [kernels_of(false), kernels_of(true)],
            on: On {
                machine: limits(&plan, options),
                threads: lowered.threads,
            },
            plan,
            forward,
            backward,
            kernels: lowered.kernels,
            dependences: lowered.dependences,
        })
    }
}

/// The limits of the machine that the plan was made for; if there is none, those that are assumed for this machine.
fn limits(plan: &Plan, options: &CompileOptions) -> Machine {
    options.target.clone().with_machine(plan.machine).machine
}

/// Lowers a plan for a number of threads; contractions are planned as those of earlier sizes where that costs little.
/// Where threads are not worth it, the kernels run on one: the first program's are written for one, those of
/// later sizes for any number, so that all sizes share them.
fn lower_for(
    plan: &Plan,
    options: &CompileOptions,
    threads: usize,
    templates: Option<&Mutex<Templates>>,
) -> Result<(Lowered, Option<OneThread>), CompileError> {
    let shares = templates.is_some_and(|t| !locked(t).is_empty());
    let mut lowered = lower_varying(plan, options, threads, templates, false)?;
    let machine = limits(plan, options);
    let one_thread = one_thread(&plan.graph, &lowered.kernels, &On { machine, threads });
    match (one_thread, shares) {
        (None, _) => {}
        (Some(_), true) => lowered.threads = 1,
        (Some(_), false) => lowered = lower_varying(plan, options, 1, templates, false)?,
    }
    Ok((lowered, one_thread))
}

/// Shows `templates` the kernels of a plan that may come, and which of their numbers are decisions. Compiles nothing.
/// Returns the kernels.
pub(crate) fn foresee(
    plan: &Plan,
    options: &CompileOptions,
    threads: usize,
    templates: &Mutex<Templates>,
) -> Result<Lowered, CompileError> {
    let lowered = lower_varying(plan, options, threads, Some(templates), false)?;
    lowered.foresee(&mut locked(templates));
    let varied = lower_varying(plan, options, threads, Some(templates), true)?;
    varied.foresee(&mut locked(templates));
    Ok(lowered)
}

/// Compiles the texts that foreseen kernels will call, so that such sizes find them in the cache.
pub(crate) fn compile_foreseen(
    foreseen: Vec<Lowered>,
    options: &CompileOptions,
    templates: &Mutex<Templates>,
    progress: &mut dyn Progress,
) -> Result<(), CompileError> {
    let mut units = Vec::new();
    for mut lowered in foreseen {
        lowered.share(&mut locked(templates));
        units.append(&mut lowered.units);
    }
    compile(&units, options, progress)?;
    Ok(())
}

fn lower_varying(
    plan: &Plan,
    options: &CompileOptions,
    threads: usize,
    templates: Option<&Mutex<Templates>>,
    varies: bool,
) -> Result<Lowered, CompileError> {
    let known = templates.map_or_else(PriorPlans::default, |t| locked(t).choices().clone());
    let target = options.target.clone().with_machine(plan.machine);
    let wanted = LoweringOptions {
        known: Some(&known),
        recipe: Some(&plan.recipe),
        n_others: 0,
        varies,
    };
    Ok(lower_as(&plan.graph, &target, threads, &wanted)?)
}

/// The part of a core's rate in products that small kernels reach; most of their time goes into starting loops.
const SMALL_KERNELS_REACH: f64 = 1.0 / 16.0;

/// Why one thread is predicted to be as fast as several, if it is: several save at most as much work as their launches
/// and barriers cost. Where the two are close, the step's data fits in the cache that the cores share, so bytes are
/// counted at its rate.
fn one_thread(graph: &Graph, kernels: &[KernelInfo], on: &On) -> Option<OneThread> {
    let On { machine, threads } = on;
    let operations_per_us = machine.product_operations_per_us.max(1) as f64 * SMALL_KERNELS_REACH;
    let work = |info: &KernelInfo| {
        let moved = bytes(graph, info.reads.iter().chain(&info.writes)) as f64;
        info.flops as f64 / operations_per_us + moved / machine.l3.rate(1)
    };
    let work: f64 = kernels.iter().map(work).sum();
    let n_launches: usize = kernels.iter().map(|info| info.n_launches).sum();
    let meeting_us = (machine.launch_ns + machine.barrier_ns) as f64 / 1e3;
    let one_thread = OneThread {
        n_threads: *threads,
        saved_us: work * (1.0 - 1.0 / *threads as f64),
        waited_us: n_launches as f64 * meeting_us,
    };
    (*threads > 1 && one_thread.saved_us <= one_thread.waited_us).then_some(one_thread)
}
