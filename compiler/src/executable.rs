//! The end of the straight line: a plan lowered, compiled, loaded, ready to run.

use crate::error::CompileError;
use crate::plan::Plan;
use kernels::assemble::assemble;
use kernels::compile::{CompileOptions, compile};
use kernels::lowering::{KernelInfo, Lowered, lower};
use kernels::progress::Progress;
use kernels::run::Program;

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
}

impl Executable {
    /// Lowers, emits and compiles a plan for a number of threads.
    ///
    /// # Errors
    /// A graph that has no kernels yet, no C compiler, a full disk.
    pub fn build(
        plan: Plan,
        options: &CompileOptions,
        threads: usize,
        progress: &mut dyn Progress,
    ) -> Result<Executable, CompileError> {
        let lowered: Lowered = lower(&plan.graph, &options.target, threads)?;
        let modules = compile(&lowered.units, options, progress)?;
        let [forward, backward] = assemble(&plan.graph, &lowered, &modules)?;
        Ok(Executable {
            plan,
            forward,
            backward,
            kernels: lowered.kernels,
        })
    }
}
