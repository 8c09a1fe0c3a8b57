//! The straight line from a captured PyTorch graph to something that runs.

use crate::error::CompileError;
use crate::executable::Executable;
use crate::steering::Choices;
use fusion::Target;
use graph::{Bindings, Graph};
use importer::torch::{ImportError, Imported, import};
use kernels::compile::CompileOptions;
use kernels::progress::Progress;
use kernels::templates::Templates;
use std::sync::Mutex;

/// A captured graph, imported and ready to be made a step.
#[derive(Debug)]
pub struct Captured {
    imported: Imported,
}

impl Captured {
    /// Imports a document and the bytes of its constants.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn parse(json: &str, constants: &[&[u8]]) -> Result<Captured, ImportError> {
        Ok(Captured {
            imported: import(json, constants)?,
        })
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
        templates: Option<&Mutex<Templates>>,
        choices: &Choices,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        let plan = self.plan(wrt, Target::Cpu, threads, choices)?;
        let options = CompileOptions::from_environment(progress)?;
        Executable::build_sharing(plan, &options, threads, templates, progress)
    }
}
