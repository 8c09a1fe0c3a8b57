//! The C text of the transforms of F(2×2, 3×3). Each is a function of vectors, or of a few numbers, in scratch; none knows
//! where tiles lie.

use crate::contraction::text::{CText, Vector};

/// `Bᵀ d B` of a tile of 4×4 positions `d`, for `channels` numbers of each: `NAME(r0, r1, r2, r3, q, v)` reads the
/// position (i, j) at `ri + j*q`, and writes element `n` of a channel `c` at `v + n*POINT + place(c)`.
pub(super) fn image(
    t: &mut CText,
    name: &str,
    vector: Vector,
    channels: i64,
    point: i64,
    place: &dyn Fn(&str) -> String,
) {
    let (number, vf) = (vector.element.c_type(), vector.c_type());
    t.line(format!(
        "static __attribute__((noinline)) void {name}(const {number} *r0, const {number} *r1, \
         const {number} *r2, const {number} *r3, long q, {number} *v) {{"
    ));
    t.line(format!(
        "for (long c = 0; c < {channels}L; c += {}L) {{",
        vector.lanes
    ));
    for i in 0..4 {
        let read = |j: usize| format!("d{i}{j} = *(const {vf} *)(r{i} + {j}*q + c)");
        let all: Vec<String> = (0..4).map(read).collect();
        t.line(format!("const {vf} {};", all.join(", ")));
    }
    for j in 0..4 {
        t.line(format!(
            "const {vf} e0{j} = d0{j} - d2{j}, e1{j} = d1{j} + d2{j}, e2{j} = d2{j} - d1{j}, e3{j} = d1{j} - d3{j};"
        ));
    }
    t.line(format!("{number} *o = v + {};", place("c")));
    for i in 0..4 {
        let terms = ["e{}0 - e{}2", "e{}1 + e{}2", "e{}2 - e{}1", "e{}1 - e{}3"];
        for (j, term) in terms.into_iter().enumerate() {
            let at = (4 * i as i64 + j as i64) * point;
            let value = term.replace("{}", &i.to_string());
            t.line(format!("*({vf} *)(o + {at}L) = {value};"));
        }
    }
    t.close(2);
}

/// `Aᵀ m A` of one tile: declares `s00`, `s01`, `s10` and `s11` from vectors at `m + n*POINT`.
pub(super) fn results(t: &mut CText, vector: Vector, m: &str, point: i64) {
    let vf = vector.c_type();
    for j in 0..4 {
        let read = |i: i64| format!("m{i} = *(const {vf} *)({m} + {}L)", (4 * i + j) * point);
        let all: Vec<String> = (0..4).map(read).collect();
        t.line(format!("{vf} f0{j}, f1{j};"));
        t.line("{");
        t.line(format!("const {vf} {};", all.join(", ")));
        t.line(format!("f0{j} = m0 + m1 + m2; f1{j} = m1 - m2 - m3;"));
        t.line("}");
    }
    for i in 0..2 {
        t.line(format!(
            "const {vf} s{i}0 = f{i}0 + f{i}1 + f{i}2, s{i}1 = f{i}1 - f{i}2 - f{i}3;"
        ));
    }
}

/// `A s Aᵀ` of a tile of 2×2 gradients `s00` to `s11`, to vectors at `z + n*POINT`.
pub(super) fn result_gradients(t: &mut CText, vector: Vector, z: &str, point: i64) {
    let vf = vector.c_type();
    for j in 0..2 {
        t.line(format!(
            "const {vf} f0{j} = s0{j}, f1{j} = s0{j} + s1{j}, f2{j} = s0{j} - s1{j}, f3{j} = -s1{j};"
        ));
    }
    for i in 0..4 {
        let values = [
            format!("f{i}0"),
            format!("f{i}0 + f{i}1"),
            format!("f{i}0 - f{i}1"),
            format!("-f{i}1"),
        ];
        for (j, value) in values.into_iter().enumerate() {
            let at = (4 * i + j as i64) * point;
            t.line(format!("*({vf} *)({z} + {at}L) = {value};"));
        }
    }
}

/// `G g Gᵀ` of filters of 3×3 taps, the vectors `*(g + (3*i + j)*STEP)`, to vectors at `u + n*POINT`.
pub(super) fn filter(t: &mut CText, vector: Vector, (g, step): (&str, i64), u: &str, point: i64) {
    let (number, vf) = (vector.element.c_type(), vector.c_type());
    t.line(format!("const {number} h = 0.5f;"));
    for j in 0..3 {
        t.line(format!("{vf} f0{j}, f1{j}, f2{j}, f3{j};"));
        t.line("{");
        let read = |i: i64| format!("g{i} = *(const {vf} *)({g} + {}L)", (3 * i + j) * step);
        let all: Vec<String> = (0..3).map(read).collect();
        t.line(format!("const {vf} {}, sum = g0 + g2;", all.join(", ")));
        t.line(format!(
            "f0{j} = g0; f1{j} = (sum + g1)*h; f2{j} = (sum - g1)*h; f3{j} = g2;"
        ));
        t.line("}");
    }
    for i in 0..4 {
        t.line(format!("const {vf} sum{i} = f{i}0 + f{i}2;"));
        let values = [
            format!("f{i}0"),
            format!("(sum{i} + f{i}1)*h"),
            format!("(sum{i} - f{i}1)*h"),
            format!("f{i}2"),
        ];
        for (j, value) in values.into_iter().enumerate() {
            let at = (4 * i + j as i64) * point;
            t.line(format!("*({vf} *)({u} + {at}L) = {value};"));
        }
    }
}

/// `Gᵀ s G` of the vectors `s0` to `s15`, to vectors at `g + (3*i + j)*STEP`.
pub(super) fn filter_gradient(t: &mut CText, vector: Vector, g: &str, step: i64) {
    let (number, vf) = (vector.element.c_type(), vector.c_type());
    t.line(format!("const {number} h = 0.5f;"));
    for j in 0..4 {
        let at = |i: usize| format!("s{}", 4 * i + j);
        let (a, b, c, d) = (at(0), at(1), at(2), at(3));
        t.line(format!(
            "const {vf} t{j} = ({b} + {c})*h, f0{j} = {a} + t{j}, f1{j} = ({b} - {c})*h, f2{j} = t{j} + {d};"
        ));
    }
    for i in 0..3 {
        t.line(format!("const {vf} r{i} = (f{i}1 + f{i}2)*h;"));
        let values = [
            format!("f{i}0 + r{i}"),
            format!("(f{i}1 - f{i}2)*h"),
            format!("r{i} + f{i}3"),
        ];
        for (j, value) in values.into_iter().enumerate() {
            let at = (3 * i + j as i64) * step;
            t.line(format!("*({vf} *)({g} + {at}L) = {value};"));
        }
    }
}
