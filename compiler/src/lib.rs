//! The straight line from model to executable, training graphs as ONNX files, reports.

pub mod attention;
mod attention_loops;
mod attention_pattern;
mod boundary;
pub mod bounds;
pub mod budget;
mod composed;
pub mod cuda;
pub mod cutout;
mod error;
mod executable;
mod functions;
pub mod internal_error;
pub mod layout_choice;
pub mod optimizer;
mod plan;
pub mod predict;
pub mod recipe;
pub mod report;
pub mod search;
pub mod slow;
pub mod steering;
pub mod torch;
pub mod trained;
pub mod training_graph;
pub mod training_input;
mod training_options;
pub mod training_proof;
pub mod tuning;
pub mod tuning_database;
pub mod undone;
mod update_groups;
mod usual;

pub use error::CompileError;
pub use executable::Executable;
pub use fusion::{Decision, Target};
pub use plan::{Plan, PlanOptions, Step};

// What a program at the edge needs of the rooms below, so that it depends on this one alone.
pub use cuda_kernels;
pub use graph;
pub use importer;
pub use kernels;
