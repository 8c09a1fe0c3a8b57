//! Each condition of chaining: a case in which it alone refuses, beside one that is accepted.

use super::chain;
use crate::decision::Decision;
use crate::text_graph::graph;
use graph::{Graph, Storage};

/// Operands of attention over `rows` and `columns` in `dtype`, and what lies between.
fn containers(dtype: &str, rows: i64, columns: i64, width: i64) -> String {
    format!(
        "%q: {dtype}[4, {rows}, {width}] input
         %k: {dtype}[4, {columns}, {width}] input
         %v: {dtype}[4, {columns}, {width}] input
         %t: {dtype}[4, {rows}, {columns}]
         %m: {dtype}[4, {rows}]
         %p: {dtype}[4, {rows}, {columns}]
         %o: {dtype}[4, {rows}, {width}]"
    )
}

const POINTS: &str = "b < 4, i < ROWS, j < COLUMNS";
const SCORES: &str = "tasklet %t[b, i, j] (sum) = $0 * $1 from %q[b, i, d], %k[b, j, d]";
const LARGEST: &str = "tasklet %m[b, i] (max) = $0 from %t[b, i, j]";
const POWERS: &str = "tasklet %p[b, i, j] = exp($0 - $1) from %t[b, i, j], %m[b, i]";
const MIXED: &str = "tasklet %o[b, i, e] (sum) = $0 * $1 from %p[b, i, j], %v[b, j, e]";

fn map(params: &str, tasklet: &str) -> String {
    format!("map [{params}] {{ {tasklet} }}\n")
}

/// The four maps of attention and more.
fn attention(more: &str) -> String {
    let wide = format!("{POINTS}, d < WIDTH");
    let out = format!("{POINTS}, e < WIDTH");
    [
        map(&wide, SCORES),
        map(POINTS, LARGEST),
        map(POINTS, POWERS),
        map(&out, MIXED),
        more.to_string(),
    ]
    .concat()
}

fn run(containers: &str, maps: &str, sizes: [i64; 3], outputs: &str) -> (Graph, Vec<Decision>) {
    let [rows, columns, width] = sizes.map(|n| n.to_string());
    let maps = maps.replace("ROWS", &rows).replace("COLUMNS", &columns);
    let maps = maps.replace("WIDTH", &width);
    let mut g = graph(containers, &maps, outputs);
    let nodes = std::mem::take(&mut g.last_state().nodes);
    let mut decisions = Vec::new();
    let nodes = chain(&mut g, nodes, &mut decisions);
    g.last_state().nodes = nodes;
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    (g, decisions)
}

/// The only sentence of what was decided.
fn sentence(dtype: &str, sizes: [i64; 3], more: [&str; 2], outputs: &str) -> String {
    let [rows, columns, width] = sizes;
    let containers = format!("{}\n{}", containers(dtype, rows, columns, width), more[0]);
    let (_, decisions) = run(&containers, &attention(more[1]), sizes, outputs);
    let [decision] = decisions.as_slice() else {
        panic!("{decisions:?}");
    };
    decision.sentence.clone()
}

const SIZES: [i64; 3] = [64, 96, 32];

fn applied(sentence: &str) -> bool {
    sentence.contains("kernels instead of")
}

#[test]
fn attention_is_one_kernel_that_keeps_its_tiles() {
    let (g, decisions) = run(&containers("bf16", 64, 96, 32), &attention(""), SIZES, "%o");
    let nodes = &g.single_state().expect("one state").nodes;
    assert_eq!(nodes.len(), 1);
    let is_local = |name| g.container(g.find(name).expect(name)).storage == Storage::Local;
    assert!(["t", "p", "m"].into_iter().all(is_local));
    let [decision] = decisions.as_slice() else {
        panic!("{decisions:?}");
    };
    // t and p stored and read, t once more by the sum over rows in the same kernel: three kernels'
    // 64 x 96 tiles, four accesses; m once.
    let tiles = 4 * 4 * 64 * 96 * 2;
    assert_eq!(decision.bytes, tiles + 4 * 64 * 2);
    assert!(decision.applied);
}

