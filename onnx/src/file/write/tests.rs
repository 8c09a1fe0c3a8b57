//! What is written, what is refused, and that nothing is lost.

use super::*;
use crate::rewrite::trial::{Trial, reals};

/// A model in `folder` whose weight is in `data` beside it.
fn external(folder: &Path, name: &str, data: &str) -> Model {
    let trial = Trial::new(17).input("x", "n 4").node("y = Mul(x, w)");
    let mut proto = trial.output("y", "n 4").model().proto;
    let mut weight = reals(&[4]).to_proto("w");
    let bytes = weight.raw_data.take().expect("elements");
    fs::write(folder.join(data), &bytes).expect("written");
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: key.to_string(),
        value: value.to_string(),
    };
    weight.data_location = 1;
    weight.external_data = vec![entry("location", data)];
    proto.graph.get_or_insert_default().initializer.push(weight);
    fs::write(folder.join(name), proto.encode_to_vec()).expect("written");
    Model::read(folder.join(name)).expect("a model")
}

fn weight(path: &Path) -> Vec<u8> {
    let model = Model::read(path).expect("a model");
    let tensor = &model.proto.graph.as_ref().expect("a graph").initializer[0];
    crate::tensor::raw(
        &crate::stored::decode(tensor, &model.folder)
            .expect("elements")
            .values,
    )
}

#[test]
fn data_that_another_model_reads_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    // As after `mv model.onnx old.onnx`.
    let old = external(folder.path(), "old.onnx", "model.onnx.data");
    let error = write(&old, &at("model.onnx"))
        .expect_err("refused")
        .to_string();
    assert!(error.contains("would be replaced"), "{error}");
    let error = write(&old, &at("model.onnx.data"))
        .expect_err("refused")
        .to_string();
    assert!(error.contains("would be replaced"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2);
    assert_eq!(
        weight(&at("old.onnx")),
        crate::tensor::raw(&reals(&[4]).values)
    );
}

#[test]
fn a_model_is_written_elsewhere_and_in_its_own_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let model = external(folder.path(), "model.onnx", "model.onnx.data");
    write(&model, &at("new.onnx")).expect("written");
    assert_eq!(weight(&at("new.onnx")), weight(&at("model.onnx")));
    assert!(at("new.onnx.data").exists());
    write(&model, &at("model.onnx")).expect("written");
    assert_eq!(weight(&at("new.onnx")), weight(&at("model.onnx")));
}

#[test]
fn data_that_changes_after_it_was_read_is_not_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let model = external(folder.path(), "model.onnx", "weights");
    let file = fs::File::options().write(true).open(at("weights"));
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    file.and_then(|f| f.set_modified(later)).expect("changed");
    let error = write(&model, &at("new.onnx"))
        .expect_err("refused")
        .to_string();
    assert!(error.contains("was changed while"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2);
}

#[test]
fn bytes_that_two_weights_share_are_written_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mut model = external(folder.path(), "model.onnx", "weights");
    let graph = model.proto.graph.get_or_insert_default();
    let mut half = graph.initializer[0].clone();
    (half.name, half.dims) = ("half".to_string(), vec![2]);
    half.external_data.push(StringStringEntryProto {
        key: "offset".to_string(),
        value: "8".to_string(),
    });
    graph.initializer.push(half);
    let written = write(&model, &at("new.onnx")).expect("written");
    assert_eq!(written.n_external, 16);
    let model = Model::read(at("new.onnx")).expect("a model");
    let read = |n: usize| {
        let tensor = &model.proto.graph.as_ref().expect("a graph").initializer[n];
        crate::tensor::raw(
            &crate::stored::decode(tensor, &model.folder)
                .expect("elements")
                .values,
        )
    };
    assert_eq!(read(0)[8..], read(1)[..]);
}

#[test]
fn where_the_model_cannot_be_replaced_its_data_is_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    for old in [None, Some("old")] {
        let (data, part) = (at("m.data"), Part::beside(&at("m"), "m").expect("created"));
        let data_part = Part::beside(&data, "m.data").expect("created");
        if let Some(text) = old {
            fs::write(&data, text).expect("written");
        }
        // A folder with something in it cannot be replaced by a file.
        fs::create_dir_all(at("m/full")).expect("created");
        part.finish_after(&at("m"), &data_part, &data)
            .expect_err("refused");
        assert_eq!(fs::read_to_string(&data).ok().as_deref(), old);
        drop((part, data_part));
        assert_eq!(
            fs::read_dir(folder.path()).expect("listed").count(),
            1 + usize::from(old.is_some())
        );
    }
}

#[test]
fn the_same_model_gives_the_same_bytes_and_reads_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
    let model = trial.node("y = Mul(x, w)").output("y", "n 4").model();
    for name in ["a.onnx", "b.onnx"] {
        let written = write(&model, &at(name)).expect("written");
        let length = fs::metadata(at(name)).expect("there").len();
        assert_eq!((written.n_bytes, written.n_external), (length, 0));
    }
    assert_eq!(
        fs::read(at("a.onnx")).expect("read"),
        fs::read(at("b.onnx")).expect("read")
    );
    assert_eq!(
        Model::read(at("a.onnx")).expect("a model").proto,
        model.proto
    );
}
