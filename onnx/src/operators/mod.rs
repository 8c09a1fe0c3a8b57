//! The standard's operators: what is known of an operator's outputs from what is known of its inputs
//! ([`Operator::infer`]), and its results on tensors ([`Operator::evaluate`]).
//!
//! One file per family, one row per operator. Rows follow the operator-set version a model imports,
//! from 7 on. Control flow is in `evaluate/control.rs`. An operator without a row is kept as it is by
//! everything here.

mod activation;
mod attention;
mod block_quantization;
mod blocks;
pub mod bounds;
mod cast;
mod convolution;
mod detection;
#[cfg(test)]
mod edge_tests;
mod einsum;
mod experimental;
mod features;
mod fused;
mod fused_attention;
mod fused_quantization;
mod gather;
mod grouped_attention;
mod join;
mod losses;
mod movement;
mod normalization;
mod pad;
pub(crate) mod permute;
mod pointwise;
mod pooling;
mod power;
mod products;
mod quantization;
mod real;
mod recurrent;
mod reduction;
mod resize;
mod running;
mod sampling;
mod scatter;
mod search;
mod shape;
mod softmax;
mod strided;
pub(crate) mod symbolic;
pub(crate) mod threads;
mod transposed_convolution;
mod unary;
mod windows;

pub use experimental::Border;
pub use join::{joined, slice_at};
pub use resize::{Interpolation, interpolations};
pub use symbolic::is_at_least;

use crate::attributes::Attributes;
use crate::element::Element;
use crate::fact::{Fact, MAX_ELEMENTS, MAX_RANK};
use crate::proto::NodeProto;
use crate::tensor::{Tensor, Values};
use graph::{SymExpr, Symbol};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

/// An operator.
#[derive(Clone, Copy)]
pub struct Operator {
    /// Its domain; empty for the standard's.
    pub domain: &'static str,
    /// Its name.
    pub name: &'static str,
    /// What is known of the outputs; `None` if nothing is.
    pub infer: fn(&Inference) -> Option<Vec<Fact>>,
    /// The outputs. An error is a sentence about what does not fit.
    pub evaluate: fn(&Call) -> Result<Vec<Tensor>, String>,
    /// What it does with integers that are symbolic.
    pub symbolic: Symbolic,
}

/// What an operator does with integers that follow from sizes.
#[derive(Clone, Copy)]
pub enum Symbolic {
    /// Nothing that could be said.
    No,
    /// Every output element is an element of the inputs at these positions, whatever their values;
    /// the other inputs are constants. Empty: all inputs.
    Moves(&'static [usize]),
    /// Element by element, after broadcasting.
    Pointwise(fn(&[&SymExpr]) -> Option<SymExpr>),
    /// A function of its own.
    Own(fn(&Inference) -> Option<Vec<SymExpr>>),
}

impl Operator {
    /// An operator of the standard.
    pub const fn new(
        name: &'static str,
        infer: fn(&Inference) -> Option<Vec<Fact>>,
        evaluate: fn(&Call) -> Result<Vec<Tensor>, String>,
    ) -> Operator {
        Operator {
            domain: "",
            name,
            infer,
            evaluate,
            symbolic: Symbolic::No,
        }
    }

    /// Returns the operator with its effect on symbolic integers.
    pub const fn symbolic(mut self, symbolic: Symbolic) -> Operator {
        self.symbolic = symbolic;
        self
    }

    /// Returns the operator in another domain.
    pub const fn domain(mut self, domain: &'static str) -> Operator {
        self.domain = domain;
        self
    }
}

const FAMILIES: &[&[Operator]] = &[
    movement::ROWS,
    permute::ROWS,
    join::ROWS,
    pad::ROWS,
    gather::ROWS,
    pointwise::ROWS,
    unary::ROWS,
    cast::ROWS,
    reduction::ROWS,
    scatter::ROWS,
    search::ROWS,
    running::ROWS,
    shape::ROWS,
    attention::ROWS,
    block_quantization::ROWS,
    convolution::ROWS,
    detection::ROWS,
    einsum::ROWS,
    experimental::ROWS,
    features::ROWS,
    fused::ROWS,
    fused_attention::ROWS,
    fused_quantization::ROWS,
    grouped_attention::ROWS,
    losses::ROWS,
    normalization::ROWS,
    pooling::ROWS,
    products::ROWS,
    quantization::ROWS,
    recurrent::ROWS,
    resize::ROWS,
    sampling::ROWS,
    softmax::ROWS,
    transposed_convolution::ROWS,
];

/// The operator a node applies, if it has a row.
pub fn find(node: &NodeProto) -> Option<&'static Operator> {
    let domain = if node.domain == "ai.onnx" {
        ""
    } else {
        node.domain.as_str()
    };
    let mut rows = FAMILIES.iter().copied().flatten();
    rows.find(|o| o.name == node.op_type && o.domain == domain)
}

