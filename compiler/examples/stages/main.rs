//! Writes the guide's page about the stages of the compiler, with its pictures, into a folder: a block of a
//! ResNet, or an ONNX model, after every stage.
//! `cargo run -p shorthaul-compiler --example stages -- docs/src`
//! `cargo run -p shorthaul-compiler --example stages -- FOLDER cli/tests/data/mlp.onnx batch=32`
//!
//! compiler/tests/stages.rs holds docs/src/stages.md and the pictures up to date.

mod drawing;
mod layered;
mod pictures;

use compiler::importer::onnx::{File, Mode, Options};
use compiler::predict::On;
use compiler::report::{Memory, Report};
use compiler::{Plan, Step};
use graph::{Bindings, Graph, Recipe};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::{Lowered, lower};
use kernels::toolchain::Family;
use pictures::{End, diagram, ends_of_model, ends_of_step, kernel_bars};
use std::error::Error;
use std::fmt::{Display, Write};
use std::path::Path;

/// Threads that the kernels are for.
const N_THREADS: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (folder, model) = match args.as_slice() {
        [folder] => (folder, Model::block()?),
        [folder, path, sizes @ ..] => (folder, Model::read(Path::new(path), sizes)?),
        [] => {
            return Err(
                "give a folder, and maybe an ONNX file and NAME=SIZE for each dynamic size".into(),
            );
        }
    };
    for (name, text) in files(&model)? {
        std::fs::write(Path::new(folder).join(name), text)?;
    }
    Ok(())
}

/// What goes through the stages.
pub struct Model {
    /// What it is, for the page.
    what: &'static str,
    graph: Graph,
    /// Positions of the inputs whose gradients are wanted.
    wrt: Vec<usize>,
}

impl Model {
    /// A convolution with batch norm, to whose result the block's input is added, and ReLU.
    ///
    /// # Errors
    /// None.
    pub fn block() -> Result<Model, Box<dyn Error>> {
        let graph = models::convolutional::residual_block(8, 16, 16)?;
        let is_running = |i: &usize| graph.container(graph.inputs[*i]).name.contains("running_");
        let wrt = (0..graph.inputs.len()).filter(|i| !is_running(i)).collect();
        Ok(Model {
            what: BLOCK,
            graph,
            wrt,
        })
    }

    /// An ONNX file; `sizes` are `NAME=SIZE`.
    ///
    /// # Errors
    /// A file that cannot be read or imported, or a size that is no number.
    pub fn read(path: &Path, sizes: &[String]) -> Result<Model, Box<dyn Error>> {
        let mut options = Options {
            sizes: Default::default(),
            mode: Mode::File,
        };
        for size in sizes {
            let (name, value) = size.split_once('=').ok_or("a size is NAME=SIZE")?;
            options.sizes.insert(name.to_string(), value.parse()?);
        }
        let model = File::read(path)?.import(&options)?;
        let is_trained = |i: &usize| {
            let id = model.graph.inputs[*i];
            let mut parameters = model.parameters.iter();
            parameters.any(|p| p.container == id && p.trainable)
        };
        let wrt = (0..model.graph.inputs.len()).filter(is_trained).collect();
        Ok(Model {
            what: "the model of an ONNX file on its way to C, forward and backward",
            graph: model.graph,
            wrt,
        })
    }
}

