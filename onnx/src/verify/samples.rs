//! Inputs made up for a model: sizes that it runs with, numbers of the kinds it expects.
//!
//! Floats are normal numbers. Integers are positions below the size of what they look up, otherwise 0 and 1, and in
//! every second run small numbers of both signs if the model runs on them. What decides sizes fits the declared sizes
//! (`fitting.rs`). Sizes are first equal, so that much fits, then all different, then one at a time 0. The
//! same seed gives the same inputs.

use super::attempts::{Attempt, Integers};
use super::cuts::Cuts;
use super::fitting::Fitting;
use super::numbers::{magnitudes, plant, words};
use super::random::Random;
use super::related::with_masks;
use super::{Options, VerifyError, given};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::evaluate::{Values, label};
use crate::fact::Fact;
use crate::file::Model;
use crate::infer::{Facts, declared, is_unknown, known_values};
use crate::operators::{Unknowns, axis};
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::{Tensor, Values as Elements};
use bytes::Bytes;
use graph::{Bindings, SymExpr, Symbol};
use std::collections::{BTreeMap, BTreeSet};

/// Sizes by name of the input.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// What is planted in inputs of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Nothing: all numbers are finite.
    Nothing,
    /// A NaN.
    Nan,
    /// Both infinities.
    Infinity,
}

impl Planted {
    /// A text for people, to be added to what else is known of a run.
    pub fn described(self) -> &'static str {
        match self {
            Planted::Nothing => "",
            Planted::Nan => ", with NaN",
            Planted::Infinity => ", with infinities",
        }
    }
}

/// A value to make up.
struct Given {
    name: String,
    fact: Fact,
    /// If its numbers look something up, all are below this: integers, and floats that are cast to positions.
    bound: Option<i64>,
    /// What fits it, if it decides sizes.
    fitting: Option<Fitting>,
    /// The texts to choose from, if it names categories.
    words: Vec<Bytes>,
    /// The node that would compute it, where models are cut.
    by: Option<String>,
    /// Whether the file holds a value for it, which a caller may replace.
    has_default: bool,
    /// Whether its type or sizes are not known but guessed.
    is_guessed: bool,
}

/// Makes up inputs.
pub struct Sampler {
    given: Vec<Given>,
    fixed: Values,
    /// Dynamic sizes, those of a first dimension first.
    symbols: Vec<String>,
    n_first: usize,
    preset: BTreeMap<String, i64>,
    /// Sizes that follow from others.
    relations: BTreeMap<String, SymExpr>,
    /// Sizes that reshapes inside of the model have.
    inner: Vec<i64>,
    /// The attempt that worked.
    settled: Option<Attempt>,
    /// Whether floats had to be above zero.
    positive: bool,
    /// Whether another program is asked for what would be guessed.
    asks: bool,
}

/// Values that are tried for dynamic sizes: small ones first, then what convolutional networks need.
const TRIED: [i64; 9] = [5, 8, 16, 32, 1, 2, 64, 128, 224];
/// Sizes that are tried last, for sound: windows of hundreds of samples.
const TRIED_LAST: [i64; 3] = [640, 2048, 16000];
/// Most sizes inside of a model that are tried.
const MOST_INNER: usize = 8;
/// Most dynamic sizes that are tried with 0.
const MOST_EMPTIES: usize = 4;

