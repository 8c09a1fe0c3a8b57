//! Rewrites and verifies files without the rest of Shorthaul, for quick trials of a rule:
//! `cargo run --release -p shorthaul-onnx --example optimize -- IN.onnx [OUT.onnx [TARGET]]`.

use onnx::file::{self, Model};
use onnx::{rewrite, verify};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = args.first() else {
        eprintln!("give a file");
        return ExitCode::from(2);
    };
    let target = args.get(2).map_or("standard", String::as_str);
    match run(Path::new(path), args.get(1).map(Path::new), target) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &Path, out: Option<&Path>, target: &str) -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::read(path)?;
    let start = Instant::now();
    let mut stage = |what: &str| eprintln!("{:7.2} s  {what}", start.elapsed().as_secs_f64());
    let proof = verify::prove(
        &model,
        &rewrite::Options {
            target: target.parse()?,
            ..rewrite::Options::default()
        },
        &verify::Options::default(),
        &mut stage,
    )?;
    let mut fired: BTreeMap<&str, usize> = BTreeMap::new();
    for application in &proof.rewritten.applied {
        *fired.entry(application.rule).or_default() += 1;
    }
    println!("{fired:?}");
    for dropped in &proof.dropped {
        let application = &dropped.application;
        println!(
            "dropped {} at {}: {}",
            application.rule, application.origin, dropped.difference
        );
    }
    for cut in &proof.evidence.cuts {
        println!("cut at {cut}");
    }
    let n = |proto: &onnx::proto::ModelProto| proto.graph.as_ref().map_or(0, |g| g.node.len());
    println!(
        "nodes {} -> {}, {:?}, worst errors (before, after) {:?}, {:.2} s",
        n(&model.proto),
        n(&proof.rewritten.model),
        proof.evidence.runs,
        proof.evidence.worst(),
        start.elapsed().as_secs_f64()
    );
    if let Some(out) = out {
        println!(
            "{:?}",
            file::write(&model.with(proof.rewritten.model), out)?
        );
    }
    Ok(())
}