/// The page and its pictures, by name.
///
/// # Errors
/// A model that cannot be compiled.
pub fn files(model: &Model) -> Result<Vec<(&'static str, String)>, Box<dyn Error>> {
    let step = Step::training(&model.graph, &model.wrt)?;
    let plan = step.plan(&Bindings::new())?;
    let bound = fusion::Bound::new(plan.bound.clone())?;
    let expanded = fusion::expand(&bound, &Recipe::default())?;
    let (laid_out, _) = expanded.lay_out(|graph| layouts::assign(graph, &Recipe::default()));
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let lowered = lower(&plan.graph, &target, N_THREADS)?;
    let on = On {
        machine: target.machine,
        threads: N_THREADS,
    };

    let mut page = HEAD.replace("{what}", model.what);
    section(&mut page, &IMPORT, &model.graph)?;
    section(&mut page, &DIFFERENTIATE, step.graph())?;
    section(&mut page, &EXPAND, &laid_out.graph)?;
    section(&mut page, &FUSE, &plan.graph)?;
    decisions(&mut page, &plan.decisions)?;
    kernels(&mut page, &lowered)?;

    let (of_model, of_step) = (
        ends_of_model(&model.graph),
        ends_of_step(&model.graph, &step),
    );
    let drawn = |part: &Part, graph: &Graph, ends: &[End], with_bytes: bool| {
        (part.file, diagram(part.alt, graph, ends, with_bytes).svg())
    };
    Ok(vec![
        ("stages.md", page),
        drawn(&IMPORT, &model.graph, &of_model, false),
        drawn(&DIFFERENTIATE, step.graph(), &of_step, false),
        drawn(&EXPAND, &laid_out.graph, &of_step, false),
        drawn(&FUSE, &plan.graph, &of_step, true),
        (LOWER.file, times(&plan, &lowered, on)),
    ])
}

/// The picture of the kernels and their times.
fn times(plan: &Plan, lowered: &Lowered, on: On) -> String {
    let memory = Memory {
        forward_arena_bytes: lowered.memory.forward_arena_bytes,
        backward_arena_bytes: lowered.memory.backward_arena_bytes,
        saved_bytes: lowered.memory.saved_bytes,
        thread_scratch_bytes: lowered.thread_scratch_bytes,
    };
    let report = Report::new(plan, &lowered.kernels, memory, Some(on));
    let bars = kernel_bars(&report.kernels);
    drawing::bars(LOWER.alt, &bars)
}

/// A part of the page, with its picture.
struct Part {
    title: &'static str,
    text: &'static str,
    file: &'static str,
    alt: &'static str,
}

fn section(page: &mut String, part: &Part, graph: &Graph) -> std::fmt::Result {
    open(page, part)?;
    block(page, "text", graph)
}

fn open(page: &mut String, part: &Part) -> std::fmt::Result {
    let Part {
        title,
        text,
        file,
        alt,
    } = part;
    write!(page, "\n## {title}\n\n{text}\n\n![{alt}]({file})\n")
}

fn block(page: &mut String, language: &str, content: impl Display) -> std::fmt::Result {
    let content = content.to_string();
    write!(page, "\n```{language}\n{}\n```\n", content.trim_end())
}

fn decisions(page: &mut String, decisions: &[fusion::Decision]) -> std::fmt::Result {
    let mut lines = String::new();
    for d in decisions {
        let verb = if d.is_applied() { "applied" } else { "refused" };
        writeln!(
            lines,
            "{verb} {} at {}: {} ({} bytes)",
            d.rewrite(),
            d.origin,
            d.sentence(),
            d.bytes
        )?;
    }
    page.push_str("\nEvery decision is recorded, with the bytes it saves or would have saved:\n");
    block(page, "text", lines)
}

fn kernels(page: &mut String, lowered: &Lowered) -> std::fmt::Result {
    open(page, &LOWER)?;
    let mut lines = String::new();
    for kernel in &lowered.kernels {
        writeln!(
            lines,
            "{} {} made by {}, {} operations, from {}",
            format!("{:?}", kernel.stage).to_lowercase(),
            kernel.name,
            kernel.path,
            kernel.flops,
            kernel.origin
        )?;
    }
    let memory = &lowered.memory;
    writeln!(
        lines,
        "arena: {} bytes forward, {} bytes backward; kept between them: {} bytes",
        memory.forward_arena_bytes, memory.backward_arena_bytes, memory.saved_bytes
    )?;
    block(page, "text", lines)?;
    let Some(loops) = lowered.kernels.iter().position(|k| k.path == "loops") else {
        return Ok(());
    };
    let launch = lowered.launches.iter().find(|l| l.kernel == loops);
    if let Some(launch) = launch {
        page.push_str(SOURCE);
        let unit = &lowered.units[launch.unit];
        block(page, "c", function(&unit.source, &launch.symbol))?;
    }
    Ok(())
}