impl Sampler {
    /// A sampler for the inputs of a model and for what `cuts` give.
    ///
    /// # Errors
    /// [`VerifyError::Given`].
    pub fn new(model: &Model, cuts: &Cuts, options: &Options) -> Result<Sampler, VerifyError> {
        let empty = GraphProto::default();
        let graph = model.proto.graph.as_ref().unwrap_or(&empty);
        let unknowns = Unknowns::default();
        let facts = known_values(&model.proto, &model.folder, &unknowns);
        let fixed = model.proto.ir_version.unwrap_or(0) < 4;
        let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        let mut given = Vec::new();
        for info in graph
            .input
            .iter()
            .filter(|i| !(fixed && stored.contains(i.name.as_str())))
        {
            let mut fact = declared(info, &unknowns);
            name_unknown(&mut fact, &info.name);
            let bound = bound(graph, &facts, &info.name, 0);
            let shape = fact.shape.as_deref();
            let fitting = shape.and_then(|shape| Fitting::new(graph, &facts, &info.name, shape));
            given.push(Given {
                name: info.name.clone(),
                fact,
                bound,
                fitting,
                words: words(graph, &info.name),
                by: None,
                has_default: stored.contains(info.name.as_str()),
                is_guessed: false,
            });
        }
        given.retain(|g: &Given| !cuts.is_opaque(&g.name));
        let known: Vec<(&str, &Fact)> = given.iter().map(|g| (g.name.as_str(), &g.fact)).collect();
        let preset = given::preset(graph, &known, options.given(), &options.sizes)?;
        for node in &cuts.nodes {
            for output in node
                .output
                .iter()
                .filter(|o| !o.is_empty() && !cuts.is_opaque(o))
            {
                let fact = facts.get(output).cloned().unwrap_or_default();
                let has_sizes = fact.shape.iter().any(|s| !s.iter().any(is_unknown));
                let is_guessed = fact.element.is_none() || !has_sizes;
                let fact = guessed(graph, &facts, node, fact);
                let by = Some(label(node));
                given.push(Given {
                    name: output.clone(),
                    fact,
                    bound: None,
                    fitting: None,
                    words: words(graph, output),
                    by,
                    has_default: false,
                    is_guessed,
                });
            }
        }
        let (mut first, mut others) = (Vec::new(), Vec::new());
        for shape in given
            .iter()
            .filter(|g| g.by.is_none())
            .filter_map(|g| g.fact.shape.as_ref())
        {
            for (d, size) in shape.iter().enumerate() {
                for symbol in size.symbols() {
                    let name = symbol.as_str().to_string();
                    let list = if d == 0 { &mut first } else { &mut others };
                    if !list.contains(&name) {
                        list.push(name);
                    }
                }
            }
        }
        others.retain(|name| !first.contains(name));
        let n_first = first.len();
        let symbols: Vec<String> = first.into_iter().chain(others).collect();
        given::known_relations(&options.relations, &symbols)?;
        let relations = with_masks(graph, &facts, &symbols, &options.relations, &preset);
        Ok(Sampler {
            given,
            fixed: options.given().clone(),
            symbols,
            n_first,
            preset,
            relations,
            inner: reshaped_sizes(graph, &facts),
            settled: None,
            positive: false,
            asks: false,
        })
    }

    /// From now on leaves out values that would be guessed; returns their names.
    pub fn ask(&mut self) -> Vec<String> {
        self.asks = true;
        let guessed = self.given.iter().filter(|given| given.is_guessed);
        guessed.map(|given| given.name.clone()).collect()
    }

    /// Whether anything of floats is made up.
    pub fn has_floats(&self) -> bool {
        let made_up = |g: &&Given| !self.fixed.contains_key(&g.name);
        let mut made_up = self.given.iter().filter(made_up);
        made_up.any(|g| g.fact.element.is_some_and(Element::is_float))
    }

    /// Whether there are integers or truth values that look nothing up, besides `others`.
    pub fn has_masks(&self, others: &[&str]) -> bool {
        let is_other = |g: &Given| g.bound.is_some() || others.contains(&g.name.as_str());
        let mut free = self.given.iter().filter(|g| !is_other(g) && !g.has_default);
        free.any(|g| g.fact.element.is_some_and(|e| !e.is_float()))
    }

    /// The largest unit roundoff of what is given, 0 if nothing is narrower than f32.
    pub fn roundoff(&self) -> f64 {
        let of = |g: &Given| match g.fact.element {
            Some(Element::F16) => 2f64.powi(-11),
            Some(Element::BF16) => 2f64.powi(-8),
            _ => 0.0,
        };
        self.given.iter().map(of).fold(0.0, f64::max)
    }

