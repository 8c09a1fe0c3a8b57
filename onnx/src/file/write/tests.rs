//! What is written, what is refused, and that nothing is lost.

use super::*;
use crate::rewrite::trial::{Trial, reals};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

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
    // The state after `mv model.onnx old.onnx`.
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
fn data_that_is_no_longer_needed_is_not_replaced_either() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mut folded = external(folder.path(), "model.onnx", "weights");
    let graph = folded.proto.graph.get_or_insert_default();
    graph.initializer[0] = reals(&[4]).to_proto("w");
    let error = write(&folded, &at("weights")).expect_err("refused");
    assert!(error.to_string().contains("would be replaced"), "{error}");
    assert_eq!(fs::read(at("weights")).expect("read").len(), 16);
}

#[test]
fn bytes_never_replace_what_they_were_made_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let model = external(folder.path(), "model.onnx", "weights");
    symlink(at("weights"), at("link")).expect("linked");
    for name in ["model.onnx", "weights", "link"] {
        let before = fs::read(at(name)).expect("read");
        let error = stage_bytes(b"bytes", &at(name), &model.files()).expect_err("refused");
        assert!(error.to_string().contains("would be replaced"), "{error}");
        assert_eq!(fs::read(at(name)).expect("read"), before);
    }
    let staged = stage_bytes(b"bytes", &at("new"), &model.files());
    staged.and_then(Staged::place).expect("written");
    assert_eq!(fs::read(at("new")).expect("read"), b"bytes");
}

#[test]
fn a_staged_model_can_be_read_and_goes_if_it_is_not_placed() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let model = external(folder.path(), "model.onnx", "model.onnx.data");
    for target in ["model.onnx", "new.onnx"] {
        let staged = stage(&model, &at(target)).expect("staged");
        assert_eq!(weight(&staged.path()), weight(&at("model.onnx")));
        drop(staged);
        assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2);
    }
}

#[test]
fn permissions_and_owner_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mode = |name: &str| fs::metadata(at(name)).expect("there").mode() & 0o777;
    let model = external(folder.path(), "model.onnx", "weights");
    fs::write(at("new.onnx"), "old").expect("written");
    fs::set_permissions(at("new.onnx"), fs::Permissions::from_mode(0o600)).expect("set");
    // Only the superuser can give a file away.
    let given = std::os::unix::fs::chown(at("new.onnx"), Some(12345), Some(12345)).is_ok();
    write(&model, &at("new.onnx")).expect("written");
    assert_eq!((mode("new.onnx"), mode("new.onnx.data")), (0o600, 0o600));
    if given {
        assert_eq!(fs::metadata(at("new.onnx")).expect("there").uid(), 12345);
    }
    fs::set_permissions(at("new.onnx.data"), fs::Permissions::from_mode(0o640)).expect("set");
    write(&model, &at("new.onnx")).expect("written");
    assert_eq!((mode("new.onnx"), mode("new.onnx.data")), (0o600, 0o640));
    // A new file gets the permissions of any new file.
    fs::write(at("any"), "").expect("written");
    write(&model, &at("fresh.onnx")).expect("written");
    assert_eq!(
        (mode("fresh.onnx"), mode("fresh.onnx.data")),
        (mode("any"), mode("any"))
    );
}

#[test]
fn links_stay_and_what_they_lead_to_is_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("in")).expect("created");
    symlink("in/real.onnx", at("link.onnx")).expect("linked");
    symlink("link.onnx", at("link2.onnx")).expect("linked");
    let trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
    let model = trial.node("y = Mul(x, w)").output("y", "n 4").model();
    // The first write creates the file that the links lead to.
    for name in ["link2.onnx", "link.onnx"] {
        write(&model, &at(name)).expect("written");
        assert!(at("link.onnx").is_symlink() && at("link2.onnx").is_symlink());
        assert_eq!(
            Model::read(at("in/real.onnx")).expect("a model").proto,
            model.proto
        );
        assert_eq!(fs::read_dir(at("in")).expect("listed").count(), 1);
        fs::write(at("in/real.onnx"), "old").expect("written");
    }
    // Beside which of the two would external data be looked for?
    let outside = external(folder.path(), "model.onnx", "weights");
    let error = write(&outside, &at("link.onnx")).expect_err("refused");
    assert!(
        error.to_string().contains("a target that is no link"),
        "{error}"
    );
    symlink("model.onnx", at("near.onnx")).expect("linked");
    write(&outside, &at("near.onnx")).expect("written");
    assert_eq!(weight(&at("near.onnx")), weight(&at("model.onnx")));
    symlink("weights", at("new.onnx.data")).expect("linked");
    let error = write(&outside, &at("new.onnx")).expect_err("refused");
    assert!(error.to_string().contains("no regular file"), "{error}");
}

#[test]
fn pipes_and_devices_are_written_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[4]));
    let model = trial.node("y = Mul(x, w)").output("y", "n 4").model();
    let made = std::process::Command::new("mkfifo")
        .arg(at("pipe"))
        .status();
    assert!(made.expect("mkfifo starts").success());
    let pipe = at("pipe");
    let reader = std::thread::spawn(move || fs::read(pipe).expect("read"));
    write(&model, &at("pipe")).expect("written");
    assert_eq!(
        reader.join().expect("bytes"),
        encoded(&model).expect("bytes")
    );
    assert!(
        fs::metadata(at("pipe"))
            .expect("there")
            .file_type()
            .is_fifo()
    );
    let null = Path::new("/dev/null");
    write(&model, null).expect("written");
    assert!(
        fs::metadata(null)
            .expect("there")
            .file_type()
            .is_char_device()
    );
    let outside = external(folder.path(), "model.onnx", "weights");
    let error = write(&outside, null).expect_err("refused");
    assert!(
        error.to_string().contains("needs to be a file as well"),
        "{error}"
    );
}

#[test]
fn small_tensors_are_not_padded_and_large_ones_where_they_were() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mut model = external(folder.path(), "model.onnx", "weights");
    let entry = |key: &str, value: usize| StringStringEntryProto {
        key: key.to_string(),
        value: value.to_string(),
    };
    let large = 1 << 20;
    // Small, large and aligned, small, large and not aligned.
    let ranges = [
        (0, 16),
        (4096, large),
        (4096 + large, 16),
        (4112 + large, large),
    ];
    fs::write(at("weights"), vec![1; 4112 + 2 * large]).expect("written");
    let graph = model.proto.graph.get_or_insert_default();
    let first = graph.initializer.remove(0);
    for (n, (offset, length)) in ranges.into_iter().enumerate() {
        let mut tensor = first.clone();
        (tensor.name, tensor.dims) = (format!("w{n}"), vec![length as i64 / 4]);
        tensor
            .external_data
            .extend([entry("offset", offset), entry("length", length)]);
        graph.initializer.push(tensor);
    }
    model.stamps = crate::file::Stamps::new(&model.proto, &model.folder);
    let written = write(&model, &at("new.onnx")).expect("written");
    assert_eq!(written.n_external, 4112 + 2 * large as u64);
    let tight = model.proto.graph.get_or_insert_default();
    tight.initializer.remove(1);
    let written = write(&model, &at("new.onnx")).expect("written");
    assert_eq!(written.n_external, 32 + large as u64);
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
