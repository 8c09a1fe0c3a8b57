//! What the pictures of the stages show of a graph: boxes for its nodes, arrows for its containers.
//!
//! Owns the choice of words in boxes; `drawing` draws them.

use super::drawing::{Bar, Diagram, Drawn, Look, wrapped};
use super::layered::Value;
use compiler::Step;
use compiler::report::KernelReport;
use graph::{
    Attr, Container, ContainerId, Expr, Graph, Index, Library, Lifetime, Map, Memlet, Node,
    NodeKind, Reduction, Stage, Storage, SymExpr, Tasklet,
};
use std::collections::BTreeMap;

/// A result of a graph.
pub enum End {
    /// A box of its own.
    Box(String),
    /// A line in the box of what makes it.
    Line(String),
}

/// The results of a model by position. What replaces a buffer is drawn as a line.
pub fn ends_of_model(model: &Graph) -> Vec<End> {
    let name = |id: ContainerId| model.container(id).name.clone();
    let end = |o: &graph::Output| match o.updates {
        Some(buffer) => End::Line(format!("new {}", name(buffer))),
        None => End::Box(format!("result {}", name(o.container))),
    };
    model.outputs.iter().map(end).collect()
}

/// The results of a step by position. Gradients of parameters are drawn as lines.
pub fn ends_of_step(model: &Graph, step: &Step) -> Vec<End> {
    let mut ends = ends_of_model(model);
    ends.extend(step.gradient_inputs.iter().map(|i| {
        let input = model.container(model.inputs[*i]);
        let what = format!("gradient of {}", input.name);
        match input.lifetime {
            Lifetime::Parameter => End::Line(what),
            _ => End::Box(what),
        }
    }));
    ends
}

/// The nodes of a graph, with bytes at the arrows if `with_bytes`.
pub fn diagram(title: &str, graph: &Graph, ends: &[End], with_bytes: bool) -> Diagram {
    let mut diagram = Diagram {
        title: title.to_string(),
        ..Diagram::default()
    };
    let nodes: &[Node] = graph.single_state().map_or(&[], |state| &state.nodes);
    let mut makers: BTreeMap<ContainerId, usize> = BTreeMap::new();
    let mut readers: BTreeMap<ContainerId, Vec<usize>> = BTreeMap::new();
    for id in &graph.inputs {
        let container = graph.container(*id);
        let reading: Vec<&Node> = nodes.iter().filter(|n| n.reads().contains(id)).collect();
        if container.lifetime == Lifetime::Input && !reading.is_empty() {
            let backward = reading.iter().all(|n| n.stage != Stage::Forward);
            makers.insert(*id, diagram.boxes.len());
            diagram
                .boxes
                .push(outside(&container.name, container, backward));
        }
    }
    for node in nodes {
        let own = node.writes();
        for id in node.reads().into_iter().filter(|id| !own.contains(id)) {
            readers.entry(id).or_default().push(diagram.boxes.len());
        }
        for id in own {
            makers.insert(id, diagram.boxes.len());
        }
        diagram.boxes.push(described(graph, node, with_bytes));
    }
    for (output, end) in graph.outputs.iter().zip(ends) {
        let id = output.container;
        let Some(maker) = makers.get(&id) else {
            continue;
        };
        match end {
            End::Line(what) => diagram.boxes[*maker].lines.push(format!("⇒ {what}")),
            End::Box(what) => {
                let backward = diagram.boxes[*maker].backward;
                readers.entry(id).or_default().push(diagram.boxes.len());
                let made = outside(what, graph.container(id), backward);
                diagram.boxes.push(made);
            }
        }
    }
    for (id, from) in makers {
        let Some(to) = readers.remove(&id) else {
            continue;
        };
        diagram.values.push(Value { from, to });
        diagram.labels.push(match with_bytes {
            true => size(bytes(graph.container(id))),
            false => String::new(),
        });
    }
    diagram
}

/// The bars of kernels: predicted microseconds of computing and of moving.
pub fn kernel_bars(kernels: &[KernelReport]) -> Vec<Bar> {
    let bar = |k: &KernelReport| {
        let predicted = k.predicted.unwrap_or_default();
        let read = format!("reads {}: {}", size(k.bytes_read), k.reads.join(", "));
        let written = format!("writes {}: {}", size(k.bytes_written), k.writes.join(", "));
        let operations = in_threes(k.operations);
        Bar {
            title: format!("{}: {}, {operations} operations", k.name, k.path),
            lines: vec![read, written],
            look: look(k.stage == Stage::Backward.name(), k.products.is_some()),
            computing: predicted.product_us + predicted.loop_us,
            moving: predicted.movement_us,
            label: format!("{:.1} µs", predicted.us),
        }
    };
    kernels.iter().map(bar).collect()
}

