//! Each condition of chaining: a case in which it alone refuses, beside one that is accepted.

use super::chain;
use crate::decision::Decision;
use graph::{Bindings, DType, Graph, NoLibrary, Precision, Recipe, Storage, Tensor, interpret};
use models::text_graph as graph;

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

/// The four maps of attention, then `more`.
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
    let nodes = chain(&mut g, nodes, &Recipe::default(), &mut decisions);
    g.last_state().nodes = nodes;
    graph::verify(&g).unwrap_or_else(|e| panic!("{e:?}\n{g}"));
    (g, decisions)
}

/// Like [`run`], and checks that the results are the same.
fn run_and_compare(containers: &str, maps: &str, outputs: &str) -> (Graph, Vec<Decision>) {
    let before = graph(containers, maps, outputs);
    let (after, decisions) = run(containers, maps, [0; 3], outputs);
    let value = |id: &graph::ContainerId| {
        let c = before.container(*id);
        let shape: Vec<usize> = (c.shape.iter())
            .map(|n| n.as_const().expect("constant") as usize)
            .collect();
        let unit = |i| f64::from(graph::philox::uniform(u64::from(id.0), i as u64)) - 0.5;
        let data = (0..shape.iter().product()).map(unit).collect();
        Tensor::from_f64(c.dtype, &shape, data)
    };
    let given: Vec<Tensor> = before.inputs.iter().map(value).collect();
    let results = |g: &Graph| {
        let none = Bindings::new();
        let all = interpret(g, &given, &none, &NoLibrary, Precision::Double);
        all.unwrap_or_else(|e| panic!("{e}\n{g}"))
    };
    for (a, b) in results(&before).iter().zip(results(&after)) {
        for (a, b) in a.to_f64().iter().zip(b.to_f64()) {
            assert!((a - b).abs() <= 1e-9 * (1.0 + a.abs()), "{a} {b}\n{after}");
        }
    }
    (after, decisions)
}

fn storage(g: &Graph, name: &str) -> Storage {
    g.container(g.find(name).expect(name)).storage
}

/// The only sentence of what was decided.
fn sentence(dtype: &str, sizes: [i64; 3], more: [&str; 2], outputs: &str) -> String {
    let [rows, columns, width] = sizes;
    let containers = format!("{}\n{}", containers(dtype, rows, columns, width), more[0]);
    let (_, decisions) = run(&containers, &attention(more[1]), sizes, outputs);
    let [decision] = decisions.as_slice() else {
        panic!("{decisions:?}");
    };
    decision.sentence()
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
    // Four accesses of tiles of 64 x 96 are saved: t and p stored and read (the sum over rows reads t in the same
    // kernel). So is one access of m.
    let tiles = 4 * 4 * 64 * 96 * 2;
    assert_eq!(decision.bytes, tiles + 4 * 64 * 2);
    assert!(decision.is_applied());
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
    assert!(decisions.iter().all(|d| d.is_applied()), "{decisions:?}");
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
    for (result, locals) in [("p", ["t", "m"]), ("t", ["p", "m"])] {
        let outputs = format!("%o, %{result}");
        let maps = attention("").replace("ROWS", "32").replace("COLUMNS", "32");
        let maps = maps.replace("WIDTH", "8");
        let (g, decisions) = run_and_compare(&containers("bf16", 32, 32, 8), &maps, &outputs);
        assert_eq!(storage(&g, result), Storage::Global);
        assert!(
            locals.iter().all(|n| storage(&g, n) == Storage::Local),
            "{g}"
        );
        assert!(decisions[0].sentence().ends_with("store 1 of them besides"));
        assert_eq!(g.single_state().expect("one state").nodes.len(), 1);
    }
}

/// A unit beside attention over 32 x 32 numbers; these are stored for the unit.
fn beside(container: &str, unit: &str) -> (Graph, Vec<Decision>) {
    let containers = format!("{}\n{container}", containers("bf16", 32, 32, 8));
    let unit = format!("map [b < 4, i < 32, j < 32] {{ tasklet {unit} }}");
    let maps = attention(&unit)
        .replace("ROWS", "32")
        .replace("COLUMNS", "32");
    run_and_compare(&containers, &maps.replace("WIDTH", "8"), "%o, %y")
}

