//! Lowering of a fused graph: its maps become C functions, launches and a memory plan.
//!
//! Contractions go to the contraction generator, all other maps to the map emitter, nodes that stay whole to the
//! generators of ordered loops. Functions with
//! the same text are emitted once. Nothing here decides what is fused: each top-level map becomes
//! the launches it needs, in the graph's order.

use crate::compile::SourceUnit;
use crate::contraction::{
    self, BlockingRequest, EmittedContraction, Hooks, NoFastForm, PlanSignature, PriorPlans,
    ScalarForm, Unsupported,
};
use crate::emit::{self, Arg};
use crate::features::{CpuTarget, Pairs};
use crate::lower::LowerError;
use crate::plan::{self, Buffer, Classes, Dependences, MemoryPlan, Touches};
use crate::prelude;
use crate::recognize::{Recognized, recognize};
use graph::{Graph, Node, NodeKind, Recipe, Stage, Storage};
use std::collections::BTreeMap;

mod attention;
mod files;
mod halves;
mod info;
mod members;
mod ordered;
mod prologue;
mod recurrence;
mod requested;
mod scalar;
mod share;
mod split;
mod sums;
mod work;

pub use info::KernelInfo;
pub use info::operators;
pub use members::{members, split_epilogue};
use members::{product_dims, split_prologues};
use prologue::Before;
pub use requested::{BlockingDecision, LoweringOptions};
pub use split::{Split, SplitReason};
use split::{Stop, not_emitted, refused, split_reason};
pub use work::KernelCost;
pub use work::operations;
use work::work;

/// Stands for a kernel's name in its text, so that equal kernels have equal text.
const PLACEHOLDER: &str = "SH_KERNEL_NAME";

/// Reductions over vector lanes that propagate NaN, for `#pragma omp simd`.
const REDUCTIONS: &str = "\
#pragma omp declare reduction(sh_max : float : omp_out = sh_max(omp_out, omp_in)) initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(sh_min : float : omp_out = sh_min(omp_out, omp_in)) initializer(omp_priv = __builtin_inff())
#pragma omp declare reduction(sh_max : double : omp_out = sh_max_f64(omp_out, omp_in)) initializer(omp_priv = -__builtin_inf())
#pragma omp declare reduction(sh_min : double : omp_out = sh_min_f64(omp_out, omp_in)) initializer(omp_priv = __builtin_inf())
";

/// A fused graph as sources and launches.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// C files.
    pub units: Vec<SourceUnit>,
    /// Launches in order, forward before backward.
    pub launches: Vec<LoweredLaunch>,
    /// Where containers live.
    pub memory: MemoryPlan,
    /// Scratch that the most demanding launch needs per thread, in bytes.
    pub thread_scratch_bytes: usize,
    /// What each top-level map became.
    pub kernels: Vec<KernelInfo>,
    /// What each kernel touches and writes.
    pub dependences: Dependences,
    /// Threads that the launches have room for; they run on fewer as well.
    pub threads: usize,
    /// Numbers that launches pass behind their buffers, where a kernel's text is shared with other sizes.
    pub(crate) values: Vec<Vec<i64>>,
    sources: Vec<Source>,
    /// The plan of each of its contractions, with the container of the product.
    pub(crate) choices: Vec<(String, PlanSignature)>,
}

/// One call of a C function by every thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoweredLaunch {
    /// The pass it belongs to.
    pub stage: Stage,
    /// The C function.
    pub symbol: String,
    /// What reports call it: the function's name where its text is not shared.
    pub name: String,
    /// Position of its file in [`Lowered::units`].
    pub unit: usize,
    /// Its buffers, in the function's order.
    pub args: Vec<Buffer>,
    /// Position of its kernel in [`Lowered::kernels`].
    pub kernel: usize,
    /// Position in [`Lowered::values`] of the numbers that it passes behind its buffers.
    pub(crate) values: Option<usize>,
    /// Position of its kernel's text in [`Lowered::sources`].
    source: usize,
}

/// Lowers a graph of maps (and reshapes, which become aliases) for a target and a number of threads.
///
/// # Errors
/// See [`LowerError`].
pub fn lower(graph: &Graph, target: &CpuTarget, threads: usize) -> Result<Lowered, LowerError> {
    lower_as(graph, target, threads, &LoweringOptions::default())
}

