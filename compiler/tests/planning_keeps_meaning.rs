//! A planned step computes what its operators mean: the interpreter runs both on the same inputs.

mod planned;

use compiler::{Step, Target};
use fusion::{Applied, Outcome};
use graph::{DType, Graph, Rewrite, SymExpr, parse};
use models::net::{Net, Window};
use models::transformer::{Decoder, Encoder, decoder_layer, encoder_layer, encoder_layer_of};
use planned::{agrees_for, both_agree, residual_block, values};

/// Every result of the planned step, and of the planned training step, is that of its operators.
fn check(graph: &Graph) {
    both_agree(graph, &values(graph, 0)).unwrap_or_else(|e| panic!("{e}"));
}

/// Like [`check`] for containers and inputs, operators, and results of one state.
fn check_text(containers: &str, operators: &str, outputs: &str) {
    let given: Vec<&str> = containers
        .lines()
        .filter(|l| l.ends_with(" input"))
        .filter_map(|l| l.trim().split(':').next())
        .collect();
    let inputs = match given.as_slice() {
        [] => String::new(),
        some => format!("inputs {}", some.join(", ")),
    };
    let text = format!(
        "graph \"g\" {{\n{containers}\n{inputs}\nstate {{\n{operators}\n}}\noutputs {outputs}\n}}"
    );
    let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    graph::verify(&graph).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    both_agree(&graph, &values(&graph, 0)).unwrap_or_else(|e| panic!("{e}\n{text}"));
}

#[test]
fn residual_block_with_batch_norm() {
    check(&residual_block());
}

/// Convolutions compute normalized activations while they read them, forward and for the weights' gradients.
#[test]
fn activations_made_by_the_convolutions_that_read_them() {
    let mut net = Net::new("chain");
    let size = |n: i64| SymExpr::constant(n);
    let x = net.input("x", DType::F32, &[size(2), size(3), size(6), size(6)]);
    let build = |net: &mut Net| {
        let depthwise = Window {
            groups: 4,
            ..Window::new(3, 2, 1)
        };
        let windows = [Window::new(3, 1, 1), depthwise, Window::new(1, 1, 0)];
        let mut y = x;
        for (n, window) in windows.into_iter().enumerate() {
            y = net.conv(&format!("conv{n}"), y, 4, window)?;
            y = net.batch_norm(&format!("bn{n}"), y)?;
            y = net.relu(&format!("relu{n}"), y)?;
        }
        let flat = net.reshape("flatten", y, &[size(2), size(36)])?;
        net.linear("fc", flat, 5)
    };
    let y = build(&mut net).expect("builds");
    let graph = net.finish(&[y]);
    check(&graph);
    let is_trained = |i: &usize| !graph.container(graph.inputs[*i]).name.contains("running");
    let trained: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let step = Step::training(&graph, &trained).expect("differentiates");
    let plan = agrees_for(&step, &values(step.graph(), 0), Target::Cpu).expect("agrees");
    let packed = plan.decisions.iter().filter_map(|d| match &d.outcome {
        Outcome::Applied(Applied::Packed { operands }) => Some(operands.len()),
        _ => None,
    });
    let packed: Vec<usize> = packed.collect();
    assert!(
        packed.iter().filter(|n| **n == 2).count() >= 2,
        "{packed:?}"
    );
}

#[test]
fn encoder_layer_of_a_transformer() {
    let e = Encoder {
        batch: 2,
        length: 5,
        hidden: 8,
        heads: 2,
        inner: 12,
    };
    check(&encoder_layer(e).expect("builds"));
}

/// Forward and training steps for a GPU keep their meaning, and attention is one kernel, with gradients
/// three.
fn check_chained(graph: &Graph) {
    // The gradient of keys' biases is 0: only rounding errors are left of sums that cancel.
    let is_trained = |i: &usize| {
        let c = graph.container(graph.inputs[*i]);
        c.dtype.is_float() && !c.name.ends_with("k_proj.bias")
    };
    let all: Vec<usize> = (0..graph.inputs.len()).filter(is_trained).collect();
    let forward = Step::forward(graph).expect("no gradients");
    let training = Step::training(graph, &all).expect("differentiates");
    for (step, kernels) in [(forward, 1), (training, 3)] {
        let given = values(step.graph(), 0);
        let plan = agrees_for(&step, &given, Target::Cuda).unwrap_or_else(|e| panic!("{e}"));
        let chains = plan
            .decisions
            .iter()
            .filter(|d| d.rewrite() == Rewrite::Chain);
        let chains = chains.filter(|d| d.is_applied());
        let done: Vec<_> = chains.map(|d| &d.outcome).collect();
        let [Outcome::Applied(Applied::Chained { n_kernels, .. })] = done[..] else {
            panic!("{done:?}");
        };
        assert_eq!(*n_kernels, kernels);
    }
}

