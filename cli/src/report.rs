//! `shorthaul report`: the kernels of a model, with bytes, arithmetic and memory.

use crate::answer::{Answer, apart};
use crate::progress::Progress;
use crate::units::{bytes, count, table};
use anyhow::{Context, Result, anyhow, bail};
use compiler::graph::{Bindings, DType, Symbol};
use compiler::importer::onnx::{File, Model, OnnxError, Options};
use compiler::recipe::RecipeFile;
use compiler::report::{KernelReport, Report};
use compiler::steering::{Choices, planned};
use compiler::training_input::{found_sizes, import_to_train};
use compiler::{Plan, Step, Target};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// How many kernels that are far from the machine's limits the text names.
const MOST_SLOW: usize = 5;

/// The text or JSON to print.
///
/// # Errors
/// The file cannot be read or imported, a size has no value, or an operator has no kernels yet.
pub fn run(
    path: &Path,
    options: &Options,
    train: bool,
    threads: u16,
    recipe: Option<&Path>,
    as_json: bool,
    mut progress: Progress,
) -> Result<Answer> {
    progress.stage("reading");
    let recipe = recipe.map(read_recipe).transpose()?;
    let Read {
        model,
        options,
        found,
    } = read(path, options, train)?;
    progress.stage("planning");
    let plan = plan(&model, train, threads, recipe)
        .with_context(|| format!("cannot plan {}", path.display()))?;
    let report = Report::of_plan(&plan, usize::from(threads))
        .with_context(|| format!("cannot lower {}", path.display()))?;
    drop(progress);
    // What lowering could not do is in the report's notes, what planning could not in the plan's.
    let notes: Vec<&String> = plan.notes.iter().chain(&report.notes).collect();
    Ok(Answer::yes(if as_json {
        let value = json!({
            "path": path.display().to_string(),
            "train": train,
            "threads": threads,
            "sizes": options.sizes,
            "found_sizes": found.sizes,
            "notes": notes,
            "report": report,
        });
        format!("{value:#}\n")
    } else {
        let notes = notes.iter().map(|note| format!("warning: {note}\n"));
        found_text(&found) + &text(path, &report, train) + &notes.collect::<String>()
    }))
}

/// A model with a value for each size.
pub struct Read {
    /// The model.
    pub model: Model,
    /// The options with all sizes.
    pub options: Options,
    found: Found,
}

impl Read {
    /// A line with the sizes that were found because they were not given; empty if all were given.
    pub fn found_text(&self) -> String {
        found_text(&self.found)
    }
}

/// Imports a file with values for all sizes, to train it or to run it.
///
/// # Errors
/// The file cannot be read or imported, or a size has no value.
pub fn read(path: &Path, options: &Options, train: bool) -> Result<Read> {
    let bytes = onnx::file::read_whole(path)?;
    let file = File::decode(path, bytes.clone())?;
    let given = onnx::file::Model::of_bytes(path, bytes)?;
    let (options, found) = with_found(&given, &file, options);
    let model = imported(file, &given, &options, train)?;
    check_sizes(path, &model, &found)?;
    Ok(Read {
        model,
        options,
        found,
    })
}

/// The model of a file, to train it or to run it.
fn imported(
    file: File,
    source: &onnx::file::Model,
    options: &Options,
    train: bool,
) -> Result<Model, OnnxError> {
    match train {
        true => import_to_train(file, source, options),
        false => file.import(options),
    }
}

/// A recipe's file.
///
/// # Errors
/// It cannot be read, or is no recipe.
pub fn read_recipe(path: &Path) -> Result<RecipeFile> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    RecipeFile::parse(&text).with_context(|| path.display().to_string())
}

/// Writes the page with the graph of any ONNX file, and the kernels where there are some.
///
/// # Errors
/// The file cannot be read, a size has no value, or the page cannot be written.
pub fn page(
    path: &Path,
    options: &Options,
    train: bool,
    threads: u16,
    out: &Path,
    mut progress: Progress,
) -> Result<Answer> {
    apart(out)?;
    progress.stage("reading");
    let bytes_read = onnx::file::read_whole(path)?;
    let model = onnx::file::Model::of_bytes(path, bytes_read.clone())?;
    let problems = onnx::check::errors(&model);
    if let Some(problem) = problems.first() {
        bail!(
            "{} is not well formed: {problem}; `shorthaul check` lists all problems",
            path.display()
        );
    }
    refuse_unknown(&model, options)?;
    let file = File::decode(path, bytes_read);
    let (options, found) = match &file {
        Ok(file) => with_found(&model, file, options),
        Err(_) => (options.clone(), Found::default()),
    };
    let shapes = shapes(&model, &drawn(&options, file.as_ref().ok()), &found)?;
    progress.stage("planning");
    let kernels = file
        .and_then(|file| imported(file, &model, &options, train))
        .map_err(anyhow::Error::from)
        .and_then(|imported| plan(&imported, train, threads, None))
        .and_then(|plan| Ok(Report::of_plan(&plan, usize::from(threads))?))
        .map_err(|error| format!("{error:#}"));
    let text = crate::page::page(&model, &shapes, &kernels);
    progress.stage("writing");
    let staged = onnx::file::stage_bytes(text.as_bytes(), out, &model.files())?;
    drop(progress);
    let said = found_text(&found)
        + &format!(
            "{}: {} of {}\n",
            out.display(),
            bytes(text.len() as i64),
            path.display()
        );
    Ok(Answer::with(said, staged))
}

