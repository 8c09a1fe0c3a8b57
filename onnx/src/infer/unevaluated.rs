//! Sizes of the outputs of operators that are not evaluated here: text, trees, weights of four bits.
//!
//! Verification makes up what such a node gives, in these sizes, and rewrites rely on them. So a row holds for every
//! input that the operator takes. Element types are the standard's (`stated_types`), or in the row.

use crate::element::Element;
use crate::fact::Fact;
use crate::operators::Inference;
use graph::SymExpr;

/// The sizes of a list of outputs, with their element types where the standard does not state them.
type Sizes = Vec<(Option<Element>, Option<Vec<SymExpr>>)>;

/// What is known of the outputs of a node without a row among the operators: `stated` with sizes.
pub(super) fn with_sizes(cx: &Inference, stated: Option<Vec<Fact>>) -> Option<Vec<Fact>> {
    let Some(sizes) = sizes(cx) else {
        return stated;
    };
    let stated = stated.unwrap_or_default();
    let mut stated = stated.into_iter().map(|fact| fact.element);
    let facts = sizes.into_iter().map(|(element, shape)| {
        let stated = stated.next().flatten();
        Fact::new(stated.or(element), shape)
    });
    Some(facts.collect())
}

fn sizes(cx: &Inference) -> Option<Sizes> {
    let float = Some(Element::F32);
    let first = || cx.shape(0).map(<[_]>::to_vec);
    let domain = if cx.node.domain == "ai.onnx" {
        ""
    } else {
        cx.node.domain.as_str()
    };
    Some(match (domain, cx.node.op_type.as_str()) {
        ("", "TfIdfVectorizer") => {
            let last = cx.attributes.ints("ngram_indexes")?.iter().max()?;
            let mut shape = first()?;
            *shape.last_mut()? = SymExpr::constant(last.checked_add(1)?);
            vec![(float, Some(shape))]
        }
        ("ai.onnx.ml", "Normalizer") => vec![(float, first())],
        ("ai.onnx.ml", "Binarizer" | "Imputer") => vec![(cx.element(0), first())],
        ("ai.onnx.ml", "LabelEncoder") => vec![(None, first())],
        ("ai.onnx.ml", "TreeEnsembleRegressor") => {
            let n = SymExpr::constant(cx.attributes.int("n_targets")?);
            vec![(float, Some(vec![rows(cx)?, n]))]
        }
        ("ai.onnx.ml", "LinearRegressor") => {
            let n = SymExpr::constant(cx.attributes.int("targets").unwrap_or(1));
            vec![(float, Some(vec![rows(cx)?, n]))]
        }
        ("ai.onnx.ml", "SVMRegressor") => vec![(float, Some(vec![rows(cx)?, 1.into()]))],
        ("ai.onnx.ml", "TreeEnsembleClassifier" | "LinearClassifier" | "SVMClassifier") => {
            let rows = rows(cx)?;
            vec![
                (None, Some(vec![rows.clone()])),
                (float, Some(vec![rows, cx.unknown()])),
            ]
        }
        ("com.microsoft", "RotaryEmbedding") => vec![(cx.element(0), first())],
        ("com.microsoft", "EmbedLayerNormalization") => {
            let (ids, words) = (cx.shape(0)?, cx.shape(2)?);
            let shape = vec![
                ids.first()?.clone(),
                ids.get(1)?.clone(),
                words.get(1)?.clone(),
            ];
            let element = cx.element(2);
            vec![
                (element, Some(shape.clone())),
                (Some(Element::I32), Some(vec![ids.first()?.clone()])),
                (element, Some(shape)),
            ]
        }
        ("com.microsoft", "QAttention") => {
            let width = cx.shape(1)?.get(1)?.as_const()?;
            let mut shape = first()?;
            *shape.get_mut(2)? = SymExpr::constant(width / 3);
            // The second output, past keys and values in one tensor, stays unknown.
            vec![(cx.element(3), Some(shape)), (None, None)]
        }
        ("com.microsoft", "DynamicQuantizeLSTM") => recurrent(cx)?,
        _ => return None,
    })
}

/// The number of rows; a list is one row.
fn rows(cx: &Inference) -> Option<SymExpr> {
    match cx.shape(0)? {
        [_] => Some(SymExpr::constant(1)),
        shape => shape.first().cloned(),
    }
}

/// All states [time, directions, batch, hidden], then the last ones without time.
fn recurrent(cx: &Inference) -> Option<Sizes> {
    let [time, batch, _] = cx.shape(0)? else {
        return None;
    };
    let is_two_way = cx.attributes.text("direction") == Some("bidirectional");
    let directions = SymExpr::constant(if is_two_way { 2 } else { 1 });
    let hidden = SymExpr::constant(cx.attributes.int("hidden_size")?);
    let last = vec![directions, batch.clone(), hidden];
    let mut all = last.clone();
    all.insert(0, time.clone());
    let float = Some(Element::F32);
    Some(vec![
        (float, Some(all)),
        (float, Some(last.clone())),
        (float, Some(last)),
    ])
}
