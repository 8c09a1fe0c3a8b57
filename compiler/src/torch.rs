//! The straight line from a captured PyTorch graph to something that runs.

use crate::error::CompileError;
use crate::executable::{Executable, compile_foreseen, foresee};
use crate::plan::{Recomputation, Step};
use crate::steering::Choices;
use fusion::Target;
use graph::{Bindings, Graph};
use importer::torch::{ImportError, Imported, import};
use kernels::compile::CompileOptions;
use kernels::features::Pairs;
use kernels::progress::{Progress, Silent};
use kernels::templates::Templates;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Steps by target and the inputs whose gradient is wanted.
type Steps = BTreeMap<(Target, Vec<usize>), Arc<Step>>;

/// A captured graph, imported and ready to be made a step.
#[derive(Debug)]
pub struct Captured {
    imported: Imported,
    /// The steps that were asked for. They have no sizes yet, so
    /// programs of several sizes share them.
    steps: Mutex<Steps>,
    /// What programs of a step compute again; see [`Captured::recompute_so`].
    recomputations: Mutex<BTreeMap<Vec<usize>, Recomputation>>,
}

/// The sizes of one program, and others that are expected.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    /// What the program is made for.
    pub own: Bindings,
    /// Sizes that nobody asked for. Planning the graph for them shows which numbers in kernels follow from
    /// sizes; the texts that they call are compiled as well.
    pub expected: Vec<Bindings>,
}

impl Captured {
    /// Imports a document and the bytes of its constants.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn parse(json: &str, constants: &[&[u8]]) -> Result<Captured, ImportError> {
        Ok(Captured {
            imported: import(json, constants)?,
            steps: Mutex::default(),
            recomputations: Mutex::default(),
        })
    }

    /// The step for gradients with respect to the inputs at positions `wrt`; without any, the forward pass.
    ///
    /// # Errors
    /// As for [`Step::training`].
    pub fn step(&self, wrt: &[usize], target: Target) -> Result<Arc<Step>, CompileError> {
        // A panic under the lock leaves steps that are whole.
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (target, wrt.to_vec());
        if let Some(step) = steps.get(&key) {
            return Ok(Arc::clone(step));
        }
        let graph = self.graph();
        let step = Arc::new(match (target, wrt) {
            (Target::Cpu, _) => Step::on_cpu(graph, self.hints(), wrt, !has_tiles())?,
            (_, []) => Step::forward(graph)?,
            _ => Step::training(graph, wrt)?,
        });
        steps.insert(key, Arc::clone(&step));
        Ok(step)
    }

    /// What programs of a step compute again, once one of them computes anything again.
    pub(crate) fn recomputation(&self, wrt: &[usize]) -> Option<Recomputation> {
        // A panic under the lock leaves lists that are whole.
        let known = self.recomputations.lock();
        let known = known.unwrap_or_else(PoisonError::into_inner);
        known.get(wrt).cloned()
    }

    /// Makes programs of other sizes compute the same values again, so that they share kernels. A list by which nothing
    /// is computed again does not count: a larger size may compute something again.
    pub(crate) fn recompute_so(&self, wrt: &[usize], first: &Recomputation) {
        if first.iter().any(|(_, take)| *take) {
            let known = self.recomputations.lock();
            let mut known = known.unwrap_or_else(PoisonError::into_inner);
            known.entry(wrt.to_vec()).or_insert_with(|| first.clone());
        }
    }

    /// The imported graph.
    pub fn graph(&self) -> &Graph {
        &self.imported.graph
    }

    /// The sizes that the graph was captured with.
    pub fn hints(&self) -> &Bindings {
        &self.imported.hints
    }

    /// Whether the last input is the seed of random numbers.
    pub fn uses_seed(&self) -> bool {
        self.imported.seed.is_some()
    }

    /// Kernels for the sizes the graph was captured with. `wrt` are positions among the graph's
    /// inputs whose gradient is wanted; without any, only the forward pass is made. `templates` are what
    /// earlier sizes of the same graph compiled.
    ///
    /// # Errors
    /// See [`CompileError`].
    pub fn compile(
        &self,
        wrt: &[usize],
        threads: usize,
        choices: &Choices,
        templates: Option<&Mutex<Templates>>,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        let sizes = Sizes {
            own: self.hints().clone(),
            expected: Vec::new(),
        };
        self.compile_for(&sizes, wrt, threads, choices, templates, progress)
    }

    /// Like [`Captured::compile`], for other sizes than the graph was captured with.
    ///
    /// # Errors
    /// See [`CompileError`].
    pub fn compile_for(
        &self,
        sizes: &Sizes,
        wrt: &[usize],
        threads: usize,
        choices: &Choices,
        templates: Option<&Mutex<Templates>>,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        let plan = self.plan_for(&sizes.own, wrt, Target::Cpu, threads, choices)?;
        let options = CompileOptions::from_environment(progress)?;
        let mut foreseen = Vec::new();
        if let Some(templates) = templates {
            let must_foresee = !sizes.expected.is_empty() && locked(templates).must_foresee();
            for expected in sizes.expected.iter().filter(|_| must_foresee) {
                // An operator may refuse sizes that nobody asked for; those then show nothing.
                let plan = self.plan_for(expected, wrt, Target::Cpu, threads, choices);
                foreseen.extend(plan.and_then(|p| foresee(&p, &options, threads, templates)));
            }
        }
        let built = Executable::build_sharing(plan, &options, threads, templates, progress)?;
        if let Some(templates) = templates.filter(|_| !foreseen.is_empty()) {
            compile_foreseen(foreseen, &options, templates, progress)?;
        }
        Ok(built)
    }
}

/// Whether this CPU has tiles (AMX). With them, attention in bf16 is faster as separate products than as one kernel
/// that stores no scores. False without a C compiler to ask.
fn has_tiles() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let options = CompileOptions::from_environment(&mut Silent);
        options.is_ok_and(|options| options.target.pairs == Some(Pairs::Tiles))
    })
}

/// A panic under the lock leaves texts that are whole.
pub fn locked(templates: &Mutex<Templates>) -> MutexGuard<'_, Templates> {
    templates.lock().unwrap_or_else(PoisonError::into_inner)
}
