//! `shorthaul report --html`: one page with the graph, its bytes and its kernels; nothing is loaded
//! from elsewhere.
//!
//! Owns the page's text and tables. The graph's places are in `layout.rs`, its picture in
//! `drawing.rs`, look and behaviour in `page.css` and `page.js`.

mod drawing;
mod layout;

use crate::units::{bytes, count};
use compiler::report::Report;
use drawing::Shown;
use onnx::cost::{Cost, NodeCost, cost};
use onnx::evaluate::{label, qualified};
use onnx::file::Model;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The page for a model at the given sizes of its inputs; `kernels` are the compiler's, or the
/// sentence that says why there are none.
pub fn page(
    model: &Model,
    shapes: &BTreeMap<String, Vec<usize>>,
    kernels: &Result<Report, String>,
) -> String {
    let cost = cost(&model.proto, &model.folder, shapes);
    let shown = nodes(model, &cost);
    let picture = drawing::svg(&model.proto, &shown, shapes);
    let name = model.path.file_name().unwrap_or_default().to_string_lossy();
    let data = json!(shown.iter().map(details).collect::<Vec<_>>()).to_string();
    PAGE.replace("{{title}}", &escaped(&name))
        .replace("{{style}}", include_str!("page.css"))
        .replace("{{subtitle}}", &escaped(&subtitle(model, shapes)))
        .replace("{{cards}}", &cards(&cost, model))
        .replace("{{rows}}", &rows(&shown, cost.bytes_moved))
        .replace("{{kernels}}", &kernel_section(kernels))
        // Text of the file is put in last, so that nothing in it is taken for a placeholder of the template.
        .replace("{{script}}", include_str!("page.js"))
        .replacen("{{data}}", &data.replace('<', "\\u003c"), 1)
        .replacen("{{picture}}", &picture, 1)
}

const PAGE: &str = r#"<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{title}}</title><style>{{style}}</style></head><body>
<header><h1>{{title}}</h1><p>{{subtitle}}</p></header>
<section class="cards">{{cards}}</section>
<main><div class="graph" id="graph"><div class="tools"><button id="in" title="Zoom in">+</button><button
id="out" title="Zoom out">−</button><button id="fit">Whole graph</button><button id="top">Top</button></div>{{picture}}<div
class="legend">bytes moved <span class="ramp"></span> <span>little → most</span></div></div>
<aside id="details"><p class="hint">Click a node to see what it reads and writes. Drag to move, scroll to zoom.</p></aside></main>
<section><h2>Nodes</h2><input id="filter" type="search" placeholder="Filter by name or operator">
<div class="scroll"><table id="nodes"><thead><tr><th data-k="n">#</th><th data-k="s">node</th><th data-k="s">operator</th><th
data-k="s">output</th><th data-k="n">read</th><th data-k="n">written</th><th data-k="n">moved</th><th
data-k="n">multiply-adds</th><th data-k="n">per byte</th></tr></thead><tbody>{{rows}}</tbody></table></div></section>
{{kernels}}
<script type="application/json" id="data">{{data}}</script><script>{{script}}</script></body></html>
"#;

/// Text that is safe in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        // No text of a file may look like a placeholder of the template.
        .replace("{{", "{\u{200b}{")
}

/// The nodes of the graph, each with what is inside it.
fn nodes(model: &Model, cost: &Cost) -> Vec<Shown> {
    let nodes = model.proto.graph.iter().flat_map(|g| &g.node);
    let mut shown: Vec<Shown> = nodes
        .map(|node| Shown {
            name: label(node),
            operator: qualified(node),
            inputs: onnx::evaluate::reads(node)
                .into_iter()
                .map(str::to_string)
                .collect(),
            outputs: node
                .output
                .iter()
                .filter(|o| !o.is_empty())
                .cloned()
                .collect(),
            is_constant: node.op_type == "Constant",
            shape: String::new(),
            read: 0,
            written: 0,
            multiply_adds: 0,
            n_inside: 0,
            is_known: true,
        })
        .collect();
    for entry in &cost.nodes {
        let Some(node) = shown.get_mut(entry.top) else {
            continue;
        };
        node.read += entry.bytes_read;
        node.written += entry.bytes_written;
        node.multiply_adds += entry.multiply_adds;
        node.is_known &= entry.is_known;
        node.n_inside += usize::from(entry.depth > 0);
        if entry.depth == 0 {
            node.shape = shape(entry);
        }
    }
    shown
}

fn shape(entry: &NodeCost) -> String {
    let sizes = entry.shape.as_ref().map(|shape| {
        let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
        sizes.join("×")
    });
    match (sizes, &entry.element) {
        (Some(sizes), Some(element)) if sizes.is_empty() => element.clone(),
        (Some(sizes), Some(element)) => format!("{element} {sizes}"),
        (None, Some(element)) => element.clone(),
        _ => String::new(),
    }
}

fn subtitle(model: &Model, shapes: &BTreeMap<String, Vec<usize>>) -> String {
    let sizes = shapes
        .iter()
        .map(|(name, shape)| format!("{name} {shape:?}"));
    let opsets = model.proto.opset_import.iter();
    let opset = opsets
        .filter(|o| o.domain.is_empty() || o.domain == "ai.onnx")
        .map(|o| format!("ONNX operators version {}", o.version));
    let producer = format!(
        "{} {}",
        model.proto.producer_name, model.proto.producer_version
    );
    let parts = opset
        .chain([producer.trim().to_string(), bytes(model.n_bytes as i64)])
        .chain(sizes);
    let parts: Vec<String> = parts.filter(|p| !p.is_empty()).collect();
    parts.join(" · ")
}

