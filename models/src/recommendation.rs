//! DLRM, a recommendation network with embedding tables.
//!
//! Sizes and names of parameters are those of `shorthaul.models.recommendation` in the Python package.

use crate::net::{Net, sizes};
use graph::{ContainerId, DType, Graph, Tensor};
use ops::OpError;

/// Sizes of DLRM. Each category has a table; an example looks up some of its rows.
#[derive(Clone, Debug)]
pub struct Dlrm {
    /// Examples.
    pub batch: i64,
    /// Numbers of each example.
    pub n_numbers: i64,
    /// Categories.
    pub n_tables: i64,
    /// Rows of each table.
    pub n_rows: i64,
    /// Rows that an example looks up in each table. They are added up.
    pub n_looked_up: i64,
    /// Width of a row.
    pub width: i64,
    /// Hidden widths of the network for the numbers.
    pub bottom: Vec<i64>,
    /// Hidden widths of the network for the products.
    pub top: Vec<i64>,
}

/// DLRM (arXiv 1906.00091): `numbers` `[batch, n_numbers]` and rows `categories`
/// `[batch, n_tables, n_looked_up]` to click scores `[batch]`. Numbers go through a network, categories
/// through tables, and all pairs of the results are multiplied.
///
/// # Errors
/// No table.
pub fn dlrm(d: &Dlrm) -> Result<Graph, OpError> {
    let mut net = Net::new("dlrm");
    let numbers = net.input("numbers", DType::F32, &sizes(&[d.batch, d.n_numbers]));
    let shape = sizes(&[d.batch, d.n_tables, d.n_looked_up]);
    let categories = net.input("categories", DType::I64, &shape);
    let dense = layers(
        &mut net,
        "bottom",
        numbers,
        &[&d.bottom[..], &[d.width]].concat(),
    )?;
    let mut vectors = vec![dense];
    for table in 0..d.n_tables {
        vectors.push(looked_up(&mut net, d, table, categories)?);
    }
    let n_vectors = d.n_tables + 1;
    for vector in &mut vectors {
        *vector = net.reshape("vectors", *vector, &sizes(&[d.batch, 1, d.width]))?;
    }
    let vectors = net.concat("vectors", &vectors, 1)?;
    let products = net.einsum("products", "bid,bjd->bij", &[vectors, vectors])?;
    let flat = sizes(&[d.batch, n_vectors * n_vectors]);
    let products = net.reshape("products", products, &flat)?;
    let pairs = pairs(n_vectors);
    let pairs = net.graph.add_constant("pairs", pairs);
    let products = net.gather("products", products, pairs, 1)?;
    let x = net.concat("top", &[dense, products], 1)?;
    let x = layers(&mut net, "top", x, &d.top)?;
    let y = net.linear(&format!("top.{}", 2 * d.top.len()), x, 1)?;
    let y = net.reshape("scores", y, &sizes(&[d.batch]))?;
    Ok(net.finish(&[y]))
}

/// Linear layers of those widths, each with ReLU.
fn layers(
    net: &mut Net,
    name: &str,
    x: ContainerId,
    widths: &[i64],
) -> Result<ContainerId, OpError> {
    let mut x = x;
    for (n, width) in widths.iter().enumerate() {
        x = net.linear(&format!("{name}.{}", 2 * n), x, *width)?;
        x = net.relu(&format!("{name}.{}", 2 * n + 1), x)?;
    }
    Ok(x)
}

/// The sum of an example's rows of a table: `[batch, width]`.
fn looked_up(
    net: &mut Net,
    d: &Dlrm,
    table: i64,
    categories: ContainerId,
) -> Result<ContainerId, OpError> {
    let name = format!("tables.{table}");
    let rows = net.parameter(&format!("{name}.weight"), &[d.n_rows, d.width]);
    let index = net.slice(&name, categories, 1, (table, table + 1))?;
    let index = net.reshape(&name, index, &sizes(&[d.batch, d.n_looked_up]))?;
    let found = net.gather(&name, rows, index, 0)?;
    net.reduce(&name, "sum", found, &[1])
}

/// Where the pairs of different vectors are in the flat matrix of all products, each pair once.
fn pairs(n_vectors: i64) -> Tensor {
    let places = (0..n_vectors).flat_map(|i| (0..i).map(move |j| i * n_vectors + j));
    let places: Vec<i64> = places.collect();
    Tensor::from_i64(DType::I64, &[places.len()], places)
}
