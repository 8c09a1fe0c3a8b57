//! What an oracle is asked and held against, and what is made up.

use super::*;
use crate::rewrite::trial::Trial;

/// Gives 100 times its input, and that much more for any other model than `first`.
#[derive(Debug)]
struct Hundred {
    first: ModelProto,
    more: f32,
}

impl Oracle for Hundred {
    fn name(&self) -> &str {
        "Hundred"
    }

    fn outputs(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, OracleError> {
        let more = if model.proto == self.first {
            0.0
        } else {
            self.more
        };
        let one = |feeds: &Values| {
            let x = &feeds["x"];
            let values = x.to_f64().expect("numbers");
            let values = values.iter().map(|v| 100.0 * *v as f32 + more).collect();
            vec![Tensor::new(&x.shape, crate::tensor::Values::F32(values))]
        };
        Ok(feeds.iter().map(one).collect())
    }
}

#[test]
fn an_oracle_that_knows_a_node_is_not_held_against_made_up_values() {
    let model = |last: &str| {
        let mut trial = Trial::new(17).input("x", "4").node("m = Mystery(x)");
        trial = trial.node("n = Abs(m)");
        let mut model = trial
            .node(&format!("y = {last}(n)"))
            .output("y", "4")
            .model();
        let graph = model.proto.graph.as_mut().expect("a graph");
        graph.node[0].domain = "own".to_string();
        let sizes = graph.input[0].r#type.clone();
        graph.value_info.push(crate::proto::ValueInfoProto {
            name: "m".to_string(),
            r#type: sizes,
            ..Default::default()
        });
        model
    };
    let original = model("Identity");
    let check = |more: f32| {
        let oracle = Hundred {
            first: original.proto.clone(),
            more,
        };
        let options = Options {
            oracle: Some(Arc::new(oracle)),
            ..Options::default()
        };
        let checker = Checker::new(&original, &options).expect("it runs");
        checker.check(&model("Relu").proto)
    };
    let evidence = check(0.0).expect("the same");
    assert!(evidence.runs.iter().any(|run| run.starts_with("Hundred")));
    assert!(
        evidence.errors.iter().all(|e| e.after < 1e-6),
        "{evidence:?}"
    );
    assert!(matches!(check(0.5), Err(VerifyError::Differs { .. })));
}

#[test]
fn made_up_inputs_are_inputs_only() {
    let model = Trial::new(17)
        .input("x", "4")
        .node("r = RandomNormalLike(x)")
        .node("y = Add(x, r)")
        .output("y", "4")
        .model();
    let made = made_up(&model, 0, &Options::default()).expect("inputs");
    assert_eq!(made.into_keys().collect::<Vec<_>>(), ["x"]);
}

/// Knows `Mystery`, which doubles the rows of its input.
#[derive(Debug)]
struct Doubles;

impl Oracle for Doubles {
    fn name(&self) -> &str {
        "Doubles"
    }

    fn outputs(&self, model: &Model, feeds: &[Values]) -> Result<Vec<Vec<Tensor>>, OracleError> {
        let asked: Vec<&String> = graph_outputs(&model.proto).collect();
        let doubled = |feeds: &Values| {
            let x = &feeds["x"];
            let values = x.to_f64().expect("numbers");
            let twice = values.iter().chain(&values).map(|v| *v as f32).collect();
            let shape = [2 * x.shape[0], x.shape[1]];
            Tensor::new(&shape, crate::tensor::Values::F32(twice))
        };
        let one = |feeds: &Values| match asked.as_slice() {
            [name] if *name == "m" || *name == "y" => Ok(vec![doubled(feeds)]),
            other => Err(OracleError::Refused(format!("{other:?}"))),
        };
        feeds.iter().map(one).collect()
    }
}

#[test]
fn an_oracle_tells_the_sizes_that_nobody_declares() {
    let trial = Trial::new(17).input("x", "3 4").node("m = own.Mystery(x)");
    // Three rows, which would be guessed, cannot be halved.
    let trial = trial.ints("halves", &[2, 3, 4]).ints("rows", &[6, 4]);
    let trial = trial
        .node("h = Reshape(m, halves)")
        .node("y = Reshape(h, rows)");
    let model = trial.output("y", "6 4").model();
    let run = |oracle: Option<Arc<dyn Oracle>>| {
        let options = Options {
            oracle,
            ..Options::default()
        };
        Checker::new(&model, &options).map(|checker| checker.runs.len())
    };
    assert!(matches!(run(None), Err(VerifyError::Original { .. })));
    assert!(run(Some(Arc::new(Doubles))).is_ok_and(|n| n > 1));
}