/// Names of the operators with a row, in the order of the rows.
pub fn names() -> Vec<&'static str> {
    FAMILIES.iter().copied().flatten().map(|o| o.name).collect()
}

/// Calls of local functions that one walk over a model looks into.
const MOST_CALLS: usize = 1 << 14;

/// Symbols that stand for sizes nothing is known of.
#[derive(Debug, Default)]
pub struct Unknowns {
    count: Cell<usize>,
    calls: Cell<usize>,
    given: RefCell<BTreeSet<String>>,
}

impl Unknowns {
    /// A size of which nothing is known; never equal to another.
    pub fn size(&self) -> SymExpr {
        self.count.set(self.count.get() + 1);
        SymExpr::symbol(Symbol::new(format!("?{}", self.count.get())))
    }

    /// Lets that name stand for a size of an input of the model from now on.
    pub fn give(&self, name: &str) {
        self.given.borrow_mut().insert(name.to_string());
    }

    /// A size that the file names. A name that was given ([`Unknowns::give`]) stands for that size of an input; any
    /// other name equals only itself.
    pub fn named(&self, name: &str) -> SymExpr {
        let is_given = self.given.borrow().contains(name) && !name.starts_with('?');
        let prefix = if is_given { "" } else { "?:" };
        SymExpr::symbol(Symbol::new(format!("{prefix}{name}")))
    }

    /// Whether one more call of a local function is looked into: functions that call each other twice would
    /// otherwise take for ever.
    pub fn looks_into_call(&self) -> bool {
        self.calls.set(self.calls.get() + 1);
        self.calls.get() <= MOST_CALLS
    }

    /// How many there are so far.
    pub fn count(&self) -> usize {
        self.count.get()
    }
}

/// The number of a symbol of [`Unknowns`], counted from 1.
pub fn number_of_unknown(symbol: &Symbol) -> Option<usize> {
    symbol.as_str().strip_prefix('?')?.parse().ok()
}

/// A node whose outputs are to be described.
pub struct Inference<'a> {
    /// The node.
    pub node: &'a NodeProto,
    /// Its attributes.
    pub attributes: Attributes<'a>,
    /// The version of the node's operator set.
    pub opset: i64,
    /// What is known of its inputs; `None` for absent ones.
    pub inputs: &'a [Option<Fact>],
    /// Sizes nothing is known of.
    pub unknowns: &'a Unknowns,
}

