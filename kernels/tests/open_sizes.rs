//! Contractions of other sizes of a model: from the second size on their texts differ only in constants, and compute
//! the definition for every size.

#![allow(unsafe_code)]

mod contraction_cases;
mod contraction_checks;

use contraction_cases::{Conv, matmul};
use contraction_checks::{Case, Number, check_emitted, target};
use kernels::contraction::{Contraction, Hooks, PriorPlans, emit};

/// A text without its numbers, names of micro-kernels counted.
fn shape(text: &str) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut found = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("/*") {
            rest = &rest[rest.find("*/").expect("an end") + 2..];
        } else if c.is_ascii_alphabetic() || c == '_' {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let (word, more) = rest.split_at(end.unwrap_or(rest.len()));
            match word.to_lowercase().strip_prefix("shl_mk") {
                Some(hash) => {
                    let at = names.iter().position(|n| n == hash).unwrap_or(names.len());
                    if at == names.len() {
                        names.push(hash.to_string());
                    }
                    found += &format!("@{at}");
                }
                None => found += word,
            }
            rest = more;
        } else if c.is_ascii_digit() {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.');
            found.push('#');
            rest = &rest[end.unwrap_or(rest.len())..];
        } else {
            found.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    found
}

/// Emits all sizes of a contraction in that order, each with what the earlier ones decided. From the second size
/// on, at most `n_texts` texts may differ in more than numbers.
fn check<T: Number>(name: &str, vw: i64, sizes: Vec<(String, Contraction)>, n_texts: usize) {
    let mut known = PriorPlans::default();
    let mut ready = Vec::new();
    let mut shapes: Vec<(String, String)> = Vec::new();
    for (i, (label, mut contraction)) in sizes.into_iter().enumerate() {
        contraction.element = T::ELEMENT;
        let mut target = target(vw);
        target.known = known.of("product");
        let prefix = format!("k{i}x");
        let emitted = emit(&prefix, &contraction, &Hooks::default(), &target).expect("supported");
        let choices: Vec<_> = (emitted.choices.iter())
            .map(|choice| ("product".to_string(), choice.clone()))
            .collect();
        known.learn(&choices, i > 0);
        let shape = shape(&emitted.source.replace(&prefix, "k"));
        if i > 0 && shapes.iter().all(|(_, known)| *known != shape) {
            shapes.push((label.clone(), shape));
        }
        ready.push(Case {
            label,
            contraction,
            emitted,
        });
    }
    let labels: Vec<&String> = shapes.iter().map(|(label, _)| label).collect();
    assert!(
        shapes.len() <= n_texts,
        "{name}: texts for vectors of {vw} are new at {labels:?}: {}",
        difference(&shapes)
    );
    check_emitted::<T>(name, &ready);
}

/// The first line in which the last two texts differ.
fn difference(shapes: &[(String, String)]) -> String {
    let [.., (_, one), (_, other)] = shapes else {
        return String::new();
    };
    let pairs = one.lines().zip(other.lines());
    let differing = pairs.filter(|(one, other)| one != other);
    differing
        .take(1)
        .map(|(a, b)| format!("{a}\n{b}"))
        .collect()
}

fn products(of: impl Fn(i64) -> [i64; 4], lengths: &[i64]) -> Vec<(String, Contraction)> {
    let product = |&n: &i64| (format!("{:?}", of(n)), matmul(of(n), "bmk", "bkn", "bmn"));
    lengths.iter().map(product).collect()
}

/// Lengths in no order, the second one short; beside and between multiples of vectors, tiles and panels.
const LENGTHS: [i64; 14] = [20, 15, 17, 45, 16, 31, 32, 64, 47, 2, 5, 14, 33, 97];

#[test]
fn rows_of_any_number() {
    for vw in [16, 8] {
        check::<f32>("rows", vw, products(|n| [1, n, 40, 24], &LENGTHS), 1);
        check::<f32>("batch", vw, products(|n| [3, n, 16, 24], &LENGTHS), 1);
    }
    check::<f64>("rows_f64", 16, products(|n| [1, n, 40, 24], &LENGTHS), 1);
}

#[test]
fn many_rows_have_few_micro_kernels_until_few_rows_come() {
    let mut lengths: Vec<i64> = LENGTHS.iter().map(|n| 80 + 8 * n).collect();
    let sizes = |lengths: &[i64]| products(|n| [1, n, 64, 24], lengths);
    check::<f32>("long", 16, sizes(&lengths), 1);
    lengths.extend([30, 1000, 31]);
    check::<f32>("then_short", 16, sizes(&lengths), 2);
}

#[test]
fn columns_of_any_number() {
    for vw in [16, 8, 4] {
        check::<f32>("columns", vw, products(|n| [2, 14, n, 20], &LENGTHS), 1);
    }
    check::<f64>("columns_f64", 16, products(|n| [2, 14, n, 20], &LENGTHS), 1);
}

#[test]
fn a_reduction_of_any_length() {
    for vw in [16, 8] {
        check::<f32>("reduction", vw, products(|n| [2, 24, 48, n], &LENGTHS), 1);
    }
}

#[test]
fn scores_and_mixtures_of_attention() {
    for vw in [16, 8] {
        check::<f32>("scores", vw, products(|n| [6, n, n, 64], &LENGTHS), 1);
        check::<f32>("mixture", vw, products(|n| [6, n, 64, n], &LENGTHS), 1);
        let turned = |&n: &i64| {
            let sizes = [6, n, n, 24];
            (format!("{sizes:?}"), matmul(sizes, "bmk", "bnk", "bmn"))
        };
        check::<f32>("turned", vw, LENGTHS.iter().map(turned).collect(), 1);
        let across = |&n: &i64| {
            let sizes = [6, n, 64, n];
            (format!("{sizes:?}"), matmul(sizes, "bkm", "bkn", "bmn"))
        };
        check::<f32>("across", vw, LENGTHS.iter().map(across).collect(), 1);
    }
}

/// Images of several sizes compute the definition; how many texts that takes is not asked.
#[test]
fn images_of_any_size() {
    let sizes = [(9, 3), (14, 3), (20, 3), (31, 3), (12, 5), (7, 3)];
    let images = |of: fn(&Conv) -> Contraction| -> Vec<(String, Contraction)> {
        let image = |&(size, kernel): &(i64, i64)| {
            let conv = Conv::square(2, 8, 20, size, kernel, 1);
            (format!("{conv:?}"), of(&conv))
        };
        sizes.iter().map(image).collect()
    };
    check::<f32>("forward", 16, images(Conv::forward), usize::MAX);
    check::<f32>("data", 16, images(Conv::data_gradient), usize::MAX);
    check::<f32>("weights", 16, images(Conv::weight_gradient), usize::MAX);
}
