//! The onnx package's own node cases: evaluation against its outputs, inference against evaluation.
//!
//! `cargo xtask test` writes the cases to a folder (`dump_node_cases.py`) and names it in
//! `SHORTHAUL_NODE_CASES`. Every case passes, is of an operator without a row, is refused with a
//! sentence, or is wrong; a wrong one fails, and so does one of `node_cases.txt` that does not pass.

use graph::{SymExpr, Symbol};
use onnx::evaluate::{EvaluateError, Precision, Program, Values as Named, function_of};
use onnx::fact::{Fact, MAX_ELEMENTS};
use onnx::infer::{Facts, Functions, Opsets, Walk};
use onnx::operators::Unknowns;
use onnx::proto::{ModelProto, TensorProto, ValueInfoProto};
use onnx::tensor::Tensor;
use prost::Message;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How a case ends.
#[derive(Clone, Debug, PartialEq)]
enum Verdict {
    Passed,
    /// No row for an operator or an element type.
    Unsupported(String),
    /// The operator says why not.
    Refused(String),
    Wrong(String),
}

struct Case {
    model: ModelProto,
    inputs: Named,
    outputs: Vec<(String, Tensor)>,
}

/// A case's tensors, or the element type that is not computed with.
fn read(folder: &Path) -> Result<Case, Verdict> {
    let bytes = |name: &str| std::fs::read(folder.join(name)).expect("a file of the case");
    let model = ModelProto::decode(&*bytes("model.onnx")).expect("the case's model");
    let graph = model.graph.as_ref().expect("a graph");
    let tensor = |name: String| {
        let proto = TensorProto::decode(&*bytes(&name)).expect("a tensor of the case");
        Tensor::of_proto(&proto).map_err(Verdict::Unsupported)
    };
    let all = |infos: &[ValueInfoProto], kind: &str| -> Result<Vec<(String, Tensor)>, Verdict> {
        let each = |(n, info): (usize, &ValueInfoProto)| {
            Ok((info.name.clone(), tensor(format!("{kind}_{n}.pb"))?))
        };
        infos.iter().enumerate().map(each).collect()
    };
    let inputs = all(&graph.input, "input")?.into_iter().collect();
    let outputs = all(&graph.output, "output")?;
    Ok(Case {
        model,
        inputs,
        outputs,
    })
}

/// Relative and absolute difference allowed to the cases' outputs, which NumPy computed in the type of
/// the output, in another order: a few hundred roundings of it.
fn tolerance(bits: u32) -> (f64, f64) {
    match bits {
        8 => (2e-2, 1e-2),
        11 => (4e-3, 2e-3),
        24 => (1e-4, 2e-6),
        _ => (1e-6, 1e-7),
    }
}

/// Digits of an element type's significand; `None` if it is compared exactly.
fn significand(x: &Tensor) -> Option<u32> {
    use onnx::element::Element::*;
    match x.element() {
        BF16 => Some(8),
        F16 => Some(11),
        F32 => Some(24),
        F64 => Some(53),
        _ => None,
    }
}

fn compare(name: &str, found: &Tensor, expected: &Tensor, widened: bool) -> Result<(), String> {
    if found.shape != expected.shape {
        return Err(format!(
            "`{name}` has sizes {:?}, not {:?}",
            found.shape, expected.shape
        ));
    }
    let wide = widened && expected.element().is_float();
    let element = if wide {
        onnx::element::Element::F64
    } else {
        expected.element()
    };
    if found.element() != element {
        return Err(format!("`{name}` is {}, not {element}", found.element()));
    }
    let Some(bits) = significand(expected) else {
        let same = found.same_bits(expected);
        return if same {
            Ok(())
        } else {
            Err(format!("`{name}` is not the same"))
        };
    };
    let (relative, absolute) = tolerance(bits);
    let (found, expected) = (found.to_f64().unwrap(), expected.to_f64().unwrap());
    for (n, (a, b)) in found.iter().zip(&expected).enumerate() {
        let close = (a - b).abs() <= absolute + relative * b.abs();
        if !(a == b || close || (a.is_nan() && b.is_nan())) {
            return Err(format!("`{name}`[{n}] is {a}, not {b}"));
        }
    }
    Ok(())
}

/// Cases that round a value which lies halfway in `f32` only.
const HALFWAY: [&str; 2] = [
    "test_dynamicquantizelinear",
    "test_dynamicquantizelinear_expanded",
];

