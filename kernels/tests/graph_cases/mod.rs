//! Graphs of maps in text form that tests read from folders: one by one, or joined into one program
//! because compiling dominates.

use graph::Graph;
use std::fs;
use std::path::{Path, PathBuf};

/// The `.graph` files of a folder of the tests and their texts, in order of their names; only those
/// whose names contain `wanted`.
pub fn files(folder: &str, wanted: &str) -> Vec<(PathBuf, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(folder);
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "graph"))
        .filter(|p| stem(p).contains(wanted))
        .collect();
    paths.sort();
    let read = |p: PathBuf| {
        let text = fs::read_to_string(&p).unwrap();
        (p, text)
    };
    paths.into_iter().map(read).collect()
}

/// The file's name without its ending.
pub fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

/// All files as one graph; every container is named after its case, as `case_container`. `single`
/// takes the place of `f32` for containers outside of kernels.
pub fn joined(files: &[(PathBuf, String)], single: &str) -> Graph {
    let (mut containers, mut nodes) = (String::new(), String::new());
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (path, text) in files {
        let name = stem(path);
        for line in text.replace('%', &format!("%{name}_")).lines().skip(1) {
            let list = |rest: &str| rest.split(", ").map(str::to_string).collect::<Vec<_>>();
            if let Some(rest) = line.strip_prefix("  inputs ") {
                inputs.extend(list(rest));
            } else if let Some(rest) = line.strip_prefix("  outputs ") {
                outputs.extend(list(rest));
            } else if line.starts_with("  %") && line.ends_with(" local") {
                containers += &format!("{line}\n");
            } else if line.starts_with("  %") {
                containers += &format!("{}\n", line.replace(": f32[", &format!(": {single}[")));
            } else if line.starts_with("    ") {
                nodes += &format!("{line}\n");
            }
        }
    }
    let (inputs, outputs) = (inputs.join(", "), outputs.join(", "));
    let text = format!(
        "graph \"cases\" {{\n{containers}  inputs {inputs}\n  state {{\n{nodes}  }}\n  outputs {outputs}\n}}\n"
    );
    graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}
