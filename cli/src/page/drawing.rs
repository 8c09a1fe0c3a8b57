//! The picture of a graph: boxes coloured by the bytes they move, lines for what flows.

use super::escaped;
use super::layout::{Line, Placed, Sketch, place};
use onnx::proto::ModelProto;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A node as the page shows it, with what is inside it.
pub struct Shown {
    /// Operator and name.
    pub name: String,
    /// Operator with domain.
    pub operator: String,
    /// What it reads.
    pub inputs: Vec<String>,
    /// What it gives.
    pub outputs: Vec<String>,
    /// Whether it only holds a constant: not drawn.
    pub is_constant: bool,
    /// Type and sizes of its first output.
    pub shape: String,
    /// Bytes it reads.
    pub read: u64,
    /// Bytes it writes.
    pub written: u64,
    /// Products it sums.
    pub multiply_adds: u64,
    /// Nodes in its bodies or its function.
    pub n_inside: usize,
    /// Whether its sizes are known.
    pub is_known: bool,
}

impl Shown {
    /// Bytes it reads and writes.
    pub fn moved(&self) -> u64 {
        self.read + self.written
    }
}

/// A box.
struct Drawn {
    title: String,
    note: String,
    /// Position of the node; `None` for inputs and outputs.
    node: Option<usize>,
    class: String,
    gives: Vec<String>,
    reads: Vec<String>,
}

/// Distance from the top of a layer to the top of the next, and height of a box.
const PITCH: f64 = 72.0;
const HEIGHT: f64 = 42.0;
const MARGIN: f64 = 24.0;
/// Shades of bytes moved.
const SHADES: f64 = 8.0;

/// The picture.
pub fn svg(model: &ModelProto, shown: &[Shown], shapes: &BTreeMap<String, Vec<usize>>) -> String {
    let boxes = boxes(model, shown, shapes);
    let sketch = Sketch {
        widths: boxes.iter().map(width).collect(),
        edges: edges(&boxes),
    };
    let placed = place(&sketch);
    let (w, h) = (
        placed.width + 2.0 * MARGIN,
        placed.n_layers as f64 * PITCH + 2.0 * MARGIN - (PITCH - HEIGHT),
    );
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" data-w=\"{w:.0}\" \
         data-h=\"{h:.0}\"><g id=\"lines\">"
    );
    for line in &placed.lines {
        text.push_str(&path(line));
    }
    text.push_str("</g><g id=\"boxes\">");
    for (n, (drawn, width)) in boxes.iter().zip(&sketch.widths).enumerate() {
        text.push_str(&rectangle(n, drawn, *width, &placed));
    }
    text.push_str("</g></svg>");
    text
}

fn boxes(model: &ModelProto, shown: &[Shown], shapes: &BTreeMap<String, Vec<usize>>) -> Vec<Drawn> {
    let Some(graph) = &model.graph else {
        return Vec::new();
    };
    let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let most = shown.iter().map(Shown::moved).max().unwrap_or(0).max(1) as f64;
    let port = |info: &onnx::proto::ValueInfoProto, is_input: bool| {
        let sizes = shapes.get(&info.name).map(|shape| {
            let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
            sizes.join("×")
        });
        let names = vec![info.name.clone()];
        let (gives, reads) = if is_input {
            (names, Vec::new())
        } else {
            (Vec::new(), names)
        };
        Drawn {
            title: info.name.clone(),
            note: sizes.unwrap_or_default(),
            node: None,
            class: "port".to_string(),
            gives,
            reads,
        }
    };
    let inputs = graph
        .input
        .iter()
        .filter(|i| !stored.contains(i.name.as_str()));
    let nodes = shown
        .iter()
        .enumerate()
        .filter(|(_, node)| !node.is_constant);
    let node = |(n, node): (usize, &Shown)| {
        let share = (node.moved() as f64 / most).sqrt();
        let class = match (node.is_known, node.moved()) {
            (false, _) => "unknown".to_string(),
            (true, 0) => "view".to_string(),
            _ => format!("s{}", (share * SHADES).ceil().clamp(1.0, SHADES)),
        };
        Drawn {
            title: node.operator.clone(),
            note: node.shape.clone(),
            node: Some(n),
            class,
            gives: node.outputs.clone(),
            reads: node.inputs.clone(),
        }
    };
    let inputs = inputs.map(|i| port(i, true));
    let outputs = graph.output.iter().map(|o| port(o, false));
    inputs.chain(nodes.map(node)).chain(outputs).collect()
}

