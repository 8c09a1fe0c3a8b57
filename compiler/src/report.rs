//! What a step does, in numbers: kernels, the bytes they move against the least possible,
//! arithmetic and memory.
//!
//! Bytes moved are bytes of elements: each that a kernel reads or writes counts once, what stays inside a kernel
//! not at all. A lookup in a table counts as many rows as it has indices. A product that packs its operands or a
//! window that leaves the cache moves more than is counted. The least possible is what crosses the border of the
//! whole step ("Data Movement Is All You Need", arXiv 2007.00072, calls it Q). Nothing here is measured.

use crate::bounds::{Bound, bound, moved};
use crate::error::CompileError;
use crate::plan::{OneThread, Plan};
use crate::predict::{On, Prediction, predict};
use crate::recipe::uncut;
use crate::slow::{SlowKernel, slow};
use crate::undone::{Undone, undone, unfollowed};
use fusion::{Decision, lower_bound};
use graph::{ContainerId, Graph, Lifetime, Node, Origin, Stage, Storage, SymExpr};
use kernels::contraction::ScalarForm;
use kernels::features::{CpuTarget, Isa, forced_isa};
use kernels::lowering::{BlockingDecision, KernelInfo, LoweringOptions, lower_as};
use kernels::toolchain::Family;
use serde::Serialize;
use std::collections::BTreeSet;

/// Most refusals a report lists.
pub const MAX_REFUSALS: usize = 50;

/// A step in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Kernels in execution order.
    pub kernels: Vec<KernelReport>,
    /// Bytes of the containers that each kernel reads or writes, over all kernels.
    pub bytes_moved: i64,
    /// Bytes that no schedule can avoid moving: inputs and parameters once, outputs once.
    pub bytes_least: i64,
    /// Arithmetic operations of all kernels.
    pub operations: u64,
    /// Least microseconds that the whole step can take on the machine: to move what no schedule can avoid, or to do the
    /// operations of its products, whichever is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline_us: Option<f64>,
    /// Memory.
    pub memory: Memory,
    /// Bytes that fusion saved.
    pub bytes_saved: i64,
    /// What the recipe says and lowering could not do, in sentences.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// Fusion's refusals in sentences, those first that would have saved most; at most
    /// [`MAX_REFUSALS`].
    pub refusals: Vec<String>,
    /// How many more refusals there are.
    pub n_more_refusals: usize,
    /// What was decided and lowering undid.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub undone: Vec<Undone>,
    /// Why the kernels run on one thread, where the caller offered more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_thread: Option<OneThread>,
    /// What computes each attention of the model, and why, where a table or the caller could choose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attentions: Vec<String>,
    /// Contractions without a fast kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
    /// Kernels that are predicted to be far from the machine's limits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slow: Vec<SlowKernel>,
    /// The containers that kernels read or write, each once, in the order of the kernels.
    pub containers: Vec<ContainerReport>,
}

/// A contraction that no fast kernel knows: right, but slow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Name of its kernel.
    pub kernel: String,
    /// Where its operators came from.
    pub origin: String,
    /// Why, and what it costs.
    #[serde(flatten)]
    pub scalar: ScalarForm,
    /// The warning in a sentence.
    pub sentence: String,
}

/// One kernel in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelReport {
    /// Its name in the C text.
    pub name: String,
    /// Where its operators came from.
    pub origin: String,
    /// The operators that it was fused from.
    pub operators: Vec<OperatorReport>,
    /// `forward`, `backward` or `optimizer`.
    pub stage: &'static str,
    /// Which generator writes it.
    pub path: &'static str,
    /// The type of the numbers that its products multiply; nothing for loops, and on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub products: Option<String>,
    /// Calls it takes.
    pub launches: usize,
    /// Bytes of the containers it reads from memory, each whole.
    pub bytes_read: i64,
    /// Bytes of the containers it writes to memory, each whole.
    pub bytes_written: i64,
    /// Names of the containers it reads from memory.
    pub reads: Vec<String>,
    /// Names of the containers it writes to memory.
    pub writes: Vec<String>,
    /// The part of the bytes read and written that belongs to the step's own inputs, parameters and outputs; the rest
    /// is intermediate.
    pub bytes_least: i64,
    /// Further bytes moved: results of another library's operator, which are copied to their places.
    #[serde(skip_serializing_if = "is_zero")]
    pub bytes_copied: i64,
    /// Arithmetic operations.
    pub operations: u64,
    /// What it is predicted to take on the machine; nothing on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Prediction>,
    /// What it moves and takes at least, on the machine; nothing on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<Bound>,
    /// How a contraction was cut.
    #[serde(skip)]
    pub cuts: Option<BlockingDecision>,
    /// Which of several candidates computes it, and why, if a table or the caller chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<String>,
    /// Why bf16 operands are multiplied in single precision, on a CPU that multiplies pairs of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_pairs: Option<String>,
}