    /// Sizes to try for a seed, in order. First dimensions are usually batches: 1, 2, 3 by seed, and 1
    /// where something is planted.
    pub fn attempts(&self, seed: usize, planted: Planted) -> Vec<Attempt> {
        let batch = match planted {
            Planted::Nothing => 1 + seed as i64 % 3,
            _ => 1,
        };
        let mut attempts: Vec<Attempt> = Vec::new();
        match &self.settled {
            // What worked; for odd seeds, something else before it.
            Some(settled) => {
                let size = self.size_of(settled);
                if seed % 2 == 1 {
                    for integers in [Integers::Signed, settled.integers] {
                        let sizes = self.different(batch, size + 1);
                        attempts.push(self.attempt(sizes, integers));
                    }
                    for size in [size * 2, size + 1] {
                        attempts.extend(self.uniform(batch, size, settled.integers));
                    }
                }
                attempts.extend(self.uniform(batch, size, settled.integers));
                // Exporters that trace with one batch may fix it inside without saying so.
                let worked = self.first_size_of(settled);
                for size in [size + seed as i64 % 2, size] {
                    let same_batch = self.uniform(worked, size, settled.integers);
                    attempts.extend(same_batch.into_iter().next());
                }
            }
            None => {
                for integers in [Integers::Masks, Integers::Zeros] {
                    let tried = TRIED.iter();
                    attempts.extend(tried.flat_map(|n| self.uniform(batch, *n, integers)));
                }
                // A size may be fixed inside though the input leaves it open.
                let inner = self.inner.iter();
                attempts.extend(inner.flat_map(|n| self.uniform(batch, *n, Integers::Masks)));
            }
        }
        self.add_variants(&mut attempts);
        if self.settled.is_none() {
            let tried = TRIED_LAST.iter();
            let mut last = tried
                .flat_map(|n| self.uniform(batch, *n, Integers::Masks))
                .collect();
            self.add_variants(&mut last);
            attempts.extend(last);
        }
        let mut known = Vec::new();
        attempts.retain(|attempt| {
            let is_new = !known.contains(attempt);
            known.push(attempt.clone());
            is_new
        });
        attempts
    }

    /// Adds the same attempts with floats above zero, then all of them with `fitted` the other way.
    fn add_variants(&self, attempts: &mut Vec<Attempt>) {
        if !self.positive {
            let all = attempts.clone().into_iter();
            attempts.extend(all.map(|attempt| Attempt {
                positive: true,
                ..attempt
            }));
        }
        if self.given.iter().any(|given| given.fitting.is_some()) {
            let all = attempts.clone().into_iter();
            attempts.extend(all.map(|attempt| Attempt {
                fitted: !attempt.fitted,
                ..attempt
            }));
        }
    }

    /// What worked, with each dynamic size in turn 0: many models run on nothing, and a decoder
    /// begins with an empty past.
    pub fn empties(&self) -> Vec<Attempt> {
        let Some(settled) = &self.settled else {
            return Vec::new();
        };
        let open = self
            .symbols
            .iter()
            .filter(|s| !self.preset.contains_key(*s) && !self.relations.contains_key(*s));
        let empty = |name: &String| {
            let mut attempt = settled.clone();
            attempt.sizes.insert(name.clone(), 0);
            self.relate(&mut attempt.sizes);
            attempt
        };
        open.take(MOST_EMPTIES).map(empty).collect()
    }

    /// The same size for all but first dimensions; then for those too, which some models want.
    fn uniform(&self, batch: i64, size: i64, integers: Integers) -> Vec<Attempt> {
        let attempt = |first: i64| {
            let size = |n: usize| if n < self.n_first { first } else { size };
            self.attempt(self.sizes(&size), integers)
        };
        vec![attempt(batch), attempt(size)]
    }

    /// Another size for every dimension, from `batch` or `size` on.
    fn different(&self, batch: i64, size: i64) -> BTreeMap<String, i64> {
        self.sizes(&|n| match n.checked_sub(self.n_first) {
            None => batch + n as i64,
            Some(n) => size + n as i64,
        })
    }

    fn sizes(&self, size: &dyn Fn(usize) -> i64) -> BTreeMap<String, i64> {
        let value = |(n, name): (usize, &String)| {
            let preset = self.preset.get(name).copied();
            (name.clone(), preset.unwrap_or_else(|| size(n)))
        };
        let mut sizes = self.symbols.iter().enumerate().map(value).collect();
        self.relate(&mut sizes);
        sizes
    }

    /// Computes the sizes that follow from others.
    fn relate(&self, sizes: &mut BTreeMap<String, i64>) {
        for (name, relation) in &self.relations {
            let value = relation.eval_with(&|symbol| sizes.get(symbol.as_str()).copied());
            // A size that overflows stays as it is, and the attempt fails.
            if let Ok(value) = value {
                sizes.insert(name.clone(), value);
            }
        }
    }

    fn attempt(&self, sizes: BTreeMap<String, i64>, integers: Integers) -> Attempt {
        Attempt {
            sizes,
            integers,
            positive: self.positive,
            fitted: self.settled.as_ref().is_none_or(|settled| settled.fitted),
        }
    }

