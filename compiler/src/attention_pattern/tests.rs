//! Which graphs are recognized, and what becomes of them.

use super::*;
use models::text_graph;

/// The nodes of a graph after the pass, in the text form, without their origins.
fn after(nodes: &str, outputs: &str) -> Vec<String> {
    let containers = "%q: f32[2, 3, 5, 4] input
         %k: f32[2, 3, 7, 4] input
         %v: f32[2, 3, 7, 6] input
         %mask: bool[2, 1, 1, 7] input
         %bias: f32[5, 7] input
         %seed: i64[] input
         %eight: f32[] constant [8.0]
         %hidden: f32[1] constant [-inf]
         %s: f32[2, 3, 5, 7]
         %t: f32[2, 3, 5, 7]
         %u: f32[2, 3, 5, 7]
         %p: f32[2, 3, 5, 7]
         %d: f32[2, 3, 5, 7]
         %h: bf16[2, 3, 5, 7]
         %y: f32[2, 3, 5, 6]
         %z: f32[2, 5, 3, 6]";
    let mut graph = text_graph(containers, nodes, outputs);
    recognize(&mut graph, |_, _| true).expect("its operands fit");
    graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
    let text = graph.to_string();
    let nodes = text.lines().filter(|line| line.contains(" = "));
    let own = nodes.filter_map(|line| line.trim().split(" @ ").next());
    own.map(str::to_string).collect()
}

const SCORES: &str = "%s = einsum(%q, %k) {equation=\"bhld,bhmd->bhlm\"}\n";
const VALUES: &str = "%y = einsum(%p, %v) {equation=\"bhlm,bhme->bhle\"}";

#[test]
fn two_products_around_a_softmax_are_one_attention() {
    let nodes = format!("{SCORES}%p = softmax(%s) {{axis=3}}\n{VALUES}");
    let found = after(&nodes, "%y");
    assert_eq!(
        found,
        ["%y = attention(%q, %k, %v, -) {safe=false, scale=1.0}"]
    );
}

#[test]
fn factors_and_fill_values_may_be_stored_as_tensors() {
    let nodes = format!(
        "{SCORES}%t = elementwise(%s, %eight) {{expr=($0 / $1)}}
         %u = elementwise(%mask, %hidden, %t, %eight) {{expr=(select($0, $1, ($2 + $3)))}}
         %p = softmax(%u) {{axis=3}}
         {VALUES}"
    );
    let found = after(&nodes, "%y");
    let [not, attention] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert!(not.contains("elementwise(%mask)"), "{not}");
    let attrs = "{fill=-inf, safe=false, scale=0.125}";
    assert!(attention.ends_with(attrs), "{attention}");
}

#[test]
fn a_number_that_is_added_matters_beside_a_finite_fill_value() {
    let with = |fill: &str| {
        let nodes = format!(
            "{SCORES}%t = elementwise(%s, %eight) {{expr=($0 + $1)}}
             %u = elementwise(%mask, %t) {{expr=(select($0, {fill}, $1))}}
             %p = softmax(%u) {{axis=3}}
             {VALUES}"
        );
        after(&nodes, "%y").len()
    };
    assert_eq!((with("-inf"), with("-9.0")), (2, 5));
}

