//! Ensembles as operators before version 5 give them: nodes numbered within their tree, leaves among them, and what
//! leaves add in lists of their own.

use super::*;

/// A list of texts.
fn texts(cx: &NodeCx, name: &str) -> Vec<String> {
    cx.has(name);
    let found = cx.node.attribute.iter().find(|a| a.name == name);
    let text = |bytes: &bytes::Bytes| String::from_utf8_lossy(bytes).into_owned();
    found.map_or_else(Vec::new, |a| a.strings.iter().map(text).collect())
}

/// Numbers from an attribute of floats or from a tensor.
fn floats(cx: &NodeCx, name: &str) -> Result<Vec<f64>, Refusal> {
    let tensor = cx.tensor(&format!("{name}_as_tensor"))?;
    let given = cx.floats(name).filter(|values| !values.is_empty());
    Ok(tensor.map(|t| t.to_f64()).or(given).unwrap_or_default())
}

/// Before version 5: nodes numbered within their tree, leaves among them, and targets of leaves in lists of their own.
pub(super) fn regressor(cx: &mut NodeCx) -> Values {
    let aggregate = match cx.text("aggregate_function", "SUM")?.as_str() {
        "AVERAGE" => Aggregate::Average,
        "SUM" => Aggregate::Sum,
        "MIN" => Aggregate::Min,
        "MAX" => Aggregate::Max,
        other => {
            return Err(Refusal(format!(
                "its attribute `aggregate_function` is `{other}`"
            )));
        }
    };
    let targets = n_targets(cx, 1)?;
    let trees = trees_of(cx, "target", targets)?;
    let x = features(cx)?;
    let mut y = trees.applied(cx, x, (targets, aggregate))?;
    let base = floats(cx, "base_values")?;
    if base.iter().any(|value| *value != 0.0) {
        if base.len() != targets {
            return Err("its base values are not as many as its targets".into());
        }
        let dtype = cx.dtype(y);
        let base = cx.constant(Tensor::from_f64(dtype, &[targets], base));
        y = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[y, base])?;
    }
    let transform = cx.text("post_transform", "NONE")?;
    let y = transformed(cx, y, &transform)?;
    single(cx.cast(y, DType::F32)?)
}

/// Sums for classes, and the class of the largest. Trees for one of two classes give a single number: the class is
/// there if it is above a half, or above zero if weights are negative too.
pub(super) fn classifier(cx: &mut NodeCx) -> Values {
    if cx
        .ints("classlabels_int64s")?
        .is_none_or(|labels| labels.is_empty())
    {
        return Err("classes whose names are texts are not supported".into());
    }
    let labels = cx.ints("classlabels_int64s")?.unwrap_or_default();
    let trees = trees_of(cx, "class", labels.len())?;
    let given = || trees.leaves.iter().flatten();
    let ids: BTreeSet<usize> = given().map(|(class, _)| *class).collect();
    let base = floats(cx, "base_values")?;
    let transform = cx.text("post_transform", "NONE")?;
    let x = features(cx)?;
    let sums = trees.applied(cx, x, (labels.len(), Aggregate::Sum))?;
    let sums = cx.cast(sums, DType::F32)?;
    let n = labels.len();
    let names = cx.constant(Tensor::from_i64(DType::I64, &[n], labels));
    let (class, scores) = match (n, ids.first()) {
        (2, Some(id)) if ids.len() == 1 && base.len() <= 1 => {
            let base = Expr::float(base.first().copied().unwrap_or(0.0));
            let score = cx.part(sums, 1, (*id).into(), (id + 1).into())?;
            let score = cx.elementwise(Expr::In(0).add(base), &[score])?;
            let is_positive = given().all(|(_, weight)| *weight >= 0.0);
            let (limit, other) = match (is_positive, transform.as_str()) {
                (true, "NONE" | "LOGISTIC") => (0.5, Expr::float(1.0).sub(Expr::In(0))),
                (false, "NONE") => (0.0, Expr::In(0).neg()),
                (false, "LOGISTIC") => (0.0, Expr::In(0).neg().sigmoid()),
                (_, other) => {
                    return Err(Refusal(format!(
                        "its attribute `post_transform` is `{other}`"
                    )));
                }
            };
            let is_logistic = !is_positive && transform == "LOGISTIC";
            let own = if is_logistic {
                Expr::In(0).sigmoid()
            } else {
                Expr::In(0)
            };
            let both = [
                cx.elementwise(other, &[score])?,
                cx.elementwise(own, &[score])?,
            ];
            let is_there = Expr::In(0).gt(Expr::float(limit)).cast(DType::I64);
            let class = cx.elementwise(is_there, &[score])?;
            let rows = cx.shape(class)[0].clone();
            (
                cx.reshape(class, vec![rows])?,
                cx.along("concat", &both, 1)?,
            )
        }
        (3.., _) if base.is_empty() || base.len() == n => {
            let mut scores = sums;
            if !base.is_empty() {
                let base = cx.constant(Tensor::from_f64(DType::F32, &[n], base));
                scores = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[sums, base])?;
            }
            let list = attrs([
                ("kind", Attr::Str("argmax".to_string())),
                ("axis", Attr::Int(1)),
                ("keep", Attr::Bool(false)),
            ]);
            let class = cx.op1("arg_reduce", &[scores], list)?;
            (class, transformed(cx, scores, &transform)?)
        }
        _ => {
            return Err(Refusal(format!(
                "trees for {} of {n} classes are not supported",
                ids.len()
            )));
        }
    };
    let label = cx.along("gather", &[names, class], 0)?;
    Ok([label, scores].map(Value::Data).to_vec())
}

