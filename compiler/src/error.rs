//! What can go wrong on the way from model to executable.

/// What can go wrong on the way from model to executable.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The model could not be differentiated.
    #[error(transparent)]
    Autodiff(#[from] autodiff::AutodiffError),
    /// A result could not be separated from another.
    #[error(transparent)]
    Op(#[from] ops::OpError),
    /// The step could not be fused.
    #[error(transparent)]
    Fuse(#[from] fusion::FuseError),
    /// The plan has no kernels yet.
    #[error(transparent)]
    Lower(#[from] kernels::lower::LowerError),
    /// The kernels did not compile.
    #[error(transparent)]
    Compile(#[from] kernels::compile::CompileError),
    /// The kernels do not fit together.
    #[error(transparent)]
    Assemble(#[from] kernels::assemble::AssembleError),
}
