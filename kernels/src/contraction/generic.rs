//! The plain-loop fallback: correct for every contraction, fast for none.

use super::text::{CText, Vector, affine, preamble};
use super::{
    Axis, Contraction, ContractionTarget, EmittedContraction, Launch, NoFastForm, Operand, Roles,
    ScalarCost, flops,
};

/// Emits plain loops. Threads divide a dim that indexes the output by itself; without one,
/// thread 0 does all the work.
pub fn emit(
    name: &str,
    c: &Contraction,
    reason: NoFastForm,
    target: &ContractionTarget,
) -> EmittedContraction {
    let mut t = CText::default();
    t.raw(&preamble(Vector::new(c.element, 4)));
    let number = c.element.c_type();
    let split = split_dim(c);
    let zero = format!("{name}_zero");
    zero_launch(&mut t, &zero, c);
    t.line(format!(
        "void {name}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line("(void)scratch;");
    t.line(format!(
        "const {number} *A = buf[0], *B = buf[1]; {number} *O = buf[2];"
    ));
    for (d, size) in c.dims.iter().enumerate() {
        if Some(d) == split {
            t.line(format!(
                "for (long d{d} = {size}L*tid/nt; d{d} < {size}L*(tid + 1)/nt; d{d}++) {{"
            ));
        } else {
            t.line(format!("for (long d{d} = 0; d{d} < {size}L; d{d}++) {{"));
        }
    }
    if split.is_none() {
        t.line("if (tid != 0) return; (void)nt;");
    }
    for op in [&c.a, &c.b, &c.out] {
        for ax in op.axes.iter().filter(|ax| ax.guarded) {
            t.line(format!(
                "{{ long v = {}; if (v < 0 || v >= {}L) continue; }}",
                position(ax),
                ax.size
            ));
        }
    }
    t.line(format!(
        "O[{}] += A[{}]*B[{}];",
        address(&c.out),
        address(&c.a),
        address(&c.b)
    ));
    t.close(c.dims.len() + 1);
    EmittedContraction {
        source: t.finish(),
        launches: [zero, name.to_string()]
            .map(|symbol| Launch { symbol })
            .to_vec(),
        shared_scratch_bytes: 0,
        thread_scratch_bytes: 0,
        flops: flops(c),
        predicted_ns: 1000 * ScalarCost::new(flops(c), target).predicted_us,
        path: "generic",
        products: c.element.dtype(),
        refusal: Some(reason),
        takes_prologues: false,
        cuts: None,
        choices: Vec::new(),
        sum_slots: 0,
        finishes_in_blocks: false,
        pitch: None,
        roles: Roles::default(),
    }
}

fn split_dim(c: &Contraction) -> Option<usize> {
    let alone = |d: usize| {
        let with: Vec<&Axis> = c
            .out
            .axes
            .iter()
            .filter(|ax| ax.terms.iter().any(|t| t.0 == d))
            .collect();
        with.len() == 1 && with[0].terms.len() == 1 && with[0].terms[0].1 != 0
    };
    (0..c.dims.len())
        .filter(|&d| alone(d))
        .max_by_key(|&d| c.dims[d])
}

fn position(ax: &Axis) -> String {
    let terms: Vec<(String, i64)> = ax
        .terms
        .iter()
        .map(|&(d, k)| (format!("d{d}"), k))
        .collect();
    affine(&terms, ax.offset)
}

fn address(op: &Operand) -> String {
    let terms: Vec<(String, i64)> = op
        .axes
        .iter()
        .map(|ax| (format!("({})", position(ax)), ax.stride))
        .collect();
    affine(&terms, op.base)
}

fn zero_launch(t: &mut CText, symbol: &str, c: &Contraction) {
    let out = &c.out;
    t.line(format!(
        "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line(format!(
        "(void)scratch; (void)nt; if (tid != 0) return; {} *O = buf[2];",
        c.element.c_type()
    ));
    let mut terms = Vec::new();
    for (i, ax) in out.axes.iter().enumerate() {
        t.line(format!(
            "for (long x{i} = 0; x{i} < {}L; x{i}++) {{",
            ax.size
        ));
        terms.push((format!("x{i}"), ax.stride));
    }
    t.line(format!("O[{}] = 0.0f;", affine(&terms, out.base)));
    t.close(out.axes.len() + 1);
}
