//! Compiled kernels compute what the interpreter computes, forward and backward, in single precision.

mod planned;

use compiler::{Executable, Step};
use graph::{Bindings, Graph, Precision, Rewrite, SymExpr, Tensor, interpret};
use kernels::compile::CompileOptions;
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::{Lowered, LoweringOptions, lower_as};
use kernels::memory::{AlignedBuffer, Buffer};
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::templates::Templates;
use kernels::toolchain::Family;
use models::net::{Net, Window};
use models::transformer::{Encoder, encoder_layer};
use planned::{Reshapes, residual_block};
use std::sync::Mutex;

fn constant(shape: &[SymExpr]) -> Vec<usize> {
    let size = |s: &SymExpr| s.as_const().expect("constant") as usize;
    shape.iter().map(size).collect()
}

/// Largest error of an output, relative to its largest value or 0.1 (a gradient may be exactly 0): that of summing a
/// few hundred terms in single precision.
const TOLERANCE: f64 = 2e-5;

fn check(graph: &Graph, threads: usize) {
    check_sharing(graph, threads, None);
}

/// Like [`check`], with kernels that other sizes compiled.
fn check_sharing(graph: &Graph, threads: usize, templates: Option<&Mutex<Templates>>) {
    let trained: Vec<usize> = (0..graph.inputs.len())
        .filter(|i| !graph.container(graph.inputs[*i]).name.contains("running"))
        .collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    let mut plain = step.graph().clone();
    ops::expand_all(&mut plain).expect("expands");
    let tensors: Vec<Tensor> = plain
        .inputs
        .iter()
        .enumerate()
        .map(|(n, id)| {
            let c = plain.container(*id);
            let shape = constant(&c.shape);
            let len: usize = shape.iter().product();
            let data = (0..len).map(|i| {
                let u = f64::from(graph::philox::uniform(11 + n as u64, i as u64)) * 2.0 - 1.0;
                f64::from(if c.name.contains("running_var") {
                    u.abs()
                } else {
                    u
                } as f32)
            });
            Tensor::from_f64(c.dtype, &shape, data.collect())
        })
        .collect();
    let expected = interpret(
        &plain,
        &tensors,
        &Bindings::new(),
        &Reshapes(&plain),
        Precision::Double,
    )
    .expect("interprets");
    let options = CompileOptions::from_environment(&mut Silent).expect("a compiler");
    let exe = Executable::build_sharing(plan, &options, threads, templates, &mut Silent);
    let exe = exe.expect("builds");
    let mut given: Vec<Vec<f32>> = tensors
        .iter()
        .map(|t| t.to_f64().iter().map(|x| *x as f32).collect())
        .collect();
    given.extend(expected.iter().map(|t| vec![f32::NAN; t.len()]));
    let pool = Pool::global();
    pool.set_threads(threads);
    let mut saved = AlignedBuffer::zeroed(exe.forward.parts().saved_bytes).expect("memory");
    for program in [&exe.forward, &exe.backward] {
        let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).expect("memory");
        let buffers: Vec<Buffer> = given.iter_mut().map(|v| Buffer::new(v)).collect();
        program
            .run(&buffers, arena.as_buffer(), saved.as_buffer(), pool)
            .expect("runs");
    }
    for (n, (e, f)) in expected.iter().zip(&given[tensors.len()..]).enumerate() {
        let e = e.to_f64();
        let scale = e.iter().fold(0.1_f64, |m, x| m.max(x.abs()));
        let error = |(x, y): (&f64, &f32)| (x - f64::from(*y)).abs();
        let worst =
            e.iter().zip(f).map(error).fold(
                0.0,
                |m: f64, d| {
                    if d.is_nan() { f64::INFINITY } else { m.max(d) }
                },
            );
        let name = &plain.container(plain.outputs[n].container).name;
        assert!(worst <= TOLERANCE * scale, "{name}: {worst:e} of {scale:e}");
    }
}

#[test]
fn residual_block_with_batch_norm() {
    let graph = residual_block();
    check(&graph, 1);
    check(&graph, 2);
}

#[test]
fn encoder_layer_of_a_transformer() {
    let e = Encoder {
        batch: 2,
        length: 24,
        hidden: 32,
        heads: 2,
        inner: 48,
    };
    check(&encoder_layer(e).expect("builds"), 2);
}