    /// The size of first dimensions.
    fn first_size_of(&self, attempt: &Attempt) -> i64 {
        let name = self.symbols.first().filter(|_| self.n_first > 0);
        let size = name.and_then(|name| attempt.sizes.get(name));
        size.copied().unwrap_or(1)
    }

    /// The size of dimensions that are not first.
    fn size_of(&self, attempt: &Attempt) -> i64 {
        let name = self.symbols.get(self.n_first);
        let size = name.and_then(|name| attempt.sizes.get(name));
        size.copied().unwrap_or(1)
    }

    /// Remembers what worked.
    pub fn settle(&mut self, attempt: &Attempt) {
        if self.settled.is_none() {
            self.settled = Some(attempt.clone());
            self.positive = attempt.positive;
        }
    }

    /// The shapes of inputs of those sizes; `None` if a size comes out negative.
    ///
    /// # Errors
    /// [`VerifyError::Cut`].
    pub fn shapes(&self, attempt: &Attempt) -> Result<Option<Shapes>, VerifyError> {
        let bindings = attempt.bindings();
        let fixed = self.fixed.iter();
        let mut shapes: Shapes = fixed.map(|(n, t)| (n.clone(), t.shape.clone())).collect();
        for given in &self.given {
            match tensor_sizes(&given.type_at(&bindings)?.1) {
                Some(sizes) => shapes.entry(given.name.clone()).or_insert(sizes),
                None => return Ok(None),
            };
        }
        Ok(Some(shapes))
    }

    /// Inputs of those sizes; `None` if a size comes out negative.
    ///
    /// # Errors
    /// [`VerifyError::Cut`].
    pub fn feeds(
        &self,
        seed: usize,
        attempt: &Attempt,
        planted: Planted,
    ) -> Result<Option<Values>, VerifyError> {
        let bindings = attempt.bindings();
        let mut feeds = self.fixed.clone();
        let mut room = MOST_ELEMENTS + 1;
        for (n, given) in self.given.iter().enumerate() {
            let left_out =
                (given.has_default && !replaces(seed, given)) || (given.is_guessed && self.asks);
            if feeds.contains_key(&given.name) || left_out {
                continue;
            }
            let (element, sizes) = given.type_at(&bindings)?;
            let Some(sizes) = tensor_sizes(&sizes) else {
                return Ok(None);
            };
            let weight = match element {
                Element::String => STRING_WEIGHT,
                _ => 1,
            };
            let len: usize = sizes.iter().product();
            room = room.saturating_sub(len.saturating_mul(weight));
            if room == 0 {
                return Ok(None);
            }
            let mut random = Random::new(seed as u64 * 1000 + n as u64);
            let fitting = given.fitting.as_ref().filter(|_| attempt.fitted);
            let fitted = fitting.and_then(|fitting| {
                fitting.tensor((element, &sizes), &bindings, attempt.integers, &mut random)
            });
            if let Some(fitted) = fitted {
                feeds.insert(given.name.clone(), fitted);
                continue;
            }
            let mut tensor = random.tensor(element, &sizes, given.bound, attempt.integers);
            if element == Element::Bool && tensor.len() == 1 {
                // It may be a condition: the branches take turns, seed by seed.
                let unmasked = attempt.integers == Integers::Ones;
                let chosen = unmasked || (seed + n).is_multiple_of(2);
                tensor = Tensor::new(&sizes, Elements::Bool(vec![chosen]));
            }
            if element == Element::String && !given.words.is_empty() {
                tensor = random.chosen(&sizes, &given.words);
            }
            if attempt.positive {
                tensor = magnitudes(tensor);
            }
            if given.by.is_none() {
                tensor = plant(tensor, planted, &mut random);
            }
            feeds.insert(given.name.clone(), tensor);
        }
        Ok(Some(feeds))
    }
}

impl Given {
    /// Its type and sizes where dynamic ones have those values.
    fn type_at(&self, bindings: &Bindings) -> Result<(Element, Vec<i64>), VerifyError> {
        let unknown = || VerifyError::Cut {
            node: match &self.by {
                Some(node) => node.clone(),
                None => format!("the input `{}`", self.name),
            },
        };
        let (Some(element), Some(shape)) = (self.fact.element, &self.fact.shape) else {
            return Err(unknown());
        };
        // What a cut gives may have any sizes.
        let any = self.by.is_some().then_some(3);
        let value = |symbol: &Symbol| bindings.get(symbol).copied().or(any);
        let sizes: Result<Vec<i64>, _> = shape.iter().map(|n| n.eval_with(&value)).collect();
        Ok((element, sizes.map_err(|_| unknown())?))
    }
}