/// Wide enough for its text.
fn width(drawn: &Drawn) -> f64 {
    let title = shortened(&drawn.title).chars().count() as f64 * 7.6;
    let note = drawn.note.chars().count() as f64 * 5.9;
    (title.max(note) + 22.0).max(64.0)
}

/// Long names of ports keep their beginning and end.
fn shortened(text: &str) -> String {
    let n = text.chars().count();
    if n <= 32 {
        return text.to_string();
    }
    let head: String = text.chars().take(15).collect();
    let tail: String = text.chars().skip(n - 16).collect();
    format!("{head}…{tail}")
}

fn edges(boxes: &[Drawn]) -> Vec<(usize, usize)> {
    let mut makers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut edges = BTreeSet::new();
    for (n, drawn) in boxes.iter().enumerate() {
        for name in &drawn.reads {
            if let Some(maker) = makers.get(name.as_str()) {
                edges.insert((*maker, n));
            }
        }
        for name in &drawn.gives {
            makers.insert(name, n);
        }
    }
    edges.into_iter().collect()
}

fn rectangle(n: usize, drawn: &Drawn, width: f64, placed: &Placed) -> String {
    let x = placed.x[n] + MARGIN;
    let y = placed.layer[n] as f64 * PITCH + MARGIN;
    let node = drawn
        .node
        .map_or(String::new(), |n| format!(" data-n=\"{n}\""));
    let has_note = !drawn.note.is_empty();
    let title_y = if has_note { 18.0 } else { 26.0 };
    let mut text = format!(
        "<g class=\"b {}\" data-b=\"{n}\"{node} transform=\"translate({:.1} {y:.1})\"><rect \
         width=\"{width:.1}\" height=\"{HEIGHT}\" rx=\"7\"/><text x=\"{:.1}\" y=\"{title_y}\">{}</text>",
        drawn.class,
        x - width / 2.0,
        width / 2.0,
        escaped(&shortened(&drawn.title)),
    );
    if has_note {
        // Writing to a string succeeds.
        let _ = write!(
            text,
            "<text class=\"note\" x=\"{:.1}\" y=\"33\">{}</text>",
            width / 2.0,
            escaped(&drawn.note)
        );
    }
    text.push_str("</g>");
    text
}

/// A smooth line through its points, vertical at each.
fn path(line: &Line) -> String {
    let last = line.points.len() - 1;
    let place = |n: usize| {
        let (layer, x) = line.points[n];
        let top = layer as f64 * PITCH + MARGIN;
        // A point between layers is passed at the height of the boxes' middle.
        let (enters, leaves) = match n {
            0 if line.from_node => (top + HEIGHT, top + HEIGHT),
            n if n == last && line.to_node => (top, top),
            _ => (top + HEIGHT / 2.0, top + HEIGHT / 2.0),
        };
        (x + MARGIN, enters, leaves)
    };
    let (x, _, y) = place(0);
    let mut d = format!("M{x:.1} {y:.1}");
    for n in 1..=last {
        let ((x0, _, y0), (x1, y1, _)) = (place(n - 1), place(n));
        let middle = (y0 + y1) / 2.0;
        // Writing to a string succeeds.
        let _ = write!(
            d,
            "C{x0:.1} {middle:.1} {x1:.1} {middle:.1} {x1:.1} {y1:.1}"
        );
    }
    let arrow = if line.to_node { " class=\"end\"" } else { "" };
    format!("<path d=\"{d}\" data-s=\"{}\"{arrow}/>", line.source)
}
