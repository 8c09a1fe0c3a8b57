//! Files that are links into a store, as downloads often are: the model and its external data each lead
//! to a file of another name in one folder.
//!
//! Owns where external data is looked for. What a link may lead to stays narrow: the folder in which
//! the model itself really is, which whoever gave the model has chosen.

use super::folder_of;
use super::stored_tensors::{change_each, each};
use crate::proto::{ModelProto, TensorProto};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Component, Path, PathBuf};

/// The folder of a model's external data. If the model is a link, and every file of its data is one
/// that leads to where the model really is, locations in `model` become those there.
pub fn settle(path: &Path, model: &mut ModelProto) -> PathBuf {
    let folder = folder_of(path);
    let Some((store, places)) = stored_elsewhere(path, folder, model) else {
        return folder.to_path_buf();
    };
    let changed: Result<(), Infallible> = change_each(model, &mut |tensor| {
        for entry in tensor
            .external_data
            .iter_mut()
            .filter(|e| e.key == "location")
        {
            if let Some(place) = places.get(&entry.value) {
                entry.value.clone_from(place);
            }
        }
        Ok(())
    });
    match changed {
        Ok(()) => store,
    }
}

/// The folder in which the model really is, and each location's path there.
fn stored_elsewhere(
    path: &Path,
    folder: &Path,
    model: &ModelProto,
) -> Option<(PathBuf, BTreeMap<String, String>)> {
    if !path.is_symlink() {
        return None;
    }
    let store = folder_of(&path.canonicalize().ok()?).to_path_buf();
    let mut places = BTreeMap::new();
    let mut all = true;
    each(model, &mut |tensor: &TensorProto| {
        let own = tensor
            .external_data
            .iter()
            .filter(|_| tensor.data_location == 1);
        for entry in own.filter(|e| e.key == "location") {
            let plain = |c: Component| matches!(c, Component::Normal(_) | Component::CurDir);
            let is_below = Path::new(&entry.value).components().all(plain);
            let real = folder.join(&entry.value).canonicalize().ok();
            let place = real.filter(|_| is_below).and_then(|real| {
                let there = real.strip_prefix(&store).ok()?;
                there.to_str().map(str::to_string)
            });
            match place {
                Some(place) => _ = places.insert(entry.value.clone(), place),
                None => all = false,
            }
        }
    });
    (all && !places.is_empty()).then_some((store, places))
}

#[cfg(all(test, unix))]
mod tests {
    use super::super::Model;
    use crate::proto::{GraphProto, StringStringEntryProto};
    use crate::stored::decode;
    use crate::tensor::{Tensor, Values};
    use prost::Message;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A store with a model and its weight in two files, and a folder with links to both.
    fn store(folder: &Path) {
        let values = Tensor::new(&[2], Values::F32(vec![1.0, 2.0]));
        let mut weight = values.to_proto("w");
        let bytes = weight.raw_data.take().expect("stored as bytes");
        weight.data_location = 1;
        weight.external_data = vec![StringStringEntryProto {
            key: "location".to_string(),
            value: "model.onnx.data".to_string(),
        }];
        let model = crate::proto::ModelProto {
            ir_version: Some(10),
            graph: Some(GraphProto {
                initializer: vec![weight],
                ..GraphProto::default()
            }),
            ..crate::proto::ModelProto::default()
        };
        for name in ["blobs", "snapshot", "elsewhere"] {
            fs::create_dir(folder.join(name)).expect("made");
        }
        fs::write(folder.join("blobs/1a"), model.encode_to_vec()).expect("written");
        fs::write(folder.join("blobs/2b"), &bytes).expect("written");
        fs::write(folder.join("elsewhere/2b"), &bytes).expect("written");
        symlink("../blobs/1a", folder.join("snapshot/model.onnx")).expect("linked");
    }

    fn weight(path: &Path) -> Result<Tensor, String> {
        let model = Model::read(path).expect("a model");
        let graph = model.proto.graph.expect("a graph");
        decode(&graph.initializer[0], &model.folder)
    }

    #[test]
    fn links_into_the_store_of_the_model_are_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        store(folder.path());
        let model = folder.path().join("snapshot/model.onnx");
        symlink(
            "../blobs/2b",
            folder.path().join("snapshot/model.onnx.data"),
        )
        .expect("linked");
        let found = weight(&model).expect("read");
        assert_eq!(found.to_f64(), Some(vec![1.0, 2.0]));
    }

    #[test]
    fn links_to_anywhere_else_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        store(folder.path());
        let model = folder.path().join("snapshot/model.onnx");
        let data = folder.path().join("snapshot/model.onnx.data");
        symlink("../elsewhere/2b", &data).expect("linked");
        let error = weight(&model).expect_err("refused");
        assert!(error.contains("leaves the model's folder"), "{error}");
        // A model that is no link says nothing of where its data may be.
        fs::copy(
            folder.path().join("blobs/1a"),
            folder.path().join("own.onnx"),
        )
        .expect("copied");
        symlink("blobs/2b", folder.path().join("model.onnx.data")).expect("linked");
        fs::remove_file(&data).expect("removed");
        symlink("../blobs/2b", &data).expect("linked");
        fs::copy(
            folder.path().join("blobs/1a"),
            folder.path().join("snapshot/own.onnx"),
        )
        .expect("copied");
        assert!(weight(&folder.path().join("snapshot/own.onnx")).is_err());
        assert!(weight(&folder.path().join("own.onnx")).is_ok());
    }
}
