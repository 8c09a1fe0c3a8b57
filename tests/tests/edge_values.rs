//! Infinities, ties, overflow, empty dimensions, negative axes: files evaluated here and compiled kernels give what
//! ONNX Runtime gives. The cases are those of `importer/tests/data/edges.py`; `importer/tests/operators.rs`
//! interprets them.

use bytes::Bytes;
use onnx::proto::{GraphProto, ModelProto, OperatorSetIdProto, TensorProto};
use prost::Message;
use std::collections::BTreeMap;
use tests::onnx_coverage::{Case, compiled, evaluated};
use tests::stored_cases::{StoredCase, stored_cases};

fn cases() -> Vec<(String, Case)> {
    read_cases(include_bytes!("../../importer/tests/data/edges.cases"))
}

fn read_cases(stored: &'static [u8]) -> Vec<(String, Case)> {
    let stored = stored_cases(stored).expect("well-formed cases");
    let tensors = |of: &[Bytes]| -> Vec<TensorProto> {
        let decoded = of.iter().cloned().map(TensorProto::decode);
        decoded.map(|t| t.expect("a tensor")).collect()
    };
    let read = |case: &StoredCase| Case {
        model: ModelProto::decode(case.model.clone()).expect("a model"),
        inputs: tensors(&case.input),
        outputs: tensors(&case.output),
    };
    stored.iter().map(|c| (c.name.clone(), read(c))).collect()
}

#[test]
fn evaluated_files_give_what_onnx_runtime_gives() {
    let (mut wrong, mut n_kept) = (Vec::new(), 0);
    for (name, case) in cases() {
        // Operators without a meaning there are kept, as docs/src/onnx-coverage.md lists them.
        let is_kept = |what: &String| {
            what.contains("does not know the operator") || what.contains("is not known")
        };
        match evaluated(&case) {
            Err(what) if is_kept(&what) => n_kept += 1,
            Err(what) => wrong.push(format!("{name}: {what}")),
            Ok(()) => {}
        }
    }
    assert!(
        n_kept < 60,
        "{n_kept} cases have operators without a meaning"
    );
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Attention with grouped heads and weights of four bits, as in language models for ONNX Runtime. The cases are those of
/// `importer/tests/data/runtime.py`.
#[test]
fn evaluated_decoders_give_what_onnx_runtime_gives() {
    let cases = read_cases(include_bytes!("../../importer/tests/data/decoders.cases"));
    let failed = cases.iter().filter_map(|(name, case)| {
        let what = evaluated(case).err()?;
        Some(format!("{name}: {what}"))
    });
    let failed: Vec<String> = failed.collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The versions of the operator sets that a model imports, with their domains.
type Versions = Vec<(String, i64)>;

#[test]
fn kernels_give_what_onnx_runtime_gives() {
    // All cases of one version become one model, so that one program is compiled.
    let mut groups: BTreeMap<Versions, Vec<(String, Case)>> = BTreeMap::new();
    for (name, case) in cases() {
        if case.imported().is_err() {
            continue;
        }
        let sets = case.model.opset_import.iter();
        let sets = sets.map(|set| (set.domain.clone(), set.version)).collect();
        groups.entry(sets).or_default().push((name, case));
    }
    let mut wrong = Vec::new();
    for (sets, cases) in &groups {
        if let Err(what) = compiled(&together(sets, cases)) {
            // Finds out which cases are wrong.
            let each = cases.iter().map(|(name, case)| (name, compiled(case)));
            let failed = each.filter_map(|(name, done)| Some(format!("{name}: {}", done.err()?)));
            let failed: Vec<String> = failed.collect();
            match failed.is_empty() {
                true => wrong.push(format!("only together: {what}")),
                false => wrong.extend(failed),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// One model of several, side by side.
fn together(sets: &[(String, i64)], cases: &[(String, Case)]) -> Case {
    let mut graph = GraphProto {
        name: "cases".to_string(),
        ..Default::default()
    };
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (n, (_, case)) in cases.iter().enumerate() {
        let mut own = case.model.graph.clone().expect("a graph");
        let rename = |name: &mut String| {
            if !name.is_empty() {
                *name = format!("case{n}_{name}");
            }
        };
        own.input.iter_mut().for_each(|port| rename(&mut port.name));
        own.output
            .iter_mut()
            .for_each(|port| rename(&mut port.name));
        own.initializer
            .iter_mut()
            .for_each(|tensor| rename(&mut tensor.name));
        for node in &mut own.node {
            rename(&mut node.name);
            node.input
                .iter_mut()
                .chain(&mut node.output)
                .for_each(rename);
        }
        graph.input.append(&mut own.input);
        graph.output.append(&mut own.output);
        graph.initializer.append(&mut own.initializer);
        graph.node.append(&mut own.node);
        inputs.extend(case.inputs.iter().cloned());
        outputs.extend(case.outputs.iter().cloned());
    }
    let opset_import = sets.iter().map(|(domain, version)| OperatorSetIdProto {
        domain: domain.clone(),
        version: *version,
    });
    Case {
        model: ModelProto {
            ir_version: Some(10),
            opset_import: opset_import.collect(),
            graph: Some(graph),
            ..Default::default()
        },
        inputs,
        outputs,
    }
}
