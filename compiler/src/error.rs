//! What can go wrong on the way from model to executable.

use graph::{Graph, VerifyError};
use std::fmt;

/// What can go wrong on the way from model to executable.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// A pass made a graph that breaks a rule of [`graph::verify`]: a defect of Shorthaul.
    #[error("internal error after pass `{pass}`: {problems}; please report it")]
    Broken {
        /// The pass.
        pass: &'static str,
        /// What is wrong, and where.
        problems: Problems,
    },
    /// A value fits no machine's memory.
    #[error("`{container}` has the sizes [{shape}], which is more than 1 TiB; give smaller sizes")]
    TooLarge {
        /// The value.
        container: String,
        /// Its sizes.
        shape: String,
    },
    /// A value has a negative size.
    #[error(
        "`{container}` has the sizes [{shape}], of which one is negative; correct the model, or give larger sizes"
    )]
    Negative {
        /// The value.
        container: String,
        /// Its sizes.
        shape: String,
    },
    /// The model could not be differentiated.
    #[error(transparent)]
    Autodiff(#[from] autodiff::AutodiffError),
    /// A result could not be separated from another.
    #[error(transparent)]
    Op(#[from] ops::OpError),
    /// The step could not be fused.
    #[error(transparent)]
    Fuse(#[from] fusion::FuseError),
    /// The memory budget is too small.
    #[error(
        "a memory budget of {budget_bytes} bytes cannot be kept: the step takes {default_bytes} bytes \
         without one, and {least_bytes} bytes is the least that was found when everything is computed \
         again that can be; use memory_budget={least_bytes} or more, or a smaller batch"
    )]
    Budget {
        /// What was allowed.
        budget_bytes: usize,
        /// What the step takes without a budget.
        default_bytes: usize,
        /// What it takes at least.
        least_bytes: usize,
    },
    /// The recipe is damaged.
    #[error(transparent)]
    Recipe(#[from] crate::recipe::RecipeError),
    /// The plan has no kernels yet.
    #[error(transparent)]
    Lower(#[from] kernels::lower::LowerError),
    /// The kernels did not compile.
    #[error(transparent)]
    Compile(#[from] kernels::compile::CompileError),
    /// NVRTC did not compile the kernels.
    #[error(transparent)]
    Nvrtc(#[from] cuda_kernels::nvrtc::NvrtcError),
    /// The kernels do not load on the device, or there is none.
    #[error(transparent)]
    Cuda(#[from] cuda_kernels::CudaError),
    /// An optimizer's step has no kernels.
    #[error(transparent)]
    Update(#[from] kernels::update::UpdateError),
    /// An optimizer's kernel does not load.
    #[error(transparent)]
    Load(#[from] kernels::run::LoadError),
    /// The kernels do not fit together.
    #[error(transparent)]
    Assemble(#[from] kernels::assemble::AssembleError),
    /// A kernel that is timed alone does not run.
    #[error("a kernel cannot be timed alone: {0}")]
    Cutout(String),
}

impl CompileError {
    /// Whether it is a defect of Shorthaul, and not of what it was given or of the machine.
    pub fn is_internal(&self) -> bool {
        use cuda_kernels::{CudaError, nvrtc::NvrtcError};
        matches!(
            self,
            CompileError::Fuse(fusion::FuseError::Circle { .. })
                | CompileError::Broken { .. }
                | CompileError::Nvrtc(NvrtcError::Refused { .. })
                | CompileError::Cuda(CudaError::SharedMemory { .. })
        )
    }
}

/// Everything the verifier found, in one line.
#[derive(Clone, Debug, PartialEq)]
pub struct Problems(pub Vec<VerifyError>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentences: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&sentences.join("; "))
    }
}

/// Checks what a pass made. Done in release builds too: all checks of a step together take some
/// milliseconds, less than a tenth of planning.
pub(crate) fn check(pass: &'static str, graph: &Graph) -> Result<(), CompileError> {
    graph::verify(graph).map_err(|problems| CompileError::Broken {
        pass,
        problems: Problems(problems),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_graph_and_a_circle_are_defects_and_a_large_value_is_none() {
        let broken = CompileError::Broken {
            pass: "fuse",
            problems: Problems(Vec::new()),
        };
        let kernels = "`a` and `b`".to_string();
        let circle = CompileError::Fuse(fusion::FuseError::Circle { kernels });
        let large = CompileError::TooLarge {
            container: "x".to_string(),
            shape: "8".to_string(),
        };
        assert!(broken.is_internal() && circle.is_internal());
        assert!(!large.is_internal());
        for defect in [broken, circle] {
            assert!(defect.to_string().starts_with("internal error"));
        }
    }
}
