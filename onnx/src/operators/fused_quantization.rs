//! Quantized operators of ONNX Runtime (domain `com.microsoft`): an operator of the standard on the numbers that the
//! small integers stand for, and the result quantized again.
//!
//! Owns where scales and zero points stand among the inputs, as ONNX Runtime's `ContribOperators.md` has them. What is
//! computed in between is the standard's operator.

use super::permute::permuted;
use super::quantization::{dequantize, dynamic, infer_dequantize, infer_quantize, quantize};
use super::{Call, FAMILIES, Inference, Operator};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::fact::Fact;
use crate::proto::AttributeProto;
use crate::tensor::Tensor;

pub const ROWS: &[Operator] = &[
    row("QuantizeLinear", infer_quantize, quantize),
    row("DequantizeLinear", infer_dequantize, dequantize),
    row("QLinearAdd", infer, evaluate),
    row("QLinearMul", infer, evaluate),
    row("QLinearSigmoid", infer, evaluate),
    row("QLinearLeakyRelu", infer, evaluate),
    row("QLinearSoftmax", infer, evaluate),
    row("QLinearAveragePool", infer, evaluate),
    row("QLinearGlobalAveragePool", infer, evaluate),
    row("QLinearConcat", infer, evaluate),
    row("QLinearWhere", infer, evaluate),
    row("QGemm", infer, gemm),
    row("MatMulIntegerToFloat", infer, integer_product),
    row("DynamicQuantizeMatMul", infer, dynamic_product),
];

const fn row(
    name: &'static str,
    infer: fn(&Inference) -> Option<Vec<Fact>>,
    evaluate: fn(&Call) -> Result<Vec<Tensor>, String>,
) -> Operator {
    Operator::new(name, infer, evaluate).domain("com.microsoft")
}

/// An operator of ONNX Runtime as one of the standard's.
struct Form {
    /// The standard's operator.
    plain: &'static str,
    /// Where its operands are.
    operands: Vec<Operand>,
    /// Where the scale of the result is, with its zero point after it; `None` if the result is of floats.
    result: Option<usize>,
}

/// Where an operand is.
#[derive(Clone, Copy)]
enum Operand {
    /// As it is.
    Plain(usize),
    /// An integer, its scale, its zero point.
    Quantized([usize; 3]),
}

impl Operand {
    /// An integer whose scale and zero point follow it.
    fn at(n: usize) -> Operand {
        Operand::Quantized([n, n + 1, n + 2])
    }

    /// The input that has its sizes.
    fn value(self) -> usize {
        match self {
            Operand::Plain(n) | Operand::Quantized([n, ..]) => n,
        }
    }
}

impl Form {
    /// The form of a node with that many inputs.
    fn new(op: &str, n_inputs: usize) -> Form {
        use Operand::{Plain, Quantized};
        let one = |plain| (plain, vec![Operand::at(0)], Some(3));
        let (plain, operands, result) = match op {
            "QLinearAdd" => ("Add", vec![Operand::at(0), Operand::at(3)], Some(6)),
            "QLinearMul" => ("Mul", vec![Operand::at(0), Operand::at(3)], Some(6)),
            "QLinearSigmoid" => one("Sigmoid"),
            "QLinearLeakyRelu" => one("LeakyRelu"),
            "QLinearSoftmax" => one("Softmax"),
            "QLinearAveragePool" => one("AveragePool"),
            "QLinearGlobalAveragePool" => one("GlobalAveragePool"),
            "QLinearConcat" => {
                let parts = (2..n_inputs).step_by(3).map(Operand::at);
                ("Concat", parts.collect(), Some(0))
            }
            "QLinearWhere" => {
                let operands = vec![Plain(0), Operand::at(1), Operand::at(4)];
                ("Where", operands, Some(7))
            }
            "QGemm" => ("Gemm", vec![Operand::at(0), Operand::at(3)], Some(7)),
            "DynamicQuantizeMatMul" => ("MatMul", vec![Plain(0), Operand::at(1)], None),
            _ => {
                let operands = vec![Quantized([0, 2, 4]), Quantized([1, 3, 5])];
                ("MatMul", operands, None)
            }
        };
        Form {
            plain,
            operands,
            result,
        }
    }

