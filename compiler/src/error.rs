//! What can go wrong on the way from model to executable.

/// What can go wrong on the way from model to executable.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The model could not be differentiated.
    #[error(transparent)]
    Autodiff(#[from] autodiff::AutodiffError),
    /// The step could not be fused.
    #[error(transparent)]
    Fuse(#[from] fusion::FuseError),
}