/// An operator of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OperatorReport {
    /// Its name in the model's file or exported graph.
    pub node: String,
    /// Path of its module; empty where there is none.
    pub module: String,
    /// Source file and line; empty where they are not known.
    pub source: String,
}

/// A container that kernels touch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ContainerReport {
    /// Its name, unique within the step.
    pub name: String,
    /// Element type.
    pub dtype: &'static str,
    /// Sizes, outermost first.
    pub shape: Vec<i64>,
    /// What its elements take.
    pub bytes: i64,
    /// `input`, `output`, `constant`, `saved` (from the forward for the backward pass) or
    /// `intermediate`.
    pub role: &'static str,
}

/// Memory of a step in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Intermediate results of the forward pass, at most at one time.
    pub forward_arena_bytes: usize,
    /// Intermediate results of the backward pass, at most at one time.
    pub backward_arena_bytes: usize,
    /// What the forward pass keeps for the backward pass.
    pub saved_bytes: usize,
    /// Scratch for each thread.
    pub thread_scratch_bytes: usize,
}

impl Memory {
    /// Most bytes of intermediate results at one time: what is kept, and the larger of the arenas.
    pub fn peak_bytes(&self) -> usize {
        self.saved_bytes + self.forward_arena_bytes.max(self.backward_arena_bytes)
    }
}

impl Report {
    /// The report of a plan that is lowered for a number of threads now, but neither compiled nor run.
    ///
    /// # Errors
    /// A graph that has no kernels yet, or what [`planning_target`] refuses.
    pub fn of_plan(plan: &Plan, threads: usize) -> Result<Report, CompileError> {
        let target = planning_target()?.with_machine(plan.machine);
        let wanted = LoweringOptions {
            recipe: Some(&plan.recipe),
            ..LoweringOptions::default()
        };
        let lowered = lower_as(&plan.graph, &target, threads, &wanted)?;
        let on = On {
            machine: target.machine,
            threads,
        };
        let memory = Memory {
            forward_arena_bytes: lowered.memory.forward_arena_bytes,
            backward_arena_bytes: lowered.memory.backward_arena_bytes,
            saved_bytes: lowered.memory.saved_bytes,
            thread_scratch_bytes: lowered.thread_scratch_bytes,
        };
        Ok(Report::new(plan, &lowered.kernels, memory, Some(on)))
    }

    /// The report of a plan and what its kernels became; `on` is what kernels of a CPU are for.
    pub fn new(plan: &Plan, kernels: &[KernelInfo], memory: Memory, on: Option<On>) -> Report {
        let graph = &plan.graph;
        let predicted = on.map(|on| predict(graph, kernels, &on));
        let border = border(graph);
        let reports: Vec<_> = kernels
            .iter()
            .zip(moved(graph, kernels))
            .enumerate()
            .map(|(n, (info, moved))| {
                let touched = info.reads.iter().zip(&moved.reads);
                let touched = touched.chain(info.writes.iter().zip(&moved.writes));
                let at_border = touched.filter(|(id, _)| border.contains(id));
                KernelReport {
                    name: info.name.clone(),
                    origin: info.origin.clone(),
                    operators: info.operators.iter().map(|o| operator(o)).collect(),
                    stage: info.stage.name(),
                    path: info.path,
                    products: info.products.map(|dtype| dtype.to_string()),
                    launches: info.n_launches,
                    bytes_read: moved.reads.iter().sum(),
                    bytes_written: moved.writes.iter().sum(),
                    reads: names(graph, &info.reads),
                    writes: names(graph, &info.writes),
                    bytes_least: at_border.map(|(_, size)| size).sum(),
                    bytes_copied: info.bytes_copied as i64,
                    operations: info.flops,
                    bound: on.and_then(|on| kernel_bound(graph, info, &on)),
                    cuts: info.cuts.clone(),
                    predicted: predicted.as_ref().map(|all| all[n]),
                    choice: info.choice.clone(),
                    no_pairs: info.no_pairs.map(|reason| reason.to_string()),
                }
            })
            .collect();
        let undone = undone(plan, kernels);
        let is_undone = |d: &Decision| undone.iter().any(|u| u.place == d.place);
        let applied = plan.decisions.iter();
        let applied = applied.filter(|d| d.is_applied() && !is_undone(d));
        let (refusals, n_more_refusals) = refusals(plan);
        Report {
            bytes_moved: reports.iter().map(KernelReport::bytes_moved).sum(),
            bytes_least: lower_bound(graph),
            operations: reports.iter().map(|k| k.operations).sum(),
            slow: slow(&reports),
            kernels: reports,
            roofline_us: on.map(|on| roofline_us(graph, kernels, &on)),
            containers: containers(graph, kernels),
            memory,
            bytes_saved: applied.map(|d| d.bytes).sum(),
            notes: notes(plan, kernels, &undone),
            refusals,
            n_more_refusals,
            undone,
            one_thread: plan.one_thread,
            attentions: Vec::new(),
            warnings: warnings(kernels),
        }
    }
}

