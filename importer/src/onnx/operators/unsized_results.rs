//! Operators whose results have sizes that depend on data, which a graph cannot express. Nodes on constants are
//! folded before they come here.

use super::{Rules, Values};
use crate::onnx::node::NodeCx;

pub static RULES: Rules = &[
    ("NonMaxSuppression", refuse),
    ("NonZero", refuse),
    ("Unique", refuse),
];

fn refuse(_: &mut NodeCx) -> Values {
    let what = "the size of its result depends on data, not on sizes; `shorthaul optimize --to` writes the part of \
                a file that ends before it";
    Err(what.into())
}
