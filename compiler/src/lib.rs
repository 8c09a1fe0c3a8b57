//! The straight line from model to executable, recipes, the compile cache.

mod error;
mod executable;
mod plan;

pub use error::CompileError;
pub use executable::Executable;
pub use plan::{Plan, Step};
