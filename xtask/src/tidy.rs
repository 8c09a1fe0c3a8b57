//! The tidy checks: house rules that neither rustfmt nor clippy knows.
//!
//! Reads every Rust and Python file of the workspace, changes none.

use crate::layering::parse_toml;
use crate::source::{code_only, has_word};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Lines that a file may have before it must be split by concept.
const MAX_LINES: usize = 600;

/// Names that do not say what a file or folder does.
const EMPTY_NAMES: [&str; 6] = ["util", "utils", "helper", "helpers", "common", "misc"];

/// Rooms that may hold `unsafe` code.
const UNSAFE_ROOMS: [&str; 2] = ["kernels", "torch-bridge"];

/// Marks of unfinished work, spelled in two halves so that this file holds none.
const UNFINISHED_MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Folders that hold no source of this repository, besides those whose names start with a dot.
const SKIPPED_FOLDERS: [&str; 4] = ["target", "out", "__pycache__", "node_modules"];

/// Every breach under `root`, one line each; empty when all is tidy.
pub fn breaches(root: &Path) -> Result<Vec<String>> {
    let mut files = BTreeMap::new();
    collect_sources(root, root, &mut files)?;
    let mut long_files = read_long_files(&root.join("xtask/long-files.toml"))?;
    let mut found = Vec::new();
    for (path, text) in &files {
        found.extend(breaches_of_file(
            path,
            text,
            long_files.remove(path).is_some(),
        ));
    }
    for path in long_files.keys() {
        found.push(format!("xtask/long-files.toml: `{path}` does not exist"));
    }
    Ok(found)
}

/// The breaches of one file. `may_be_long` where xtask/long-files.toml gives a reason for its length.
fn breaches_of_file(path: &str, text: &str, may_be_long: bool) -> Vec<String> {
    let mut found = Vec::new();
    let parts = path
        .split('/')
        .map(|part| part.split_once('.').map_or(part, |(stem, _)| stem));
    for name in parts.filter(|part| EMPTY_NAMES.contains(part)) {
        found.push(format!("{path}: `{name}` does not say what the file does"));
    }
    let n_lines = text.lines().count();
    match (n_lines > MAX_LINES, may_be_long) {
        (true, false) => found.push(format!(
            "{path}: {n_lines} lines, more than {MAX_LINES}: split it by concept, or give the \
             reason in xtask/long-files.toml"
        )),
        (false, true) => found.push(format!(
            "xtask/long-files.toml: `{path}` has {n_lines} lines and needs no exception"
        )),
        _ => {}
    }
    let mut report = |line_idx: usize, what: &str| {
        found.push(format!("{path}:{}: {what}", line_idx + 1));
    };
    for (line_idx, line) in text.lines().enumerate() {
        for mark in UNFINISHED_MARKS.iter().filter(|mark| has_word(line, mark)) {
            report(line_idx, &format!("`{mark}`: finish it, or open an issue"));
        }
    }
    if path.ends_with(".rs") {
        if !text.starts_with("//!") {
            report(0, "the file does not open with `//!` saying what it owns");
        }
        check_rust_code(path, &code_only(text), &mut report);
    } else if !opens_with_docstring(text) {
        report(
            0,
            "the file does not open with a docstring saying what it owns",
        );
    }
    found
}

/// Checks `code`, which is free of comments and literals.
fn check_rust_code(path: &str, code: &str, report: &mut impl FnMut(usize, &str)) {
    let may_be_unsafe = UNSAFE_ROOMS
        .iter()
        .any(|room| path.split('/').next() == Some(*room));
    for (line_idx, line) in code.lines().enumerate() {
        if !may_be_unsafe && has_word(line, "unsafe") {
            report(line_idx, "`unsafe` lives only in kernels and torch-bridge");
        }
        for name in ["todo", "unimplemented", "dbg"] {
            if has_word(line, name) && line.contains(&format!("{name}!")) {
                report(
                    line_idx,
                    &format!("`{name}!` has no place in finished code"),
                );
            }
        }
    }
}