impl<'a> Inference<'a> {
    /// What is known of the input at that position, if it is given.
    pub fn fact(&self, at: usize) -> Option<&'a Fact> {
        self.inputs.get(at)?.as_ref()
    }

    /// Element type of an input.
    pub fn element(&self, at: usize) -> Option<Element> {
        self.fact(at)?.element
    }

    /// Sizes of an input.
    pub fn shape(&self, at: usize) -> Option<&'a [SymExpr]> {
        self.fact(at)?.shape.as_deref()
    }

    /// Number of dimensions of an input.
    pub fn rank(&self, at: usize) -> Option<usize> {
        self.shape(at).map(<[_]>::len)
    }

    /// Integers of an input, constant or following from sizes.
    pub fn ints(&self, at: usize) -> Option<Vec<SymExpr>> {
        self.fact(at)?.ints()
    }

    /// Integers of a constant input.
    pub fn known_ints(&self, at: usize) -> Option<Vec<i64>> {
        self.fact(at)?.known_ints()
    }

    /// Integers of an attribute or, in newer operator sets, of the constant input at `at`; `None` if
    /// neither is given or the input is not constant. Tell the two apart by [`Inference::fact`].
    pub fn ints_of(&self, attribute: &str, at: usize) -> Option<Vec<i64>> {
        match self.attributes.ints(attribute) {
            Some(ints) => Some(ints.to_vec()),
            None => self.known_ints(at),
        }
    }

    /// A size of which nothing is known.
    pub fn unknown(&self) -> SymExpr {
        self.unknowns.size()
    }

    /// `rank` sizes of which nothing is known.
    pub fn unknown_shape(&self, rank: usize) -> Vec<SymExpr> {
        (0..rank).map(|_| self.unknown()).collect()
    }

    /// Sizes of which only the number is known: as many as the list at input `at` is long, if that is a rank.
    pub fn shape_as_long_as(&self, at: usize) -> Option<Vec<SymExpr>> {
        let rank = self.fact(at)?.sizes()?.first().copied()?;
        (rank <= MAX_RANK).then(|| self.unknown_shape(rank))
    }

    /// One output of the type of the first input and those sizes.
    pub fn like_first(&self, shape: Option<Vec<SymExpr>>) -> Option<Vec<Fact>> {
        Some(vec![Fact::new(self.element(0), shape)])
    }
}

/// An axis as a position among `rank` dimensions; negative ones count from the end. A scalar has none.
pub fn axis(axis: i64, rank: usize) -> Option<usize> {
    let at = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(at).ok().filter(|at| *at < rank)
}

/// Sizes that several shapes broadcast to; a size that cannot be decided becomes unknown. `None` if
/// the shapes never fit.
pub fn broadcast(shapes: &[&[SymExpr]], unknowns: &Unknowns) -> Option<Vec<SymExpr>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let one = SymExpr::constant(1);
    let mut joined = Vec::with_capacity(rank);
    for d in 0..rank {
        let mut size = one.clone();
        let mut undecided = false;
        for shape in shapes {
            let Some(at) = (d + shape.len()).checked_sub(rank) else {
                continue;
            };
            let given = &shape[at];
            if *given == one || *given == size {
                continue;
            }
            match (size.as_const(), given.as_const()) {
                (Some(1), _) => size = given.clone(),
                (Some(a), Some(b)) if a != b => return None,
                // A size above 1 is the result: the symbol beside it is then equal to it, or 1.
                (None, Some(_)) => (size, undecided) = (given.clone(), false),
                (Some(_), None) => {}
                _ => undecided = true,
            }
        }
        joined.push(if undecided { unknowns.size() } else { size });
    }
    Some(joined)
}

/// A node with the tensors of its inputs.
pub struct Call<'a> {
    /// The node.
    pub node: &'a NodeProto,
    /// Its attributes.
    pub attributes: Attributes<'a>,
    /// The version of the node's operator set.
    pub opset: i64,
    /// Its inputs; `None` for absent ones.
    pub inputs: &'a [Option<Tensor>],
    /// Whether floats of every type are computed as `f64`, without rounding to the type the file
    /// gives: then the inputs are `f64` already.
    pub widened: bool,
}

