//! The table of what is known of each operator of the standard.

use super::{Found, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Characters of a reason that are shown.
const SHOWN: usize = 150;

/// The page, as Markdown.
pub fn page(found: &[Found], command: &str) -> String {
    let mut text = String::from("# Coverage of ONNX operators\n\n");
    let _ = writeln!(
        text,
        "Written by `{command}` from the test cases of the `onnx` package. The columns say what Shorthaul does with a \
         case: it is *evaluated* as a file; *optimized* and verified, and then *kept* if no rule of `optimize` changes \
         it; *imported* as a graph; *interpreted*, and compiled to *C*, both with the expected outputs; and \
         *differentiated*. A number `a/b` means that this holds \
         for a of b cases; `–` means that the column does not apply, or was not computed.{} The last column names the \
         *rules* of `optimize` that change at least one of these cases, most of which have a single node; \
         `shorthaul optimize --list-rules` says what the rules do. Some cases expect random numbers that NumPy drew. \
         Shorthaul's graphs draw other numbers, so the test checks only which numbers occur, and how many of them are \
         not 0.\n",
        sampled(found)
    );
    let ours: Vec<&Found> = found.iter().filter(|f| f.has_our_types).collect();
    let _ = writeln!(text, "{}\n", sentence(&ours, found.len()));
    text.push_str(&table(found));
    text.push_str(&reasons(&ours));
    text
}

/// A sentence that begins with a space, where only some cases are compiled.
fn sampled(found: &[Found]) -> String {
    let n = found.iter().filter(|f| f.compiled.is_some()).count();
    match n == found.len() {
        true => String::new(),
        false => format!(
            " Compiling takes long: {n} of the {} cases were compiled to C.",
            found.len()
        ),
    }
}

fn sentence(ours: &[&Found], n_all: usize) -> String {
    let count = |is: &dyn Fn(&Found) -> bool| ours.iter().filter(|f| is(f)).count();
    let share = |n: usize| format!("{n} ({:.1} %)", 100.0 * n as f64 / ours.len().max(1) as f64);
    let mut text = format!(
        "Of {n_all} cases, {} have inputs and outputs of the element types that graphs have (f16, bf16, f32, f64, \
         bool, u8, i8 to i64). Of these {} are evaluated, {} optimized, {} imported, {} interpreted",
        ours.len(),
        share(count(&|f| f.evaluated.is_ok())),
        share(count(&|f| f.rewritten.is_ok())),
        share(count(&|f| f.imported.is_ok())),
        share(count(&|f| f.interpreted.is_ok())),
    );
    let compiled = count(&|f| f.compiled.is_some());
    let runs = count(&|f| matches!(f.compiled, Some(Ok(()))));
    let _ = match compiled {
        0 => Ok(()),
        n if n == ours.len() => write!(text, ", {} run as C", share(runs)),
        n => write!(text, "; {runs} of {n} that were compiled run as C"),
    };
    let asked = count(&|f| f.differentiated.is_some());
    let done = count(&|f| matches!(f.differentiated, Some(Ok(()))));
    let _ = write!(text, "; {done} of {asked} with floats are differentiated.");
    text
}

/// How many of some verdicts are good.
fn ratio<'f>(verdicts: impl Iterator<Item = Option<&'f Verdict>>) -> String {
    let asked: Vec<&Verdict> = verdicts.flatten().collect();
    match asked.len() {
        0 => "–".to_string(),
        n => format!("{}/{n}", asked.iter().filter(|v| v.is_ok()).count()),
    }
}

/// The share of the optimized cases that no rule changes.
fn kept(cases: &[&Found]) -> String {
    let optimized = || cases.iter().filter(|f| f.rewritten.is_ok());
    match optimized().count() {
        0 => "–".to_string(),
        n => format!("{}/{n}", optimized().filter(|f| f.rules.is_empty()).count()),
    }
}

/// The rules that change any of the cases.
fn rules(cases: &[&Found]) -> String {
    let names: BTreeSet<&str> = cases
        .iter()
        .flat_map(|f| f.rules.iter().map(String::as_str))
        .collect();
    match names.is_empty() {
        true => "–".to_string(),
        false => names.into_iter().collect::<Vec<_>>().join(", "),
    }
}

