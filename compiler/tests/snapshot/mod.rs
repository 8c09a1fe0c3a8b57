//! What snapshots of planned networks share: the planned training step, and the comparison with a committed file.

use compiler::{Plan, Step, Target};
use graph::{Bindings, Graph, Lifetime};
use std::path::Path;

/// The training step of a network. All parameters are trained, as in `module.train()`; running statistics are none.
pub fn training_plan(graph: &Graph, target: Target) -> Plan {
    let is_trained = |position: &usize| {
        let c = graph.container(graph.inputs[*position]);
        c.lifetime == Lifetime::Parameter && c.dtype.is_float() && !c.name.contains("running")
    };
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    step.plan_for(&Bindings::new(), target).expect("plans")
}

/// Compares a text with a file in `compiler/tests`; with `SHORTHAUL_UPDATE`, writes the file instead.
pub fn compare(file: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(file);
    if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
        std::fs::write(&path, found).expect("the snapshot can be written");
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{file} has changed; if that is meant, run again with SHORTHAUL_UPDATE=1\n\
         --- committed\n{expected}\n--- found\n{found}"
    );
}