/// A Python file is empty or starts with a docstring, after a `#!` line or comments.
fn opens_with_docstring(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    first.is_none_or(|line| line.trim_start_matches('r').starts_with("\"\"\""))
}

/// Reads the Rust and Python files below `folder` into `files`, by path from `root`.
fn collect_sources(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_symlink() || name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            let is_venv = path.join("pyvenv.cfg").exists();
            if !SKIPPED_FOLDERS.contains(&name.as_str()) && !is_venv {
                collect_sources(root, &path, files)?;
            }
        } else if name.ends_with(".rs") || name.ends_with(".py") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {} as UTF-8", path.display()))?;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            files.insert(relative.to_string_lossy().replace('\\', "/"), text);
        }
    }
    Ok(())
}

/// Path → reason of the files that may be long.
fn read_long_files(list: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for (path, reason) in parse_toml(list)? {
        match reason.as_str() {
            Some(reason) if !reason.trim().is_empty() => files.insert(path, reason.to_owned()),
            _ => bail!("{}: `{path}` gives no reason", list.display()),
        };
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found in a Rust file of `graph` that opens properly and then holds `body`.
    fn found(body: &str) -> Vec<String> {
        breaches_of_file("graph/src/lib.rs", &format!("//! Owns x.\n{body}"), false)
    }

    #[test]
    fn a_tidy_file_is_silent() {
        let body = "// An unsafe word in prose.\nconst S: &str = \"todo!()\";\n";
        assert_eq!(found(body), Vec::<String>::new());
    }

    #[test]
    fn a_file_must_open_with_what_it_owns() {
        let rust = breaches_of_file("graph/src/lib.rs", "use x;\n", false);
        assert_eq!(rust.len(), 1);
        assert!(rust[0].starts_with("graph/src/lib.rs:1: the file does not open with `//!`"));
        assert_eq!(breaches_of_file("bench/a.py", "import x\n", false).len(), 1);
        let python = "#!/usr/bin/env python3\n\"\"\"Owns x.\"\"\"\n";
        assert_eq!(
            breaches_of_file("bench/a.py", python, false),
            Vec::<String>::new()
        );
    }

    #[test]
    fn empty_names_are_reported_for_files_and_folders() {
        for path in [
            "graph/src/utils.rs",
            "graph/src/helpers/mod.rs",
            "bench/common.py",
        ] {
            assert_eq!(breaches_of_file(path, "//! X.\n\"\"\"", false)[0], {
                let name = ["utils", "helpers", "common"]
                    .into_iter()
                    .find(|n| path.contains(n));
                format!(
                    "{path}: `{}` does not say what the file does",
                    name.unwrap_or_default()
                )
            });
        }
        assert!(breaches_of_file("graph/src/commonality.rs", "//! X.\n", false).is_empty());
    }

    #[test]
    fn long_files_need_a_reason_and_short_ones_none() {
        let long = format!("//! X.\n{}", "\n".repeat(MAX_LINES));
        assert!(breaches_of_file("graph/src/a.rs", &long, false)[0].contains("601 lines"));
        assert!(breaches_of_file("graph/src/a.rs", &long, true).is_empty());
        assert!(
            breaches_of_file("graph/src/a.rs", "//! X.\n", true)[0].contains("needs no exception")
        );
    }

    #[test]
    fn unsafe_stays_in_its_rooms() {
        let body = "unsafe fn f() {}\n";
        assert_eq!(
            found(body),
            ["graph/src/lib.rs:2: `unsafe` lives only in kernels and torch-bridge"]
        );
        let text = format!("//! X.\n{body}");
        assert!(breaches_of_file("kernels/src/run.rs", &text, false).is_empty());
        assert!(breaches_of_file("torch-bridge/src/lib.rs", &text, false).is_empty());
    }

    #[test]
    fn unfinished_work_is_reported() {
        for body in [
            "fn f() { todo!() }",
            "fn f() { unimplemented!(\"x\") }",
            "dbg!(x);",
        ] {
            assert_eq!(found(body).len(), 1, "{body}");
        }
        for mark in UNFINISHED_MARKS {
            assert_eq!(found(&format!("// {mark}: later")).len(), 1, "{mark}");
        }
    }
}
