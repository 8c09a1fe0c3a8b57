//! Which attention is computed by an operator of PyTorch's instead of our own kernels.
//!
//! Owns the replacement of `attention` by `attention_with_lse` before differentiation, by a table of
//! measured times or by decree, and the reason of each choice, also where a candidate cannot be taken.
//! Never calls an operator; whoever runs a program provides what it needs of PyTorch.

use crate::cuda::ProductsBy;
use crate::error::CompileError;
use cuda_kernels::CudaError;
use cuda_kernels::vendor::{Attending, Attention, Candidate, Choice, Key, Mask, Offers, Products};
use graph::{Attr, Bindings, Builder, ContainerId, DType, Expr, Graph, Library, NodeKind};
use ops::{OpBuilder, OpError, attrs};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Whether PyTorch's operators can be called where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operators {
    /// There is no PyTorch.
    None,
    /// The program is run by the Python package.
    PyTorch,
}

/// What computes one attention of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenAttention {
    /// The part of the model.
    pub origin: String,
    /// What computes it, and why.
    pub choice: Choice,
}

/// Order of the dimensions of results in memory, outermost first, here and in our own kernels. It is that of PyTorch's
/// operators: the rows of all heads lie side by side, as one row of the layer.
pub(crate) const RESULT_ORDER: [i64; 4] = [0, 2, 1, 3];

/// Replaces each attention that an operator of PyTorch's is to compute, forward and, if gradients with respect
/// to the inputs at positions `wrt` are wanted, backward. Nothing is chosen where there is no table and no
/// decree.
///
/// # Errors
/// An operator of PyTorch's is chosen, but there is no PyTorch.
pub fn choose(
    graph: &mut Graph,
    hints: &Bindings,
    products: &ProductsBy,
    wrt: &[usize],
    operators: Operators,
) -> Result<Vec<ChosenAttention>, CompileError> {
    let products = match products {
        ProductsBy::Own => return Ok(Vec::new()),
        ProductsBy::Table(table) => Products::Measured(Arc::clone(table)),
        ProductsBy::Every {
            candidate,
            workspace_bytes,
        } => Products::Every {
            candidate: *candidate,
            workspace_bytes: *workspace_bytes,
            offers: Offers::default(),
        },
    };
    let Some(state) = graph.single_state() else {
        return Ok(Vec::new());
    };
    let before = state.nodes.clone();
    let inputs: Vec<ContainerId> = wrt.iter().map(|n| graph.inputs[*n]).collect();
    let trained = autodiff::active(graph, &inputs);
    let with_gradients = !wrt.is_empty();
    let (mut nodes, mut chosen) = (Vec::new(), Vec::new());
    for node in before {
        let library = match &node.kind {
            NodeKind::Library(library) if library.op == "attention" => library,
            _ => {
                nodes.push(node);
                continue;
            }
        };
        let described = described(graph, library, hints, &trained);
        let choice = choice(described, &products, with_gradients);
        let origin = node.origin.to_string();
        match choice.candidate {
            Candidate::Attention(by) if operators == Operators::None => {
                let operator = by.to_string();
                return Err(CudaError::NoOperators { operator, origin }.into());
            }
            Candidate::Attention(by) => {
                let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
                replace(&mut builder, library, by, with_gradients)?;
                nodes.append(&mut builder.nodes);
            }
            _ => nodes.push(node),
        }
        chosen.push(ChosenAttention { origin, choice });
    }
    graph.last_state().nodes = nodes;
    Ok(chosen)
}

/// What computes an attention, and why. The reason also names candidates that were faster and cannot be taken.
fn choice(
    described: Result<Attention, String>,
    products: &Products,
    with_gradients: bool,
) -> Choice {
    let own = |reason: String| Choice {
        key: None,
        candidate: Candidate::Own,
        reason,
        n_maps: 0,
    };
    let attention = match described {
        Ok(attention) => attention,
        Err(reason) => return own(reason),
    };
    let key = Key::of_attention(&attention, with_gradients);
    let can = |candidate: Candidate| match candidate {
        Candidate::Own => Ok(()),
        Candidate::Attention(by) => attention.obstacle(by).map_or(Ok(()), Err),
        _ => Err("it is no product".to_string()),
    };
    // A table may also name candidates that were faster and cannot be taken.
    let refused: Vec<String> = match products {
        Products::Measured(table) => {
            let candidates = table.candidates(&key).iter().map(|m| m.candidate);
            let told = candidates.filter_map(|c| Some(format!("{c} cannot: {}", can(c).err()?)));
            told.collect()
        }
        Products::Every { .. } | Products::Own => Vec::new(),
    };
    let choice = products.choose(key, &can);
    let reason = [vec![choice.reason], refused].concat().join("; ");
    Choice {
        reason,
        n_maps: 0,
        ..choice
    }
}

