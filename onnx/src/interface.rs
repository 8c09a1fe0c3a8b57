//! What the users of a file rely on besides its numbers: inputs, outputs, versions, texts.
//!
//! Owns the comparison of two models in these; nodes and initializers are nobody's interface.

use crate::proto::{GraphProto, ModelProto, ValueInfoProto};
use crate::rewrite::TARGET_KEY;
use std::collections::BTreeSet;

/// The first part of the interface in which a rewritten model differs from the original, if any: its
/// outputs, the inputs a caller has to or may give, versions of its operators, texts and metadata.
/// The stamp of a target is an addition that was asked for.
pub fn changed(before: &ModelProto, after: &ModelProto) -> Option<String> {
    let empty = GraphProto::default();
    let (a, b) = (
        before.graph.as_ref().unwrap_or(&empty),
        after.graph.as_ref().unwrap_or(&empty),
    );
    let parts: [(&str, bool); 8] = [
        ("the list of outputs", a.output == b.output),
        ("the list of inputs", inputs(before) == inputs(after)),
        ("the name of the graph", a.name == b.name),
        ("a doc string", {
            before.doc_string == after.doc_string && a.doc_string == b.doc_string
        }),
        (
            "the version of the file",
            before.ir_version == after.ir_version,
        ),
        ("the version of an operator set", versions(before, after)),
        ("the metadata", metadata(before) == metadata(after)),
        ("the producer", {
            before.producer_name == after.producer_name
                && before.producer_version == after.producer_version
                && before.domain == after.domain
                && before.model_version == after.model_version
        }),
    ];
    let part = parts.iter().find(|(_, same)| !same)?;
    Some(part.0.to_string())
}

/// The inputs, without those of files before version 4 that only declare an initializer.
fn inputs(model: &ModelProto) -> Vec<&ValueInfoProto> {
    let graph = model.graph.iter();
    let stored: BTreeSet<&str> = graph
        .clone()
        .flat_map(|g| &g.initializer)
        .map(|t| t.name.as_str())
        .collect();
    let declares = model.ir_version.unwrap_or(0) < 4;
    graph
        .flat_map(|g| &g.input)
        .filter(|input| !(declares && stored.contains(input.name.as_str())))
        .collect()
}

/// Whether every operator set of the original keeps its version; a target may add a new set.
fn versions(before: &ModelProto, after: &ModelProto) -> bool {
    let of = |model: &ModelProto, domain: &str| {
        let mut sets = model.opset_import.iter();
        sets.find(|o| o.domain == domain).map(|o| o.version)
    };
    let mut sets = before.opset_import.iter();
    sets.all(|set| of(after, &set.domain).is_none_or(|version| version == set.version))
}

fn metadata(model: &ModelProto) -> Vec<(&str, &str)> {
    let entries = model.metadata_props.iter();
    entries
        .filter(|entry| entry.key != TARGET_KEY)
        .map(|entry| (entry.key.as_str(), entry.value.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::trial::Trial;

    #[test]
    fn each_part_is_compared() {
        let model = || {
            let trial = Trial::new(17).input("x", "n 4").node("y = Exp(x)");
            trial.output("y", "n 4").model().proto
        };
        let with = |change: &dyn Fn(&mut ModelProto)| {
            let mut other = model();
            change(&mut other);
            changed(&model(), &other).unwrap_or_default()
        };
        let in_graph =
            |change: &dyn Fn(&mut GraphProto)| with(&|m| change(m.graph.get_or_insert_default()));
        assert_eq!(with(&|_| ()), "");
        assert_eq!(in_graph(&|g| g.node.clear()), "");
        assert_eq!(
            in_graph(&|g| g.output[0].name = "z".into()),
            "the list of outputs"
        );
        assert_eq!(
            in_graph(&|g| g.output[0].r#type = None),
            "the list of outputs"
        );
        assert_eq!(in_graph(&|g| g.input.clear()), "the list of inputs");
        assert_eq!(
            with(&|m| m.opset_import[0].version = 18),
            "the version of an operator set"
        );
        assert_eq!(with(&|m| m.doc_string = "new".into()), "a doc string");
        assert_eq!(with(&|m| m.producer_name = "me".into()), "the producer");
        assert_eq!(with(&|m| m.ir_version = Some(3)), "the version of the file");
    }
}
