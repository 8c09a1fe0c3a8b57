//! Prints the training step of an ONNX model after every stage of the compiler, as a page in Markdown.
//! `cargo run -p shorthaul-compiler --example stages -- cli/tests/data/mlp.onnx batch=32`
//!
//! The guide's page docs/src/stages.md is this output; compiler/tests/stages.rs holds it up to date.

use compiler::Step;
use compiler::importer::onnx::{File, Mode, Options};
use graph::{Bindings, Graph, Recipe};
use kernels::features::{CpuTarget, Isa};
use kernels::lowering::{Lowered, lower};
use kernels::toolchain::Family;
use std::error::Error;
use std::fmt::{Display, Write};
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((path, sizes)) = args.split_first() else {
        return Err("give an ONNX file, then NAME=SIZE for each dynamic size".into());
    };
    print!("{}", page(Path::new(path), sizes)?);
    Ok(())
}

/// The page for a model; `sizes` are `NAME=SIZE`.
pub fn page(path: &Path, sizes: &[String]) -> Result<String, Box<dyn Error>> {
    let mut options = Options {
        sizes: Default::default(),
        mode: Mode::File,
    };
    for size in sizes {
        let (name, value) = size.split_once('=').ok_or("a size is NAME=SIZE")?;
        options.sizes.insert(name.to_string(), value.parse()?);
    }
    let model = File::read(path)?.import(&options)?;
    let wrt: Vec<usize> = (0..model.graph.inputs.len())
        .filter(|i| {
            let id = model.graph.inputs[*i];
            model
                .parameters
                .iter()
                .any(|p| p.container == id && p.trainable)
        })
        .collect();
    let step = Step::training(&model.graph, &wrt)?;
    let plan = step.plan(&Bindings::new())?;
    let mut expanded = fusion::expand(&plan.bound, &Recipe::default())?;
    layouts::assign(&mut expanded.graph, &Recipe::default());
    let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
    let lowered = lower(&plan.graph, &target, 2)?;

    let mut page = String::from(HEAD);
    section(&mut page, "Import", IMPORT, &model.graph)?;
    section(&mut page, "Differentiate", DIFFERENTIATE, step.graph())?;
    section(&mut page, "Expand and lay out", EXPAND, &expanded.graph)?;
    section(&mut page, "Fuse", FUSE, &plan.graph)?;
    decisions(&mut page, &plan.decisions)?;
    kernels(&mut page, &lowered)?;
    Ok(page)
}

fn section(page: &mut String, title: &str, text: &str, graph: &Graph) -> std::fmt::Result {
    write!(page, "\n## {title}\n\n{text}\n")?;
    block(page, "text", graph)
}

fn block(page: &mut String, language: &str, content: impl Display) -> std::fmt::Result {
    let content = content.to_string();
    write!(page, "\n```{language}\n{}\n```\n", content.trim_end())
}

fn decisions(page: &mut String, decisions: &[fusion::Decision]) -> std::fmt::Result {
    let mut lines = String::new();
    for d in decisions {
        let verb = if d.is_applied() { "did" } else { "refused" };
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
    write!(page, "\n## Lower\n\n{LOWER}\n")?;
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

const HEAD: &str = "\
# One block through all stages

This page is the output of a command. It shows a small model, a linear layer with ReLU and another
linear layer, on its way from an ONNX file to C:

```sh
cargo run -p shorthaul-compiler --example stages -- cli/tests/data/mlp.onnx batch=32
```

The text form is explained at the top of `graph/src/text.rs`. In short: a line `%name: type[sizes]`
is a container, `<1,0>` its order of dimensions in memory where that is not row-major; `map [i < 8]`
is a loop nest; in a tasklet, `$0` is its first operand, and `(sum)` says that results are added up.
";

const IMPORT: &str = "\
The file becomes a graph of library nodes, one for each operator. Sizes may still be symbols; here
the command fixed `batch`.";

const DIFFERENTIATE: &str = "\
Forward and backward are one graph now. The gradient of the output is an input, the gradients of the
parameters are outputs. Nodes marked `!backward` belong to the backward pass.";

const EXPAND: &str = "\
Every library node becomes maps of scalar expressions. No operator has a name any more: a
contraction is a map that sums products. Then each container gets a layout.";

const FUSE: &str = "\
Element-wise work moves into the kernels that read or write its operands. A container that only one
kernel uses becomes `local` to it and leaves memory.";

const LOWER: &str = "\
Each top-level map becomes a kernel, contractions by the contraction generator. Offsets in one arena
are planned for all intermediate results. This is for AVX-512 and two threads:";

const SOURCE: &str = "\nThe C text of the first kernel that is made of plain loops:\n";
