//! Places for the nodes of a graph: layers from top to bottom, few crossings, straight lines.
//!
//! Layers by longest path; edges over several layers run through points of their own, which all edges
//! from one node share; order within a layer by the mean place of neighbours (Sugiyama, Tagawa, Toda
//! 1981); places by least squares under the order. Deterministic.

/// What is to be placed.
pub struct Sketch {
    /// Width of each node.
    pub widths: Vec<f64>,
    /// Edges from node to node; acyclic, and every edge goes from a smaller to a larger position.
    pub edges: Vec<(usize, usize)>,
}

/// Where everything is.
pub struct Placed {
    /// Centre of each node.
    pub x: Vec<f64>,
    /// Layer of each node, from 0.
    pub layer: Vec<usize>,
    /// Lines from node to node, through points of layers between.
    pub lines: Vec<Line>,
    /// Width of all.
    pub width: f64,
    /// Number of layers.
    pub n_layers: usize,
}

/// A line: its ends are at nodes or at points where it leaves another one.
pub struct Line {
    /// Layer and place of each point.
    pub points: Vec<(usize, f64)>,
    /// Whether it begins at a node.
    pub from_node: bool,
    /// Whether it ends at a node.
    pub to_node: bool,
    /// The node it comes from.
    pub source: usize,
}

/// Room between neighbours.
const GAP: f64 = 22.0;
/// Room that a passing line takes.
const LINE: f64 = 10.0;
/// Passes over the layers, each way.
const SWEEPS: usize = 12;

/// A node, or a point of a line.
struct Vertex {
    layer: usize,
    width: f64,
    above: Vec<usize>,
    below: Vec<usize>,
    x: f64,
}

/// Places a graph.
pub fn place(sketch: &Sketch) -> Placed {
    let n = sketch.widths.len();
    let layer = layers(n, &sketch.edges);
    let n_layers = layer.iter().max().map_or(0, |l| l + 1);
    let mut vertices: Vec<Vertex> = (0..n)
        .map(|v| Vertex {
            layer: layer[v],
            width: sketch.widths[v],
            above: Vec::new(),
            below: Vec::new(),
            x: 0.0,
        })
        .collect();
    let chains = connect(&mut vertices, sketch, &layer);
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); n_layers];
    for (v, vertex) in vertices.iter().enumerate() {
        rows[vertex.layer].push(v);
    }
    arrange(&mut vertices, &mut rows);
    for _ in 0..SWEEPS {
        for row in &rows {
            settle(&mut vertices, row, |v| &v.above);
        }
        for row in rows.iter().rev() {
            settle(&mut vertices, row, |v| &v.below);
        }
    }
    for row in &rows {
        settle(&mut vertices, row, |v| &v.above);
    }
    let edge = |v: &Vertex, side: f64| v.x + side * v.width / 2.0;
    let left = vertices
        .iter()
        .map(|v| edge(v, -1.0))
        .fold(f64::INFINITY, f64::min);
    let right = vertices.iter().map(|v| edge(v, 1.0)).fold(0.0, f64::max);
    let left = if left.is_finite() { left } else { 0.0 };
    for vertex in &mut vertices {
        vertex.x -= left;
    }
    let point = |v: usize| (vertices[v].layer, vertices[v].x);
    let line = |(source, chain): &(usize, Vec<usize>)| Line {
        points: chain.iter().map(|v| point(*v)).collect(),
        from_node: chain.first().is_some_and(|v| *v < n),
        to_node: chain.last().is_some_and(|v| *v < n),
        source: *source,
    };
    Placed {
        x: vertices[..n].iter().map(|v| v.x).collect(),
        layer,
        lines: chains.iter().map(line).collect(),
        width: right - left,
        n_layers,
    }
}

/// The layer of each node: its longest path from above. A node with nothing above is put right before its first reader.
fn layers(n: usize, edges: &[(usize, usize)]) -> Vec<usize> {
    let mut layer = vec![0usize; n];
    let mut sorted = edges.to_vec();
    sorted.sort_unstable();
    for (from, to) in &sorted {
        layer[*to] = layer[*to].max(layer[*from] + 1);
    }
    let mut is_fed = vec![false; n];
    let mut first_use = vec![usize::MAX; n];
    for (_, to) in edges {
        is_fed[*to] = true;
    }
    for (from, to) in edges {
        first_use[*from] = first_use[*from].min(layer[*to]);
    }
    for v in 0..n {
        if !is_fed[v] && first_use[v] != usize::MAX {
            layer[v] = first_use[v].saturating_sub(1);
        }
    }
    layer
}

/// Adds points for long edges and notes neighbours; gives each line with its source.
fn connect(
    vertices: &mut Vec<Vertex>,
    sketch: &Sketch,
    layer: &[usize],
) -> Vec<(usize, Vec<usize>)> {
    let mut targets: Vec<Vec<usize>> = vec![Vec::new(); layer.len()];
    for (from, to) in &sketch.edges {
        if !targets[*from].contains(to) {
            targets[*from].push(*to);
        }
    }
    let mut lines = Vec::new();
    for (from, list) in targets.iter().enumerate() {
        let last = list.iter().map(|to| layer[*to]).max().unwrap_or(0);
        let mut chain = vec![from];
        for between in layer[from] + 1..last {
            let above = chain[chain.len() - 1];
            vertices.push(Vertex {
                layer: between,
                width: LINE,
                above: vec![above],
                below: Vec::new(),
                x: 0.0,
            });
            let v = vertices.len() - 1;
            vertices[above].below.push(v);
            chain.push(v);
        }
        if chain.len() > 1 {
            lines.push((from, chain.clone()));
        }
        for to in list {
            let above = chain[layer[*to] - layer[from] - 1];
            vertices[above].below.push(*to);
            vertices[*to].above.push(above);
            lines.push((from, vec![above, *to]));
        }
    }
    lines
}