/// `1,234,567`.
fn in_threes(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn look(backward: bool, contracts: bool) -> Look {
    match (backward, contracts) {
        (false, false) => Look::Forward,
        (false, true) => Look::ForwardContraction,
        (true, false) => Look::Backward,
        (true, true) => Look::BackwardContraction,
    }
}

fn outside(name: &str, container: &Container, backward: bool) -> Drawn {
    Drawn {
        title: name.to_string(),
        lines: vec![kind(container)],
        look: Look::Outside,
        backward,
    }
}

fn described(graph: &Graph, node: &Node, with_bytes: bool) -> Drawn {
    let (title, mut lines, contracts) = match &node.kind {
        NodeKind::Library(library) => operator(graph, node, library),
        NodeKind::Map(map) if !with_bytes => unit(graph, node, map),
        _ => kernel(graph, node),
    };
    if with_bytes {
        let reads = node.reads().into_iter().map(|id| graph.container(id));
        let parameters = reads.filter(|c| c.lifetime == Lifetime::Parameter);
        lines.extend(parameters.map(|c| format!("reads {}, {}", c.name, size(bytes(c)))));
    }
    let backward = node.stage != Stage::Forward;
    Drawn {
        title,
        lines,
        look: look(backward, contracts),
        backward,
    }
}

/// Title and lines of a box, and whether it is a contraction.
type Words = (String, Vec<String>, bool);

fn operator(graph: &Graph, node: &Node, library: &Library) -> Words {
    let named = |id: &ContainerId| graph.container(*id).name.clone();
    let inputs: Vec<Option<String>> = library
        .inputs
        .iter()
        .map(|id| id.as_ref().map(named))
        .collect();
    let mut lines = Vec::new();
    let title = match library.attrs.get("expr") {
        Some(Attr::Expr(expr)) if library.op == "elementwise" => {
            let inputs: Vec<String> = inputs.into_iter().flatten().collect();
            lines.extend(wrapped(&with_names(expr, &inputs), 4));
            format!("{}: elementwise", node.origin.node)
        }
        _ => {
            let present = library.inputs.iter().flatten();
            let parameters = present.filter(|id| is_parameter(graph, **id));
            lines.extend(parameters.map(named));
            library.op.clone()
        }
    };
    for id in library.outputs.iter().flatten() {
        let container = graph.container(*id);
        lines.push(format!("→ {} {}", container.name, shape(container)));
    }
    let contracts = library.op == "einsum" || library.op.starts_with("conv");
    (title, lines, contracts)
}

fn unit(graph: &Graph, node: &Node, map: &Map) -> Words {
    let name = |p: &graph::Param| format!("{}<{}", p.name, p.size);
    let params: Vec<String> = map.params.iter().map(name).collect();
    let mut lines = wrapped(&format!("for {}", params.join(", ")), 3);
    let mut what = "";
    node.visit_tasklets(&mut |tasklet| {
        lines.extend(wrapped(&statement(graph, tasklet), 6));
        let first = tasklet.outputs.first();
        what = first.map_or("", |(target, _)| kind_of_work(tasklet, target));
    });
    let title = format!("{}: {what}", node.origin.node);
    (title, lines, what == "contraction")
}

fn kernel(graph: &Graph, node: &Node) -> Words {
    let mut contracts = false;
    let mut lines = Vec::new();
    node.visit_tasklets(&mut |tasklet| {
        contracts |= tasklet.summed_product().is_some();
        for (target, _) in &tasklet.outputs {
            let container = graph.container(target.container);
            let local = match container.storage {
                Storage::Local => ", local",
                _ => "",
            };
            let what = kind_of_work(tasklet, target);
            lines.push(format!("{what} → {}{local}", container.name));
        }
    });
    (node.origin.node.clone(), lines, contracts)
}

/// What is done to an element of a result, in a word.
fn kind_of_work(tasklet: &Tasklet, target: &Memlet) -> &'static str {
    match target.conflict {
        _ if tasklet.summed_product().is_some() => "contraction",
        None => "elementwise",
        Some(Reduction::Sum) => "sum",
        Some(Reduction::Prod) => "product",
        Some(Reduction::Max) => "maximum",
        Some(Reduction::Min) => "minimum",
    }
}

/// `y[i] += x[i, j] * w[j]`.
fn statement(graph: &Graph, tasklet: &Tasklet) -> String {
    let reads: Vec<String> = tasklet.inputs.iter().map(|m| memlet(graph, m)).collect();
    let one = |(target, expr): &(Memlet, Expr)| {
        let sign = match target.conflict {
            None => "=",
            Some(Reduction::Sum) => "+=",
            Some(Reduction::Prod) => "*=",
            Some(Reduction::Max) => "max=",
            Some(Reduction::Min) => "min=",
        };
        format!(
            "{} {sign} {}",
            memlet(graph, target),
            with_names(expr, &reads)
        )
    };
    let all: Vec<String> = tasklet.outputs.iter().map(one).collect();
    all.join("; ")
}

/// An expression with the names of its operands, from the last on, so that `$1` is not found in `$10`.
fn with_names(expr: &Expr, names: &[String]) -> String {
    let mut text = expr.to_string();
    for (n, name) in names.iter().enumerate().rev() {
        text = text.replace(&format!("${n}"), name);
    }
    text
}

fn memlet(graph: &Graph, memlet: &Memlet) -> String {
    let index = |i: &Index| match i {
        Index::At(at) => at.to_string().replace(' ', ""),
        Index::Data(n) => format!("input {n}"),
    };
    let subset: Vec<String> = memlet.subset.iter().map(index).collect();
    let name = &graph.container(memlet.container).name;
    match subset.is_empty() {
        true => name.clone(),
        false => format!("{name}[{}]", subset.join(",")),
    }
}

fn is_parameter(graph: &Graph, id: ContainerId) -> bool {
    graph.container(id).lifetime == Lifetime::Parameter
}

fn kind(container: &Container) -> String {
    format!("{}{}", container.dtype, shape(container))
}

fn shape(container: &Container) -> String {
    let sizes: Vec<String> = container.shape.iter().map(SymExpr::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn bytes(container: &Container) -> i64 {
    let elements = SymExpr::product(&container.shape).as_const();
    elements.unwrap_or(0) * container.dtype.bytes() as i64
}

/// Bytes as a person writes them.
fn size(bytes: i64) -> String {
    match bytes {
        ..1024 => format!("{bytes} B"),
        _ => format!("{} KiB", (bytes + 512) / 1024),
    }
}