/// Queries, keys and values of one layer, for attention: the products of the backward pass write their parts of the
/// layer's gradient, and nothing copies them.
#[test]
fn parts_of_a_stack_are_written_where_they_belong() {
    let mut slices = String::new();
    let mut containers = String::new();
    for (n, name) in ["q", "k", "v"].into_iter().enumerate() {
        containers += &format!("%{name}1: f32[1, 2, 2, 8, 8]\n%{name}: f32[2, 2, 8, 8]\n");
        slices += &format!(
            "%{name}1 = slice(%turned) {{axis=0, start=sizes[{n}], stop=sizes[{}], step=1}}
             %{name} = reshape(%{name}1) {{shape=sizes[2, 2, 8, 8]}}\n",
            n + 1
        );
    }
    let text = format!(
        "graph \"g\" {{
         %x: f32[2, 8, 16] input
         %w: f32[48, 16] input
         %z: f32[2, 8, 48]
         %five: f32[2, 8, 3, 2, 8]
         %turned: f32[3, 2, 2, 8, 8]
         {containers}
         %y: f32[2, 2, 8, 8]
         inputs %x, %w
         state {{
         %z = einsum(%x, %w) {{equation=\"bnc,oc->bno\"}}
         %five = reshape(%z) {{shape=sizes[2, 8, 3, 2, 8]}}
         %turned = permute(%five) {{order=[2, 0, 3, 1, 4]}}
         {slices}
         %y = attention(%q, %k, %v)
         }}
         outputs %y
         }}"
    );
    let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    check(&graph, 1);
    check(&graph, 2);
    let step = Step::training(&graph, &[0, 1]).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    let joined = plan
        .decisions
        .iter()
        .filter(|d| d.rewrite() == Rewrite::Join);
    let joined: Vec<_> = joined.map(|d| d.sentence()).collect();
    assert_eq!(joined.len(), 1, "{joined:?}");
    assert!(joined[0].starts_with("the 3 parts of"), "{joined:?}");
    assert!(
        joined[0].contains("are written to their places"),
        "{joined:?}"
    );
}

/// A training step's kernels, its contractions planned like those that `templates` knows; with `varies` in other
/// blocks.
fn lowered(graph: &Graph, templates: &Templates, varies: bool) -> Lowered {
    let trained: Vec<usize> = (0..graph.inputs.len()).collect();
    let step = Step::training(graph, &trained).expect("differentiates");
    let plan = step.plan(&Bindings::new()).expect("plans");
    let target = CpuTarget::for_isa(Isa::Avx2, Family::Gcc);
    let known = templates.choices().clone();
    let options = LoweringOptions {
        known: Some(&known),
        varies,
        ..LoweringOptions::default()
    };
    lower_as(&plan.graph, &target, 2, &options).expect("lowers")
}

/// Kernels that are compiled for a training step after the sizes that `templates` knows, and all of its
/// kernels.
fn newly_compiled(graph: &Graph, templates: &mut Templates) -> (usize, usize) {
    let mut lowered = lowered(graph, templates, false);
    let n_forms = templates.n_texts();
    lowered.share(templates);
    (templates.n_texts() - n_forms, lowered.kernels.len())
}

#[test]
fn encoder_layers_of_many_lengths_share_their_kernels() {
    let layer = |length| {
        let e = Encoder {
            batch: 2,
            length,
            hidden: 32,
            heads: 2,
            inner: 48,
        };
        encoder_layer(e).expect("builds")
    };
    let templates = Mutex::new(Templates::default());
    for length in [40, 57, 64, 41, 70] {
        check_sharing(&layer(length), 2, Some(&templates));
    }
    let mut templates = Templates::default();
    let (first, all) = newly_compiled(&layer(40), &mut templates);
    assert!(
        first > all / 2,
        "equal kernels of a step are one: {first} of {all}"
    );
    for length in [48, 80] {
        for varies in [false, true] {
            lowered(&layer(length), &templates, varies).foresee(&mut templates);
        }
    }
    newly_compiled(&layer(57), &mut templates);
    newly_compiled(&layer(75), &mut templates);
    // Only tiles of attention's products may be new among the kernels of a fourth length.
    let (fourth, _) = newly_compiled(&layer(68), &mut templates);
    assert!(fourth * 5 <= first, "{fourth} of {first} kernels are new");
    let (again, _) = newly_compiled(&layer(68), &mut templates);
    assert_eq!(again, 0, "a length that was there needs no kernel");
}

#[test]
fn convolutions_of_many_image_sizes_share_their_kernels() {
    let templates = Mutex::new(Templates::default());
    for side in [6, 9, 12, 15, 9] {
        let mut net = Net::new("block");
        let sizes = [2, 3, side, side].map(SymExpr::constant);
        let x = net.input("x", graph::DType::F32, &sizes);
        let build = |net: &mut Net| {
            let y = net.conv("conv1", x, 4, Window::new(3, 1, 1))?;
            let y = net.batch_norm("bn1", y)?;
            let y = net.relu("relu1", y)?;
            net.conv("conv2", y, 5, Window::new(3, 2, 1))
        };
        let y = build(&mut net).expect("builds");
        check_sharing(&net.finish(&[y]), 2, Some(&templates));
    }
}
