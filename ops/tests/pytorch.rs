//! Operators whose definition is easily taken for another one, against PyTorch 2: inputs are
//! `sin(n + offset)` at row-major position n, results are those of `torch.nn.functional` in double
//! precision, to nine digits.

use graph::{Attr, Attrs, DType, Library, Tensor};
use ops::{Call, attrs};

/// Nine digits are given.
const TOLERANCE: f64 = 2e-9;

struct Case {
    op: &'static str,
    inputs: Vec<Tensor>,
    attrs: Attrs,
    /// The leading outputs.
    expected: &'static [&'static [f64]],
}

fn wave(shape: &[usize], offset: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let data = (0..n).map(|i| ((i + offset) as f64).sin()).collect();
    Tensor::from_f64(DType::F64, shape, data)
}

fn cases() -> Vec<Case> {
    vec![
        Case {
            op: "cross_entropy",
            inputs: vec![
                wave(&[2, 3, 3], 0),
                Tensor::from_i64(DType::I64, &[2, 3], vec![2, 0, 1, 2, 1, 0]),
                Tensor::from_f64(DType::F64, &[3], vec![0.5, 0.8, 1.1]),
            ],
            attrs: attrs([
                ("reduction", Attr::Str("mean".into())),
                ("ignore_index", Attr::Int(1)),
                ("label_smoothing", Attr::Float(0.1)),
            ]),
            expected: &[&[1.189895325]],
        },
        Case {
            op: "cross_entropy",
            inputs: vec![
                wave(&[2, 3, 3], 0),
                Tensor::from_i64(DType::I64, &[2, 3], vec![2, 0, 1, 2, 1, 0]),
                Tensor::from_f64(DType::F64, &[3], vec![0.5, 0.8, 1.1]),
            ],
            attrs: attrs([
                ("reduction", Attr::Str("none".into())),
                ("ignore_index", Attr::Int(1)),
                ("label_smoothing", Attr::Float(0.1)),
            ]),
            expected: &[&[
                1.425213689,
                0.425629565,
                0.000000000,
                0.826045712,
                0.000000000,
                1.130776073,
            ]],
        },
        Case {
            op: "average_pool",
            inputs: vec![wave(&[1, 1, 6, 5], 0)],
            attrs: attrs([
                ("kernel", Attr::Ints(vec![3, 2])),
                ("stride", Attr::Ints(vec![2, 2])),
                ("pad_low", Attr::Ints(vec![1, 1])),
                ("pad_high", Attr::Ints(vec![1, 1])),
                ("ceil", Attr::Bool(true)),
                ("count_include_pad", Attr::Bool(true)),
            ]),
            expected: &[&[
                -0.159820712,
                0.354723252,
                0.130965707,
                -0.142109591,
                -0.401382139,
                0.368523515,
                0.238480223,
                0.216239650,
                -0.457606150,
                -0.033087938,
                0.429733595,
                -0.098182024,
            ]],
        },
        Case {
            op: "average_pool",
            inputs: vec![wave(&[1, 1, 6, 5], 0)],
            attrs: attrs([
                ("kernel", Attr::Ints(vec![3, 2])),
                ("stride", Attr::Ints(vec![2, 2])),
                ("pad_low", Attr::Ints(vec![1, 1])),
                ("pad_high", Attr::Ints(vec![1, 1])),
                ("ceil", Attr::Bool(true)),
                ("count_include_pad", Attr::Bool(false)),
            ]),
            expected: &[&[
                -0.479462137,
                0.532084878,
                0.196448561,
                -0.284219182,
                -0.401382139,
                0.368523515,
                0.476960447,
                0.216239650,
                -0.457606150,
                -0.132351750,
                0.859467189,
                -0.196364048,
            ]],
        },
        Case {
            op: "max_pool",
            inputs: vec![wave(&[1, 1, 6, 5], 0)],
            attrs: attrs([
                ("kernel", Attr::Ints(vec![3, 2])),
                ("stride", Attr::Ints(vec![2, 2])),
                ("pad_low", Attr::Ints(vec![1, 1])),
                ("pad_high", Attr::Ints(vec![1, 1])),
                ("dilation", Attr::Ints(vec![1, 2])),
                ("ceil", Attr::Bool(true)),
            ]),
            expected: &[
                &[
                    0.841470985,
                    0.989358247,
                    0.989358247,
                    -0.279415498,
                    0.989358247,
                    0.989358247,
                    0.836655639,
                    0.836655639,
                    0.270905788,
                    0.762558450,
                    0.762558450,
                    0.270905788,
                ],
                &[
                    1.000000000,
                    8.000000000,
                    8.000000000,
                    6.000000000,
                    8.000000000,
                    8.000000000,
                    21.000000000,
                    21.000000000,
                    28.000000000,
                    26.000000000,
                    26.000000000,
                    28.000000000,
                ],
            ],
        },
        Case {
            op: "adaptive_average_pool",
            inputs: vec![wave(&[1, 1, 7, 5], 0)],
            attrs: attrs([("output", Attr::Ints(vec![3, 2]))]),
            expected: &[&[
                -0.101241000,
                0.358475527,
                -0.104316403,
                -0.272106237,
                0.276298847,
                0.098157665,
            ]],
        },
        Case {
            op: "conv",
            inputs: vec![wave(&[1, 4, 5, 4], 0), wave(&[2, 2, 3, 2], 1)],
            attrs: attrs([
                ("stride", Attr::Ints(vec![2, 1])),
                ("pad_low", Attr::Ints(vec![1, 0])),
                ("pad_high", Attr::Ints(vec![1, 0])),
                ("dilation", Attr::Ints(vec![1, 2])),
                ("groups", Attr::Int(2)),
            ]),
            expected: &[&[
                0.993088936,
                1.172259995,
                -0.128489341,
                0.056237106,
                1.292737378,
                0.139527201,
                -0.948821977,
                -1.509266154,
                -0.019308370,
                0.199212371,
                -1.156256252,
                -0.338967419,
            ]],
        },
        Case {
            op: "conv_transpose",
            inputs: vec![wave(&[1, 4, 2, 3], 0), wave(&[4, 1, 2, 2], 1)],
            attrs: attrs([
                ("stride", Attr::Ints(vec![2, 1])),
                ("pad_low", Attr::Ints(vec![1, 0])),
                ("pad_high", Attr::Ints(vec![1, 0])),
                ("output_padding", Attr::Ints(vec![1, 0])),
                ("groups", Attr::Int(2)),
            ]),
            expected: &[&[
                -0.183572238,
                0.273937756,
                0.791482938,
                0.290671179,
                -0.276442027,
                -0.101984524,
                -0.384142702,
                -0.592534614,
                0.290671179,
                -0.163281706,
                -0.757785321,
                -0.263632274,
                0.048209788,
                0.181422620,
                -0.665520858,
                -0.794373045,
                0.619530760,
                0.352657609,
                -0.603906288,
                -0.315251625,
                -0.106214483,
                -0.307658179,
                0.568130682,
                0.759489519,
            ]],
        },
        Case {
            op: "group_norm",
            inputs: vec![wave(&[1, 4, 3], 0), wave(&[4], 1), wave(&[4], 2)],
            attrs: attrs([("groups", Attr::Int(2)), ("eps", Attr::Float(1e-3))]),
            expected: &[&[
                0.874633892,
                1.868097287,
                1.948175018,
                0.283702072,
                -0.861859395,
                -1.119724546,
                -0.820908898,
                -0.632485847,
                -0.565605946,
                -1.361373652,
                -0.329594089,
                0.162446609,
            ]],
        },
        Case {
            op: "batch_norm",
            inputs: vec![wave(&[3, 2, 2], 0), wave(&[2], 1), wave(&[2], 2)],
            attrs: attrs([("eps", Attr::Float(1e-3))]),
            expected: &[&[
                0.809727716,
                1.763237128,
                1.410235658,
                0.360408278,
                -0.047839942,
                -0.276873412,
                -0.214315318,
                1.065415817,
                1.930814975,
                1.276718096,
                -0.575937790,
                -1.199086596,
            ]],
        },
        Case {
            op: "layer_norm",
            inputs: vec![wave(&[2, 2, 3], 0), wave(&[2, 3], 1), wave(&[2, 3], 2)],
            attrs: attrs([("axes", Attr::Int(2)), ("eps", Attr::Float(1e-3))]),
            expected: &[&[
                0.874633892,
                1.177203559,
                -0.582576150,
                -1.077594424,
                0.778303646,
                1.044428044,
                0.527043493,
                0.942146098,
                -0.565605946,
                -1.361373652,
                0.517992010,
                1.071002681,
            ]],
        },
        Case {
            op: "rms_norm",
            inputs: vec![wave(&[2, 3], 0), wave(&[3], 1)],
            attrs: attrs([("axes", Attr::Int(1)), ("eps", Attr::Float(1e-3))]),
            expected: &[&[
                0.000000000,
                1.068666905,
                0.179222201,
                0.167091090,
                -0.968309232,
                -0.190413818,
            ]],
        },
        Case {
            op: "log_softmax",
            inputs: vec![wave(&[2, 3], 0)],
            attrs: attrs([("axis", Attr::Int(0))]),
            expected: &[&[
                -0.766194479,
                -0.184190973,
                -0.143578982,
                -0.625074471,
                -1.782464453,
                -2.011800683,
            ]],
        },
        Case {
            op: "attention",
            inputs: vec![
                wave(&[1, 3, 2], 0),
                wave(&[1, 3, 2], 1),
                wave(&[1, 3, 2], 2),
            ],
            attrs: attrs([("causal", Attr::Bool(true))]),
            expected: &[&[
                0.909297427,
                0.141120008,
                0.325222354,
                -0.244516193,
                -0.363889352,
                -0.028215097,
            ]],
        },
    ]
}

#[test]
fn results_are_those_of_pytorch() {
    for case in cases() {
        let library = Library {
            op: case.op.into(),
            attrs: case.attrs,
            inputs: vec![None; case.inputs.len()],
            outputs: vec![],
        };
        let inputs: Vec<_> = case.inputs.iter().map(Some).collect();
        let call = Call {
            library: &library,
            inputs: case
                .inputs
                .iter()
                .map(|t| Some(ops::meaning::type_of(t)))
                .collect(),
        };
        let results = ops::registry::find(case.op)
            .unwrap()
            .evaluate(&call, &inputs)
            .unwrap();
        for (found, expected) in results.iter().zip(case.expected) {
            let found = found.to_f64();
            assert_eq!(found.len(), expected.len(), "{}: elements", case.op);
            for (n, (a, b)) in found.iter().zip(*expected).enumerate() {
                assert!(
                    (a - b).abs() < TOLERANCE,
                    "{}: element {n} is {a}, expected {b}",
                    case.op
                );
            }
        }
    }
}
