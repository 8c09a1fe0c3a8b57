//! What a program does, in numbers, as JSON and as text.

use compiler::Executable;
use compiler::graph::Stage;
use serde_json::json;
use std::fmt::Write;

/// The report as JSON.
pub fn json(executable: &Executable) -> String {
    let kernels: Vec<_> = executable
        .kernels
        .iter()
        .map(|k| {
            json!({
                "name": k.name,
                "origin": k.origin,
                "stage": stage(k.stage),
                "path": k.path,
                "flops": k.flops,
                "launches": k.n_launches,
            })
        })
        .collect();
    let forward = executable.forward.parts();
    let backward = executable.backward.parts();
    json!({
        "kernels": kernels,
        "launches": forward.launches.len() + backward.launches.len(),
        "saved_bytes": forward.saved_bytes,
        "forward_arena_bytes": forward.arena_bytes,
        "backward_arena_bytes": backward.arena_bytes,
    })
    .to_string()
}

/// The report as text, one line for each kernel.
pub fn text(executable: &Executable) -> String {
    let mut out = String::new();
    for k in &executable.kernels {
        let _ = writeln!(
            out,
            "{:<8} {:<12} {:>10.3} GFLOP  {}",
            stage(k.stage),
            k.path,
            k.flops as f64 / 1e9,
            k.origin
        );
    }
    let (forward, backward) = (executable.forward.parts(), executable.backward.parts());
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    let _ = writeln!(
        out,
        "{} kernels; saved {:.1} MiB, arenas {:.1} MiB forward, {:.1} MiB backward",
        executable.kernels.len(),
        mib(forward.saved_bytes),
        mib(forward.arena_bytes),
        mib(backward.arena_bytes)
    );
    out
}

fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Forward => "forward",
        Stage::Backward => "backward",
        Stage::Optimizer => "optimizer",
    }
}
