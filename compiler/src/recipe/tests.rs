//! Recipes written, read again, applied, and refused where they are damaged.

use super::{Entry, RecipeError, RecipeFile, Section, fingerprint};
use crate::{Plan, PlanOptions, Step};
use graph::{Bindings, Graph, Rewrite, parse};

fn model(rows: i64, name: &str) -> Graph {
    let text = format!(
        "graph \"g\" {{
  %x: f32[{rows}, 16] input
  %w: f32[16, 8] parameter
  %b: f32[8] parameter
  %p: f32[{rows}, 8]
  %u: f32[{rows}, 8]
  %y: f32[{rows}, 8]
  inputs %x, %w, %b
  state {{
    %p = einsum(%x, %w) {{equation=\"ni,io->no\"}} @ \"{name}\"
    %u = elementwise(%p, %b) {{expr=($0 + $1)}} @ \"{name}.bias\"
    %y = elementwise(%u) {{expr=(tanh($0))}} @ \"{name}.tanh\"
  }}
  outputs %y
}}"
    );
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

fn step(graph: &Graph) -> Step {
    Step::training(graph, &[1, 2]).expect("differentiates")
}

fn file(plan: &Plan, take: &dyn Fn(&fusion::Decision) -> Option<bool>) -> RecipeFile {
    let entries = plan.decisions.iter().map(|d| Entry {
        sentence: d.sentence(),
        ..Entry::of_place(&d.place, d.is_applied(), take(d))
    });
    let section = Section {
        structure: fingerprint(plan.step.graph()),
        training: true,
        decisions: entries.collect(),
    };
    RecipeFile::new("Model", vec![section])
}

fn planned(graph: &Graph, file: &RecipeFile) -> Plan {
    let step = step(graph);
    let chosen = file.for_step(step.graph(), true).expect("known names");
    let options = PlanOptions {
        recipe: chosen.recipe,
        ..PlanOptions::default()
    };
    step.plan_with(&Bindings::new(), &options).expect("plans")
}

#[test]
fn what_is_written_is_read_and_planned_again() {
    let graph = model(64, "layer");
    let plan = step(&graph).plan(&Bindings::new()).expect("plans");
    let forbidden = |d: &fusion::Decision| d.is_applied().then_some(false);
    let own = file(&plan, &|_| None);
    let other = file(&plan, &forbidden);
    for file in [&own, &other] {
        let text = file.text();
        let read = RecipeFile::parse(&text).expect("reads");
        assert_eq!(
            read.text().lines().filter(|l| !l.starts_with("# ")).count(),
            text.lines().filter(|l| !l.starts_with("# ")).count()
        );
        let (a, b) = (planned(&graph, file), planned(&graph, &read));
        assert_eq!(a.graph.to_string(), b.graph.to_string());
        assert_eq!(a.decisions, b.decisions);
    }
    assert_eq!(planned(&graph, &own).graph, plan.graph);
    let less = planned(&graph, &other);
    assert_ne!(less.graph, plan.graph);
    assert!(less.unmet.is_empty(), "{:?}", less.unmet);
}

#[test]
fn sizes_are_no_part_of_a_recipe_and_names_are() {
    let structure = |rows, name| fingerprint(step(&model(rows, name)).graph());
    assert_eq!(structure(64, "layer"), structure(96, "layer"));
    assert_ne!(structure(64, "layer"), structure(64, "other"));
    let plan = step(&model(64, "layer")).plan(&Bindings::new()).unwrap();
    let file = file(&plan, &|d| {
        (d.rewrite() == Rewrite::Epilogue).then_some(false)
    });
    let here = step(&model(96, "layer"));
    let there = step(&model(96, "other"));
    let chosen = |step: &Step| file.for_step(step.graph(), true).unwrap();
    assert!(chosen(&here).is_for_program && !chosen(&here).recipe.is_empty());
    assert!(!chosen(&there).is_for_program && chosen(&there).recipe.is_empty());
}

#[test]
fn what_is_gone_or_illegal_is_named() {
    let graph = model(64, "layer");
    let plan = step(&graph).plan(&Bindings::new()).expect("plans");
    let mut file = file(&plan, &|_| None);
    let entries = &mut file.programs[0].decisions;
    let mut gone = entries[0].clone();
    gone.container = "nowhere".into();
    gone.take = Some(true);
    let refused = plan
        .decisions
        .iter()
        .position(|d| !d.is_applied() && !d.may_change());
    let refused = refused.expect("something is not legal");
    entries[refused].take = Some(true);
    entries.push(gone);
    let planned = planned(&graph, &file);
    assert_eq!(planned.graph, plan.graph);
    let told: Vec<String> = planned.unmet.iter().map(|u| u.sentence()).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told.iter()
            .any(|s| s.contains("there is no decision in this program"))
    );
    assert!(told.iter().any(|s| s.contains("which is not possible: ")));
}

#[test]
fn a_text_that_is_no_recipe_is_refused_in_one_sentence() {
    let good = "format = 1\nshorthaul = \"0.1.0\"\nmodel = \"M\"\n";
    assert!(RecipeFile::parse(good).is_ok());
    let error = |text: &str| RecipeFile::parse(text).unwrap_err().to_string();
    assert!(error("format = [").starts_with("this is not a recipe of Shorthaul: "));
    assert_eq!(
        error("a = 1"),
        "this is not a recipe of Shorthaul: it has no `format`"
    );
    assert!(
        error("format = 7").contains("has format 7, and this version of Shorthaul reads format 1")
    );
    let entry = "[[program]]\nstructure = \"\"\ntraining = true\n[[program.decision]]\nkind = \"bend\"\n\
                 stage = \"forward\"\nnode = \"n\"\ncontainer = \"c\"\napplied = true\n";
    let unknown = RecipeFile::parse(&format!("{good}{entry}")).unwrap_err();
    assert!(matches!(unknown, RecipeError::Name { what: "kind", .. }));
    assert!(error(&format!("{good}surprise = 1\n")).contains("surprise"));
    let cut = format!("{good}{}", &entry[..entry.len() / 2]);
    assert!(error(&cut).starts_with("this is not a recipe of Shorthaul: "));
}