/// Like [`lower`], but cuts contractions as a recipe says, or as `known` contractions of other sizes if that costs
/// little.
///
/// # Errors
/// See [`LowerError`].
pub fn lower_as(
    graph: &Graph,
    target: &CpuTarget,
    threads: usize,
    wanted: &LoweringOptions<'_>,
) -> Result<Lowered, LowerError> {
    let mut lowering = Lowering {
        graph: graph.clone(),
        pairs: target.pairs,
        target: contraction::ContractionTarget {
            vector_width: target.vector_width_f32 as i64,
            threads: threads as i64,
            machine: target.machine,
            known: Vec::new(),
            requested: BlockingRequest {
                blocking: None,
                n_others: wanted.n_others,
                varies: wanted.varies,
                allows_winograd: target.allows_winograd,
            },
        },
        known: wanted.known,
        product: String::new(),
        threads,
        recipe: wanted.recipe.cloned().unwrap_or_default(),
        choices: Vec::new(),
        before: Before::default(),
        texts: BTreeMap::new(),
        emitted: BTreeMap::new(),
        emitted_words: BTreeMap::new(),
        names: BTreeMap::new(),
        sources: Vec::new(),
        launches: Vec::new(),
        workspaces: Vec::new(),
        scratch: 0,
        kernels: Vec::new(),
    };
    let nodes = match graph.single_state() {
        Some(state) => state.nodes.clone(),
        None => return Err(LowerError::ControlFlow),
    };
    for node in &nodes {
        lowering.node(node)?;
    }
    lowering.finish()
}

struct Lowering<'a> {
    graph: Graph,
    /// The target of the contraction at hand.
    target: contraction::ContractionTarget,
    known: Option<&'a PriorPlans>,
    /// The container of the product at hand.
    product: String,
    pairs: Option<Pairs>,
    threads: usize,
    recipe: Recipe,
    /// What makes operands of the contraction at hand.
    before: Before,
    /// Position in `sources` by text.
    texts: BTreeMap<String, usize>,
    /// Contractions by what decides their text.
    emitted: BTreeMap<String, Result<EmittedContraction, Unsupported>>,
    /// The same for those that multiply two steps of their reduction at a time.
    emitted_words: BTreeMap<String, Result<EmittedContraction, NoFastForm>>,
    /// How often a name was asked for.
    names: BTreeMap<String, usize>,
    sources: Vec<Source>,
    launches: Vec<(Stage, usize, String, Vec<Buffer>, usize)>,
    workspaces: Vec<usize>,
    scratch: usize,
    kernels: Vec<KernelInfo>,
    choices: Vec<(String, PlanSignature)>,
}

/// The functions of one kernel.
#[derive(Clone, Debug)]
struct Source {
    name: String,
    /// A line for whoever reads the C text.
    comment: String,
    /// The text with [`PLACEHOLDER`] for the name.
    text: String,
    symbols: Vec<String>,
}