#[test]
fn chained_encoder_layer_of_a_transformer() {
    let e = Encoder {
        batch: 2,
        length: 40,
        hidden: 16,
        heads: 2,
        inner: 24,
    };
    check_chained(&encoder_layer_of(e, DType::BF16).expect("builds"));
}

#[test]
fn chained_decoder_layer_with_shared_keys() {
    for key_heads in [1, 2] {
        let layer = Decoder {
            batch: 2,
            length: 40,
            hidden: 32,
            heads: 4,
            key_heads,
            inner: 24,
        };
        check_chained(&decoder_layer(layer, DType::BF16).expect("builds"));
    }
}

#[test]
fn chained_attention_with_masks_and_dropout() {
    let attention = |mask: &str, arguments: &str, attributes: &str| {
        let text = format!(
            "graph \"g\" {{
             %q: f16[2, 3, 40, 16] input
             %k: f16[2, 3, 56, 16] input
             %v: f16[2, 3, 56, 8] input
             {mask}
             %y: f16[2, 3, 40, 8]
             inputs %q, %k, %v{arguments}
             state {{ %y = attention(%q, %k, %v{arguments}) {{{attributes}}} }}
             outputs %y
             }}"
        );
        let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        check_chained(&graph);
    };
    attention("", "", "scale=0.5");
    attention("", "", "causal=true");
    attention("%mask: f16[2, 1, 40, 56] input", ", %mask", "causal=false");
    attention("%mask: f16[3, 40, 56] input", ", %mask", "causal=false");
    attention("%mask: f16[2, 3, 40, 56] input", ", %mask", "causal=false");
    attention("%mask: bool[40, 56] input", ", %mask", "causal=true");
}

