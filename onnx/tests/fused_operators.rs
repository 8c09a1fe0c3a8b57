//! ONNX Runtime's fused operators against the standard's operators that they stand for.

use onnx::evaluate::{Precision, Program, Values as Named};
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
};
use onnx::tensor::{Tensor, Values};
use std::path::Path;

fn node(op: &str, inputs: &str, output: &str) -> NodeProto {
    NodeProto {
        op_type: op.to_string(),
        input: inputs
            .split(' ')
            .map(|n| n.trim_matches('_').to_string())
            .collect(),
        output: output.split(' ').map(str::to_string).collect(),
        ..Default::default()
    }
}

trait With {
    fn with(self, name: &str, set: impl FnOnce(&mut AttributeProto)) -> Self;
    fn int(self, name: &str, i: i64) -> Self;
    fn ints(self, name: &str, ints: &[i64]) -> Self;
    fn float(self, name: &str, f: f32) -> Self;
    fn floats(self, name: &str, floats: &[f32]) -> Self;
    fn text(self, name: &str, s: &str) -> Self;
    fn runtime(self) -> Self;
}

impl With for NodeProto {
    fn with(mut self, name: &str, set: impl FnOnce(&mut AttributeProto)) -> Self {
        let mut attribute = AttributeProto {
            name: name.to_string(),
            ..Default::default()
        };
        set(&mut attribute);
        self.attribute.push(attribute);
        self
    }
    fn int(self, name: &str, i: i64) -> Self {
        self.with(name, |a| a.i = Some(i))
    }
    fn ints(self, name: &str, ints: &[i64]) -> Self {
        self.with(name, |a| a.ints = ints.to_vec())
    }
    fn float(self, name: &str, f: f32) -> Self {
        self.with(name, |a| a.f = Some(f))
    }
    fn floats(self, name: &str, floats: &[f32]) -> Self {
        self.with(name, |a| a.floats = floats.to_vec())
    }
    fn text(self, name: &str, s: &str) -> Self {
        self.with(name, |a| a.s = Some(s.to_string().into()))
    }
    fn runtime(mut self) -> Self {
        self.domain = "com.microsoft".to_string();
        self
    }
}