#[test]
fn tiles_that_are_used_at_other_points_are_stored() {
    for (container, unit) in [
        (
            "%y: bf16[4, 32, 32]",
            "%y[b, i, j] = $0 from %p[b, 31 - i, j]",
        ),
        ("%y: bf16[4, 32, 32]", "%y[b, i, j] = $0 from %p[b, j, i]"),
        ("%y: f32[4]", "%y[b] (sum) = $0 from %p[b, i, j]"),
        ("%y: f32[32, 32]", "%y[i, j] (sum) = $0 from %p[b, i, j]"),
    ] {
        let (g, decisions) = beside(container, unit);
        assert!(applied(&decisions[0].sentence()), "{decisions:?}");
        assert_eq!(storage(&g, "p"), Storage::Global, "{unit}");
        assert_eq!(storage(&g, "t"), Storage::Local, "{unit}");
    }
    // A sum over rows needs no memory, nor another tile that is a result.
    let (g, _) = beside("%y: f32[4, 32]", "%y[b, i] (sum) = $0 from %p[b, i, j]");
    assert_eq!(storage(&g, "p"), Storage::Local);
    let (g, _) = beside("%y: bf16[4, 32, 32]", "%y[b, i, j] = $0 from %p[b, i, j]");
    assert_eq!(storage(&g, "p"), Storage::Local);
}

/// A sum over rows of one tile and over columns of another one can have only one of them in registers.
#[test]
fn sums_along_different_dimensions_read_memory() {
    let (g, _) = beside(
        "%y: f32[4, 32]",
        "%y[b, i] (sum) = $0 * $1 from %p[b, i, j], %t[b, j, i]",
    );
    assert_eq!([storage(&g, "p"), storage(&g, "t")], [Storage::Global; 2]);
}

#[test]
fn values_that_are_summed_over_the_batch_are_one_tile() {
    let (g, decisions) = beside(
        "%y: bf16[32, 32]",
        "%y[i, j] (sum) = $0 * ($1 - $2) from %p[b, i, j], %t[b, i, j], %m[b, i]",
    );
    assert!(
        decisions[0].sentence().ends_with("store 1 of them besides"),
        "{decisions:?}"
    );
    assert_eq!([storage(&g, "p"), storage(&g, "t")], [Storage::Local; 2]);
    // What is summed is rounded once, behind the sum.
    let y = g.find("y").expect("y");
    let nodes = &g.single_state().expect("one state").nodes;
    let sum = nodes
        .iter()
        .find(|n| n.writes().contains(&y))
        .expect("a sum");
    let terms: Vec<DType> = sum
        .reads()
        .iter()
        .map(|id| g.container(*id).dtype)
        .collect();
    assert_eq!(
        (terms, g.container(y).dtype),
        (vec![DType::F32], DType::BF16)
    );
}