impl Lowering<'_> {
    fn node(&mut self, node: &Node) -> Result<(), LowerError> {
        if plan::is_alias(&self.graph, node) {
            return Ok(());
        }
        let NodeKind::Map(map) = &node.kind else {
            return Err(match &node.kind {
                NodeKind::Library(l) if l.computed_by().is_some() => {
                    return self.whole(node, l);
                }
                NodeKind::Library(l) => LowerError::Library {
                    op: l.op.clone(),
                    origin: node.origin.to_string(),
                },
                _ => LowerError::NotAMap {
                    origin: node.origin.to_string(),
                },
            });
        };
        if let Some(found) = self.recognize(node) {
            return self.contraction(node, &found);
        }
        if let Some((before, product)) = split_prologues(&self.graph, node, map) {
            return self.after_prologues(&before, &product);
        }
        if let Some((first, rest)) = split_epilogue(node, map)
            && let Some(found) = self.recognize(&first)
        {
            let followers = sums::followers(&rest);
            if !followers.sums.is_empty() {
                return self.summed_contraction(node, &first, &followers, &found);
            }
            let written = self.with_epilogue(node, &rest, &found);
            let Some(reason) = split_reason(written)? else {
                return Ok(());
            };
            // The rest reads the product from memory, while it is still in cache for small ones.
            self.graph.container_mut(found.out).storage = Storage::Global;
            let kernel = self.kernels.len();
            self.contraction(&first, &found)?;
            self.loops(&rest)?;
            self.record_split(kernel, Split::new([&first, &rest], reason));
            return Ok(());
        }
        self.loops(node)?;
        let reason = scalar::reason(&self.graph, node);
        if let Some(kernel) = self.kernels.last_mut() {
            kernel.scalar =
                reason.map(|reason| ScalarForm::new(reason, kernel.flops, &self.target));
        }
        Ok(())
    }

    fn contraction(&mut self, node: &Node, found: &Recognized) -> Result<(), LowerError> {
        if self.has_halves(found) {
            return self.whole_half_contraction(node, found);
        }
        let place = self.requested(node, found);
        let hooks = self.before.hooks();
        let emitted = self.emitted(&found.contraction, &hooks);
        let emitted = emitted.map_err(|e| not_emitted(node, &e.to_string()))?;
        self.note(&emitted.choices);
        let symbols = emitted.launches.iter().map(|l| l.symbol.clone()).collect();
        let kernel = self.kernel(
            node,
            emitted.generator(),
            emitted.flops,
            emitted.launches.len(),
        );
        self.kernels[kernel].work.product_ns = emitted.predicted_ns;
        self.kernels[kernel].cuts = self.placed(place, &emitted);
        let scalar = |reason| ScalarForm::new(reason, emitted.flops, &self.target);
        self.kernels[kernel].scalar = emitted.refusal.map(scalar);
        let source = self.source(node, self.before.text.clone() + &emitted.source, symbols);
        let workspace = self.workspace(emitted.shared_scratch_bytes);
        self.scratch = self.scratch.max(emitted.thread_scratch_bytes);
        let product = Buffer::Container(found.out);
        let [a, b] = self.before.operands(found);
        let mut args = vec![a, b, product];
        match self.before.args.is_empty() {
            true => args.extend(workspace),
            false => args.push(workspace.unwrap_or(product)),
        }
        args.extend(self.before.buffers());
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
        Ok(())
    }

    /// Lowers a contraction whose `rest` runs on every block of the product while it is in cache. Adds nothing
    /// if it returns a [`Stop`].
    fn with_epilogue(&mut self, node: &Node, rest: &Node, found: &Recognized) -> Result<(), Stop> {
        if self.has_halves(found) {
            return self.half_contraction(node, found, Some(rest));
        }
        let name = format!("{PLACEHOLDER}_epilogue");
        let hooks = Hooks {
            epilogue: Some(name.clone()),
            ..self.before.hooks()
        };
        let c = &found.contraction;
        let place = self.requested(node, found);
        let emitted = self.emitted(c, &hooks).map_err(|e| refused(node, e))?;
        let dims = product_dims(c, &emitted.roles).ok_or(SplitReason::Blocks)?;
        let escapes = self.graph.container(found.out).storage != Storage::Local;
        let buffers = emit::Buffers {
            product: 2,
            first: 4 + self.before.args.len(),
            pitch: None,
        };
        let epilogue = emit::emit_epilogue(&self.graph, rest, found.out, !escapes, &dims, buffers)?;
        let epilogue = epilogue.ok_or(SplitReason::Elements)?;
        if epilogue.in_place.is_none() {
            self.graph.container_mut(found.out).storage = Storage::Global;
        }
        self.note(&emitted.choices);
        let flops = emitted.flops + operations(rest, 1);
        let kernel = self.kernel(node, emitted.generator(), flops, emitted.launches.len());
        self.kernels[kernel].work = KernelCost {
            product_ns: emitted.predicted_ns,
            ..work(rest, 1)
        };
        self.kernels[kernel].cuts = self.placed(place, &emitted);
        let symbols = emitted.launches.iter().map(|l| l.symbol.clone()).collect();
        let text = self.before.text.clone() + &epilogue.text.replace(emit::NAME, &name);
        let text = text + &emitted.source;
        let source = self.source(node, text, symbols);
        let workspace = self.workspace(emitted.shared_scratch_bytes);
        self.scratch = self.scratch.max(emitted.thread_scratch_bytes);
        let product = Buffer::Container(epilogue.in_place.unwrap_or(found.out));
        let [a, b] = self.before.operands(found);
        // A kernel without shared scratch does not read the fourth buffer.
        let mut args = vec![a, b, product, workspace.unwrap_or(product)];
        args.extend(self.before.buffers());
        args.extend(epilogue.args.iter().map(|id| Buffer::Container(*id)));
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
        Ok(())
    }

    fn loops(&mut self, node: &Node) -> Result<(), LowerError> {
        let parts = emit::emit_map(&self.graph, node, self.threads)?;
        let container = |arg: &Arg| match arg {
            Arg::Container(id) => Some(*id),
            Arg::Workspace => None,
        };
        let touched = |part: &emit::Emitted| {
            let args = part.functions.iter().flat_map(|f| &f.args);
            args.filter_map(container).collect()
        };
        let split = Split::by_phases(node, &parts.iter().map(touched).collect::<Vec<_>>());
        for id in split.iter().flat_map(Split::written) {
            self.graph.container_mut(id).storage = Storage::Global;
        }
        let n_launches = parts.iter().map(|p| p.functions.len()).sum();
        let kernel = self.kernel(node, ("loops", None), operations(node, 1), n_launches);
        self.kernels[kernel].work = work(node, 1);
        self.kernels[kernel].splits.extend(split);
        for part in parts {
            let workspace = self.workspace(
                part.workspace_bytes_shared + part.workspace_bytes_per_thread * self.threads,
            );
            self.scratch = self.scratch.max(part.scratch_bytes);
            for f in part.functions {
                let symbol = format!("{PLACEHOLDER}{}", f.suffix);
                let text = f.text.replace(emit::NAME, PLACEHOLDER);
                let source = self.source(node, text, vec![symbol]);
                let buffer = |arg: &Arg| match arg {
                    Arg::Container(id) => Some(Buffer::Container(*id)),
                    Arg::Workspace => workspace,
                };
                let args = f.args.iter().filter_map(buffer).collect();
                let symbol = self.sources[source].symbols[0].clone();
                self.launches
                    .push((node.stage, source, symbol, args, kernel));
            }
        }
        Ok(())
    }

    fn note(&mut self, choices: &[PlanSignature]) {
        let product = &self.product;
        let choices = choices.iter().map(|c| (product.clone(), c.clone()));
        self.choices.extend(choices);
    }

    /// Recognizes a contraction, and looks up the plans of the same product for other sizes.
    fn recognize(&mut self, node: &Node) -> Option<Recognized> {
        let found = recognize(&self.graph, node)?;
        self.product
            .clone_from(&self.graph.container(found.out).name);
        let known = self.known.map(|known| known.of(&self.product));
        self.target.known = known.unwrap_or_default();
        Some(found)
    }

    fn workspace(&mut self, bytes: usize) -> Option<Buffer> {
        (bytes > 0).then(|| {
            self.workspaces.push(bytes);
            Buffer::Workspace(self.workspaces.len() - 1)
        })
    }

    /// The position of a source with this text, which names itself [`PLACEHOLDER`].
    fn source(&mut self, node: &Node, text: String, symbols: Vec<String>) -> usize {
        if let Some(known) = self.texts.get(&text) {
            return *known;
        }
        let base = identifier(&node.origin.node);
        let n = self.names.entry(base.clone()).or_insert(0);
        *n += 1;
        let name = format!("k_{base}_{n}");
        let comment = emit::comment(&node.origin.to_string());
        self.sources.push(Source {
            comment,
            text: text.clone(),
            symbols: symbols
                .iter()
                .map(|s| s.replace(PLACEHOLDER, &name))
                .collect(),
            name,
        });
        self.texts.insert(text, self.sources.len() - 1);
        self.sources.len() - 1
    }

    fn finish(self) -> Result<Lowered, LowerError> {
        let (units, unit_of) = files::files(&self.sources);
        let launches: Vec<LoweredLaunch> = self
            .launches
            .into_iter()
            .map(|(stage, source, symbol, args, kernel)| LoweredLaunch {
                stage,
                name: symbol.clone(),
                symbol,
                unit: unit_of[source],
                args,
                kernel,
                values: None,
                source,
            })
            .collect();
        let touches: Vec<Touches> = launches
            .iter()
            .map(|l| Touches {
                stage: l.stage,
                buffers: l.args.clone(),
            })
            .collect();
        let classes = Classes::new(&self.graph)?;
        Ok(Lowered {
            dependences: Dependences::new(&self.graph, &classes, &launches, &self.kernels),
            memory: plan::plan_memory(&self.graph, &touches, &self.workspaces)?,
            units,
            launches,
            thread_scratch_bytes: self.scratch,
            kernels: self.kernels,
            threads: self.threads,
            values: Vec::new(),
            sources: self.sources,
            choices: self.choices,
        })
    }
}

/// A C identifier from an origin's name.
fn identifier(name: &str) -> String {
    let short: String = name.chars().take(60).collect();
    short
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect()
}

/// What stands above the kernels of a file.
fn head() -> String {
    format!("{}{}{}", prelude::ALL, emit::INTEGER_SUPPORT, REDUCTIONS)
}
