//! Small graphs for tests, from text.

use graph::{Graph, parse};

/// A graph with those containers, nodes of one state and results; inputs are listed as declared.
///
/// # Panics
/// If the text is no graph, or the graph is wrong: a mistake of the test.
pub fn text_graph(containers: &str, nodes: &str, outputs: &str) -> Graph {
    let given: Vec<&str> = containers
        .lines()
        .filter(|l| l.ends_with(" input"))
        .filter_map(|l| l.trim().split(':').next())
        .collect();
    let inputs = match given.as_slice() {
        [] => String::new(),
        some => format!("inputs {}", some.join(", ")),
    };
    let text = format!(
        "graph \"g\" {{\n{containers}\n{inputs}\nstate {{\n{nodes}\n}}\noutputs {outputs}\n}}"
    );
    let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    graph
}
