//! Operators whose results are as large as data says, which the sizes of a graph cannot be. Nodes on constants are
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
