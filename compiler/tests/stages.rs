//! The guide's page about the stages, and its pictures, are what the example `stages` writes today.
//!
//! `SHORTHAUL_UPDATE=1` (or `cargo xtask snapshots`) writes them anew.

#[allow(dead_code)]
#[path = "../examples/stages/main.rs"]
mod stages;

use std::path::Path;

#[test]
fn the_guide_shows_what_the_stages_make() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src");
    let model = stages::Model::block().expect("the block builds");
    let files = stages::files(&model).expect("the block compiles");
    assert_eq!(files.len(), 6, "a page and five pictures");
    for (name, found) in files {
        let path = folder.join(name);
        if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
            std::fs::write(&path, &found).expect("the file can be written");
            continue;
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == expected,
            "docs/src/{name} has changed; if that is meant, run again with SHORTHAUL_UPDATE=1"
        );
    }
}

#[test]
fn the_stages_of_an_onnx_file_can_be_drawn() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/tests/data/mlp.onnx");
    let model = stages::Model::read(&file, &["batch=32".to_owned()]).expect("the file is read");
    let files = stages::files(&model).expect("it compiles");
    assert_eq!(files.len(), 6, "a page and five pictures");
    let (name, page) = &files[0];
    assert!(
        name.ends_with(".md") && page.contains("an ONNX file"),
        "{name}"
    );
    assert!(page.contains("[32, 4]"), "{page}");
}
