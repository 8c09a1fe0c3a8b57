//! The straight line from model to executable, recipes, the compile cache.

mod error;
mod plan;

pub use error::CompileError;
pub use plan::{Plan, Step};