/// Values for sizes that were not given.
#[derive(Default)]
struct Found {
    sizes: BTreeMap<String, i64>,
    /// Why there are none.
    obstacle: Option<anyhow::Error>,
}

impl Found {
    /// The error for sizes that still have no number.
    fn refusal(&self, path: &Path, open: &[String]) -> anyhow::Error {
        let open = open.join(" ");
        let path = path.display();
        match &self.obstacle {
            Some(obstacle) => anyhow!(
                "{path} has dynamic sizes; give each a value: {open} (Shorthaul found none: {obstacle:#})"
            ),
            None => anyhow!("{path} has dynamic sizes; give each a value: {open}"),
        }
    }
}

/// The options with values found for the sizes that are not given, and these values. If none are found, the options as
/// they are.
fn with_found(model: &onnx::file::Model, file: &File, options: &Options) -> (Options, Found) {
    let found = match found_sizes(model, file, &options.sizes) {
        Ok(sizes) => Found {
            sizes,
            obstacle: None,
        },
        Err(obstacle) => Found {
            sizes: BTreeMap::new(),
            obstacle: Some(obstacle.into()),
        },
    };
    let mut options = options.clone();
    options.sizes.extend(found.sizes.clone());
    (options, found)
}

/// The options with sizes without a name also under the names that verification has for them.
fn drawn(options: &Options, file: Option<&File>) -> Options {
    let mut options = options.clone();
    let unnamed = file.map(File::dynamic_sizes).unwrap_or_default();
    for size in unnamed.into_iter().filter(|size| !size.is_named) {
        if let Some(n) = options.sizes.get(&size.name).copied() {
            let name = format!("{}.{}", size.input, size.dimension);
            options.sizes.insert(name, n);
        }
    }
    options
}

/// A line with the sizes that were not given.
fn found_text(found: &Found) -> String {
    let sizes: Vec<String> = found
        .sizes
        .iter()
        .map(|(name, n)| format!("{name}={n}"))
        .collect();
    match sizes.as_slice() {
        [] => String::new(),
        sizes => format!(
            "sizes found by running the model: {}; --bind sets others\n",
            sizes.join(", ")
        ),
    }
}

/// Refuses a value for a size that no input and no output has, also if the file is only drawn.
fn refuse_unknown(model: &onnx::file::Model, options: &Options) -> Result<()> {
    let mut known = BTreeSet::new();
    let ports = model.proto.graph.iter();
    for port in ports.flat_map(|g| g.input.iter().chain(&g.output)) {
        let fact = onnx::infer::declared(port, &onnx::operators::Unknowns::default());
        for (d, size) in fact.shape.iter().flatten().enumerate() {
            match onnx::infer::is_unknown(size) {
                true => drop(known.insert(format!("{}.{d}", port.name))),
                false => known.extend(size.symbols().iter().map(|s| s.as_str().to_string())),
            }
        }
    }
    if let Some(unknown) = options.sizes.keys().find(|name| !known.contains(*name)) {
        let has = match known.is_empty() {
            true => "none".to_string(),
            false => known.into_iter().collect::<Vec<_>>().join(", "),
        };
        bail!(
            "{} has no dynamic size of the name `{unknown}`; it has {has}",
            model.path.display()
        );
    }
    Ok(())
}

/// Sizes of the inputs that have to be given.
fn shapes(
    model: &onnx::file::Model,
    options: &Options,
    found: &Found,
) -> Result<BTreeMap<String, Vec<usize>>> {
    let mut shapes = BTreeMap::new();
    let Some(graph) = &model.proto.graph else {
        return Ok(shapes);
    };
    let bound = options.sizes.iter();
    let bound: Bindings = bound.map(|(name, n)| (Symbol::new(name), *n)).collect();
    let mut open = BTreeSet::new();
    for input in &graph.input {
        let is_stored = graph.initializer.iter().any(|t| t.name == input.name);
        let fact = onnx::infer::declared(input, &onnx::operators::Unknowns::default());
        let Some(shape) = fact.shape.filter(|_| !is_stored) else {
            continue;
        };
        let mut sizes = Vec::new();
        for (d, size) in shape.iter().enumerate() {
            // A size without a name is called by its place, as in verification.
            let place = Symbol::new(format!("{}.{d}", input.name));
            let known = match onnx::infer::is_unknown(size) {
                true => bound.get(&place).copied(),
                false => size.eval(&bound).ok(),
            };
            match known.and_then(|n| usize::try_from(n).ok()) {
                Some(n) => sizes.push(n),
                None if onnx::infer::is_unknown(size) => {
                    open.insert(format!("--bind {}=…", place.as_str()));
                }
                None => open.extend(
                    size.symbols()
                        .iter()
                        .map(|s| format!("--bind {}=…", s.as_str())),
                ),
            }
        }
        shapes.insert(input.name.clone(), sizes);
    }
    if !open.is_empty() {
        let open: Vec<String> = open.into_iter().collect();
        return Err(found.refusal(&model.path, &open));
    }
    Ok(shapes)
}

