//! `shorthaul optimize`: a better file that was shown to give what the original gives.

use anyhow::{Context, Result, bail};
use onnx::file::{self, Model};
use onnx::proto::{GraphProto, ModelProto};
use onnx::{rewrite, verify};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// What to do besides.
pub struct Optimize {
    /// How to rewrite.
    pub rewriting: rewrite::Options,
    /// How to verify; `None`: not at all.
    pub verifying: Option<verify::Options>,
}

/// Rewrites, verifies, writes; gives the summary.
///
/// # Errors
/// The file cannot be read, verified or written; the target then is as it was.
pub fn run(path: &Path, out: &Path, optimize: &Optimize) -> Result<String> {
    let model = Model::read(path)?;
    let (rewritten, proof) = match &optimize.verifying {
        Some(verifying) => {
            let proof = verify::prove(&model, &optimize.rewriting, verifying, &mut |_| {})
                .with_context(|| format!("{} is not optimized", path.display()))?;
            (proof.rewritten.clone(), Some(proof))
        }
        None => (
            rewrite::rewrite(&model.proto, &model.folder, &optimize.rewriting),
            None,
        ),
    };
    let undefined = rewritten
        .model
        .graph
        .as_ref()
        .map(rewrite::undefined)
        .unwrap_or_default();
    if !undefined.is_empty() {
        bail!(
            "internal error: nothing computes {}; report this file",
            undefined.join(", ")
        );
    }
    let written = file::write(&model.with(rewritten.model.clone()), out)?;
    let mut text = String::new();
    let mut fired: BTreeMap<&str, usize> = BTreeMap::new();
    for application in &rewritten.applied {
        *fired.entry(application.rule).or_default() += 1;
    }
    for (rule, n) in fired {
        writeln!(text, "{rule:>24}  {n}")?;
    }
    if let Some(proof) = &proof {
        for dropped in &proof.dropped {
            writeln!(
                text,
                "dropped {} at {}: {}",
                dropped.application.rule, dropped.application.origin, dropped.difference
            )?;
        }
        let (before, after) = proof.evidence.worst().unwrap_or_default();
        writeln!(
            text,
            "verified in {} runs: worst error {after:.1e}, before {before:.1e}",
            proof.evidence.runs.len()
        )?;
    }
    writeln!(
        text,
        "nodes {} → {}, file {} → {}",
        n_nodes(&model.proto),
        n_nodes(&rewritten.model),
        crate::units::bytes(model.n_bytes as i64),
        crate::units::bytes(written.n_bytes as i64),
    )?;
    Ok(text)
}

/// Nodes of a model, in bodies and functions too.
pub fn n_nodes(model: &ModelProto) -> usize {
    fn body(graph: &GraphProto) -> usize {
        let inner = graph
            .node
            .iter()
            .flat_map(onnx::attributes::bodies)
            .map(body);
        graph.node.len() + inner.sum::<usize>()
    }
    let functions = model.functions.iter().map(|f| f.node.len());
    model.graph.as_ref().map_or(0, body) + functions.sum::<usize>()
}