    fn operator(&self) -> Option<&'static Operator> {
        let mut rows = FAMILIES.iter().copied().flatten();
        rows.find(|row| row.name == self.plain && row.domain.is_empty())
    }
}

/// Whether the channels are the last dimension.
fn is_channels_last(attributes: Attributes) -> bool {
    attributes.flag("channels_last")
}

/// The version of the standard's operator set whose operator is meant: attributes hold the axes.
fn version(attributes: Attributes) -> i64 {
    attributes.int("opset").unwrap_or(13)
}

/// An order that moves the channels from the end to after the batch, or back.
fn order(rank: usize, to_front: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rank).collect();
    match (order.get_mut(1..), to_front) {
        (Some(behind), true) if !behind.is_empty() => behind.rotate_right(1),
        (Some(behind), false) if !behind.is_empty() => behind.rotate_left(1),
        _ => {}
    }
    order
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let form = Form::new(&cx.node.op_type, cx.inputs.len());
    let turned = is_channels_last(cx.attributes);
    let arranged = |shape: &[graph::SymExpr], to_front| -> Vec<graph::SymExpr> {
        let order = order(shape.len(), to_front).into_iter();
        order.map(|d| shape[d].clone()).collect()
    };
    let fact = |operand: &Operand| {
        let fact = cx.fact(operand.value())?;
        let shape = fact.shape.as_ref();
        let shape = shape.map(|shape| match turned {
            true => arranged(shape, true),
            false => shape.clone(),
        });
        Some(Fact::new(Some(Element::F32), shape))
    };
    let inputs: Vec<Option<Fact>> = form.operands.iter().map(fact).collect();
    let plain = Inference {
        node: cx.node,
        attributes: cx.attributes,
        opset: version(cx.attributes),
        inputs: &inputs,
        unknowns: cx.unknowns,
    };
    let shape = (form.operator()?.infer)(&plain);
    let shape = shape.and_then(|facts| facts.into_iter().next()?.shape);
    let shape = shape.map(|shape| match turned {
        true => arranged(&shape, false),
        false => shape,
    });
    let quantized = form.operands.iter().rev();
    let mut quantized = quantized.filter(|o| matches!(o, Operand::Quantized(_)));
    let element = match form.result.map(|at| (cx.fact(at), cx.element(at + 1))) {
        Some((Some(_), Some(zero))) => Some(zero),
        Some((Some(_), None)) => quantized.next().and_then(|o| cx.element(o.value())),
        // Floats, of the type that the scales have.
        Some((None, _)) => cx.element(1),
        None => match form.operands.first() {
            Some(Operand::Plain(at)) => cx.element(*at),
            _ => cx.element(2),
        },
    };
    Some(vec![Fact::new(element, shape)])
}

/// A call of another operator.
fn called(
    call: &Call,
    inputs: &[Option<Tensor>],
    attributes: &[AttributeProto],
    operator: fn(&Call) -> Result<Vec<Tensor>, String>,
) -> Result<Tensor, String> {
    let outputs = operator(&Call {
        node: call.node,
        attributes: Attributes(attributes),
        opset: version(call.attributes),
        inputs,
        widened: call.widened,
    });
    let first = outputs?.into_iter().next();
    first.ok_or_else(|| "it has no output".to_string())
}

/// The numbers that integers stand for, with scales along `axis` if there are several.
fn numbers(call: &Call, [x, scale, zero]: [usize; 3], axis: usize) -> Result<Tensor, String> {
    let inputs = [
        Some(call.input(x)?.clone()),
        Some(call.input(scale)?.clone()),
        call.optional(zero).cloned(),
    ];
    let axis = AttributeProto {
        name: "axis".to_string(),
        i: Some(axis as i64),
        ..AttributeProto::default()
    };
    called(call, &inputs, &[axis], dequantize)
}

/// The result as integers of the type of its zero point, or of `like` if it has none.
fn quantized(call: &Call, y: Tensor, at: usize, like: Element) -> Result<Tensor, String> {
    let zero = call.optional(at + 1).cloned();
    let zero = zero.or_else(|| Tensor::of_ints(like, &[], &[0]));
    let inputs = [Some(y), Some(call.input(at)?.clone()), zero];
    called(call, &inputs, &[], quantize)
}

