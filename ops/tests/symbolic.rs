//! Operators on symbolic sizes: every case again with sizes `2 ≤ n < 100` of its inputs and attributes
//! replaced by a symbol `s<n>` of that value. The expansion made without knowing the values must
//! mean what `evaluate` says once they are bound.

use graph::{Attr, Bindings, DType, Graph, Lifetime, Precision, SymExpr, Symbol};
use ops::check::{Case, append, builder, compare};
use ops::{Call, Gradient, GradientCall, Meaning, attrs};

/// Expansions reorder sums of a few dozen terms.
const EXPANSION: f64 = 1e-10;

/// Operators that need numbers for channels or windows, and refuse symbols with a sentence. They accept
/// a symbolic batch.
const NEED_NUMBERS: &[&str] = &[
    "conv",
    "conv_transpose",
    "conv_data_gradient",
    "conv_weight_gradient",
    "group_norm",
    "group_norm_gradient",
    "max_pool_gradient",
    "average_pool_gradient",
    "adaptive_average_pool",
    "adaptive_max_pool",
];

/// Operators whose first dimension counts steps of a loop. Expansions unroll the steps, so they need their number and
/// refuse a symbol. Targets that have loops do not expand them.
const UNROLLED: &[&str] = &["recurrence", "recurrence_gradient"];

/// Which sizes become symbols.
#[derive(Clone, Copy, PartialEq)]
enum Sizes {
    /// All of them.
    All,
    /// The first one of each input and attribute that equals the first of the first input.
    Batch,
}

fn symbolic(shape: &[SymExpr], which: Sizes, batch: &SymExpr) -> Vec<SymExpr> {
    let replace = |(d, size): (usize, &SymExpr)| match size.as_const() {
        Some(n) if (2..100).contains(&n) && (which == Sizes::All || d == 0 && size == batch) => {
            SymExpr::symbol(format!("s{n}").as_str())
        }
        _ => size.clone(),
    };
    shape.iter().enumerate().map(replace).collect()
}

/// Whether the operator accepted the symbols; an error if its expansion means something else.
fn check(case: &Case, which: Sizes) -> Result<bool, Box<dyn std::error::Error>> {
    let one = case.one_node()?;
    let (mut library, mut graph) = (one.library, Graph::new("symbolic"));
    let first = library.inputs.iter().flatten().next();
    let batch = first.and_then(|id| one.graph.container(*id).shape.first());
    let batch = batch.cloned().unwrap_or_default();
    for (position, id) in library.inputs.iter_mut().enumerate() {
        *id = id.map(|id| {
            let c = one.graph.container(id);
            let shape = symbolic(&c.shape, which, &batch);
            graph.add_input(&format!("x{position}"), c.dtype, shape, Lifetime::Input)
        });
    }
    for attr in library.attrs.values_mut() {
        if let Attr::Sizes(sizes) = attr {
            *sizes = symbolic(sizes, which, &batch);
        }
    }
    graph.symbols = (2..100).map(|n| Symbol::new(format!("s{n}"))).collect();
    let bindings: Bindings = graph.symbols.iter().cloned().zip(2..).collect();
    let Ok(types) = case.op.infer(&Call::of(&graph, &library)) else {
        return Ok(false);
    };
    library.outputs = types
        .into_iter()
        .map(|ty| Some(graph.add_transient("y", ty.dtype, ty.shape)))
        .collect();
    for id in library.outputs.iter().flatten() {
        graph.add_output(*id);
    }
    let mut nodes = builder(&mut graph);
    let call = Call::of(nodes.graph, &library);
    match case.op.expand(&call, &mut nodes) {
        Err(e) if UNROLLED.contains(&case.op.name()) && e.to_string().contains("no value here") => {
            return Ok(false);
        }
        expanded => expanded?,
    }
    append(nodes);
    ops::expand_all(&mut graph)?;
    let given = case.given();
    let found = graph::interpret(&graph, &given, &bindings, &Meaning, Precision::Double)?;
    for (n, (a, b)) in case.evaluate(&case.inputs)?.iter().zip(&found).enumerate() {
        compare(a, b, EXPANSION).map_err(|e| format!("output {n}: {e}"))?;
    }
    Ok(true)
}