/// Every dynamic size needs a value.
fn check_sizes(path: &Path, model: &Model, found: &Found) -> Result<()> {
    let open: Vec<_> = model
        .sizes
        .iter()
        .map(|(name, _)| format!("--bind {name}=…"))
        .collect();
    if !open.is_empty() {
        return Err(found.refusal(path, &open));
    }
    Ok(())
}

/// The step as it is planned, with a recipe or as Shorthaul decides.
fn plan(model: &Model, train: bool, threads: u16, recipe: Option<RecipeFile>) -> Result<Plan> {
    let choices = Choices {
        recipe,
        ..Choices::default()
    };
    let place = (Target::Cpu, usize::from(threads));
    Ok(planned(
        &step(model, train)?,
        &Bindings::new(),
        place,
        &choices,
    )?)
}

/// The step: forward, or with the gradients of all trainable parameters.
///
/// # Errors
/// There is nothing to train, or an operator has no gradient.
pub fn step(model: &Model, train: bool) -> Result<Step> {
    let graph = &model.graph;
    // All sizes of the model are constants here.
    let sizes = Bindings::new();
    Ok(if train {
        let trainable = |position: &usize| {
            let id = graph.inputs[*position];
            let is_weight = model
                .parameters
                .iter()
                .any(|p| p.container == id && p.trainable);
            is_weight && graph.container(id).dtype >= DType::F16
        };
        let wrt: Vec<usize> = (0..graph.inputs.len()).filter(trainable).collect();
        if wrt.is_empty() {
            bail!("the model has no trainable parameters; leave out --train");
        }
        Step::on_cpu(graph, &sizes, &wrt, true)?
    } else {
        Step::on_cpu(graph, &sizes, &[], true)?
    })
}

fn text(path: &Path, report: &Report, train: bool) -> String {
    let step = if train {
        "a training step"
    } else {
        "inference"
    };
    let mut text = format!(
        "{}: {step} in {} kernels\n",
        path.display(),
        report.kernels.len()
    );
    let header = [
        "kernel",
        "stage",
        "made by",
        "read",
        "written",
        "least",
        "operations",
        "origin",
    ];
    let mut rows = vec![header.map(ToString::to_string).to_vec()];
    rows.extend(report.kernels.iter().map(row));
    text.push_str(&table(&rows));
    let ratio = report.bytes_moved as f64 / report.bytes_least.max(1) as f64;
    let _ = writeln!(
        text,
        "moved: {}, {ratio:.2} times the least possible ({}); fusion saved {}",
        bytes(report.bytes_moved),
        bytes(report.bytes_least),
        bytes(report.bytes_saved)
    );
    let _ = writeln!(
        text,
        "arithmetic: {} operations",
        count(report.operations as f64)
    );
    let memory = &report.memory;
    let size = |n: usize| bytes(n as i64);
    let _ = write!(
        text,
        "memory for intermediate results: {} forward",
        size(memory.forward_arena_bytes)
    );
    if train {
        let _ = write!(
            text,
            ", {} backward, {} kept between them",
            size(memory.backward_arena_bytes),
            size(memory.saved_bytes)
        );
    }
    let _ = writeln!(
        text,
        ", {} for each thread",
        size(memory.thread_scratch_bytes)
    );
    for undone in &report.undone {
        let _ = writeln!(text, "{}", undone.sentence);
    }
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {}", warning.sentence);
    }
    for slow in report.slow.iter().take(MOST_SLOW) {
        let _ = writeln!(text, "slow: {}", slow.sentence);
    }
    if let Some(more @ 1..) = report.slow.len().checked_sub(MOST_SLOW) {
        let _ = writeln!(text, "slow: {more} more kernels; --json lists all");
    }
    text
}

fn row(kernel: &KernelReport) -> Vec<String> {
    vec![
        kernel.name.clone(),
        kernel.stage.to_string(),
        kernel.path.to_string(),
        bytes(kernel.bytes_read),
        bytes(kernel.bytes_written),
        bytes(kernel.bytes_least),
        count(kernel.operations as f64),
        kernel.origin.clone(),
    ]
}