/// An attention node in the terms of PyTorch's operators. `trained` are the containers whose gradients are needed.
///
/// # Errors
/// Why PyTorch's operators do not compute this attention, in a sentence.
fn described(
    graph: &Graph,
    library: &Library,
    hints: &Bindings,
    trained: &BTreeSet<ContainerId>,
) -> Result<Attention, String> {
    let operand = |n: usize| library.inputs.get(n).copied().flatten();
    let sizes = |n: usize| -> Result<[i64; 4], String> {
        let id = operand(n).ok_or("an operand is missing")?;
        let shape = &graph.container(id).shape;
        let sizes: Option<Vec<i64>> = shape.iter().map(|s| s.bind(hints).as_const()).collect();
        let sizes = sizes.ok_or("its sizes have no values")?;
        <[i64; 4]>::try_from(sizes.as_slice()).map_err(|_| {
            let found = sizes.len();
            format!("PyTorch's operators take [batch, heads, rows, width], not {found} dimensions")
        })
    };
    let ([batch, heads, rows, width], [_, _, columns, values]) = (sizes(0)?, sizes(2)?);
    let is_causal = library.attrs.get("causal") == Some(&Attr::Bool(true));
    let mask = operand(3).map(|id| graph.container(id).dtype);
    if is_causal && mask.is_some() {
        return Err("PyTorch's operators take a mask or a causal one, not both".into());
    }
    let mask_columns = operand(3).and_then(|id| graph.container(id).shape.last());
    if let Some(Attr::Float(fill)) = library.attrs.get("fill") {
        return Err(format!(
            "PyTorch's operators add −∞ to hidden scores; this attention replaces them by {fill}"
        ));
    }
    if library.attrs.get("safe") == Some(&Attr::Bool(false)) {
        return Err("PyTorch's operators give zeros for rows that see nothing".into());
    }
    if mask_columns.is_some_and(|n| n.bind(hints).as_const() != Some(columns)) {
        return Err(format!(
            "PyTorch's operators take masks with a number for each of the {columns} columns"
        ));
    }
    if operand(3).is_some_and(|id| trained.contains(&id)) {
        return Err("PyTorch's operators are not asked for the gradient of a mask".into());
    }
    let dropout = library.attrs.get("dropout");
    let dtype = operand(0).map_or(DType::F32, |id| graph.container(id).dtype);
    Ok(Attention {
        batch,
        heads,
        rows,
        columns,
        width,
        values,
        dtype,
        mask: match mask {
            Some(DType::Bool) => Mask::Chosen,
            Some(_) => Mask::Added,
            None if is_causal => Mask::Causal,
            None => Mask::Nothing,
        },
        drops: matches!(dropout, Some(Attr::Float(p)) if *p > 0.0),
    })
}

/// Appends the node for the operator `by` to compute. It keeps lse if gradients are wanted.
fn replace(
    builder: &mut Builder,
    library: &Library,
    by: Attending,
    with_gradients: bool,
) -> Result<(), OpError> {
    let query = library.inputs[0].map(|id| builder.graph.container(id).clone());
    let dtype = query.as_ref().map_or(DType::F32, |q| q.dtype);
    let lse = query.filter(|_| with_gradients).map(|q| {
        let rows = &q.shape[..q.shape.len() - 1];
        builder.transient(&format!("{}_lse", q.name), DType::F32, rows)
    });
    let mut attrs = library.attrs.clone();
    attrs.retain(|name, _| name == "scale" || name == "causal");
    attrs.insert("order".into(), Attr::Ints(RESULT_ORDER.to_vec()));
    let mut inputs = library.inputs.clone();
    inputs.truncate(4);
    if let Some(Some(mask)) = inputs.get_mut(3) {
        *mask = added(builder, *mask, dtype)?;
    }
    let mut replaced = Library {
        op: "attention_with_lse".into(),
        attrs,
        inputs,
        outputs: vec![library.outputs[0], lse, None],
    };
    replaced.compute_by(by.name());
    builder.library(replaced);
    Ok(())
}

/// A mask as numbers of the queries' type to be added.
fn added(builder: &mut Builder, mask: ContainerId, dtype: DType) -> Result<ContainerId, OpError> {
    let expr = match builder.dtype(mask) {
        own if own == dtype => return Ok(mask),
        DType::Bool => {
            let never = Expr::float(f64::NEG_INFINITY);
            Expr::select(Expr::In(0), Expr::float(0.0), never)
        }
        _ => Expr::In(0),
    };
    let list = attrs([("expr", Attr::Expr(expr)), ("dtype", Attr::DType(dtype))]);
    builder.op1("elementwise", &[mask], list)
}