/// Whether a seed gives another value for an input with a default: of floats, every second one.
/// Integers there are usually sizes or axes that only the default fits.
fn replaces(seed: usize, given: &Given) -> bool {
    seed % 2 == 1 && given.fact.element.is_some_and(Element::is_float)
}

/// The numbers above 1 among the sizes that the nodes `Reshape` and `Expand` ask for, the first few.
fn reshaped_sizes(graph: &GraphProto, facts: &Facts) -> Vec<i64> {
    let nodes = graph.node.iter();
    let nodes = nodes.filter(|node| matches!(node.op_type.as_str(), "Reshape" | "Expand"));
    let asked = nodes.filter_map(|node| facts.get(node.input.get(1)?)?.ints());
    let mut sizes: Vec<i64> = Vec::new();
    for size in asked.flatten().filter_map(|size| size.as_const()) {
        let is_new = size > 1 && !sizes.contains(&size) && !TRIED.contains(&size);
        if is_new && sizes.len() < MOST_INNER {
            sizes.push(size);
        }
    }
    sizes
}

/// A size the file does not name is called by the input and the dimension.
fn name_unknown(fact: &mut Fact, input: &str) {
    for (d, size) in fact.shape.iter_mut().flatten().enumerate() {
        if is_unknown(size) {
            *size = SymExpr::symbol(Symbol::new(format!("{input}.{d}")));
        }
    }
}

/// What is not known of an output is taken from the nearest value above that is known. This decides
/// what both models are tried on, not what is taken for granted.
fn guessed(graph: &GraphProto, facts: &Facts, node: &NodeProto, fact: Fact) -> Fact {
    let mut names: Vec<&str> = node.input.iter().map(String::as_str).collect();
    let mut seen = 0;
    while let (Some(name), true) = (names.get(seen).copied(), seen < 64) {
        seen += 1;
        let producer = graph
            .node
            .iter()
            .find(|n| n.output.iter().any(|o| o == name));
        names.extend(producer.iter().flat_map(|n| &n.input).map(String::as_str));
    }
    let known = |f: &&Fact| f.element.is_some() && f.rank() > Some(0);
    let above: Vec<&Fact> = names
        .iter()
        .filter_map(|n| facts.get(n))
        .filter(known)
        .collect();
    // Integers beside floats are usually positions and sizes.
    let is_float = |f: &&&Fact| f.element.is_some_and(Element::is_float);
    let model = above.iter().find(is_float).or(above.first());
    Fact::new(
        fact.element.or(model.and_then(|f| f.element)),
        fact.shape.or(model.and_then(|f| f.shape.clone())),
    )
}

/// What numbers of `name` must be below, where they look something up.
fn bound(graph: &GraphProto, facts: &Facts, name: &str, depth: usize) -> Option<i64> {
    let mut least: Option<i64> = None;
    for node in graph
        .node
        .iter()
        .filter(|n| depth < 8 && n.input.iter().any(|i| i == name))
    {
        let found = match node.op_type.as_str() {
            "Gather" | "GatherElements" if node.input.get(1).is_some_and(|i| i == name) => {
                let shape = facts.get(&node.input[0]).and_then(|f| f.shape.clone());
                let at = Attributes::new(node).int("axis").unwrap_or(0);
                shape.and_then(|s| s.get(axis(at, s.len())?)?.as_const())
            }
            "Cast" | "Reshape" | "Unsqueeze" | "Squeeze" | "Identity" | "Flatten" | "Expand"
            | "Slice" | "Transpose" | "Concat"
                if node.input[0] == name || node.op_type == "Concat" =>
            {
                node.output
                    .first()
                    .and_then(|o| bound(graph, facts, o, depth + 1))
            }
            _ => None,
        };
        least = match (least, found) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    least
}

/// Most elements that are made up for all inputs together: as many as a picture of 3840 × 2160 has.
pub(super) const MOST_ELEMENTS: usize = 3 << 23;

/// A string counts as this many elements, because it takes that many times the memory of a number.
pub(super) const STRING_WEIGHT: usize = 8;

/// Sizes of a tensor that is not too large to be made up.
fn tensor_sizes(sizes: &[i64]) -> Option<Vec<usize>> {
    let (shape, n) = crate::tensor::sizes(sizes).ok()?;
    (n <= MOST_ELEMENTS).then_some(shape)
}