/// The definition of a function in a C text.
fn function(source: &str, symbol: &str) -> String {
    let opens = format!(" {symbol}(");
    let lines = source
        .lines()
        .skip_while(|line| line.starts_with(' ') || !line.contains(&opens) || line.ends_with(';'));
    let mut text = String::new();
    for line in lines {
        text.push_str(line);
        text.push('\n');
        if line == "}" {
            break;
        }
    }
    text
}

const BLOCK: &str = "\
a small block on its way to C, forward and
backward: a convolution with batch norm, to whose result the block's input is added, and ReLU";

const HEAD: &str = "\
# One block through all stages

This page and its pictures are the output of a command. They show {what}.

```sh
cargo run -p shorthaul-compiler --example stages -- docs/src
```

With an ONNX file, the command writes the same page for the model in it (here the file has a dynamic
size `batch`):

```sh
cargo run -p shorthaul-compiler --example stages -- target cli/tests/data/mlp.onnx batch=32
```

In the pictures, arrows go from the node that computes a value to the nodes that read it. Parameters
are named in the boxes that read them, and `⇒` marks what the step returns to its caller.

Below each picture is the whole graph as text. This form is explained at the top of
`graph/src/text.rs`. In short: a line `%name: type[sizes]` is a container. If its order of dimensions
in memory is not row-major, `<1,0>` gives it. `map [i < 8]` is a loop nest. In a tasklet, `$0` is the
first operand, and `(sum)` says that results are added up.
";

const IMPORT: Part = Part {
    title: "Import",
    text: "\
The model is a graph of library nodes, one for each operator. Sizes may still be symbols; here they
are numbers from the start.",
    file: "stages-import.svg",
    alt: "The operators of the model and the values between them",
};

const DIFFERENTIATE: Part = Part {
    title: "Differentiate",
    text: "\
Forward and backward are one graph now. The gradient of the result is an input; the gradients of the
block's input and parameters are results. Nodes marked `!backward` belong to the backward pass. A green
arrow is a value that the forward pass keeps for the backward pass.",
    file: "stages-differentiate.svg",
    alt: "The operators of the forward and the backward pass",
};

const EXPAND: Part = Part {
    title: "Expand and lay out",
    text: "\
Every library node becomes maps of scalar expressions. No operator has a name any more: a
contraction is a map that sums products. What a map reads or writes is a memlet, a container with an
index. Cheap arithmetic has moved into the maps that read its result. Then each container gets a
layout.",
    file: "stages-expand.svg",
    alt: "The maps that the operators have become, with what they read and write",
};

const FUSE: Part = Part {
    title: "Fuse",
    text: "\
Element-wise work moves into the kernels that read or write its operands. A container that only one
kernel uses becomes `local` to it and takes no memory. Each box is a kernel with its maps; each arrow
is a container in memory, with its bytes.",
    file: "stages-fuse.svg",
    alt: "The kernels, and the bytes of the containers between them",
};

const LOWER: Part = Part {
    title: "Lower",
    text: "\
Each top-level map becomes a kernel; the contraction generator writes those of contractions. All
intermediate results get a planned offset in one arena. This plan is for AVX-512 and two threads. The
times are predicted for the machine that the compiler assumes if none was measured: the longer of
computing and moving bytes (the two bars), and the launch. A product that is `local` in the graph gets
memory after all if its epilogue cannot write in its place, for example because the result has another
order of dimensions.",
    file: "stages-lower.svg",
    alt: "The kernels in order, with their bytes and predicted times",
};

const SOURCE: &str = "\nThe C text of the first kernel that is made by loops:\n";
