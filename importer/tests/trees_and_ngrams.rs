//! Trees and runs of integers beyond the cases of `data/edges.py`: other types, runs that share a column, bad files.

mod files;

use graph::{DType, Precision, Tensor, interpret};
use importer::onnx::{File, Options};
use onnx::element::Element;
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    ValueInfoProto, attribute_type,
};
use prost::Message;

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::INT,
        i: Some(value),
        ..Default::default()
    }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::INTS,
        ints: values.to_vec(),
        ..Default::default()
    }
}

fn floats(name: &str, values: &[f32]) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::FLOATS,
        floats: values.to_vec(),
        ..Default::default()
    }
}

fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::STRING,
        s: Some(value.as_bytes().to_vec().into()),
        ..Default::default()
    }
}

fn texts(name: &str, values: &[&str]) -> AttributeProto {
    let bytes = |value: &&str| value.as_bytes().to_vec().into();
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::STRINGS,
        strings: values.iter().map(bytes).collect(),
        ..Default::default()
    }
}

fn tensor(name: &str, element: Element, values: &[f64]) -> AttributeProto {
    let tensor = match element {
        Element::U8 => TensorProto {
            int32_data: values.iter().map(|v| *v as i32).collect(),
            ..Default::default()
        },
        _ => onnx::tensor::Tensor::floats(element, &[values.len()], values)
            .expect("floats")
            .to_proto(""),
    };
    AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::TENSOR,
        t: Some(TensorProto {
            dims: vec![values.len() as i64],
            data_type: element.number(),
            ..tensor
        }),
        ..Default::default()
    }
}

/// A port of that type.
fn typed(name: &str, element: Element, sizes: &[i64]) -> ValueInfoProto {
    let mut port = files::port(name, sizes);
    let tensor = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
    tensor.expect("a tensor").elem_type = element.number();
    port
}

/// What a node makes of `x`, or why it is refused.
fn run(
    (domain, version, op): (&str, i64, &str),
    attribute: Vec<AttributeProto>,
    (element, x): (Element, &Tensor),
) -> Result<Tensor, String> {
    let sizes: Vec<i64> = x.shape.iter().map(|n| *n as i64).collect();
    let sets = [("", 21), (domain, version)];
    let model = ModelProto {
        ir_version: Some(10),
        opset_import: sets
            .iter()
            .map(|(domain, version)| OperatorSetIdProto {
                domain: domain.to_string(),
                version: *version,
            })
            .skip(usize::from(domain.is_empty()))
            .collect(),
        graph: Some(GraphProto {
            node: vec![NodeProto {
                op_type: op.to_string(),
                domain: domain.to_string(),
                input: vec!["x".to_string()],
                output: vec!["y".to_string()],
                attribute,
                ..Default::default()
            }],
            input: vec![typed("x", element, &sizes)],
            output: vec![ValueInfoProto {
                name: "y".to_string(),
                ..Default::default()
            }],
            ..Default::default()
        }),
        ..Default::default()
    };
    let file = File::decode("case.onnx", model.encode_to_vec().into());
    let file = file.map_err(|error| error.to_string())?;
    let model = file.import(&Options::default());
    let model = model.map_err(|error| error.to_string())?;
    let mut inputs = vec![x.clone()];
    let stored = model.parameters.iter().map(|p| p.stored.tensor());
    inputs.extend(stored.map(|tensor| tensor.expect("stored")));
    let none = Default::default();
    let found = interpret(
        &model.graph,
        &inputs,
        &none,
        &ops::Meaning,
        Precision::Declared,
    );
    Ok(found.map_err(|error| error.to_string())?.remove(0))
}

const ENSEMBLE: (&str, i64, &str) = ("ai.onnx.ml", 5, "TreeEnsemble");

/// `x ≤ 0.5 ? 1 : 3`, with weights of that type.
fn stump(element: Element, weights: &[f64]) -> Vec<AttributeProto> {
    vec![
        tensor("nodes_modes", Element::U8, &[0.0]),
        tensor("nodes_splits", element, &[0.5]),
        ints("nodes_featureids", &[0]),
        ints("nodes_truenodeids", &[0]),
        ints("nodes_trueleafs", &[1]),
        ints("nodes_falsenodeids", &[1]),
        ints("nodes_falseleafs", &[1]),
        ints("leaf_targetids", &[0, 0]),
        tensor("leaf_weights", element, weights),
        ints("tree_roots", &[0]),
        int("n_targets", 1),
    ]
}