fn cards(cost: &Cost, model: &Model) -> String {
    let size = |n: u64| bytes(n as i64);
    let ratio = cost.bytes_moved as f64 / cost.bytes_least.max(1) as f64;
    let n = onnx::optimize::n_nodes(&model.proto);
    let unknown = match cost.n_unknown {
        0 => String::new(),
        n => format!("{n} without known sizes"),
    };
    let cards = [
        ("operators", n.to_string(), unknown),
        (
            "multiply-adds",
            count(cost.multiply_adds as f64),
            format!(
                "{:.1} per byte moved",
                cost.multiply_adds as f64 / cost.bytes_moved.max(1) as f64
            ),
        ),
        (
            "bytes moved",
            size(cost.bytes_moved),
            "node by node, nothing fused".to_string(),
        ),
        (
            "least possible",
            size(cost.bytes_least),
            format!("inputs, weights, outputs once: {ratio:.2} times less"),
        ),
        (
            "peak memory",
            size(cost.peak_bytes),
            "activations alive at once".to_string(),
        ),
    ];
    let card = |(title, value, note): &(&str, String, String)| {
        format!(
            "<div><h3>{title}</h3><b>{}</b><small>{note}</small></div>",
            escaped(value)
        )
    };
    cards.iter().map(card).collect()
}

/// What the panel shows of a node.
fn details(node: &Shown) -> serde_json::Value {
    json!({
        "name": node.name,
        "operator": node.operator,
        "inputs": node.inputs,
        "outputs": node.outputs,
        "shape": node.shape,
        "read": bytes(node.read as i64),
        "written": bytes(node.written as i64),
        "moved": bytes(node.moved() as i64),
        "arithmetic": count(node.multiply_adds as f64),
        "inside": node.n_inside,
        "known": node.is_known,
    })
}

fn rows(shown: &[Shown], total: u64) -> String {
    let most = shown.iter().map(Shown::moved).max().unwrap_or(0).max(1);
    let mut text = String::new();
    for (n, node) in shown.iter().enumerate().filter(|(_, n)| !n.is_constant) {
        let moved = node.moved();
        let share = 100.0 * moved as f64 / total.max(1) as f64;
        let bar = 100.0 * moved as f64 / most as f64;
        let intensity = node.multiply_adds as f64 / moved.max(1) as f64;
        let size = |n: u64| bytes(n as i64);
        let sums = match node.multiply_adds {
            0 => String::new(),
            n => count(n as f64),
        };
        let per_byte = match node.multiply_adds {
            0 => String::new(),
            _ => format!("{intensity:.1}"),
        };
        // Writing to a string succeeds.
        let _ = write!(
            text,
            "<tr data-n=\"{n}\"><td data-v=\"{n}\">{n}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td data-v=\"{}\">{}</td><td data-v=\"{}\">{}</td>\
             <td data-v=\"{moved}\" class=\"bar\" style=\"--w:{bar:.1}%\">{} <i>{share:.1}%</i></td>\
             <td data-v=\"{}\">{sums}</td><td data-v=\"{intensity}\">{per_byte}</td></tr>",
            escaped(&node.name),
            escaped(&node.operator),
            escaped(&node.shape),
            node.read,
            size(node.read),
            node.written,
            size(node.written),
            size(moved),
            node.multiply_adds,
        );
    }
    text
}

fn kernel_section(kernels: &Result<Report, String>) -> String {
    let report = match kernels {
        Ok(report) => report,
        Err(why) => {
            let first = why.lines().next().unwrap_or_default();
            return format!(
                "<section><h2>Kernels after fusion</h2><p class=\"hint\">None: {}</p></section>",
                escaped(first)
            );
        }
    };
    let ratio = report.bytes_moved as f64 / report.bytes_least.max(1) as f64;
    let most = report
        .kernels
        .iter()
        .map(|k| k.bytes_read + k.bytes_written)
        .max()
        .unwrap_or(1);
    let mut text = format!(
        "<section><h2>Kernels after fusion</h2><p>{} kernels move {}, {ratio:.2} times the least \
         possible; fusion saved {}.</p><div class=\"scroll\"><table><thead><tr><th data-k=\"s\">kernel</th>\
         <th data-k=\"s\">made by</th><th data-k=\"s\">of</th><th data-k=\"n\">read</th>\
         <th data-k=\"n\">written</th><th data-k=\"n\">moved</th><th data-k=\"n\">least</th>\
         <th data-k=\"n\">operations</th></tr></thead><tbody>",
        report.kernels.len(),
        bytes(report.bytes_moved),
        bytes(report.bytes_saved)
    );
    for kernel in &report.kernels {
        let moved = kernel.bytes_read + kernel.bytes_written;
        let bar = 100.0 * moved as f64 / most.max(1) as f64;
        let cell = |n: i64| format!("<td data-v=\"{n}\">{}</td>", bytes(n));
        // Writing to a string succeeds.
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td>{}{}\
             <td data-v=\"{moved}\" class=\"bar\" style=\"--w:{bar:.1}%\">{}</td>{}\
             <td data-v=\"{}\">{}</td></tr>",
            escaped(&kernel.name),
            escaped(kernel.path),
            escaped(&kernel.origin),
            cell(kernel.bytes_read),
            cell(kernel.bytes_written),
            bytes(moved),
            cell(kernel.bytes_least),
            kernel.operations,
            count(kernel.operations as f64),
        );
    }
    text.push_str("</tbody></table></div></section>");
    text
}
