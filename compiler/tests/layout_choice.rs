//! Orders of dimensions: those that a recipe asks for change no result, and those that are chosen together are never
//! predicted to be slower than the rule's.

mod planned;

use compiler::search::search;
use compiler::steering::Choices;
use compiler::{PlanOptions, Step};
use graph::{Bindings, Graph, Machine, Place, Rewrite};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::lower;
use kernels::toolchain::Family;
use models::transformer::{Encoder, encoder_layer};
use planned::{means_the_same, residual_block, values};
use std::collections::BTreeMap;

fn encoder() -> Graph {
    let sizes = Encoder {
        batch: 2,
        length: 12,
        hidden: 16,
        heads: 2,
        inner: 64,
    };
    encoder_layer(sizes).expect("builds")
}

fn training(graph: &Graph) -> Step {
    let is_trained = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        c.dtype.is_float() && !c.name.contains("running") && !c.name.ends_with("k_proj.bias")
    };
    let wrt: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    Step::training(graph, &wrt).expect("differentiates")
}

#[test]
fn any_order_that_a_recipe_asks_for_means_the_same() {
    for graph in [residual_block(), encoder()] {
        let step = training(&graph);
        let own = step.plan(&Bindings::new()).expect("plans");
        // The node of a decision writes the container of the decision.
        let ranks: BTreeMap<Place, usize> = own
            .decisions
            .iter()
            .filter_map(|d| {
                let id = own.graph.find(&d.place.container)?;
                let place = Place {
                    rewrite: Rewrite::Layout,
                    other: None,
                    ..d.place.clone()
                };
                Some((place, own.graph.container(id).shape.len()))
            })
            .filter(|(_, rank)| *rank >= 2)
            .collect();
        let mut n_met = 0;
        for turn in 0..3 {
            let mut options = PlanOptions::default();
            for (n, (place, rank)) in ranks.iter().enumerate() {
                let mut order: Vec<usize> = (0..*rank).collect();
                order.rotate_left((n + turn) % rank);
                if turn == 2 {
                    order.reverse();
                }
                options.recipe.lay_out(place.clone(), order);
            }
            let plan = step.plan_with(&Bindings::new(), &options).expect("plans");
            n_met += ranks.len() - plan.unmet.len();
            let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
            lower(&plan.graph, &target, 2).expect("lowers");
            let given = values(plan.step.graph(), 0);
            means_the_same(&plan, &given).unwrap_or_else(|e| panic!("{e}"));
        }
        assert!(n_met > 15, "only {n_met} orders were laid out");
    }
}

#[test]
fn orders_chosen_together_are_not_predicted_to_be_slower() {
    let choices = Choices {
        machine: Some(Machine::with_vector_width(16)),
        ..Choices::default()
    };
    for graph in [residual_block(), encoder()] {
        let found = search(&training(&graph), &Bindings::new(), 1, &choices, 2).expect("plans");
        let gain = found.layouts;
        assert!(
            gain.n_containers > 10 && gain.n_contractions > 5,
            "{gain:?}"
        );
        let sum = 1e-6 * gain.rule_us;
        assert!(gain.bound_us <= gain.chosen_us + sum, "{gain:?}");
        assert!(gain.chosen_us <= gain.rule_us + sum, "{gain:?}");
        assert!(gain.chosen_us <= gain.row_major_us + sum, "{gain:?}");
        assert_eq!(gain.n_changed > 0, gain.chosen_us < gain.rule_us - sum);
        assert!(found.found_us <= found.start_us);
    }
}