/// The operators that refused, each once.
fn check_all(which: Sizes) -> Vec<&'static str> {
    let (mut failed, mut refused) = (Vec::new(), Vec::new());
    for case in Case::all().unwrap() {
        match check(&case, which) {
            Ok(true) => {}
            Ok(false) if refused.last() == Some(&case.op.name()) => {}
            Ok(false) => refused.push(case.op.name()),
            Err(e) => failed.push(format!("{}: {e}", case.name())),
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    refused
}

#[test]
fn expansions_hold_for_symbolic_sizes() {
    assert_eq!(check_all(Sizes::All), [NEED_NUMBERS, UNROLLED].concat());
}

#[test]
fn expansions_hold_for_a_symbolic_batch() {
    let refused = check_all(Sizes::Batch);
    // Some other operators refuse because only one of two equal sizes became a symbol.
    let unexpected: Vec<_> = refused
        .iter()
        .filter(|op| NEED_NUMBERS.contains(op))
        .collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
}

/// A gradient whose type is larger than its operand's would be written past the end of the operand's gradient.
#[test]
fn gradients_have_the_type_of_their_operand() {
    let (mut failed, mut checked) = (Vec::new(), 0);
    for case in Case::all().unwrap() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            for which in [None, Some(Sizes::All), Some(Sizes::Batch)] {
                match check_types(&case, dtype, which) {
                    Ok(gradients) => checked += gradients,
                    Err(e) => failed.push(format!("{} in {dtype}: {e}", case.name())),
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(checked > 1000, "only {checked} gradients were checked");
}

/// How many gradients were checked; 0 if the operator refuses these sizes or has no rule.
fn check_types(
    case: &Case,
    dtype: DType,
    which: Option<Sizes>,
) -> Result<usize, Box<dyn std::error::Error>> {
    let one = case.one_node()?;
    let (mut library, mut graph) = (one.library, Graph::new("types"));
    let first = library.inputs.iter().flatten().next();
    let batch = first.and_then(|id| one.graph.container(*id).shape.first());
    let batch = batch.cloned().unwrap_or_default();
    let look = |shape: &[SymExpr]| match which {
        Some(which) => symbolic(shape, which, &batch),
        None => shape.to_vec(),
    };
    for id in library.inputs.iter_mut().flatten() {
        let c = one.graph.container(*id);
        let dtype = if c.dtype.is_float() { dtype } else { c.dtype };
        *id = graph.add_input("x", dtype, look(&c.shape), Lifetime::Input);
    }
    for attr in library.attrs.values_mut() {
        if let Attr::Sizes(sizes) = attr {
            *sizes = look(sizes);
        }
    }
    graph.symbols = (2..100).map(|n| Symbol::new(format!("s{n}"))).collect();
    let Ok(types) = case.op.infer(&Call::of(&graph, &library)) else {
        return Ok(0);
    };
    let output_gradients: Vec<_> = types
        .iter()
        .map(|ty| {
            let shape = ty.shape.clone();
            let id = graph.add_input("dy", ty.dtype, shape, Lifetime::Input);
            ty.dtype.is_float().then_some(id)
        })
        .collect();
    library.outputs = types
        .into_iter()
        .map(|ty| Some(graph.add_transient("y", ty.dtype, ty.shape)))
        .collect();
    let wanted: Vec<_> = library
        .inputs
        .iter()
        .map(|id| id.is_some_and(|id| graph.container(id).dtype.is_float()))
        .collect();
    let mut nodes = builder(&mut graph);
    let rule = GradientCall {
        call: Call::of(nodes.graph, &library),
        output_gradients: &output_gradients,
        wanted: &wanted,
    };
    let Ok(Gradient::Rule(parts)) = case.op.gradient(&rule, &mut nodes) else {
        return Ok(0);
    };
    let mut checked = 0;
    for (position, (id, part)) in library.inputs.iter().zip(parts).enumerate() {
        if let (Some(id), Some(part)) = (id, part) {
            checked += 1;
            let (found, expected) = (nodes.dtype(part), nodes.dtype(*id));
            if found != expected {
                let shape = nodes.shape(*id);
                return Err(
                    format!("the gradient of input {position} {shape:?} is {found}").into(),
                );
            }
        }
    }
    Ok(checked)
}

/// Sizes that only meet symbolically: `[batch, seq, heads·d]` split into heads and back.
#[test]
fn attention_heads_split_and_merge() {
    let size = |name: &str| SymExpr::symbol(name);
    let mut graph = Graph::new("heads");
    let flat = vec![size("batch"), size("seq"), SymExpr::constant(12)];
    let x = graph.add_input("x", graph::DType::F32, flat.clone(), Lifetime::Input);
    let split = [&flat[..2], &[4.into(), 3.into()]].concat();
    let mut nodes = builder(&mut graph);
    let heads = ops::shape_rules::reshape(&mut nodes, x, &split).unwrap();
    use ops::OpBuilder;
    let order = attrs([("order", Attr::Ints(vec![0, 2, 1, 3]))]);
    let swapped = nodes.op1("permute", &[heads], order.clone()).unwrap();
    let back = nodes.op1("permute", &[swapped], order).unwrap();
    let merged = attrs([("shape", Attr::Sizes([&flat[..2], &[(-1).into()]].concat()))]);
    let y = nodes.op1("reshape", &[back], merged).unwrap();
    assert_eq!(nodes.shape(y), flat);
    assert_eq!(nodes.shape(swapped)[1].as_const(), Some(4));
}
