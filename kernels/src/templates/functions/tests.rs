//! Which functions of kernels become one, and how they are called.

use super::{Functions, Piece};

/// A kernel that scales the rows of a matrix by a helper.
fn scaling(rows: i64, columns: i64, factor: &str) -> String {
    format!(
        "static void NAME_scale(float *x, long from, long to) {{\n\
         float r[{columns}] __attribute__((aligned(64)));\n\
         for (long i = from; i < to; ++i) {{\n\
         for (long j = 0; j < {columns}; ++j) r[j] = x[i*{columns} + j] * {factor};\n\
         for (long j = 0; j < {columns}; ++j) x[i*{columns} + j] = r[j] + r[{columns} - 1 - j];\n\
         }}\n}}\n\
         void NAME(void *const *buf, void *scratch, long tid, long nt) {{\n\
         float *x = buf[0];\n\
         /* What this kernel does is told in so many words that a text of its own is worth having. */\n\
         const long from = {rows} * tid / nt, to = {rows} * (tid + 1) / nt;\n\
         (void)scratch;\n\
         NAME_scale(x, from, to);\n\
         }}\n"
    )
}

fn functions(kernels: &[String]) -> Functions {
    let texts: Vec<&str> = kernels.iter().map(String::as_str).collect();
    Functions::new(&texts, "NAME")
}

/// A kernel's text as a file has it.
fn whole(functions: &Functions, kernel: usize) -> String {
    let pieces = functions.kernels[kernel].iter();
    let texts = pieces.map(|piece| match piece {
        Piece::Own(text) => text.as_str(),
        Piece::Shared(id) => functions.shared[*id].as_str(),
    });
    texts.collect()
}

#[test]
fn functions_that_differ_in_numbers_are_one() {
    let functions = functions(&[scaling(8, 400, "0.5f"), scaling(9, 500, "0.25f")]);
    let [helper, kernel] = &functions.shared[..] else {
        panic!("{} texts are shared", functions.shared.len());
    };
    let head = "static __attribute__((noinline)) void shc_scale_0(\
                float *x, long from, long to, const int sh_v0, const float sh_v1) {";
    assert!(helper.starts_with(head), "{helper}");
    assert!(
        helper.contains("float r[500]"),
        "the longest array serves all: {helper}"
    );
    assert!(helper.contains("x[i*sh_v0 + j] * sh_v1"), "{helper}");
    assert!(
        helper.contains("r[sh_v0 - 1 - j]"),
        "equal numbers stay: {helper}"
    );
    assert!(
        kernel.contains("shc_scale_0(x, from, to, sh_v1, sh_v2);"),
        "{kernel}"
    );
    assert!(
        kernel.contains("const long from = sh_v0 * tid / nt"),
        "{kernel}"
    );
    let entry = "void NAME(void *const *buf, void *scratch, long tid, long nt) { \
                 shc_kernel_1(buf, scratch, tid, nt, 9, 500, 0.25f); }";
    assert!(whole(&functions, 1).contains(entry));
}

#[test]
fn kernels_share_what_stands_in_the_same_order() {
    let functions = functions(&[scaling(8, 400, "0.5f"), scaling(9, 500, "0.25f")]);
    let shared = |kernel: usize| -> Vec<usize> {
        let pieces = functions.kernels[kernel].iter();
        let ids = pieces.filter_map(|piece| match piece {
            Piece::Shared(id) => Some(*id),
            Piece::Own(_) => None,
        });
        ids.collect()
    };
    assert_eq!(shared(0), [0, 1]);
    assert_eq!(shared(1), [0, 1]);
}

#[test]
fn short_loops_keep_their_numbers() {
    let functions = functions(&[scaling(8, 40, "0.5f"), scaling(8, 50, "0.5f")]);
    assert!(functions.shared.is_empty(), "{:?}", functions.shared);
    assert_eq!(whole(&functions, 0), scaling(8, 40, "0.5f"));
}

#[test]
fn divisors_of_inner_loops_keep_their_numbers() {
    let wrapped = |n: i64| {
        let text = scaling(8, 400, "0.5f");
        text.replace("x[i*400 + j] * 0.5f", &format!("x[i*400 + j % {n}] * 0.5f"))
    };
    assert!(functions(&[wrapped(7), wrapped(9)]).shared.is_empty());
    assert!(!functions(&[wrapped(7), wrapped(7)]).shared.is_empty());
}

#[test]
fn a_caller_of_a_function_that_stays_stays() {
    let adding = scaling(9, 400, "0.5f").replace("r[j] +", "r[j] -");
    let functions = functions(&[scaling(8, 400, "0.5f"), adding.clone()]);
    assert!(functions.shared.is_empty(), "{:?}", functions.shared);
    assert_eq!(whole(&functions, 1), adding);
}

#[test]
fn inline_functions_and_short_ones_stay() {
    let inline = |columns| {
        let text = scaling(8, columns, "0.5f");
        text.replace("static void", "static inline void")
    };
    let short = |n: i64| format!("static void NAME_f(float *x) {{\n x[0] = {n};\n}}\n");
    assert!(functions(&[inline(400), inline(500)]).shared.is_empty());
    assert!(functions(&[short(400), short(500)]).shared.is_empty());
}

#[test]
fn micro_kernels_are_part_of_a_text() {
    let calling = |name: &str| {
        let text = scaling(8, 400, "0.5f");
        text.replace("float r[400]", &format!("{name}(x);\nfloat r[400]"))
    };
    assert!(
        functions(&[calling("shl_mk01"), calling("shl_mk02")])
            .shared
            .is_empty()
    );
    assert_eq!(
        functions(&[calling("shl_mk01"), calling("shl_mk01")])
            .shared
            .len(),
        2
    );
}