impl Report {
    /// Microseconds of all kernels; `None` if there is one without a prediction, as on a GPU.
    pub fn predicted_us(&self) -> Option<f64> {
        self.kernels.iter().map(|k| Some(k.predicted?.us)).sum()
    }
}

/// What a recipe says and lowering could not do, in sentences.
pub(crate) fn notes(plan: &Plan, kernels: &[KernelInfo], undone: &[Undone]) -> Vec<String> {
    let mut notes = uncut(&plan.recipe, kernels);
    notes.extend(unfollowed(plan, undone));
    notes
}

/// The bounds of the node that a kernel was made of; none where a node became several kernels.
fn kernel_bound(graph: &Graph, info: &KernelInfo, on: &On) -> Option<Bound> {
    let first = info.writes.first()?;
    let nodes = &graph.single_state()?.nodes;
    let node = nodes.iter().find(|n| n.writes().contains(first))?;
    let is_whole = info.writes.len() == stored(graph, node);
    is_whole.then(|| bound(graph, node, &on.machine, on.threads))
}

fn stored(graph: &Graph, node: &Node) -> usize {
    let in_memory = |id: &ContainerId| graph.container(*id).storage != Storage::Local;
    node.writes().into_iter().filter(in_memory).count()
}

fn roofline_us(graph: &Graph, kernels: &[KernelInfo], on: &On) -> f64 {
    let machine = &on.machine;
    let threads = on.threads.max(1) as f64;
    let us = |k: &KernelInfo| Some(k.flops as f64 / machine.product_rate(k.products?) as f64);
    let multiplying = kernels.iter().filter_map(us).sum::<f64>() / threads;
    let moving = lower_bound(graph) as f64 / machine.memory.rate(on.threads);
    moving.max(multiplying)
}

