//! Which texts are shared, and what they are given.

use super::{Own, Purpose, Shared, Templates};
use crate::compile::SourceUnit;
use std::sync::Arc;

const NAME: &str = "NAME";

/// A kernel that multiplies `rows` rows of `columns` numbers by `factor`.
fn scaling(rows: i64, columns: i64, factor: &str) -> String {
    format!(
        "void NAME(void *const *buf, void *scratch, long tid, long nt) {{\n\
         float *x = buf[0];\n\
         float r[{columns}] __attribute__((aligned(64)));\n\
         for (long i = {rows} * tid / nt; i < {rows} * (tid + 1) / nt; ++i) {{\n\
         for (long j = 0; j < {columns}; ++j) r[j] = x[i*{columns} + j] * {factor};\n\
         }}\n}}\n"
    )
}

fn own<'a>(text: &'a str, name: &'a str, symbols: &'a [String]) -> Own<'a> {
    Own {
        text,
        placeholder: NAME,
        name,
        symbols,
        n_buffers: 1,
    }
}

fn unit(name: &str, text: &str) -> SourceUnit {
    SourceUnit {
        name: name.to_string(),
        source: text.to_string(),
        symbols: vec![name.to_string()],
    }
}

fn first(templates: &mut Templates, texts: &[String]) {
    for (i, text) in texts.iter().enumerate() {
        let name = format!("k{i}");
        let file = Arc::new(unit(&name, &text.replace(NAME, &name)));
        templates.keep(&own(text, &name, std::slice::from_ref(&name)), &file);
    }
    templates.close_program();
}

fn share(templates: &mut Templates, text: &str, name: &str) -> Shared {
    let symbols = [name.to_string()];
    templates.share(&own(text, name, &symbols), Purpose::Run, |text| {
        unit(name, text)
    })
}

#[test]
fn the_same_text_is_the_same_unit() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(8, 40, "0.5f")]);
    let shared = share(&mut templates, &scaling(8, 40, "0.5f"), "other");
    assert_eq!(shared.symbols, ["k0"]);
    assert_eq!(shared.values, None);
}

#[test]
fn what_differs_becomes_values_and_serves_a_third_size() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(8, 40, "0.5f")]);
    let second = share(&mut templates, &scaling(8, 57, "0.25f"), "second");
    assert_eq!(second.values, Some(vec![57, i64::from(0.25f32.to_bits())]));
    let text = &second.unit.source;
    assert!(text.contains("sh_values = buf[1];"), "{text}");
    assert!(text.contains("8 * tid / nt"), "rows stay a number: {text}");
    assert!(text.contains("float r[64]"), "room for more: {text}");
    assert!(text.contains("j < ((int)sh_v0)"), "{text}");
    assert!(text.contains("* sh_from_bits((sh_u32)sh_v1)"), "{text}");
    templates.close_program();
    let third = share(&mut templates, &scaling(8, 41, "0.75f"), "third");
    assert_eq!(third.symbols, ["second"]);
    assert_eq!(third.values, Some(vec![41, i64::from(0.75f32.to_bits())]));
    assert_eq!(third.unit, second.unit);
}

#[test]
fn an_array_that_must_be_longer_is_another_text() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(8, 40, "0.5f")]);
    share(&mut templates, &scaling(8, 57, "0.5f"), "second");
    templates.close_program();
    let longer = share(&mut templates, &scaling(8, 65, "0.5f"), "longer");
    assert_eq!(longer.symbols, ["longer"]);
    assert!(longer.unit.source.contains("float r[128]"));
    let again = share(&mut templates, &scaling(8, 100, "0.5f"), "again");
    assert_eq!(again.symbols, ["longer"]);
    let shorter = share(&mut templates, &scaling(8, 41, "0.5f"), "shorter");
    assert_eq!(shorter.symbols, ["second"]);
}

#[test]
fn values_that_were_equal_and_are_not_any_more_part() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(40, 40, "0.5f")]);
    let second = share(&mut templates, &scaling(57, 57, "0.5f"), "second");
    assert_eq!(second.values, Some(vec![57]));
    templates.close_program();
    let third = share(&mut templates, &scaling(8, 60, "0.5f"), "third");
    assert_eq!(third.symbols, ["third"]);
    assert_eq!(third.values, Some(vec![8, 60]));
}

#[test]
fn kernels_of_one_program_that_differ_in_few_numbers_are_one_text() {
    let mut templates = Templates::default();
    first(
        &mut templates,
        &[scaling(8, 40, "0.5f"), scaling(8, 80, "0.5f")],
    );
    share(&mut templates, &scaling(9, 40, "0.5f"), "second");
    let other = share(&mut templates, &scaling(9, 80, "0.5f"), "other");
    assert_eq!(other.symbols, ["other"]);
    assert_eq!(other.values, Some(vec![9, 80]));
    let third = share(&mut templates, &scaling(9, 60, "0.5f"), "third");
    assert_eq!(third.symbols, ["other"]);
    assert_eq!(third.values, Some(vec![9, 60]));
}

#[test]
fn a_foreseen_text_counts_when_a_program_calls_it() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(8, 40, "0.5f")]);
    for (rows, columns) in [(9, 40), (9, 50)] {
        let name = format!("foreseen{columns}");
        let symbols = [name.clone()];
        let text = scaling(rows, columns, "0.5f");
        let own = own(&text, &name, &symbols);
        templates.share(&own, Purpose::Foresee, |text| unit(&name, text));
    }
    assert_eq!(templates.n_texts(), 1);
    // If several texts serve it, the one that serves most other sizes is taken.
    let second = share(&mut templates, &scaling(11, 40, "0.5f"), "second");
    assert_eq!(second.symbols, ["foreseen50"]);
    assert_eq!(second.values, Some(vec![11, 40]));
    assert_eq!(templates.n_texts(), 2);
    share(&mut templates, &scaling(13, 60, "0.5f"), "third");
    assert_eq!(templates.n_texts(), 2, "the third length compiles nothing");
}

#[test]
fn another_text_is_compiled_for_itself() {
    let mut templates = Templates::default();
    first(&mut templates, &[scaling(8, 40, "0.5f")]);
    let text = scaling(8, 40, "0.5f").replace('+', "-");
    let shared = share(&mut templates, &text, "other");
    assert_eq!(shared.symbols, ["other"]);
    assert_eq!(shared.values, None);
    let unrolled = |n: usize| {
        format!(
            "void NAME(void *const *buf, void *scratch, long tid, long nt) {{\n#pragma GCC unroll {n}\nfor (;;) {{}}\n}}\n"
        )
    };
    let mut templates = Templates::default();
    first(&mut templates, &[unrolled(4)]);
    let shared = share(&mut templates, &unrolled(8), "other");
    assert_eq!(
        shared.values, None,
        "a compiler must know how far to unroll"
    );
}

#[test]
fn a_function_that_cannot_take_values_keeps_its_numbers() {
    let mut templates = Templates::default();
    let other = |columns| scaling(8, columns, "0.5f").replace("void *scratch, ", "");
    first(&mut templates, &[other(40)]);
    let shared = share(&mut templates, &other(57), "other");
    assert_eq!(shared.symbols, ["other"]);
    assert_eq!(shared.values, None);
}
