//! The data-centric graph: containers, states, maps, memlets, tasklets; its text form, verifier,
//! interpreter and simplification.
//!
//! Every other room uses these types. This room never knows an operator by name: library nodes
//! carry a name and attributes, and the `ops` room knows their meaning.

mod bind;
mod build;
mod called;
mod cell;
mod compact;
mod derive;
mod dtype;
mod expr;
mod fold;
mod function;
mod graph;
mod interpret;
mod joined;
mod layout;
mod lexer;
mod machine;
mod meaning;
mod moments;
mod parse;
mod parse_expr;
pub mod philox;
mod problem;
mod product;
pub mod range;
mod recipe;
mod scalar;
mod simplify;
mod size;
mod tensor;
pub mod text;
mod touched;
mod typed;
mod verify;

pub use bind::{BindError, complete_bindings, infer_bindings};
pub use build::Builder;
pub use called::{Operand, View};
pub use cell::{Cell, CellGradient};
pub use dtype::DType;
pub use expr::Expr;
pub use function::{Binary, Unary};
pub use graph::{
    Attr, Attrs, Block, Branch, Container, ContainerId, Graph, Index, Library, Lifetime, Loop, Map,
    Memlet, Node, NodeKind, Origin, Output, Param, Reduction, Schedule, Stage, State, Tasklet,
};
pub use interpret::{Precision, interpret};
pub use joined::{Joined, Part};
pub use layout::{Layout, Storage};
pub use machine::{Level, Machine};
pub use meaning::{InterpretError, LibraryMeaning, NoLibrary, Refusal};
pub use moments::is_second_moment;
pub use parse::{ParseError, parse, parse_with};
pub use problem::{Problem, VerifyError};
pub use product::SummedProduct;
pub use recipe::{Blocking, Place, Recipe, Rewrite};
pub use scalar::Scalar;
pub use simplify::{Rule, SimplifyReport, simplify, simplify_before_gradients};
pub use size::{Atom, Bindings, SizeError, SymExpr, Symbol};
pub use tensor::{Tensor, Values};
pub use touched::{Touched, Traffic, traffic};
pub use typed::TypedExpr;
pub use verify::verify;
