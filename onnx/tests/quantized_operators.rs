//! ONNX Runtime's quantized operators, against what ONNX Runtime 1.31 computes.

use onnx::element::Element;
use onnx::evaluate::{Precision, Program, Values as Named};
use onnx::infer::known_values;
use onnx::operators::Unknowns;
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    ValueInfoProto,
};
use onnx::tensor::Tensor;
use std::path::Path;
use std::sync::Arc;

const A: [i64; 8] = [0, 10, 100, 130, 131, 200, 254, 255];
const B: [i64; 8] = [3, 250, 17, 128, 90, 1, 255, 64];

fn ints(name: &str, element: Element, shape: &[usize], values: &[i64]) -> TensorProto {
    let tensor = Tensor::of_ints(element, shape, values);
    tensor.expect("integers").to_proto(name)
}

fn floats(name: &str, shape: &[usize], values: &[f64]) -> TensorProto {
    let tensor = Tensor::floats(Element::F32, shape, values);
    tensor.expect("floats").to_proto(name)
}

/// `a` and `b` of these sizes, and all scales and zero points.
fn stored(a: &[usize], b: &[usize]) -> Vec<TensorProto> {
    let number = |name: &str, value: f64| floats(name, &[], &[value]);
    let zero = |name: &str, value: i64| ints(name, Element::U8, &[], &[value]);
    let n_b = b.iter().product();
    vec![
        ints("a", Element::U8, a, &A),
        ints("b", Element::U8, b, &B[..n_b]),
        ints("c32", Element::I32, &[2], &[1000, -500]),
        ints("c", Element::Bool, &[2, 4], &[1, 0, 1, 0, 0, 1, 1, 0]),
        floats("x", &[2, 4], &[0.5, -1.0, 2.0, 0.25, 1.0, 1.5, -0.75, 0.0]),
        floats("bias", &[2], &[0.5, -1.0]),
        floats("sb2", &[2], &[0.05, 0.1]),
        ints("zb2", Element::U8, &[2], &[100, 90]),
        number("sa", 0.02),
        zero("za", 128),
        number("sb", 0.05),
        zero("zb", 100),
        number("sy", 0.1),
        zero("zy", 30),
        number("s3", 0.02),
        number("s8", 1.0 / 256.0),
        zero("z0", 0),
        ints("q16", Element::I16, &[3], &[-3, 0, 500]),
        ints("z16", Element::I16, &[], &[7]),
        floats("x3", &[3], &[-3.0, 0.13, 500.0]),
    ]
}

/// The output of a node. Checks that its type and sizes are inferred.
fn output(op: &str, inputs: &str, stored: Vec<TensorProto>, given: &[(&str, &[i64])]) -> Tensor {
    let attribute = |(name, values): &(&str, &[i64])| AttributeProto {
        name: name.to_string(),
        i: (values.len() == 1 && *name != "kernel_shape").then(|| values[0]),
        f: (*name == "alpha").then(|| values[0] as f32 / 4.0),
        ints: values.to_vec(),
        ..Default::default()
    };
    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_string(),
        version,
    };
    let y = ValueInfoProto {
        name: "y".to_string(),
        ..Default::default()
    };
    let node = NodeProto {
        op_type: op.to_string(),
        domain: "com.microsoft".to_string(),
        input: inputs.split(' ').map(str::to_string).collect(),
        output: vec!["y".to_string()],
        attribute: given.iter().map(attribute).collect(),
        ..Default::default()
    };
    let model = ModelProto {
        opset_import: vec![opset("", 17), opset("com.microsoft", 1)],
        graph: Some(GraphProto {
            node: vec![node],
            initializer: stored,
            output: vec![y],
            ..Default::default()
        }),
        ..Default::default()
    };
    let program = Program::new(&model, Path::new("."), Precision::AsStored).expect("a graph");
    let outputs = program.run(&Named::new(), &["y"]);
    let y = outputs
        .unwrap_or_else(|error| panic!("{op}: {error}"))
        .remove(0);
    let known = known_values(&model, &Arc::from(Path::new(".")), &Unknowns::default());
    let fact = known.get("y").unwrap_or_else(|| panic!("{op}"));
    assert_eq!(fact.element, Some(y.element()), "{op}");
    assert_eq!(fact.sizes(), Some(y.shape.clone()), "{op}");
    y
}

/// Sizes, attributes and the expected output.
type Case<'c> = (
    &'c str,
    &'c str,
    [&'c [usize]; 2],
    &'c [(&'c str, &'c [i64])],
    &'c [usize],
    &'c [f64],
);

