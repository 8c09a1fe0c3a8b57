//! Every graph on the straight line keeps the verifier's rules, reads back from its text, and
//! survives simplification.

use compiler::Step;
use graph::{Bindings, Graph, parse_with, simplify, verify};
use models::transformer::{Encoder, encoder_layer};

/// Small sizes of the models: the rules do not depend on them.
fn models() -> Vec<(&'static str, Graph)> {
    let small_layer = Encoder {
        batch: 2,
        length: 8,
        hidden: 16,
        heads: 2,
        inner: 32,
    };
    vec![
        (
            "resnet",
            models::convolutional::resnet(2, 32, [1, 1, 1, 1]).unwrap(),
        ),
        (
            "mobilenet",
            models::convolutional::mobilenet_v2(2, 32).unwrap(),
        ),
        ("encoder", encoder_layer(small_layer).unwrap()),
    ]
}

fn check(name: &str, stage: &str, g: &Graph) {
    if let Err(found) = verify(g) {
        let list: Vec<String> = found.iter().map(ToString::to_string).collect();
        panic!(
            "{name}, {stage}: {} problems\n{}",
            list.len(),
            list.join("\n")
        );
    }
    let text = g.to_string();
    match parse_with(&text, &g.large_constants()) {
        Ok(read) => assert!(
            read == *g,
            "{name}, {stage}: the text reads back as another graph"
        ),
        Err(e) => panic!("{name}, {stage}: {e}"),
    }
}

#[test]
fn every_stage_keeps_the_rules() {
    for (name, model) in models() {
        check(name, "imported", &model);
        let float = |i: &usize| model.container(model.inputs[*i]).dtype.is_float();
        let wrt: Vec<usize> = (0..model.inputs.len()).filter(float).collect();
        let step = Step::training(&model, &wrt).unwrap();
        check(name, "differentiated", step.graph());

        let mut simple = step.graph().clone();
        let report = simplify(&mut simple, &ops::meaning::Meaning);
        println!("{name}: {report}");
        check(name, "simplified", &simple);
        simple.compact();
        check(name, "compacted", &simple);

        let bound = step.graph().bind(&Bindings::new());
        check(name, "bound", &bound);
        let bound = fusion::Bound::new(bound).unwrap();
        let expanded = fusion::expand(&bound, &graph::Recipe::default()).unwrap();
        check(name, "expanded", &expanded.graph);
        let plan = step.plan(&Bindings::new()).unwrap();
        check(name, "planned", &plan.graph);
    }
}