#[test]
fn products_use_tiles_at_the_same_points() {
    let with = |point: &str| {
        let maps = attention("").replace("ROWS", "32").replace("COLUMNS", "32");
        let maps = maps.replace("WIDTH", "8").replace(
            "map [b < 4, i < 32, j < 32, e < 8] { tasklet %o[b, i, e] (sum) = $0 * $1 from %p",
            &format!(
                "map [b < 4, i < 32, j < 32] {{ tasklet %y[b, i, j] = $0 + $1 from %p[b, i, j], %t[{point}] }}
                 map [b < 4, i < 32, j < 32, e < 8] {{ tasklet %o[b, i, e] (sum) = $0 * $1 from %y"
            ),
        );
        let containers = format!("{}\n%y: bf16[4, 32, 32]", containers("bf16", 32, 32, 8));
        run_and_compare(&containers, &maps, "%o").1[0].sentence()
    };
    assert!(applied(&with("b, i, j")));
    let told = with("b, j, i");
    assert!(told.contains("at different points"), "{told}");
}

/// A stage without sums has no kernel that could store a tile.
#[test]
fn a_kernel_of_the_same_stage_stores() {
    let told = |stage: &str| {
        let maps = format!(
            "map [b < 4, i < 32, j < 32, d < 8] {{ {SCORES} }}
             map [b < 4, i < 32, j < 32] {{ tasklet %p[b, i, j] = exp($0) from %t[b, i, j] }}
             map [b < 4, i < 32, j < 32, e < 8]{stage} {{ {MIXED}{stage} }}"
        );
        let (_, decisions) = run(&containers("bf16", 32, 32, 8), &maps, [0; 3], "%o, %p");
        decisions[0].sentence()
    };
    assert!(applied(&told("")));
    assert_eq!(
        told(" !backward"),
        "is not chained: `p` is read from memory, and no kernel of its pass makes it"
    );
}

/// Heads of queries that share two heads of keys: forward, and the values' gradient.
fn shared_heads(length: i64, shared: i64) -> (Graph, Vec<Decision>) {
    let containers = "%q: bf16[1, 2, R, L, 8] input
         %k: bf16[1, 2, L, 8] input
         %v: bf16[1, 2, L, 8] input
         %g: bf16[1, 2, R, L, 8] input
         %t: bf16[1, 2, R, L, L]
         %m: bf16[1, 2, R, L]
         %p: bf16[1, 2, R, L, L]
         %o: bf16[1, 2, R, L, 8]
         %w: bf16[1, 2, R, L, 8]
         %y: bf16[1, 2, L, 8]";
    let maps = "map [h < 2, r < R, i < L, j < L, d < 8] {
           tasklet %t[0, h, r, i, j] (sum) = $0 * $1 from %q[0, h, r, i, d], %k[0, h, j, d]
         }
         map [h < 2, r < R, i < L, j < L] {
           tasklet %m[0, h, r, i] (max) = $0 from %t[0, h, r, i, j]
         }
         map [h < 2, r < R, i < L, j < L] {
           tasklet %p[0, h, r, i, j] = exp($0 - $1) from %t[0, h, r, i, j], %m[0, h, r, i]
         }
         map [h < 2, r < R, i < L, j < L, e < 8] {
           tasklet %o[0, h, r, i, e] (sum) = $0 * $1 from %p[0, h, r, i, j], %v[0, h, j, e]
         }
         map [h < 2, r < R, i < L, j < L, e < 8] !backward {
           tasklet %w[0, h, r, j, e] (sum) = $0 * $1 from %p[0, h, r, i, j], %g[0, h, r, i, e] !backward
         }
         map [h < 2, r < R, j < L, e < 8] !backward {
           tasklet %y[0, h, j, e] (sum) = $0 from %w[0, h, r, j, e] !backward
         }";
    let sized = |text: &str| {
        text.replace('L', &length.to_string())
            .replace('R', &shared.to_string())
    };
    run_and_compare(&sized(containers), &sized(maps), "%o, %y")
}

#[test]
fn heads_share_keys() {
    let (g, decisions) = shared_heads(48, 2);
    assert!(decisions.iter().all(|d| d.is_applied()), "{decisions:?}");
    let nodes = &g.single_state().expect("one state").nodes;
    assert_eq!(nodes.len(), 2, "{g}");
    let w = g.find("w").expect("w");
    assert!(nodes.iter().all(|n| !n.writes().contains(&w)));
}

/// A block for each head of keys would run over the columns of four heads of queries. So each head of queries has
/// blocks of its own, and the sum of their results is a unit of its own.
#[test]
fn heads_that_share_keys_leave_enough_blocks() {
    let nodes = |shared| {
        let (g, decisions) = shared_heads(64, shared);
        assert!(decisions.iter().all(|d| d.is_applied()), "{decisions:?}");
        g.single_state().expect("one state").nodes.len()
    };
    assert_eq!([nodes(2), nodes(4)], [2, 3]);
}

#[test]
fn factors_have_the_tiles_type() {
    let told = |p: &str| {
        let containers = containers("bf16", 64, 96, 32).replace("%p: bf16", &format!("%p: {p}"));
        let (_, decisions) = run(&containers, &attention(""), SIZES, "%o");
        decisions[0].sentence()
    };
    assert!(applied(&told("bf16")));
    assert!(
        told("f32").contains("`p` is f32; tiles are"),
        "{}",
        told("f32")
    );
    let wide = |name: &str| {
        let from = format!("%{name}: bf16");
        let containers = containers("bf16", 64, 96, 32).replace(&from, &format!("%{name}: f64"));
        let (_, decisions) = run(&containers, &attention(""), SIZES, "%o");
        decisions[0].sentence()
    };
    assert!(wide("t").contains("`t` is f64"), "{}", wide("t"));
    assert!(wide("m").contains("`m` is f64"), "{}", wide("m"));
}

#[test]
fn kernels_keep_few_results_together() {
    let with = |n: usize| {
        let (mut more, mut maps, mut outputs) = (String::new(), String::new(), String::from("%o"));
        for k in 1..n {
            more += &format!("%v{k}: bf16[4, 96, 128] input\n%o{k}: bf16[4, 64, 128]\n");
            maps += &format!(
                "map [b < 4, i < 64, j < 96, e < 128] {{
                   tasklet %o{k}[b, i, e] (sum) = $0 * $1 from %p[b, i, j], %v{k}[b, j, e]
                 }}\n"
            );
            outputs += &format!(", %o{k}");
        }
        sentence("bf16", [64, 96, 128], [&more, &maps], &outputs)
    };
    assert!(applied(&with(2)), "{}", with(2));
    assert_eq!(
        with(3),
        "is not chained: its results are 384 numbers wide together; kernels keep up to 256"
    );
}

