//! Damaged text forms: the parser gives a graph or an error, and what it accepts is verified, printed and read back.
//!
//! The same numbers give the same damage. Whether accepted graphs mean anything is for the verifier.

use graph::{parse, verify};

/// Texts with every kind of statement.
const TEXTS: [&str; 2] = [
    include_str!("texts/toy.graph"),
    include_str!("texts/maps.graph"),
];

/// Pieces that a parser goes wrong with.
const PIECES: [&str; 24] = [
    "9223372036854775807",
    "-9223372036854775808",
    "99999999999999999999",
    "1e999",
    "nan",
    "-inf",
    "$18446744073709551615",
    "%x",
    "%",
    "\"",
    "\\",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "floordiv(n, 0)",
    "mod(n, -1)",
    "*",
    "-",
    "é",
    "\u{0}",
    "//",
];

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// The text with some characters left out, doubled or exchanged with others of its own, or with pieces put between.
fn damaged(text: &str, random: &mut Random) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..1 + random.below(3) {
        let at = random.below(chars.len());
        let end = (at + 1 + random.below(12)).min(chars.len());
        match random.below(5) {
            0 => drop(chars.drain(at..end)),
            1 => {
                let again = chars[at..end].to_vec();
                drop(chars.splice(at..at, again));
            }
            2 => {
                let other = random.below(chars.len());
                chars.swap(at, other);
            }
            3 => {
                let from = random.below(chars.len());
                let to = (from + 1 + random.below(40)).min(chars.len());
                let moved = chars[from..to].to_vec();
                drop(chars.splice(at..at, moved));
            }
            _ => {
                let piece = PIECES[random.below(PIECES.len())].chars();
                drop(chars.splice(at..end, piece));
            }
        }
        if chars.is_empty() {
            break;
        }
    }
    chars.into_iter().collect()
}

#[test]
fn damaged_texts_are_errors_or_graphs_that_print_as_they_are_read() {
    for text in TEXTS {
        parse(text).unwrap_or_else(|error| panic!("{error}"));
    }
    let (mut n_errors, mut n_graphs) = (0, 0);
    for seed in 0..5_000 {
        let mut random = Random(seed);
        let text = damaged(TEXTS[random.below(TEXTS.len())], &mut random);
        let Ok(graph) = parse(&text) else {
            n_errors += 1;
            continue;
        };
        n_graphs += 1;
        // Whatever it says.
        drop(verify(&graph));
        let printed = graph.to_string();
        match parse(&printed) {
            Ok(again) => assert_eq!(again.to_string(), printed, "seed {seed}:\n{text}"),
            Err(error) => panic!("seed {seed}: {error}\n{printed}"),
        }
    }
    let all = [n_errors, n_graphs];
    assert!(all.iter().all(|n| *n > 50), "errors, graphs: {all:?}");
}

#[test]
fn deep_nesting_is_an_error_and_not_the_end_of_the_stack() {
    for (open, close) in [("(", ")"), ("$1 + ", ""), ("abs(", ")")] {
        let deep = format!("{}$0{}", open.repeat(200_000), close.repeat(200_000));
        let text = TEXTS[1].replace("$0 * select", &format!("{deep} * select"));
        assert!(parse(&text).is_err(), "{open}");
    }
    for line in ["state {", "loop t < n {", "map [] kernel {"] {
        let text = TEXTS[1].replace("state {", &line.repeat(200_000));
        assert!(parse(&text).is_err(), "{line}");
    }
    let sizes = format!("%x: f32[{}n, 8]", "(".repeat(200_000));
    assert!(parse(&TEXTS[1].replace("%x: f32[n, 8]", &sizes)).is_err());
}