/// The types are those under autocast: products in half precision, the softmax between them in single.
#[test]
fn chained_attention_in_two_precisions() {
    let text = "graph \"g\" {
        %q: bf16[2, 3, 40, 16] input
        %k: bf16[2, 3, 56, 16] input
        %v: bf16[2, 3, 56, 8] input
        %scores: bf16[2, 3, 40, 56]
        %wide: f32[2, 3, 40, 56]
        %softmax: f32[2, 3, 40, 56]
        %narrow: bf16[2, 3, 40, 56]
        %y: bf16[2, 3, 40, 8]
        inputs %q, %k, %v
        state {
          %scores = einsum(%q, %k) {equation=\"abld,abmd->ablm\"}
          %wide = elementwise(%scores) {expr=(f32($0))}
          %softmax = softmax(%wide) {axis=-1}
          %narrow = elementwise(%softmax) {expr=(bf16($0))}
          %y = einsum(%narrow, %v) {equation=\"ablm,abme->able\"}
        }
        outputs %y
      }";
    check_chained(&parse(text).unwrap_or_else(|e| panic!("{e}")));
}

#[test]
fn a_lookup_used_as_an_index() {
    check_text(
        "%ids: i64[4] input
         %remap: i64[3] input
         %table: f32[3, 2] input
         %picked: i64[4]
         %rows: f32[4, 2]",
        "%picked = gather(%remap, %ids) {axis=0}
         %rows = gather(%table, %picked) {axis=0}",
        "%rows",
    );
    check_text(
        "%ids: i64[2, 4] input
         %remap: i64[2, 3] input
         %table: f32[2, 3] input
         %picked: i64[2, 4]
         %rows: f32[2, 4]",
        "%picked = gather_elements(%remap, %ids) {axis=1}
         %rows = gather_elements(%table, %picked) {axis=1}",
        "%rows",
    );
}

#[test]
fn padding_around_what_reads_nothing() {
    check_text(
        "%ones: f32[2, 3]
         %y: f32[3, 5]",
        "%ones = full() {shape=sizes[2, 3], value=1.0, dtype=f32}
         %y = pad(%ones) {low=sizes[1, 1], high=sizes[0, 1]}",
        "%y",
    );
    check_text(
        "%ones: f32[4]
         %y: f32[4]",
        "%ones = full() {shape=sizes[4], value=1.0, dtype=f32}
         %y = cumsum(%ones) {axis=0}",
        "%y",
    );
    check_text(
        "%ones: f32[1, 2, 4, 4]
         %y: f32[1, 2, 4, 4]",
        "%ones = full() {shape=sizes[1, 2, 4, 4], value=1.0, dtype=f32}
         %y = average_pool(%ones) {kernel=[3, 3], pad_low=[1, 1], pad_high=[1, 1]}",
        "%y",
    );
    check_text(
        "%count: f32[4]
         %y: f32[6]",
        "%count = iota() {size=sizes[4], start=sizes[1], step=sizes[1], dtype=f32}
         %y = pad(%count) {low=sizes[1], high=sizes[1]}",
        "%y",
    );
}

#[test]
fn padding_along_a_dimension_of_size_one() {
    check_text(
        "%x: f32[2, 1, 4] input
         %w: f32[3, 4, 3] input
         %t: f32[2, 4, 1]
         %y: f32[2, 3, 1]",
        "%t = permute(%x) {order=[0, 2, 1]}
         %y = conv(%t, %w) {pad_low=[1], pad_high=[1]}",
        "%y",
    );
    check_text(
        "%x: f32[2, 5, 3, 1] input
         %w: f32[2, 3, 3, 3] input
         %t: f32[2, 3, 1, 5]
         %y: f32[2, 2, 1, 5]",
        "%t = permute(%x) {order=[0, 2, 3, 1]}
         %y = conv(%t, %w) {pad_low=[1, 1], pad_high=[1, 1]}",
        "%y",
    );
    check_text(
        "%x: f32[1, 3] input
         %t: f32[3, 1]
         %y: f32[3, 3]",
        "%t = permute(%x) {order=[1, 0]}
         %y = pad(%t) {low=sizes[0, 1], high=sizes[0, 1]}",
        "%y",
    );
}

#[test]
fn a_diagonal_beside_its_producer() {
    check_text(
        "%x: f32[40, 40] input
         %t: f32[40, 40]
         %d: f32[]",
        "%t = elementwise(%x) {expr=(tanh($0))}
         %d = einsum(%t) {equation=\"ii->\"}",
        "%t, %d",
    );
    check_text(
        "%x: f32[40, 40] input
         %t: f32[40, 40]
         %d: f32[40]
         %u: f32[40]",
        "%t = elementwise(%x) {expr=(tanh($0))}
         %d = einsum(%t) {equation=\"ii->i\"}
         %u = elementwise(%d) {expr=(exp($0))}",
        "%t, %d, %u",
    );
}

#[test]
fn products_of_many_dimensions() {
    let letters = "abcdefghijkl";
    let sizes = ["2"; 12].join(", ");
    check_text(
        &format!(
            "%x: f32[{sizes}, 2] input
             %w: f32[2, 3] input
             %v: f32[3, 2] input
             %t: f32[{sizes}, 3]
             %y: f32[{sizes}, 2]"
        ),
        &format!(
            "%t = einsum(%x, %w) {{equation=\"{letters}m,mn->{letters}n\"}}
             %y = einsum(%t, %v) {{equation=\"{letters}n,nm->{letters}m\"}}"
        ),
        "%y",
    );
}

#[test]
fn a_buffer_replaced_by_a_reshaped_value() {
    check_text(
        "%x: f32[2, 3] input
         %buffer: f32[6] input
         %t: f32[2, 3]
         %y: f32[6]",
        "%t = elementwise(%x) {expr=(tanh($0))}
         %y = reshape(%t) {shape=sizes[6]}",
        "%y -> %buffer",
    );
}

#[test]
fn channels_that_are_normalized_and_shuffled() {
    let size = |n: i64| SymExpr::constant(n);
    let shape = |list: &[i64]| list.iter().map(|n| size(*n)).collect::<Vec<_>>();
    let mut net = Net::new("shuffle");
    let x = net.input("x", DType::F32, &shape(&[2, 3, 4, 4]));
    let build = |net: &mut Net| {
        let y = net.conv("conv1", x, 6, Window::new(3, 1, 1))?;
        let y = net.batch_norm("bn", y)?;
        let y = net.reshape("split", y, &shape(&[2, 2, 3, 4, 4]))?;
        let y = net.permute("turn", y, &[0, 2, 1, 3, 4])?;
        let y = net.reshape("join", y, &shape(&[2, 6, 4, 4]))?;
        net.conv("conv2", y, 2, Window::new(1, 1, 0))
    };
    let y = build(&mut net).expect("builds");
    check(&net.finish(&[y]));
}

/// The networks of the room `models` but those with too many points for the interpreter of maps.
#[test]
fn small_networks() {
    let too_large = ["resnet", "mobilenet_v2"];
    let networks = models::small::SMALL.iter();
    for (name, make) in networks.filter(|(name, _)| !too_large.contains(name)) {
        let graph = make().expect("builds");
        both_agree(&graph, &values(&graph, 0)).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}