impl<'a> Call<'a> {
    /// The input at that position.
    ///
    /// # Errors
    /// It is absent.
    pub fn input(&self, at: usize) -> Result<&'a Tensor, String> {
        self.optional(at)
            .ok_or_else(|| format!("its input {at} is missing"))
    }

    /// The input at that position, if it is given.
    pub fn optional(&self, at: usize) -> Option<&'a Tensor> {
        self.inputs.get(at)?.as_ref()
    }

    /// The positive integer that an attribute gives.
    ///
    /// # Errors
    /// The attribute is absent or not positive.
    pub fn positive(&self, name: &str) -> Result<usize, String> {
        let n = self.attributes.int(name);
        n.and_then(|n| usize::try_from(n).ok().filter(|n| *n > 0))
            .ok_or_else(|| format!("its {name} is missing or not positive"))
    }

    /// Integers of the input at that position.
    ///
    /// # Errors
    /// It is absent or not of integers.
    pub fn ints(&self, at: usize) -> Result<Vec<i64>, String> {
        self.input(at)?
            .to_i64()
            .ok_or_else(|| format!("its input {at} is not of integers"))
    }

    /// Integers of an attribute or, in newer operator sets, of the input at `at`, if one is given.
    ///
    /// # Errors
    /// The input is not of integers.
    pub fn ints_of(&self, attribute: &str, at: usize) -> Result<Option<Vec<i64>>, String> {
        match self.attributes.ints(attribute) {
            Some(ints) => Ok(Some(ints.to_vec())),
            None if self.optional(at).is_some() => self.ints(at).map(Some),
            None => Ok(None),
        }
    }

    /// The axis an attribute gives among `rank` dimensions.
    ///
    /// # Errors
    /// There is no such dimension.
    pub fn axis(&self, default: i64, rank: usize) -> Result<usize, String> {
        let given = self.attributes.int("axis").unwrap_or(default);
        axis(given, rank)
            .ok_or_else(|| format!("axis {given} is out of range for {rank} dimensions"))
    }

    /// The float type a tensor of type `element` has in this run.
    pub fn element(&self, element: Element) -> Element {
        if self.widened && element.is_float() {
            Element::F64
        } else {
            element
        }
    }
}

/// Integers of the node's outputs that follow from sizes: one list per output that has some.
pub fn symbolic_elements(
    operator: &Operator,
    cx: &Inference,
    outputs: &[Fact],
) -> Option<Vec<SymExpr>> {
    // What could become large is not computed.
    outputs.first()?.len().filter(|n| *n <= MAX_ELEMENTS)?;
    match operator.symbolic {
        Symbolic::No => None,
        Symbolic::Own(own) => own(cx),
        Symbolic::Moves(data) => moved(operator.evaluate, cx, data),
        Symbolic::Pointwise(f) => pointwise_elements(cx, outputs.first()?, f),
    }
}

/// Runs an operator that only moves the elements of the inputs at `data` (empty: of all) on positions in
/// a table of the symbolic elements, and looks the results up.
fn moved(
    evaluate: fn(&Call) -> Result<Vec<Tensor>, String>,
    cx: &Inference,
    data: &[usize],
) -> Option<Vec<SymExpr>> {
    let mut table: Vec<SymExpr> = Vec::new();
    let mut inputs = Vec::new();
    for (at, fact) in cx.inputs.iter().enumerate() {
        let Some(fact) = fact else {
            inputs.push(None);
            continue;
        };
        if !data.is_empty() && !data.contains(&at) {
            inputs.push(Some(fact.small()?));
            continue;
        }
        let elements = fact.ints()?;
        let first = table.len() as i64;
        let shape = fact.sizes()?;
        let positions = (first..first + elements.len() as i64).collect();
        table.extend(elements);
        inputs.push(Some(Tensor::new(&shape, Values::I64(positions))));
    }
    let call = Call {
        node: cx.node,
        attributes: cx.attributes,
        opset: cx.opset,
        inputs: &inputs,
        widened: false,
    };
    let outputs = evaluate(&call).ok()?;
    let [output] = outputs.as_slice() else {
        return None;
    };
    let at = |n: &i64| table.get(usize::try_from(*n).ok()?).cloned();
    output.to_i64()?.iter().map(at).collect()
}

fn pointwise_elements(
    cx: &Inference,
    output: &Fact,
    f: fn(&[&SymExpr]) -> Option<SymExpr>,
) -> Option<Vec<SymExpr>> {
    let shape = output.sizes()?;
    let n: usize = shape.iter().product();
    output
        .element
        .filter(|e| e.is_int() || *e == Element::Bool)?;
    let mut operands = Vec::new();
    for at in 0..cx.inputs.len() {
        let from = cx.fact(at)?.sizes()?;
        operands.push((cx.ints(at)?, movement::Broadcast::new(&from, &shape)));
    }
    (0..n)
        .map(|n| {
            let elements: Vec<&SymExpr> = operands.iter().map(|(e, b)| &e[b.at(n)]).collect();
            f(&elements)
        })
        .collect()
}

/// The elements as they stand, shared by every output that has them.
pub fn shared(elements: Vec<SymExpr>) -> Option<Arc<[SymExpr]>> {
    (elements.len() <= MAX_ELEMENTS).then(|| elements.into())
}