#[test]
fn factors_a_mask_and_dropout_belong_to_it() {
    let nodes = format!(
        "{SCORES}%t = elementwise(%s) {{expr=($0 / 8)}}
         %u = elementwise(%mask, %t) {{expr=(select($0, -inf, $1))}}
         %p = softmax(%u) {{axis=-1}}
         %d = dropout(%p, %seed) {{p=0.25, id=3}}
         %z = einsum(%v, %d) {{equation=\"bhme,bhlm->blhe\"}}"
    );
    let found = after(&nodes, "%z");
    let [not, attention, back] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert!(not.contains("elementwise(%mask)"), "{not}");
    assert!(attention.contains("attention(%q, %k, %v, "), "{attention}");
    let attrs = "{dropout=0.25, fill=-inf, id=3, safe=false, scale=0.125}";
    assert!(attention.ends_with(attrs), "{attention}");
    assert!(back.starts_with("%z = permute(") && back.ends_with("{order=[0, 2, 1, 3]}"));
}

#[test]
fn a_mask_may_say_what_is_seen() {
    let nodes = format!(
        "{SCORES}%t = elementwise(%mask, %s) {{expr=(select($0, $1, -5))}}
         %p = softmax(%t) {{axis=3}}\n{VALUES}"
    );
    let found = after(&nodes, "%y");
    let attrs = "{fill=-5.0, safe=false, scale=1.0}";
    assert_eq!(
        found,
        [format!("%y = attention(%q, %k, %v, %mask) {attrs}")]
    );
}

#[test]
fn an_added_mask_stays_as_it_is() {
    let nodes = format!(
        "{SCORES}%t = elementwise(%bias, %s) {{expr=($0 + ($1 * 0.5))}}
         %p = softmax(%t) {{axis=3, safe=true}}\n{VALUES}"
    );
    let found = after(&nodes, "%y");
    assert_eq!(
        found,
        ["%y = attention(%q, %k, %v, %bias) {safe=true, scale=0.5}"]
    );
}

#[test]
fn a_product_belongs_to_one_attention_only() {
    let containers = "%q: f32[2, 5, 4] input
         %k: f32[2, 5, 4] input
         %v: f32[2, 5, 6] input
         %s: f32[2, 5, 5]
         %p: f32[2, 5, 5]
         %t: f32[2, 5, 5]
         %r: f32[2, 5, 5]
         %y: f32[2, 5, 5]
         %z: f32[2, 5, 6]";
    let scores = "%s = einsum(%q, %k) {equation=\"bld,bmd->blm\"}
         %p = softmax(%s) {axis=2}\n";
    let chained = "%t = einsum(%p, %q) {equation=\"blm,bme->ble\"}
         %r = softmax(%t) {axis=2}
         %z = einsum(%r, %v) {equation=\"ble,bef->blf\"}";
    let chained = chained.replace("%t =", "%t4 =").replace("(%t)", "(%t4)");
    let chained = chained.replace("%r", "%r4").replace("%v", "%v4");
    let more = "\n%t4: f32[2, 5, 4]\n%r4: f32[2, 5, 4]\n%v4: f32[2, 4, 6] input";
    let both = "%t = einsum(%k, %q) {equation=\"bld,bmd->blm\"}
         %r = softmax(%t) {axis=2}
         %y = einsum(%p, %r) {equation=\"blm,bem->ble\"}";
    for (nodes, output) in [(chained.as_str(), "%z"), (both, "%y")] {
        let nodes = format!("{scores}{nodes}");
        let mut graph = text_graph(&format!("{containers}{more}"), &nodes, output);
        let before = models::results(&graph);
        recognize(&mut graph, |_, _| true).expect("its operands fit");
        graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
        let text = graph.to_string();
        assert_eq!(text.matches(" = attention(").count(), 1, "{text}");
        let after = models::results(&graph);
        for (a, b) in before[0].to_f64().iter().zip(after[0].to_f64()) {
            assert!((a - b).abs() < 1e-6, "{a} and {b}");
        }
    }
}

#[test]
fn each_of_these_is_no_attention() {
    let with = |between: &str, after: &str| format!("{SCORES}{between}\n{VALUES}{after}");
    let softmax = "%p = softmax(%s) {axis=3}";
    let cases = [
        ("over the rows", with("%p = softmax(%s) {axis=2}", ""), "%y"),
        ("probabilities are a result", with(softmax, ""), "%y, %p"),
        ("scores are a result", with(softmax, ""), "%y, %s"),
        (
            "probabilities are read again",
            with(softmax, "\n%t = elementwise(%p) {expr=($0 * 2)}"),
            "%y, %t",
        ),
        (
            "a function of the scores",
            with(
                "%t = elementwise(%s) {expr=(tanh($0))}\n%p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "the scores twice",
            with(
                "%t = elementwise(%s, %s) {expr=($0 + $1)}\n%p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "a factor of the mask",
            with(
                "%t = elementwise(%s, %bias) {expr=(($0 + $1) * 2)}
                 %p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "a rounding between",
            with(
                "%h = elementwise(%s) {expr=($0), dtype=bf16}
                 %t = elementwise(%h) {expr=($0), dtype=f32}
                 %p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "hidden by another tensor",
            with(
                "%t = elementwise(%mask, %bias, %s) {expr=(select($0, $1, $2))}
                 %p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "a factor of zero",
            with(
                "%t = elementwise(%s) {expr=($0 * 0)}\n%p = softmax(%t) {axis=3}",
                "",
            ),
            "%y",
        ),
        (
            "two masks",
            with(
                "%t = elementwise(%s, %bias) {expr=($0 + $1)}
                 %u = elementwise(%mask, %t) {expr=(select($0, -inf, $1))}
                 %p = softmax(%u) {axis=3}",
                "",
            ),
            "%y",
        ),
    ];
    for (what, nodes, outputs) in cases {
        let found = after(&nodes, outputs);
        assert!(
            !found.iter().any(|n| n.contains("attention")),
            "{what}: {found:?}"
        );
    }
}