/// The result of a reshape shares the memory of its operand, and with it the type.
#[test]
fn numbers_that_reshapes_share_keep_their_type() {
    let with = |more: [&str; 2], outputs: &str| {
        let containers = format!("{}\n{}", containers("bf16", 64, 96, 32), more[0]);
        let (g, decisions) = run(&containers, &attention(more[1]), SIZES, outputs);
        assert!(decisions.iter().all(|d| d.is_applied()), "{decisions:?}");
        let m = g.container(g.find("m").expect("m"));
        (m.dtype, m.storage)
    };
    let read = "map [b < 4, i < 64] { tasklet %n[b, i] = $0 from %m[b, i] }";
    assert_eq!(with(["", ""], "%o"), (DType::F32, Storage::Local));
    assert_eq!(
        with(["%n: bf16[4, 64]", read], "%o, %n"),
        (DType::F32, Storage::Global)
    );
    let reshape = "%n = reshape(%m) {shape=sizes[256]}";
    assert_eq!(
        with(["%n: bf16[256]", reshape], "%o, %n"),
        (DType::BF16, Storage::Global)
    );
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
    let told = decisions[0].sentence();
    assert!(told.contains("`k` does not hold side by side"), "{told}");
}

#[test]
fn lines_may_be_parts_of_longer_ones() {
    for (first, fits) in [(32, true), (36, false)] {
        let stacked =
            containers("bf16", 64, 96, 32).replace("%k: bf16[4, 96, 32]", "%k: bf16[4, 96, 96]");
        let maps = attention("").replace("%k[b, j, d]", &format!("%k[b, j, d + {first}]"));
        let (_, decisions) = run(&stacked, &maps, SIZES, "%o");
        let told = decisions[0].sentence();
        assert_eq!(applied(&told), fits, "{told}");
        assert!(
            fits || told.contains("`k` does not hold side by side"),
            "{told}"
        );
    }
}

#[test]
fn products_have_common_rows() {
    // The batch of the second product is the rows of the first one.
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
    let told = decisions[0].sentence();
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
        // Reorders the maps so that producers come first.
        let mut lines: Vec<&str> = maps.lines().collect();
        let last = lines.pop().expect("a line");
        lines.insert(2, last);
        let maps = lines.join("\n").replace("%t[b, i, j], %m[b, i]", read);
        let (_, decisions) = run(&containers, &maps, SIZES, "%o, %n");
        decisions[0].sentence()
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