/// Orders the layers by the mean position of neighbours, down and up.
fn arrange(vertices: &mut [Vertex], rows: &mut [Vec<usize>]) {
    let mut position = vec![0.0; vertices.len()];
    let note = |row: &[usize], position: &mut Vec<f64>| {
        for (n, v) in row.iter().enumerate() {
            position[*v] = n as f64;
        }
    };
    for row in rows.iter() {
        note(row, &mut position);
    }
    let sort = |row: &mut Vec<usize>, position: &mut Vec<f64>, above: bool| {
        let mean = |v: usize, position: &[f64]| {
            let near = if above {
                &vertices[v].above
            } else {
                &vertices[v].below
            };
            match near.len() {
                0 => position[v],
                n => near.iter().map(|u| position[*u]).sum::<f64>() / n as f64,
            }
        };
        let mut keyed: Vec<(f64, usize)> = row.iter().map(|v| (mean(*v, position), *v)).collect();
        keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
        *row = keyed.into_iter().map(|(_, v)| v).collect();
        note(row, position);
    };
    for _ in 0..SWEEPS {
        for row in rows.iter_mut() {
            sort(row, &mut position, true);
        }
        for row in rows.iter_mut().rev() {
            sort(row, &mut position, false);
        }
    }
    for row in rows.iter() {
        let mut x = 0.0;
        for v in row {
            x += vertices[*v].width / 2.0;
            vertices[*v].x = x;
            x += vertices[*v].width / 2.0 + GAP;
        }
    }
}

/// Moves a layer to the mean place of its neighbours as far as its order and its gaps allow.
fn settle(vertices: &mut [Vertex], row: &[usize], near: impl Fn(&Vertex) -> &Vec<usize>) {
    let mut offset = 0.0;
    let mut offsets = Vec::with_capacity(row.len());
    // Neighbours that were merged, with their mean place and number.
    let mut blocks: Vec<(f64, f64, usize)> = Vec::new();
    for (n, v) in row.iter().enumerate() {
        if n > 0 {
            offset += (vertices[row[n - 1]].width + vertices[*v].width) / 2.0 + GAP;
        }
        offsets.push(offset);
        let vertex = &vertices[*v];
        let list = near(vertex);
        let wanted = match list.len() {
            0 => vertex.x,
            n => list.iter().map(|u| vertices[*u].x).sum::<f64>() / n as f64,
        };
        // Lines are kept straight before nodes are centred.
        let weight = match (list.len(), vertex.width <= LINE) {
            (0, _) => 0.1,
            (_, true) => 4.0,
            (_, false) => 1.0,
        };
        blocks.push((wanted - offset, weight, 1));
        while let [.., a, b] = blocks[..]
            && a.0 > b.0
        {
            blocks.truncate(blocks.len() - 2);
            let weight = a.1 + b.1;
            blocks.push(((a.0 * a.1 + b.0 * b.1) / weight, weight, a.2 + b.2));
        }
    }
    let places = blocks
        .iter()
        .flat_map(|(x, _, n)| std::iter::repeat_n(*x, *n));
    for ((v, place), offset) in row.iter().zip(places).zip(&offsets) {
        vertices[*v].x = place + offset;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A residual block: a chain with an edge past it.
    fn block() -> Placed {
        place(&Sketch {
            widths: vec![80.0; 5],
            edges: vec![(0, 1), (1, 2), (2, 3), (0, 3), (3, 4)],
        })
    }

    #[test]
    fn edges_go_down() {
        let placed = block();
        assert_eq!(placed.layer, [0, 1, 2, 3, 4]);
        assert_eq!(placed.n_layers, 5);
        for line in &placed.lines {
            assert!(line.points.windows(2).all(|w| w[0].0 < w[1].0));
        }
    }

    #[test]
    fn nothing_overlaps() {
        let edges: Vec<_> = (1..9).flat_map(|n| [(0, n), (n, 9)]).collect();
        let placed = place(&Sketch {
            widths: vec![100.0; 10],
            edges,
        });
        let mut middle: Vec<f64> = placed.x[1..9].to_vec();
        middle.sort_by(f64::total_cmp);
        assert!(middle.windows(2).all(|w| w[1] - w[0] >= 100.0 + GAP - 1e-6));
        // Both ends of the chain are in the middle of the width.
        assert!((placed.x[0] - placed.width / 2.0).abs() < 1.0);
    }

    #[test]
    fn a_long_edge_passes_beside_the_nodes() {
        let placed = block();
        let passing = placed.lines.iter().find(|l| l.points.len() == 3);
        let passing = passing.expect("a line over two layers");
        let beside = (passing.points[1].1 - placed.x[1]).abs();
        assert!(beside >= 40.0 + GAP, "{beside}");
    }

    #[test]
    fn nothing_has_no_places() {
        let placed = place(&Sketch {
            widths: Vec::new(),
            edges: Vec::new(),
        });
        assert_eq!((placed.n_layers, placed.width), (0, 0.0));
    }
}
