//! Prints a network's memory against predicted time under several memory budgets.
//! `cargo run --release -p shorthaul-compiler --example memory -- resnet 0.9 0.7 0.5`

use compiler::budget::MemoryBudget;
use compiler::steering::{Choices, Described, planned};
use compiler::{Step, Target};
use graph::{Bindings, DType, Graph, Lifetime};
use models::transformer::{Encoder, encoder_layer};
use std::time::Instant;

const THREADS: usize = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let graph = match args.next().as_deref() {
        Some("resnet") => models::convolutional::resnet(8, 224, [3, 4, 6, 3])?,
        Some("mobilenet") => models::convolutional::mobilenet_v2(8, 224)?,
        Some("bert") => encoder_layer(Encoder::bert_large(2, 512))?,
        _ => {
            return Err(
                "give a network: resnet, mobilenet or bert, and parts of its memory".into(),
            );
        }
    };
    let step = Step::training(&graph, &trained(&graph))?;
    let mut parts = vec![None];
    for part in args {
        parts.push(Some(MemoryBudget::Fraction(part.parse()?)));
    }
    println!(
        "budget   peak MiB  kept MiB  moved MiB    GFLOP  predicted ms  added ms  at least  planned in s"
    );
    for budget in parts {
        let choices = Choices {
            budget,
            ..Choices::default()
        };
        let started = Instant::now();
        let plan = planned(&step, &Bindings::new(), (Target::Cpu, THREADS), &choices);
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => {
                println!("{error}");
                continue;
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        let d = Described::of_plan(&plan, THREADS)?;
        let mib = |n: f64| n / f64::from(1 << 20);
        let kept = d.budget.map_or((0.0, 0.0), |k| (k.added_us, k.least_us));
        println!(
            "{:<8}{:>9.1}{:>10.1}{:>11.1}{:>9.1}{:>14.1}{:>10.2}{:>10.2}{:>14.2}",
            match budget {
                Some(MemoryBudget::Fraction(part)) => part.to_string(),
                _ => "none".to_string(),
            },
            mib(d.peak_bytes as f64),
            mib(d.memory.saved_bytes as f64),
            mib(d.bytes_moved as f64),
            d.operations as f64 / 1e9,
            d.predicted_us.ok_or("a kernel without a prediction")? / 1e3,
            kept.0 / 1e3,
            kept.1 / 1e3,
            seconds
        );
    }
    Ok(())
}

/// Positions of the parameters that are trained.
fn trained(graph: &Graph) -> Vec<usize> {
    let is_trained = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        c.lifetime == Lifetime::Parameter && c.dtype == DType::F32 && !c.name.contains("running")
    };
    (0..graph.inputs.len()).filter(is_trained).collect()
}