fn evaluated(case: &Case, precision: Precision) -> Result<(), Verdict> {
    let program = Program::new(&case.model, Path::new("."), precision).expect("a graph");
    let outputs = program.outputs(&case.inputs).map_err(|error| match error {
        EvaluateError::Unsupported { operator, .. } => Verdict::Unsupported(operator),
        error => Verdict::Refused(error.to_string()),
    })?;
    for (found, (name, expected)) in outputs.iter().zip(&case.outputs) {
        compare(name, found, expected, precision == Precision::Float64)
            .map_err(|what| Verdict::Wrong(format!("{precision:?}: {what}")))?;
    }
    Ok(())
}

/// What inference is told of the inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// Type and sizes.
    Sizes,
    /// Sizes as symbols, nothing of the elements.
    Symbols,
    /// Sizes as symbols, integers as constants.
    Integers,
    /// Sizes as symbols, integers as they would follow from sizes: symbols of their own.
    SymbolicIntegers,
    /// Everything that is small.
    Constants,
}

/// Values of the symbols that stand for the inputs' sizes and integers.
type Bound = BTreeMap<Symbol, i64>;

/// A number of at least 1 as a symbol, another one as it is.
fn symbol(name: String, value: i64, bound: &mut Bound) -> SymExpr {
    if value < 1 {
        return SymExpr::constant(value);
    }
    let symbol = Symbol::new(name);
    bound.insert(symbol.clone(), value);
    SymExpr::symbol(symbol)
}

fn told(name: &str, x: &Tensor, told: Told, bound: &mut Bound) -> Fact {
    let whole = !x.element().is_float() && x.to_i64().is_some() && x.len() <= MAX_ELEMENTS;
    let is_constant = match told {
        Told::Constants => x.len() <= MAX_ELEMENTS,
        Told::Integers => whole,
        _ => false,
    };
    if is_constant {
        return Fact::of_tensor(x.clone());
    }
    let has_elements = told == Told::SymbolicIntegers && whole;
    let sizes = x.shape.iter().enumerate();
    let size = |(d, n): (usize, &usize)| match told == Told::Sizes || has_elements {
        true => SymExpr::from(*n),
        false => symbol(format!("{name}.{d}"), *n as i64, bound),
    };
    let mut fact = Fact::new(Some(x.element()), Some(sizes.map(size).collect()));
    if has_elements {
        let ints = x.to_i64().unwrap();
        let each = |(n, i): (usize, &i64)| symbol(format!("{name}[{n}]"), *i, bound);
        fact.elements = Some(ints.iter().enumerate().map(each).collect());
    }
    fact
}

/// Checks that the inferred types agree with the outputs; returns how many of their sizes are not inferred.
fn inferred(case: &Case, how: Told) -> Result<usize, String> {
    let graph = case.model.graph.as_ref().unwrap();
    let opsets = Opsets::new(&case.model.opset_import);
    let unknowns = Unknowns::default();
    let walk = Walk {
        opsets: &opsets,
        functions: Functions::new(&case.model.functions),
        unknowns: &unknowns,
        inputs_are_constant: false,
    };
    let mut bound = Bound::new();
    let mut facts = Facts::default();
    for (name, x) in &case.inputs {
        facts.set(name, told(name, x, how, &mut bound));
    }
    for proto in &graph.initializer {
        let tensor = Tensor::of_proto(proto).map_err(|what| format!("initializer: {what}"))?;
        facts.set(&proto.name, Fact::of_tensor(tensor));
    }
    for node in &graph.node {
        for (name, fact) in node.output.iter().zip(walk.node(node, &facts)) {
            facts.set(name, fact);
        }
    }
    let mut open = 0;
    for (name, expected) in &case.outputs {
        let fact = facts.get(name).cloned().unwrap_or_default();
        open +=
            agrees(&fact, expected, &bound).map_err(|what| format!("{how:?}: `{name}` {what}"))?;
    }
    Ok(open)
}

/// The value of a size, if only bound symbols occur.
fn value(e: &SymExpr, bound: &Bound) -> Option<i64> {
    e.eval(bound).ok()
}

