//! Small graphs for tests, from text, and their results.

use graph::{Bindings, Graph, Precision, SymExpr, Tensor, interpret, parse};

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

/// The results of a graph whose inputs are the same numbers between 0 and 1 in every call.
///
/// # Panics
/// If a size is no number, or the graph cannot be interpreted: a mistake of the test.
pub fn results(graph: &Graph) -> Vec<Tensor> {
    let given = graph.inputs.iter().enumerate().map(|(n, id)| {
        let container = graph.container(*id);
        let size = |s: &SymExpr| s.as_const().and_then(|s| usize::try_from(s).ok());
        let shape: Option<Vec<usize>> = container.shape.iter().map(size).collect();
        let shape = shape.unwrap_or_else(|| panic!("a size of `{}` is open", container.name));
        let data = 0..shape.iter().product::<usize>() as u64;
        let data = data.map(|i| f64::from(graph::philox::uniform(n as u64, i)));
        Tensor::from_f64(container.dtype, &shape, data.collect())
    });
    let given: Vec<Tensor> = given.collect();
    let none = Bindings::new();
    let all = interpret(graph, &given, &none, &ops::Meaning, Precision::Double);
    all.unwrap_or_else(|e| panic!("{e}\n{graph}"))
}
