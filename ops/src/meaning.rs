//! The meaning of library nodes for the interpreter of the `graph` room: every operator's
//! `evaluate`.

use crate::elementwise;
use crate::op::{Call, OpError, TensorType};
use crate::registry;
use graph::{
    Attr, ContainerId, Expr, Graph, Library, LibraryMeaning, Operand, Refusal, SymExpr, Tensor,
};

/// The operators of the registry.
#[derive(Clone, Copy, Debug)]
pub struct Meaning;

/// The type of a value.
pub fn type_of(tensor: &Tensor) -> TensorType {
    let shape = tensor.shape.iter().map(|n| SymExpr::from(*n)).collect();
    TensorType::new(tensor.dtype, shape)
}

/// What an operator gives for inputs, in double precision. Where the node says that operands are views
/// of containers, inputs and results are those containers.
///
/// # Errors
/// As [`crate::Op::infer`].
pub fn evaluate(library: &Library, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
    on_views(library, inputs, evaluate_whole)
}

/// What `compute` gives for the parts of containers that the node says its operands are.
fn on_views(
    library: &Library,
    inputs: &[Option<&Tensor>],
    compute: impl Fn(&Library, &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError>,
) -> Result<Vec<Tensor>, OpError> {
    let viewed = |(n, container): (usize, &Option<&Tensor>)| {
        let container = (*container)?;
        let view = library.view(Operand::Input(n))?;
        Some(view.of(container))
    };
    let views: Vec<Option<Tensor>> = inputs.iter().enumerate().map(viewed).collect();
    let inputs: Vec<Option<&Tensor>> = (views.iter().zip(inputs))
        .map(|(view, whole)| view.as_ref().or(*whole))
        .collect();
    let results = compute(library, &inputs)?;
    let stored = |(n, result): (usize, Tensor)| match library.view(Operand::Output(n)) {
        Some(view) => view.container(&result),
        None => result,
    };
    Ok(results.into_iter().enumerate().map(stored).collect())
}

fn evaluate_whole(library: &Library, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
    registry::find(&library.op)?.evaluate(&call_of(library, inputs), inputs)
}

fn call_of<'a>(library: &'a Library, inputs: &[Option<&Tensor>]) -> Call<'a> {
    Call {
        library,
        inputs: inputs.iter().map(|t| t.map(type_of)).collect(),
    }
}

impl LibraryMeaning for Meaning {
    fn evaluate(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal> {
        Ok(evaluate(library, inputs)?)
    }

    fn folded(
        &self,
        library: &Library,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, Refusal> {
        let mut results = on_views(library, inputs, |library, inputs| {
            match library.op.as_str() {
                "elementwise" => elementwise::evaluate_typed(&call_of(library, inputs), inputs),
                _ => evaluate_whole(library, inputs),
            }
        })?;
        results.iter_mut().for_each(Tensor::round_to_dtype);
        Ok(results)
    }

    fn is_random(&self, op: &str) -> bool {
        registry::find(op).map_or(true, |op| op.is_random())
    }

    fn copied_input(&self, graph: &Graph, library: &Library) -> Option<usize> {
        let id = |ids: &[Option<ContainerId>]| ids.first().copied().flatten();
        let (from, to) = (id(&library.inputs)?, id(&library.outputs)?);
        let (from, to) = (graph.container(from), graph.container(to));
        let same_type = from.shape == to.shape && from.dtype == to.dtype;
        let copies = match library.op.as_str() {
            "reshape" | "expand" => true,
            "elementwise" => {
                library.attrs.get("expr") == Some(&Attr::Expr(Expr::In(0)))
                    && library.inputs.len() == 1
            }
            _ => false,
        };
        (same_type && copies).then_some(0)
    }
}