fn agrees(fact: &Fact, expected: &Tensor, bound: &Bound) -> Result<usize, String> {
    if fact.element.is_some_and(|e| e != expected.element()) {
        return Err(format!(
            "is inferred as {:?}, not {}",
            fact.element,
            expected.element()
        ));
    }
    let Some(shape) = &fact.shape else {
        return Ok(expected.shape.len().max(1) + usize::from(fact.element.is_none()));
    };
    let wrong = || {
        format!(
            "has inferred sizes {shape:?}, not {:?} ({bound:?})",
            expected.shape
        )
    };
    if shape.len() != expected.shape.len() {
        return Err(wrong());
    }
    let mut open = 0;
    for (size, n) in shape.iter().zip(&expected.shape) {
        match value(size, bound) {
            Some(found) if found != *n as i64 => return Err(wrong()),
            Some(_) => {}
            None => open += 1,
        }
    }
    if let Some(elements) = &fact.elements {
        let ints = expected.to_i64().ok_or("has inferred integers")?;
        if elements.len() != ints.len() {
            return Err(format!(
                "has {} inferred integers, not {}",
                elements.len(),
                ints.len()
            ));
        }
        for (element, n) in elements.iter().zip(ints) {
            if value(element, bound).is_some_and(|found| found != n) {
                return Err(format!(
                    "has an inferred integer {element}, not {n} ({bound:?})"
                ));
            }
        }
    }
    if let Some(constant) = fact.tensor() {
        compare("", &constant, expected, false)?;
    }
    Ok(open)
}

const WAYS: [Told; 5] = [
    Told::Sizes,
    Told::Symbols,
    Told::Integers,
    Told::SymbolicIntegers,
    Told::Constants,
];

/// How a case ends, and how many sizes are not inferred, for each way of declaring sizes.
fn judge(folder: &Path) -> (Verdict, [usize; 5]) {
    let mut open = [0; 5];
    let case = match read(folder) {
        Ok(case) => case,
        Err(verdict) => return (verdict, open),
    };
    for precision in [Precision::AsStored, Precision::Float64] {
        if precision == Precision::Float64 && HALFWAY.iter().any(|name| folder.ends_with(name)) {
            continue;
        }
        if let Err(verdict) = evaluated(&case, precision) {
            return (verdict, open);
        }
    }
    for (n, way) in WAYS.into_iter().enumerate() {
        match inferred(&case, way) {
            Ok(n_open) => open[n] = n_open,
            Err(what) => return (Verdict::Wrong(what), open),
        }
    }
    (Verdict::Passed, open)
}

/// Operators of a case, for the table.
fn operators(folder: &Path) -> Option<String> {
    let model = ModelProto::decode(&*std::fs::read(folder.join("model.onnx")).ok()?).ok()?;
    let node = model.graph.as_ref()?.node.first()?.clone();
    let local = function_of(&model, &node).is_some();
    Some(if local {
        format!("{} (function)", node.op_type)
    } else {
        node.op_type
    })
}

#[test]
#[ignore = "reads the cases in the folder that SHORTHAUL_NODE_CASES names"]
fn node_cases_pass() {
    let folder = std::env::var_os("SHORTHAUL_NODE_CASES").map(PathBuf::from);
    let folder = folder.expect("SHORTHAUL_NODE_CASES names no folder");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("the folder of cases")
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut verdicts = BTreeMap::new();
    let mut by_reason: BTreeMap<String, usize> = BTreeMap::new();
    let mut open: BTreeMap<String, [usize; 5]> = BTreeMap::new();
    for name in &names {
        let at = folder.join(name);
        let (verdict, n_open) = judge(&at);
        match &verdict {
            Verdict::Unsupported(what) => *by_reason.entry(what.clone()).or_default() += 1,
            Verdict::Refused(what) => println!("refused      {name}: {what}"),
            Verdict::Wrong(what) => println!("WRONG        {name}: {what}"),
            Verdict::Passed => {
                let sum = open.entry(operators(&at).unwrap_or_default()).or_default();
                (0..5).for_each(|n| sum[n] += n_open[n]);
            }
        }
        verdicts.insert(name.as_str(), verdict);
    }
    for (what, n) in by_reason {
        println!("unsupported  {n:4} × {what}");
    }
    for (what, n) in open.into_iter().filter(|(_, n)| n[2] + n[3] > 0) {
        println!("not inferred {n:?} {what}");
    }
    report(&verdicts);
}

fn report(verdicts: &BTreeMap<&str, Verdict>) {
    let count = |of: fn(&Verdict) -> bool| verdicts.values().filter(|v| of(v)).count();
    let wrong = count(|v| matches!(v, Verdict::Wrong(_)));
    println!(
        "{} cases: {} passed, {} unsupported, {} refused, {wrong} wrong",
        verdicts.len(),
        count(|v| *v == Verdict::Passed),
        count(|v| matches!(v, Verdict::Unsupported(_))),
        count(|v| matches!(v, Verdict::Refused(_))),
    );
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node_cases.txt");
    let passed = verdicts.iter().filter(|(_, v)| **v == Verdict::Passed);
    if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
        let text: String = passed.map(|(name, _)| format!("{name}\n")).collect();
        std::fs::write(&list, text).unwrap();
    }
    let listed = std::fs::read_to_string(&list).unwrap();
    let lost: Vec<&str> = listed
        .lines()
        .filter(|name| verdicts.get(name) != Some(&Verdict::Passed))
        .collect();
    assert!(lost.is_empty(), "no longer passed: {lost:?}");
    assert_eq!(wrong, 0, "wrong cases are printed above");
}