impl KernelReport {
    fn bytes_moved(&self) -> i64 {
        self.bytes_read + self.bytes_written + self.bytes_copied
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde asks by reference
fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// The kernels in the scalar form, each as a warning.
fn warnings(kernels: &[KernelInfo]) -> Vec<Warning> {
    let warned = kernels.iter().filter_map(|info| Some((info, info.scalar?)));
    let warning = |(info, scalar): (&KernelInfo, ScalarForm)| {
        let times = scalar.cost.map_or(String::new(), |cost| {
            let [predicted, fast] = [cost.predicted_us, cost.fast_us].map(|us| us as f64 / 1e3);
            format!("; predicted {predicted:.1} ms, {fast:.1} ms with a fast kernel")
        });
        let (stage, reason) = (info.stage.name(), scalar.reason);
        Warning {
            kernel: info.name.clone(),
            origin: info.origin.clone(),
            scalar,
            sentence: format!(
                "{} ({stage}): a contraction runs as scalar loops, since {reason}{times}",
                info.origin
            ),
        }
    };
    warned.map(warning).collect()
}

/// What fusion refused although it would have saved bytes, each sentence once, and how many more there are.
fn refusals(plan: &Plan) -> (Vec<String>, usize) {
    let mut refused: Vec<_> = plan
        .decisions
        .iter()
        .filter(|d| !d.is_applied() && d.bytes > 0)
        .collect();
    refused.sort_by_key(|d| -d.bytes);
    let mut seen = BTreeSet::new();
    let sentences = refused.into_iter().map(|d| {
        let what = d.sentence();
        format!("{} at {}: {what}", d.rewrite(), d.origin)
    });
    let mut sentences: Vec<String> = sentences.filter(|s| seen.insert(s.clone())).collect();
    let n_more = sentences.len().saturating_sub(MAX_REFUSALS);
    sentences.truncate(MAX_REFUSALS);
    (sentences, n_more)
}

/// The target this CPU says it is, without trying it: good enough to plan, not to run.
///
/// # Errors
/// `SHORTHAUL_ISA` or `SHORTHAUL_WINOGRAD` with an unknown value.
pub fn planning_target() -> Result<CpuTarget, CompileError> {
    let isa = match forced_isa().map_err(kernels::compile::CompileError::from)? {
        Some(isa) => isa,
        None => declared_isa(),
    };
    let target = CpuTarget::for_isa(isa, Family::Gcc).with_environment();
    Ok(target.map_err(kernels::compile::CompileError::from)?)
}

#[cfg(target_arch = "x86_64")]
fn declared_isa() -> Isa {
    if std::arch::is_x86_feature_detected!("avx512f") {
        Isa::Avx512
    } else if std::arch::is_x86_feature_detected!("avx2") {
        Isa::Avx2
    } else {
        Isa::Portable
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn declared_isa() -> Isa {
    Isa::Portable
}

fn operator(origin: &Origin) -> OperatorReport {
    OperatorReport {
        node: origin.node.clone(),
        module: origin.module.clone(),
        source: origin.source.clone(),
    }
}

fn names(graph: &Graph, ids: &[ContainerId]) -> Vec<String> {
    let name = |id: &ContainerId| graph.container(*id).name.clone();
    ids.iter().map(name).collect()
}

/// What kernels touch, each container once, in the order of the kernels.
fn containers(graph: &Graph, kernels: &[KernelInfo]) -> Vec<ContainerReport> {
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let touched = |info: &KernelInfo| [info.reads.clone(), info.writes.clone()].concat();
    let in_backward: BTreeSet<ContainerId> = kernels
        .iter()
        .filter(|info| info.stage != Stage::Forward)
        .flat_map(touched)
        .collect();
    let written_forward: BTreeSet<ContainerId> = kernels
        .iter()
        .filter(|info| info.stage == Stage::Forward)
        .flat_map(|info| info.writes.clone())
        .collect();
    let mut seen = BTreeSet::new();
    let each = kernels.iter().flat_map(touched);
    each.filter(|id| seen.insert(*id))
        .map(|id| {
            let container = graph.container(id);
            let crosses = written_forward.contains(&id) && in_backward.contains(&id);
            ContainerReport {
                name: container.name.clone(),
                dtype: container.dtype.name(),
                shape: container
                    .shape
                    .iter()
                    .filter_map(SymExpr::as_const)
                    .collect(),
                bytes: bytes(graph, [&id]),
                role: match &container.lifetime {
                    Lifetime::Constant(_) => "constant",
                    Lifetime::Input | Lifetime::Parameter => "input",
                    Lifetime::Transient if outputs.contains(&id) => "output",
                    Lifetime::Transient if crosses => "saved",
                    Lifetime::Transient => "intermediate",
                },
            }
        })
        .collect()
}

/// Containers that the caller owns.
fn border(graph: &Graph) -> BTreeSet<ContainerId> {
    let given = |id: &ContainerId| graph.container(*id).lifetime != Lifetime::Transient;
    let returned = graph.outputs.iter().map(|o| o.container);
    graph
        .container_ids()
        .filter(given)
        .chain(returned)
        .collect()
}

/// Size of containers together.
pub(crate) fn bytes<'a>(graph: &Graph, ids: impl IntoIterator<Item = &'a ContainerId>) -> i64 {
    let size = |id: &ContainerId| {
        let container = graph.container(*id);
        let elements = SymExpr::product(&container.shape).as_const();
        let elements = elements.unwrap_or_else(|| unreachable!("a plan's sizes are fixed"));
        elements * container.dtype.bytes() as i64
    };
    ids.into_iter().map(size).sum()
}