#[test]
fn results_of_trees_have_the_type_of_the_features() {
    let kinds = [
        (Element::F16, DType::F16),
        (Element::F32, DType::F32),
        (Element::F64, DType::F64),
    ];
    for (element, dtype) in kinds {
        let x = Tensor::from_f64(dtype, &[2, 1], vec![0.5, 0.75]);
        let y = run(ENSEMBLE, stump(element, &[1.0, 3.0]), (element, &x)).expect("it runs");
        assert_eq!((y.dtype, y.to_f64()), (dtype, vec![1.0, 3.0]));
    }
}

#[test]
fn the_least_of_doubles_may_be_beyond_single_precision() {
    let mut attributes = stump(Element::F64, &[1e300, -1e300]);
    attributes.push(int("aggregate_function", 2));
    let x = Tensor::from_f64(DType::F64, &[2, 1], vec![0.0, 1.0]);
    let y = run(ENSEMBLE, attributes, (Element::F64, &x)).expect("it runs");
    assert_eq!(y.to_f64(), [1e300, -1e300]);
}

#[test]
fn lists_of_trees_that_do_not_fit_are_refused() {
    let x = Tensor::from_f64(DType::F32, &[1, 1], vec![0.0]);
    let refused = |change: &dyn Fn(&mut AttributeProto)| {
        let mut attributes = stump(Element::F32, &[1.0, 3.0]);
        attributes.iter_mut().for_each(change);
        run(ENSEMBLE, attributes, (Element::F32, &x)).expect_err("it is refused")
    };
    let lists = |name: &'static str, values: &'static [i64]| {
        refused(&move |a| {
            if a.name == name {
                a.ints = values.to_vec();
            }
        })
    };
    let leaves = lists("leaf_targetids", &[0, 0, 0]);
    assert!(
        leaves.contains("its leaves have 3 targets, but 2 weights"),
        "{leaves}"
    );
    let feature = lists("nodes_featureids", &[7]);
    let expected = "its trees read feature 7, but its input has 1 features";
    assert!(feature.contains(expected), "{feature}");
    let none = refused(&|a| {
        if a.name == "n_targets" {
            a.i = Some(0);
        }
    });
    assert!(none.contains("`n_targets` is 0, not a number"), "{none}");
}

#[test]
fn a_tree_with_two_nodes_of_one_number_is_refused() {
    let attributes = vec![
        ints("nodes_treeids", &[0, 0, 0]),
        ints("nodes_nodeids", &[0, 1, 1]),
        ints("nodes_featureids", &[0, 0, 0]),
        texts("nodes_modes", &["BRANCH_LEQ", "LEAF", "LEAF"]),
        floats("nodes_values", &[0.5, 0.0, 0.0]),
        ints("nodes_truenodeids", &[1, 0, 0]),
        ints("nodes_falsenodeids", &[1, 0, 0]),
        ints("target_treeids", &[0]),
        ints("target_nodeids", &[1]),
        ints("target_ids", &[0]),
        floats("target_weights", &[1.0]),
        int("n_targets", 1),
    ];
    let x = Tensor::from_f64(DType::F32, &[1, 1], vec![0.0]);
    let regressor = ("ai.onnx.ml", 3, "TreeEnsembleRegressor");
    let refused = run(regressor, attributes, (Element::F32, &x)).expect_err("two nodes");
    assert!(refused.contains("tree 0 has two nodes 1"), "{refused}");
}

/// Runs 5 and 7 of one element, and `2 5` of two, all in column 0 but for 7, in column 1.
fn counted(mode: &str, weights: &[f32]) -> Result<Vec<f64>, String> {
    let mut attributes = vec![
        text("mode", mode),
        int("min_gram_length", 1),
        int("max_gram_length", 2),
        int("max_skip_count", 0),
        ints("pool_int64s", &[5, 7, 2, 5]),
        ints("ngram_counts", &[0, 2]),
        ints("ngram_indexes", &[0, 1, 0]),
    ];
    if !weights.is_empty() {
        attributes.push(floats("weights", weights));
    }
    let x = Tensor::from_i64(DType::I32, &[2, 4], vec![2, 5, 7, 7, 1, 2, 3, 4]);
    let vectorizer = ("", 21, "TfIdfVectorizer");
    run(vectorizer, attributes, (Element::I32, &x)).map(|y| y.to_f64())
}

#[test]
fn runs_that_share_a_column_are_there_once() {
    assert_eq!(counted("TF", &[]), Ok(vec![2.0, 2.0, 0.0, 0.0]));
    assert_eq!(counted("IDF", &[]), Ok(vec![1.0, 1.0, 0.0, 0.0]));
    let equal = counted("IDF", &[0.5, 3.0, 0.5]);
    assert_eq!(equal, Ok(vec![0.5, 3.0, 0.0, 0.0]));
    let refused = counted("IDF", &[0.5, 3.0, 0.25]).expect_err("which weight?");
    assert!(refused.contains("two runs of its column 0"), "{refused}");
}