/// Numbers that files should not have in most places.
const ODD: [i64; 7] = [-1, 0, 1, 7, -9, i64::MIN, i64::MAX];

/// Ways to damage a case: an integer of an attribute or an input, the sizes of an input, an absent input.
fn damaged(case: &Case) -> Vec<(ModelProto, Named)> {
    let mut all = Vec::new();
    let nodes = case.model.graph.as_ref().unwrap().node.len();
    for n in 0..nodes {
        let node = &case.model.graph.as_ref().unwrap().node[n];
        for a in 0..node.attribute.len() {
            for odd in ODD {
                let mut model = case.model.clone();
                let attribute = &mut model.graph.as_mut().unwrap().node[n].attribute[a];
                match attribute.ints.len() {
                    0 if attribute.i.is_none() => continue,
                    0 => attribute.i = Some(odd),
                    len => attribute.ints[odd.unsigned_abs() as usize % len] = odd,
                }
                all.push((model, case.inputs.clone()));
            }
        }
        for i in 0..node.input.len() {
            let mut model = case.model.clone();
            model.graph.as_mut().unwrap().node[n].input[i].clear();
            all.push((model, case.inputs.clone()));
        }
    }
    for (name, x) in &case.inputs {
        let mut others = vec![
            vec![1; x.shape.len() + 1],
            vec![0; x.shape.len()],
            vec![2, 3],
        ];
        others.push(Vec::new());
        others.push([&[1][..], &x.shape].concat());
        others.push(x.shape.iter().rev().copied().collect());
        for shape in others {
            let n: usize = shape.iter().product();
            if n > 0 && x.is_empty() {
                continue;
            }
            let values = x.values.pick((0..n).map(|i| i % x.len()));
            let mut inputs = case.inputs.clone();
            inputs.insert(name.clone(), Tensor::new(&shape, values));
            all.push((case.model.clone(), inputs));
        }
        let Some(ints) = x.to_i64().filter(|v| !v.is_empty()) else {
            continue;
        };
        for odd in ODD {
            let mut ints = ints.clone();
            let at = odd.unsigned_abs() as usize % ints.len();
            ints[at] = odd;
            let mut inputs = case.inputs.clone();
            inputs.extend(Tensor::of_ints(x.element(), &x.shape, &ints).map(|x| (name.clone(), x)));
            all.push((case.model.clone(), inputs));
        }
    }
    all
}

#[test]
#[ignore = "reads the cases in the folder that SHORTHAUL_NODE_CASES names"]
fn damaged_node_cases_do_not_panic() {
    let folder = std::env::var_os("SHORTHAUL_NODE_CASES").map(PathBuf::from);
    let folder = folder.expect("SHORTHAUL_NODE_CASES names no folder");
    let mut entries: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("the folder of cases")
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    let mut by_operator: BTreeMap<String, usize> = BTreeMap::new();
    // Two cases of an operator are enough.
    entries.retain(|at| {
        let seen = by_operator
            .entry(operators(at).unwrap_or_default())
            .or_default();
        *seen += 1;
        *seen <= 2
    });
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut n, mut panics) = (0, Vec::new());
        while let Some(at) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (count, panicked) = damaged_case(at);
            n += count;
            panics.extend(panicked);
        }
        (n, panics)
    };
    let n_threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let done: Vec<(usize, Vec<OsString>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        let done = threads.into_iter().map(|thread| thread.join());
        done.map(|done| done.expect("panics are caught")).collect()
    });
    let n: usize = done.iter().map(|(n, _)| n).sum();
    let panics: Vec<OsString> = done.into_iter().flat_map(|(_, panics)| panics).collect();
    assert!(
        panics.is_empty(),
        "of {n} damaged cases panicked: {panics:?}"
    );
}

/// How many ways of damaging a case ran, and its name if one panicked.
fn damaged_case(at: &Path) -> (usize, Option<OsString>) {
    let Ok(case) = read(at) else { return (0, None) };
    let mut n = 0;
    for (model, inputs) in damaged(&case) {
        let case = Case {
            model,
            inputs,
            outputs: Vec::new(),
        };
        n += 1;
        let done = std::panic::catch_unwind(|| {
            let _ = evaluated(&case, Precision::AsStored);
            WAYS.map(|way| inferred(&case, way).is_ok())
        });
        if done.is_err() {
            return (n, at.file_name().map(OsString::from));
        }
    }
    (n, None)
}
