//! The guide's page about the stages is what the example `stages` prints today.
//!
//! `SHORTHAUL_UPDATE=1` (or `cargo xtask snapshots`) writes the page anew.

#[allow(dead_code)]
#[path = "../examples/stages.rs"]
mod stages;

use std::path::Path;

#[test]
fn the_guide_shows_what_the_stages_make() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let model = root.join("cli/tests/data/mlp.onnx");
    let found = stages::page(&model, &["batch=32".to_string()]).expect("the model compiles");
    let page = root.join("docs/src/stages.md");
    if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
        std::fs::write(&page, &found).expect("the page can be written");
        return;
    }
    let expected = std::fs::read_to_string(&page).expect("docs/src/stages.md");
    assert_eq!(
        found, expected,
        "docs/src/stages.md has changed; if that is meant, run again with SHORTHAUL_UPDATE=1"
    );
}
