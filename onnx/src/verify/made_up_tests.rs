//! Inputs and results that verification makes up: their sizes, where the file fixes them inside or declares none.

use super::*;
use crate::element::Element;
use crate::infer::known_values;
use crate::operators::Unknowns;
use crate::proto::{AttributeProto, SparseTensorProto};
use crate::rewrite::patch::int;
use crate::rewrite::trial::{Trial, reals};
use crate::tensor::Tensor;
use bytes::Bytes;
use prost::Message;

fn evidence(model: &Model, options: &Options) -> Result<Evidence, VerifyError> {
    Checker::new(model, options)?.check(&model.proto)
}

#[test]
fn a_size_that_a_reshape_fixes_is_tried() {
    // Exporters that trace leave the size of the example inside, and the input open.
    let trial = Trial::new(17).input("x", "b t 4").ints("s", &[-1, 6, 4]);
    let trial = trial.node("y = Reshape(x, s)").output("y", "b 6 4");
    let runs = evidence(&trial.model(), &Options::default());
    let runs = runs.expect("it runs").runs;
    assert_eq!(runs[0], "seed 0, b=1 t=6");
}

#[test]
fn inputs_that_are_too_large_are_said_to_be() {
    let trial = Trial::new(17).input("x", "b 4").node("y = Relu(x)");
    let options = Options {
        sizes: [("b".to_string(), 1 << 40)].into(),
        ..Options::default()
    };
    let error = evidence(&trial.output("y", "b 4").model(), &options).expect_err("too large");
    assert!(error.to_string().ends_with("give smaller sizes"), "{error}");
}

#[test]
fn strings_are_made_up_as_long_as_they_take_little_memory() {
    // This many numbers would be made up, but not this many strings.
    let mut model = Trial::new(20).input("x", "9000000");
    model = model.node("y = Identity(x)").output("y", "9000000");
    let mut model = model.model();
    let graph = model.proto.graph.as_mut().expect("a graph");
    let values = graph.input.iter_mut().chain(&mut graph.output);
    let types = values.filter_map(|value| value.r#type.as_mut()?.tensor_type.as_mut());
    types.for_each(|of| of.elem_type = Element::String.number());
    let error = evidence(&model, &Options::default()).expect_err("too large");
    assert!(error.to_string().ends_with("give smaller sizes"), "{error}");
}

#[test]
fn a_sparse_constant_is_what_it_stands_for() {
    let sparse = SparseTensorProto {
        values: Some(reals(&[2]).to_proto("")),
        indices: Some(Tensor::ints(&[0, 4]).to_proto("")),
        dims: vec![2, 3],
    };
    let attribute = AttributeProto {
        name: "sparse_value".to_string(),
        sparse_tensor: Some(sparse.encode_to_vec().into()),
        r#type: 11,
        ..AttributeProto::default()
    };
    let trial = Trial::new(17)
        .input("x", "2 3")
        .with("w = Constant()", vec![attribute])
        .node("y = Add(x, w)")
        .output("y", "2 3");
    evidence(&trial.model(), &Options::default()).expect("it runs");
    let known = known_values(
        &trial.model().proto,
        &trial.model().folder,
        &Unknowns::default(),
    );
    let shown: Vec<f64> = known
        .get("w")
        .and_then(|w| w.small()?.to_f64())
        .expect("numbers");
    let zeros = shown.iter().filter(|x| **x == 0.0).count();
    assert_eq!((shown.len(), zeros), (6, 4));
}

#[test]
fn what_a_suppression_selects_is_a_list_of_three_positions() {
    let trial = Trial::new(17).input("b", "1 n 4").input("s", "1 1 n");
    let trial = trial.ints("k", &[3]).ints("two", &[2]).ints("one", &[1]);
    let trial = trial
        .node("p = NonMaxSuppression(b, s, k)")
        .with("q = Gather(p, two)", vec![int("axis", 1)])
        .node("r = Squeeze(q, one)");
    let trial = trial.constant("x", reals(&[5, 4])).node("y = Gather(x, r)");
    evidence(&trial.output("y", "m 4").model(), &Options::default()).expect("it runs");
}

#[test]
fn text_names_categories_that_the_model_knows() {
    let categories = AttributeProto {
        name: "cats_strings".to_string(),
        strings: ["left", "right"].map(Bytes::from).to_vec(),
        ..AttributeProto::default()
    };
    // Text that is no category is an error.
    let attributes = vec![categories, int("zeros", 0)];
    let trial = Trial::new(17).input_of("x", Element::String, "n");
    let trial = trial.ints("s", &[-1, 1]).node("r = Reshape(x, s)");
    let trial = trial.with("y = ai.onnx.ml.OneHotEncoder(r)", attributes);
    let found = evidence(&trial.output("y", "n 1 2").model(), &Options::default());
    assert!(found.expect("it runs").runs.len() > 1);
}

#[test]
fn results_of_operators_that_are_not_evaluated_have_their_sizes() {
    let indexes = AttributeProto {
        name: "ngram_indexes".to_string(),
        ints: vec![0, 4, 2],
        ..AttributeProto::default()
    };
    let counted = |trial: Trial| trial.with("c = TfIdfVectorizer(x)", vec![indexes.clone()]);
    let trial = counted(Trial::new(17).input_of("x", Element::I64, "n 3"));
    let trial = trial.constant("w", reals(&[5])).node("y = Mul(c, w)");
    let found = evidence(&trial.output("y", "n 5").model(), &Options::default());
    assert_eq!(found.expect("it runs").runs[1], "seed 1, n=2");
    let coefficients = AttributeProto {
        name: "coefficients".to_string(),
        floats: vec![0.5; 24],
        ..AttributeProto::default()
    };
    let attributes = vec![coefficients, int("targets", 6)];
    let trial = Trial::new(17).input("x", "n 4");
    let trial = trial.with("c = ai.onnx.ml.LinearRegressor(x)", attributes);
    let trial = trial.constant("w", reals(&[6])).node("y = Mul(c, w)");
    let trial = trial.output("y", "n 6");
    evidence(&trial.model(), &Options::default()).expect("it runs");
}
