//! A part of the standard's cases through everything: what `docs/src/onnx-coverage.md` does not name works.
//!
//! `cargo xtask onnx-coverage` writes that page from all cases; `cargo xtask test` writes the cases and names their
//! folder in `SHORTHAUL_NODE_CASES`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tests::onnx_coverage::look_at;

/// The test reads one case in `EVERY`, and compiles one in `EVERY_COMPILED` to C.
const EVERY: usize = 11;
const EVERY_COMPILED: usize = 99;

/// Cases that the page names.
fn named() -> BTreeSet<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/onnx-coverage.md");
    let text = std::fs::read_to_string(page).expect("the page");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| test_"));
    let name = |row: &str| row.split(' ').next().map(|name| format!("test_{name}"));
    rows.filter_map(name).collect()
}

#[test]
#[ignore = "needs the standard's node cases in SHORTHAUL_NODE_CASES"]
fn cases_that_the_page_does_not_name_work() {
    let folder = std::env::var_os("SHORTHAUL_NODE_CASES");
    let folder = folder.expect("SHORTHAUL_NODE_CASES names the folder of the node cases");
    let cases = std::fs::read_dir(folder).expect("the folder of the node cases");
    let mut cases: Vec<PathBuf> = cases.flatten().map(|case| case.path()).collect();
    cases.sort();
    assert!(cases.len() > 1000, "only {} cases", cases.len());
    let named = named();
    let mut wrong = Vec::new();
    for (n, case) in cases.iter().enumerate().step_by(EVERY) {
        let Some(found) = look_at(case, n % EVERY_COMPILED == 0) else {
            continue;
        };
        if !found.has_our_types || named.contains(&found.case) {
            continue;
        }
        let steps = [
            Some(found.evaluated),
            Some(found.rewritten),
            Some(found.imported),
            Some(found.interpreted),
            found.compiled,
            found.differentiated,
        ];
        let failed = steps.into_iter().flatten().filter_map(Result::err);
        wrong.extend(failed.map(|why| format!("{}: {why}", found.case)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