#[test]
fn what_is_used_again_is_computed_again() {
    let more = [
        "%g: f16[4, 64, 32] input
         %w: f16[4, 96, 32]",
        "map [b < 4, i < 64, j < 96, e < 32] {
           tasklet %w[b, j, e] (sum) = $0 * $1 from %p[b, i, j], %g[b, i, e]
         }",
    ];
    let containers = format!("{}\n{}", containers("f16", 64, 96, 32), more[0]);
    let (g, decisions) = run(&containers, &attention(more[1]), SIZES, "%o, %w");
    assert!(decisions.iter().all(|d| d.applied), "{decisions:?}");
    let nodes = &g.single_state().expect("one state").nodes;
    assert_eq!(nodes.len(), 2);
    let m = g.container(g.find("m").expect("m"));
    assert_eq!((m.storage, m.dtype), (Storage::Global, graph::DType::F32));
    let locals = g.containers.iter().filter(|c| c.storage == Storage::Local);
    let names: Vec<&str> = locals.map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["t", "p", "t_1", "p_1"]);
}

#[test]
fn a_result_of_the_graph_is_stored() {
    let told = sentence("bf16", SIZES, ["", ""], "%o, %p");
    assert_eq!(told, "is not chained: `p` is a result of the graph");
}

#[test]
fn tiles_are_used_at_their_points_only() {
    let other = |index: &str| {
        let map =
            format!("map [b < 4, i < 64, j < 96] {{ tasklet %y[b, i, j] = $0 from %p[{index}] }}");
        sentence("bf16", SIZES, ["%y: bf16[4, 64, 96]", &map], "%o, %y")
    };
    let turned = other("b, 63 - i, j");
    assert!(
        turned.contains("uses `p` neither point by point"),
        "{turned}"
    );
    // Point by point, but then it is a tile that is stored.
    assert!(other("b, i, j").contains("`y` is a result"));
    let both = "map [b < 4, i < 64, j < 96] { tasklet %y[b] (sum) = $0 from %p[b, i, j] }";
    let both = sentence("bf16", SIZES, ["%y: bf16[4]", both], "%o, %y");
    assert!(both.contains("neither point by point"), "{both}");
    let rows = "map [b < 4, i < 64, j < 96] { tasklet %y[b, i] (sum) = $0 from %p[b, i, j] }";
    assert!(applied(&sentence(
        "bf16",
        SIZES,
        ["%y: f32[4, 64]", rows],
        "%o, %y"
    )));
}

#[test]
fn factors_have_sixteen_bits() {
    assert!(applied(&sentence("f16", SIZES, ["", ""], "%o")));
    let told = sentence("f32", SIZES, ["", ""], "%o");
    assert_eq!(
        told,
        "is not chained: its factors have no common type of 16 bits"
    );
}

#[test]
fn lines_are_whole_vectors_and_few() {
    for (width, fits) in [(128, true), (136, false), (24, true), (20, false)] {
        let told = sentence("bf16", [256, 256, width], ["", ""], "%o");
        assert_eq!(applied(&told), fits, "{width}: {told}");
        assert!(fits || told.contains("numbers side by side"), "{told}");
    }
}

#[test]
fn lines_lie_side_by_side() {
    let turned =
        containers("bf16", 64, 96, 32).replace("%k: bf16[4, 96, 32]", "%k: bf16[4, 32, 96]");
    let maps = attention("").replace("%k[b, j, d]", "%k[b, d, j]");
    let (_, decisions) = run(&turned, &maps, SIZES, "%o");
    let told = &decisions[0].sentence;
    assert!(told.contains("`k` does not hold side by side"), "{told}");
}

