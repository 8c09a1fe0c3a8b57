//! Captured PyTorch graphs → graphs of library nodes.
//!
//! The Python package captures a module with `torch.export` and writes a document of ATen operator
//! calls ([`document`]). [`import`] lowers each call by a rule found by its target ([`rules`]) to
//! operators of the `ops` room, keeps symbolic sizes, and gives every node its module path and
//! source line. Buffers that the module writes become outputs that update an input. This room never
//! looks at values, except constants that the graph closes over.

mod document;
mod error;
mod import;
mod merged_divisions;
mod rules;
mod site;

pub use error::{ImportError, Missing};
pub use import::{Imported, import, supported_targets};