fn evaluate(call: &Call) -> Result<Vec<Tensor>, String> {
    let form = Form::new(&call.node.op_type, call.inputs.len());
    let turned = is_channels_last(call.attributes);
    let mut like = Element::U8;
    let mut inputs = Vec::new();
    for operand in &form.operands {
        let mut x = match operand {
            Operand::Plain(at) => call.input(*at)?.clone(),
            Operand::Quantized(at) => {
                like = call.input(at[0])?.element();
                numbers(call, *at, 1)?
            }
        };
        if turned {
            x = permuted(&x, &order(x.shape.len(), true));
        }
        inputs.push(Some(x));
    }
    let operator = form.operator().ok_or("it has no plain form")?;
    let mut y = called(call, &inputs, call.attributes.0, operator.evaluate)?;
    if turned {
        y = permuted(&y, &order(y.shape.len(), false));
    }
    let at = form.result.ok_or("its result has no scale")?;
    quantized(call, y, at, like).map(|y| vec![y])
}

/// The standard's operator of that name on these inputs.
fn plain(
    call: &Call,
    name: &'static str,
    inputs: &[Option<Tensor>],
    attributes: &[AttributeProto],
) -> Result<Tensor, String> {
    let mut rows = FAMILIES.iter().copied().flatten();
    let row = rows.find(|row| row.name == name && row.domain.is_empty());
    called(
        call,
        inputs,
        attributes,
        row.ok_or("it is not known")?.evaluate,
    )
}

/// `alpha·(a·b + c)`, where `c` has the scale `a_scale·b_scale`.
fn gemm(call: &Call) -> Result<Vec<Tensor>, String> {
    let columns = usize::from(!call.attributes.flag("transB"));
    let (a, b) = (
        numbers(call, [0, 1, 2], 1)?,
        numbers(call, [3, 4, 5], columns)?,
    );
    let mut y = plain(call, "Gemm", &[Some(a), Some(b)], call.attributes.0)?;
    if let Some(c) = call.optional(6) {
        let scales = [call.input(1)?, call.input(4)?].map(|scale| Some(scale.clone()));
        let scale = plain(call, "Mul", &scales, &[])?;
        let alpha = f64::from(call.attributes.float("alpha").unwrap_or(1.0));
        let alpha = Tensor::floats(scale.element(), &[], &[alpha]);
        let scale = plain(call, "Mul", &[Some(scale), alpha], &[])?;
        let c = c
            .to_f64()
            .and_then(|v| Tensor::floats(scale.element(), &c.shape, &v));
        let c = plain(call, "Mul", &[c, Some(scale)], &[])?;
        y = plain(call, "Add", &[Some(y), Some(c)], &[])?;
    }
    if call.optional(7).is_some() {
        y = quantized(call, y, 7, call.input(0)?.element())?;
    }
    Ok(vec![y])
}

/// `a·b + bias` of integers, as floats.
fn integer_product(call: &Call) -> Result<Vec<Tensor>, String> {
    let columns = call.input(1)?.shape.len().saturating_sub(1);
    let rows = call.input(0)?.shape.len().saturating_sub(2);
    let a = numbers(call, [0, 2, 4], rows)?;
    let b = numbers(call, [1, 3, 5], columns)?;
    product(call, a, b, call.optional(6))
}

/// `a·b + bias`, where the floats `a` are rounded as `DynamicQuantizeLinear` rounds them.
fn dynamic_product(call: &Call) -> Result<Vec<Tensor>, String> {
    let inputs = [Some(call.input(0)?.clone())];
    let parts = dynamic(&Call {
        node: call.node,
        attributes: Attributes(&[]),
        opset: version(call.attributes),
        inputs: &inputs,
        widened: call.widened,
    })?;
    let parts: Vec<Option<Tensor>> = parts.into_iter().map(Some).collect();
    let a = called(call, &parts, &[], dequantize)?;
    let b = numbers(
        call,
        [1, 2, 3],
        call.input(1)?.shape.len().saturating_sub(1),
    )?;
    product(call, a, b, call.optional(4))
}

fn product(
    call: &Call,
    a: Tensor,
    b: Tensor,
    bias: Option<&Tensor>,
) -> Result<Vec<Tensor>, String> {
    let y = plain(call, "MatMul", &[Some(a), Some(b)], &[])?;
    Ok(vec![match bias {
        Some(bias) => plain(call, "Add", &[Some(y), Some(bias.clone())], &[])?,
        None => y,
    }])
}