#[test]
fn lines_may_be_parts_of_longer_ones() {
    for (first, fits) in [(32, true), (36, false)] {
        let stacked =
            containers("bf16", 64, 96, 32).replace("%k: bf16[4, 96, 32]", "%k: bf16[4, 96, 96]");
        let maps = attention("").replace("%k[b, j, d]", &format!("%k[b, j, d + {first}]"));
        let (_, decisions) = run(&stacked, &maps, SIZES, "%o");
        let told = &decisions[0].sentence;
        assert_eq!(applied(told), fits, "{told}");
        assert!(
            fits || told.contains("`k` does not hold side by side"),
            "{told}"
        );
    }
}

#[test]
fn products_have_common_rows() {
    // Of the second product the batch is the first one's rows.
    let more = "%x: bf16[64, 4, 32] input
         %u: bf16[64, 96, 32] input
         %s: bf16[4, 64, 96]";
    let second = "map [b < 4, i < 64, j < 96, d < 32] {
        tasklet %s[b, i, j] (sum) = $0 * $1 from %x[i, b, d], %u[i, j, d]
      }";
    let containers = format!("{}\n{more}", containers("bf16", 64, 96, 32));
    let maps = format!("{second}\n{}", attention(""));
    let maps = maps.replace(
        "exp($0 - $1) from %t[b, i, j], %m[b, i]",
        "exp($0 - $1) + $2 from %t[b, i, j], %m[b, i], %s[b, i, j]",
    );
    let (_, decisions) = run(&containers, &maps, SIZES, "%o");
    let told = &decisions[0].sentence;
    assert_eq!(
        told,
        "is not chained: its products do not have the same rows and columns"
    );
}

#[test]
fn tiles_are_not_small() {
    assert!(applied(&sentence("bf16", [16, 96, 8], ["", ""], "%o")));
    let told = sentence("bf16", [15, 96, 8], ["", ""], "%o");
    assert_eq!(
        told,
        "is not chained: tiles of 15 x 96 numbers are too small"
    );
}

#[test]
fn blocks_share_the_columns() {
    assert!(applied(&sentence("bf16", [64, 256, 8], ["", ""], "%o")));
    let told = sentence("bf16", [64, 264, 8], ["", ""], "%o");
    assert_eq!(
        told,
        "is not chained: 4 blocks of threads would each go over 264 columns"
    );
}

#[test]
fn nothing_runs_between() {
    let between = |read: &str| {
        let more = "%n: bf16[4, 64]";
        let maps = attention("map [b < 4, i < 64] { tasklet %n[b, i] = $0 * 2.0 from %m[b, i] }");
        let containers = format!("{}\n{more}", containers("bf16", 64, 96, 32));
        // In an order in which producers come first.
        let mut lines: Vec<&str> = maps.lines().collect();
        let last = lines.pop().expect("a line");
        lines.insert(2, last);
        let maps = lines.join("\n").replace("%t[b, i, j], %m[b, i]", read);
        let (_, decisions) = run(&containers, &maps, SIZES, "%o, %n");
        decisions[0].sentence.clone()
    };
    assert!(applied(&between("%t[b, i, j], %m[b, i]")));
    let told = between("%t[b, i, j], %n[b, i]");
    assert_eq!(
        told,
        "is not chained: another kernel must run between its parts"
    );
}

#[test]
fn operands_are_smaller_than_tiles() {
    // Backward alone reads its operands once more for each kernel.
    let more = |n: usize| {
        let mut containers = String::new();
        let mut maps = String::new();
        for k in 0..n {
            containers += &format!("%g{k}: bf16[4, 16, 128] input\n%w{k}: bf16[4, 16, 128]\n");
            maps += &format!(
                "map [b < 4, i < 16, j < 16, e < 128] {{
                   tasklet %w{k}[b, j, e] (sum) = $0 * $1 from %p[b, i, j], %g{k}[b, i, e]
                 }}\n"
            );
        }
        let outputs: Vec<String> = (0..n).map(|k| format!("%w{k}")).collect();
        let outputs = format!("%o, {}", outputs.join(", "));
        sentence("bf16", [16, 16, 128], [&containers, &maps], &outputs)
    };
    let told = more(1);
    assert!(told.contains("would move"), "{told}");
}