#[test]
fn quantized_operators_compute_what_onnx_runtime_computes() {
    let cases: [Case; 17] = [
        (
            "QLinearAdd",
            "a sa za b sb zb sy zy",
            [&[2, 4], &[2, 4]],
            &[],
            &[2, 4],
            &[0., 81., 0., 44., 26., 0., 133., 37.],
        ),
        (
            "QLinearMul",
            "a sa za b sb zb sy zy",
            [&[2, 4], &[4]],
            &[],
            &[2, 4],
            &[154., 0., 53., 31., 27., 138., 0., 66.],
        ),
        (
            "QLinearSigmoid",
            "a sa za s8 z0",
            [&[8], &[8]],
            &[],
            &[8],
            &[18., 22., 93., 131., 132., 207., 237., 237.],
        ),
        (
            "QLinearLeakyRelu",
            "a sa za s3 zy",
            [&[8], &[8]],
            &[("alpha", &[1])],
            &[8],
            &[0., 0., 23., 32., 33., 102., 156., 157.],
        ),
        (
            "QLinearSoftmax",
            "a sa za s8 z0",
            [&[2, 4], &[8]],
            &[("axis", &[-1]), ("opset", &[13])],
            &[2, 4],
            &[11., 14., 82., 149., 9., 36., 105., 107.],
        ),
        (
            "QLinearSoftmax",
            "a sa za s8 z0",
            [&[2, 2, 2], &[8]],
            &[("axis", &[1]), ("opset", &[11])],
            &[2, 2, 2],
            &[11., 14., 82., 149., 9., 36., 105., 107.],
        ),
        (
            "QLinearGlobalAveragePool",
            "a sa za s3 zy",
            [&[1, 2, 2, 2], &[8]],
            &[],
            &[1, 2, 1, 1],
            &[0., 112.],
        ),
        (
            "QLinearGlobalAveragePool",
            "a sa za s3 zy",
            [&[1, 2, 2, 2], &[8]],
            &[("channels_last", &[1])],
            &[1, 1, 1, 2],
            &[23., 51.],
        ),
        (
            "QLinearAveragePool",
            "a sa za s3 zy",
            [&[1, 1, 2, 4], &[8]],
            &[("kernel_shape", &[2, 2])],
            &[1, 1, 1, 3],
            &[0., 43., 87.],
        ),
        (
            "QLinearAveragePool",
            "a sa za s3 zy",
            [&[1, 2, 2, 2], &[8]],
            &[("kernel_shape", &[2, 1]), ("channels_last", &[1])],
            &[1, 1, 2, 2],
            &[0., 7., 79., 94.],
        ),
        (
            "QLinearConcat",
            "sy zy a sa za b sb zb",
            [&[2, 4], &[2, 4]],
            &[("axis", &[0])],
            &[4, 4],
            &[
                4., 6., 24., 30., 31., 44., 55., 55., 0., 105., 0., 44., 25., 0., 108., 12.,
            ],
        ),
        (
            "QLinearWhere",
            "c a sa za b sb zb sy zy",
            [&[2, 4], &[2, 4]],
            &[],
            &[2, 4],
            &[4., 105., 24., 44., 25., 44., 55., 12.],
        ),
        (
            "QGemm",
            "a sa za b sb zb c32 sy zy",
            [&[2, 4], &[2, 4]],
            &[("transB", &[1])],
            &[2, 2],
            &[11., 111., 76., 103.],
        ),
        (
            "QGemm",
            "a sa za b sb2 zb2 c32",
            [&[2, 4], &[4, 2]],
            &[],
            &[2, 2],
            &[23.8, -46.048, 13.158, -23.6],
        ),
        (
            "MatMulIntegerToFloat",
            "a b sa sb2 za zb2 bias",
            [&[2, 4], &[4, 2]],
            &[],
            &[2, 2],
            &[23.3, -46.048, 12.658, -23.6],
        ),
        (
            "DynamicQuantizeMatMul",
            "x b sb2 zb2 bias",
            [&[8], &[4, 2]],
            &[],
            &[2, 2],
            &[3.168_235_5, -15.336_471_6, -10.222_941_4, 27.423_530_6],
        ),
        (
            "QuantizeLinear",
            "x3 sa z16",
            [&[8], &[8]],
            &[],
            &[3],
            &[-143., 13., 25007.],
        ),
    ];
    for (op, inputs, [a, b], attributes, shape, expected) in cases {
        let y = output(op, inputs, stored(a, b), attributes);
        assert_eq!(y.shape, shape, "{op}");
        let found = y.to_f64().expect("numbers");
        // A tie may be rounded either way.
        let error = if y.element().is_float() { 1e-4 } else { 1.0 };
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= error;
        assert!(found.iter().zip(expected).all(near), "{op}: {found:?}");
        let same = found
            .iter()
            .zip(expected)
            .filter(|(a, b)| (*a - *b).abs() < 1e-4);
        assert!(same.count() + 1 >= expected.len(), "{op}: {found:?}");
    }
}