fn table(found: &[Found]) -> String {
    let mut rows: BTreeMap<(String, i64), Vec<&Found>> = BTreeMap::new();
    for one in found {
        let name = one.operator.clone();
        let name = name.unwrap_or_else(|| "several operators".to_string());
        rows.entry((name, one.opset)).or_default().push(one);
    }
    let mut text = String::from(
        "| operator | version | evaluated | optimized | kept | imported | interpreted | C | differentiated | rules |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for ((name, opset), cases) in rows {
        let all = || cases.iter();
        let _ = writeln!(
            text,
            "| {name} | {opset} | {} | {} | {} | {} | {} | {} | {} | {} |",
            ratio(all().map(|f| Some(&f.evaluated))),
            ratio(all().map(|f| Some(&f.rewritten))),
            kept(&cases),
            ratio(all().map(|f| Some(&f.imported))),
            ratio(all().map(|f| Some(&f.interpreted))),
            ratio(all().map(|f| f.compiled.as_ref())),
            ratio(all().map(|f| f.differentiated.as_ref())),
            rules(&cases),
        );
    }
    text
}

/// Why some cases of our element types do not get through all steps.
fn reasons(ours: &[&Found]) -> String {
    let mut text =
        String::from("\n## Cases that fail\n\n| case | step | reason |\n|---|---|---|\n");
    for one in ours {
        let of_file = [
            ("evaluated", Some(&one.evaluated)),
            ("optimized", Some(&one.rewritten)),
        ];
        let of_graph = [
            ("imported", Some(&one.imported)),
            ("interpreted", Some(&one.interpreted)),
            ("C", one.compiled.as_ref()),
            ("differentiated", one.differentiated.as_ref()),
        ];
        for failed in [first_failed(&of_file), first_failed(&of_graph)] {
            let Some((step, why)) = failed else { continue };
            let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
            let why = why
                .replace("case.onnx cannot be imported ", "")
                .replace('|', "\\|");
            let short: String = why.chars().take(SHOWN).collect();
            let _ = writeln!(text, "| {} | {step} | {short} |", one.case);
        }
    }
    text
}

fn first_failed<'f>(
    steps: &[(&'static str, Option<&'f Verdict>)],
) -> Option<(&'static str, &'f String)> {
    steps.iter().find_map(|(step, verdict)| match verdict {
        Some(Err(why)) => Some((*step, why)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(case: &str, rules: &[&str], compiled: Option<Verdict>) -> Found {
        Found {
            case: case.to_string(),
            operator: Some("Relu".to_string()),
            opset: 14,
            has_our_types: true,
            evaluated: Ok(()),
            rewritten: Ok(()),
            rules: rules.iter().map(ToString::to_string).collect(),
            imported: Ok(()),
            interpreted: Ok(()),
            compiled,
            differentiated: None,
        }
    }

    #[test]
    fn the_page_says_what_is_kept_and_what_was_compiled() {
        let wrong = Some(Err("element 0 is 1 instead of 2".to_string()));
        let mut all = vec![
            found("test_a", &[], Some(Ok(()))),
            found("test_b", &["fold"], wrong),
            found("test_c", &[], Some(Ok(()))),
        ];
        let text = page(&all, "this");
        let row = "| Relu | 14 | 3/3 | 3/3 | 2/3 | 3/3 | 3/3 | 2/3 | – | fold |\n";
        assert!(text.contains(row), "{text}");
        assert!(text.contains(", 2 (66.7 %) run as C; 0 of 0"), "{text}");
        assert!(
            text.contains("| test_b | C | element 0 is 1 instead of 2 |"),
            "{text}"
        );
        assert!(!text.contains("Compiling takes long"), "{text}");
        all[2].compiled = None;
        let text = page(&all, "this");
        let row = "| Relu | 14 | 3/3 | 3/3 | 2/3 | 3/3 | 3/3 | 1/2 | – | fold |\n";
        assert!(text.contains(row), "{text}");
        assert!(
            text.contains("2 of the 3 cases were compiled to C."),
            "{text}"
        );
        assert!(
            text.contains("; 1 of 2 that were compiled run as C; 0 of 0"),
            "{text}"
        );
    }
}