fn transformed(cx: &mut NodeCx, y: ContainerId, transform: &str) -> Result<ContainerId, Refusal> {
    match transform {
        "NONE" => Ok(y),
        "LOGISTIC" => cx.elementwise(Expr::In(0).sigmoid(), &[y]),
        "SOFTMAX" => cx.op1("softmax", &[y], attrs([("axis", Attr::Int(1))])),
        other => Err(Refusal(format!(
            "its attribute `post_transform` is `{other}`"
        ))),
    }
}

/// Trees whose nodes have numbers within a tree; `kind` names the lists of what leaves give.
fn trees_of(cx: &NodeCx, kind: &str, targets: usize) -> Result<Trees, Refusal> {
    let list = |name: &str| cx.ints(name).map(Option::unwrap_or_default);
    let of_leaf = |what: &str| format!("{kind}_{what}");
    for ignored in ["nodes_hitrates", "nodes_hitrates_as_tensor"] {
        cx.has(ignored);
    }
    let (tree, number) = (list("nodes_treeids")?, list("nodes_nodeids")?);
    let feature = list("nodes_featureids")?;
    let (if_true, if_false) = (list("nodes_truenodeids")?, list("nodes_falsenodeids")?);
    let (modes, values) = (texts(cx, "nodes_modes"), floats(cx, "nodes_values")?);
    let tracks = cx.ints("nodes_missing_value_tracks_true")?;
    let n = tree.len();
    let lengths = [
        number.len(),
        feature.len(),
        if_true.len(),
        if_false.len(),
        modes.len(),
        values.len(),
    ];
    if lengths != [n; 6] {
        return Err("its nodes differ in number".into());
    }
    let mut trees = Trees::default();
    let mut places: BTreeMap<(i64, i64), Way> = BTreeMap::new();
    let mut known = BTreeSet::new();
    let (mut n_conditions, mut n_leaves) = (0, 0);
    for at in 0..n {
        let count = if modes[at] == "LEAF" {
            &mut n_leaves
        } else {
            &mut n_conditions
        };
        let way = if modes[at] == "LEAF" {
            Way::Leaf(*count)
        } else {
            Way::Condition(*count)
        };
        *count += 1;
        // The first node of a tree is its root.
        if known.insert(tree[at]) {
            trees.roots.push(way);
        }
        if places.insert((tree[at], number[at]), way).is_some() {
            let (tree, number) = (tree[at], number[at]);
            return Err(Refusal(format!("tree {tree} has two nodes {number}")));
        }
    }
    let way = |tree: i64, node: i64| {
        let found = places.get(&(tree, node)).copied();
        found.ok_or_else(|| Refusal(format!("node {node} of tree {tree} is not there")))
    };
    trees.leaves = vec![Vec::new(); n_leaves];
    for at in (0..n).filter(|at| modes[*at] != "LEAF") {
        let mode = MODES.iter().position(|mode| mode.0 == modes[at]);
        let mode = mode
            .ok_or_else(|| Refusal(format!("nodes of mode `{}` are not supported", modes[at])))?;
        trees.conditions.push(Condition {
            feature: feature[at],
            asks: Asks::Compares(comparison(mode as i64)?, values[at]),
            holds_if_missing: is_truth(tracks.as_ref(), at),
            ways: [way(tree[at], if_true[at])?, way(tree[at], if_false[at])?],
        });
    }
    let (of_tree, of_node) = (list(&of_leaf("treeids"))?, list(&of_leaf("nodeids"))?);
    let (target, weight) = (list(&of_leaf("ids"))?, floats(cx, &of_leaf("weights"))?);
    if [of_node.len(), target.len(), weight.len()] != [of_tree.len(); 3] {
        return Err("what its leaves give differs in number".into());
    }
    for at in 0..of_tree.len() {
        match way(of_tree[at], of_node[at])? {
            Way::Leaf(leaf) => trees.leaves[leaf].push((within(target[at], targets)?, weight[at])),
            Way::Condition(_) => return Err("a node that is no leaf gives a number".into()),
        }
    }
    Ok(trees)
}