/// Numbers between -1 and 1 that repeat late.
fn tensor(shape: &[usize], seed: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let number = |k: usize| ((k * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0;
    Tensor::new(shape, Values::F64((0..n).map(number).collect()))
}

fn outputs(nodes: Vec<NodeProto>, feeds: &[(&str, Tensor)], wanted: &[&str]) -> Vec<Tensor> {
    let opset = |domain: &str, version| OperatorSetIdProto {
        domain: domain.to_string(),
        version,
    };
    let info = |name: &&str| ValueInfoProto {
        name: name.to_string(),
        ..Default::default()
    };
    let model = ModelProto {
        opset_import: vec![opset("", 23), opset("com.microsoft", 1)],
        graph: Some(GraphProto {
            node: nodes,
            output: wanted.iter().map(info).collect(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let program = Program::new(&model, Path::new("."), Precision::AsStored).expect("a graph");
    let feeds: Named = feeds
        .iter()
        .map(|(n, t)| (n.to_string(), t.clone()))
        .collect();
    program.run(&feeds, wanted).expect("outputs")
}

/// `fused` and `plain` compute the same `y` and further outputs.
fn check(fused: NodeProto, plain: Vec<NodeProto>, feeds: &[(&str, Tensor)], wanted: &[&str]) {
    let what = fused.op_type.clone();
    let got = outputs(vec![fused], feeds, wanted);
    let expected = outputs(plain, feeds, wanted);
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!(got.shape, expected.shape, "{what}");
        let pairs = got
            .to_f64()
            .unwrap()
            .into_iter()
            .zip(expected.to_f64().unwrap());
        for (a, b) in pairs {
            assert!(
                (a - b).abs() <= 1e-12 * (1.0 + b.abs()),
                "{what}: {a} is not {b}"
            );
        }
    }
}

#[test]
fn convolutions_add_and_activate() {
    let feeds = [
        ("x", tensor(&[2, 4, 7, 6], 1)),
        ("w", tensor(&[6, 2, 3, 3], 2)),
        ("b", tensor(&[6], 3)),
        ("z", tensor(&[2, 6, 7, 6], 4)),
    ];
    let conv = |op: &str, inputs: &str, output: &str| {
        node(op, inputs, output)
            .ints("pads", &[1; 4])
            .int("group", 2)
    };
    let fused = conv("FusedConv", "x w b z", "y").runtime();
    check(
        fused
            .text("activation", "LeakyRelu")
            .floats("activation_params", &[0.1]),
        vec![
            conv("Conv", "x w b", "c"),
            node("Add", "c z", "s"),
            node("LeakyRelu", "s", "y").float("alpha", 0.1),
        ],
        &feeds,
        &["y"],
    );
    let fused = conv("FusedConv", "x w", "y").runtime();
    check(
        fused
            .text("activation", "HardSigmoid")
            .floats("activation_params", &[0.3, 0.4]),
        vec![
            conv("Conv", "x w", "c"),
            node("HardSigmoid", "c", "y")
                .float("alpha", 0.3)
                .float("beta", 0.4),
        ],
        &feeds,
        &["y"],
    );
}

#[test]
fn products_transpose_scale_and_activate() {
    let feeds = [
        ("a", tensor(&[2, 5, 3], 1)),
        ("b", tensor(&[2, 7, 5], 2)),
        ("p", tensor(&[3, 5], 3)),
        ("q", tensor(&[7, 5], 4)),
        ("c", tensor(&[7], 5)),
        ("r", tensor(&[3, 2, 5], 6)),
    ];
    let turn = |input: &str, output: &str, order: &[i64]| {
        node("Transpose", input, output).ints("perm", order)
    };
    let fused = node("FusedMatMul", "a b", "y").runtime();
    check(
        fused.int("transA", 1).int("transB", 1).float("alpha", 0.5),
        vec![
            turn("a", "at", &[0, 2, 1]),
            turn("b", "bt", &[0, 2, 1]),
            node("MatMul", "at bt", "m"),
            node("Add", "m m", "s"),
            // A quarter of twice the product, to have the scale from exact operations.
            node("Constant", "_", "k").float("value_float", 0.25),
            node("CastLike", "k s", "l"),
            node("Mul", "s l", "y"),
        ],
        &feeds,
        &["y"],
    );
    check(
        node("FusedMatMul", "r b", "y")
            .runtime()
            .int("transBatchA", 1)
            .int("transB", 1),
        vec![
            turn("r", "rt", &[1, 0, 2]),
            turn("b", "bt", &[0, 2, 1]),
            node("MatMul", "rt bt", "y"),
        ],
        &feeds,
        &["y"],
    );
    let gemm = |op: &str, output: &str| node(op, "p q c", output).int("transB", 1);
    check(
        gemm("FusedGemm", "y").runtime().text("activation", "Relu"),
        vec![gemm("Gemm", "g"), node("Relu", "g", "y")],
        &feeds,
        &["y"],
    );
}

#[test]
fn gelus_are_the_standards() {
    let feeds = [("x", tensor(&[3, 40], 1)), ("b", tensor(&[40], 2))];
    check(
        node("Gelu", "x", "y").runtime(),
        vec![node("Gelu", "x", "y")],
        &feeds,
        &["y"],
    );
    for (fused, approximate) in [("BiasGelu", "none"), ("FastGelu", "tanh")] {
        check(
            node(fused, "x b", "y").runtime(),
            vec![
                node("Add", "x b", "s"),
                node("Gelu", "s", "y").text("approximate", approximate),
            ],
            &feeds,
            &["y"],
        );
    }
    check(
        node("QuickGelu", "x", "y").runtime().float("alpha", 1.0),
        vec![node("Sigmoid", "x", "s"), node("Mul", "x s", "y")],
        &feeds,
        &["y"],
    );
}

#[test]
fn skips_are_added_and_given() {
    let feeds = [
        ("x", tensor(&[2, 3, 8], 1)),
        ("s", tensor(&[3, 8], 2)),
        ("g", tensor(&[8], 3)),
        ("h", tensor(&[8], 4)),
        ("b", tensor(&[8], 5)),
    ];
    let sums = || vec![node("Add", "x s", "t"), node("Add", "t b", "sum")];
    let mut plain = sums();
    plain.push(node("LayerNormalization", "sum g h", "y").float("epsilon", 1e-3));
    check(
        node("SkipLayerNormalization", "x s g h b", "y m v sum")
            .runtime()
            .float("epsilon", 1e-3),
        plain,
        &feeds,
        &["y", "sum"],
    );
    let mut plain = sums();
    plain.push(node("RMSNormalization", "sum g", "y").float("epsilon", 1e-3));
    let fused = node("SkipSimplifiedLayerNormalization", "x s g b", "y m v sum").runtime();
    check(fused.float("epsilon", 1e-3), plain, &feeds, &["y", "sum"]);
}

#[test]
fn heads_attend_as_in_the_standard() {
    let feeds = [
        ("q", tensor(&[2, 3, 8], 1)),
        ("k", tensor(&[2, 5, 8], 2)),
        ("v", tensor(&[2, 5, 12], 3)),
        ("bias", tensor(&[1, 2, 3, 5], 4)),
    ];
    let standard = |inputs: &str| {
        node("Attention", inputs, "y")
            .int("q_num_heads", 2)
            .int("kv_num_heads", 2)
    };
    check(
        node("MultiHeadAttention", "q k v _ _ bias", "y")
            .runtime()
            .int("num_heads", 2),
        vec![standard("q k v bias")],
        &feeds,
        &["y"],
    );
    check(
        node("MultiHeadAttention", "q q q", "y")
            .runtime()
            .int("num_heads", 2)
            .int("unidirectional", 1),
        vec![standard("q q q").int("is_causal", 1)],
        &feeds,
        &["y"],
    );
}

#[test]
fn one_product_gives_queries_keys_and_values() {
    let feeds = [
        ("x", tensor(&[2, 3, 6], 1)),
        ("w", tensor(&[6, 24], 2)),
        ("b", tensor(&[24], 3)),
    ];
    check(
        node("Attention", "x w b", "y")
            .runtime()
            .int("num_heads", 2),
        vec![
            node("MatMul", "x w", "m"),
            node("Add", "m b", "s"),
            node("Split", "s", "q k v")
                .int("axis", -1)
                .int("num_outputs", 3),
            node("Attention", "q k v", "y")
                .int("q_num_heads", 2)
                .int("kv_num_heads", 2),
        ],
        &feeds,
        &["y"],
    );
}
