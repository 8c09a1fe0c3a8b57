//! A model rewritten by rules until none fires, each application recorded and refusable.
//!
//! Owns the loop. Rules are in files of their own, each with before → after, why it is legal and what
//! it saves; they are rows of [`RULES`]. The result is a function of the model and the options alone:
//! that is how a guilty application is found (`verify/bisect.rs`). Inputs and outputs keep names,
//! order, types and sizes; operators without a row in `operators` stay as they are.

mod activations;
mod agnostic;
mod attention;
mod batch_norm;
mod branches;
mod broadcasting;
mod channel_norms;
mod clips;
mod dead;
mod described;
mod fold;
mod fused;
mod gemm;
mod inline;
mod inline_all;
mod local_functions;
mod local_response;
mod matching;
mod min_cut;
mod noop;
mod normalizations;
mod pad;
pub mod patch;
mod pieces;
mod product;
mod repeat;
mod reshapes;
mod scale_bias;
mod scope;
mod shape_arithmetic;
mod sizes_between;
mod stacked;
mod target;
mod targets;
mod transposes;
#[cfg(test)]
pub(crate) mod trial;
mod wide_groups;
mod zero_states;

pub use described::about;
pub use inline_all::{InlineError, inline_all};
pub use patch::Patch;
pub use scope::{Constants, Names, Scope, Surroundings};
pub use target::{TARGET_KEY, Target};

use crate::attributes::{bodies, bodies_mut};
use crate::evaluate::captured;
use crate::infer::{Facts, Functions, Opsets};
use crate::operators::Unknowns;
use crate::proto::{GraphProto, ModelProto};
use crate::stored::Stored;
use crate::verify::is_known;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// A rule: what it makes of the node at a position, if it fires there.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its name, in reports and in [`Options::refused`].
    pub name: &'static str,
    /// Looks at a node.
    pub at: fn(&Scope, usize) -> Option<Patch>,
}

/// Every rule, in the order in which they are tried on a node.
const RULES: &[&[Rule]] = &[
    fold::RULES,
    noop::RULES,
    repeat::RULES,
    branches::RULES,
    shape_arithmetic::RULES,
    broadcasting::RULES,
    reshapes::RULES,
    sizes_between::RULES,
    pieces::RULES,
    batch_norm::RULES,
    scale_bias::RULES,
    gemm::RULES,
    attention::RULES,
    normalizations::RULES,
    channel_norms::RULES,
    activations::RULES,
    fused::RULES,
    pad::RULES,
    clips::RULES,
    stacked::RULES,
    local_response::RULES,
    wide_groups::RULES,
    zero_states::RULES,
    transposes::RULES,
];

/// Names of the rules, in order.
pub fn rule_names() -> Vec<&'static str> {
    let rules = RULES.iter().copied().flatten();
    let mut names: Vec<&str> = vec![inline::NAME];
    names.extend(rules.map(|rule| rule.name));
    // A rule may have several rows.
    names.dedup();
    names
}

/// How to rewrite.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the file is meant for.
    pub target: Target,
    /// Bytes of constants that one folding may add to the file beyond those it removes.
    pub fold_limit: usize,
    /// Largest number of applications; for bisection.
    pub limit: Option<usize>,
    /// Applications that are not made, by rule and site.
    pub refused: BTreeSet<(String, String)>,
    /// Rules that are not tried.
    pub without: BTreeSet<String>,
    /// Rules that are tried before all others; tests plant wrong ones.
    #[cfg(test)]
    pub planted: &'static [Rule],
}

impl Default for Options {
    fn default() -> Self {
        Options {
            target: Target::Standard,
            fold_limit: 16 << 10,
            limit: None,
            refused: BTreeSet::new(),
            without: BTreeSet::new(),
            #[cfg(test)]
            planted: &[],
        }
    }
}

/// A rule that fired.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Application {
    /// The rule.
    pub rule: &'static str,
    /// The first output of the last node it removed, below the names of the nodes whose bodies it is in.
    pub site: String,
    /// The name of that node in messages.
    pub origin: String,
}

/// A rewritten model.
#[derive(Clone, Debug)]
pub struct Rewritten {
    /// The model.
    pub model: ModelProto,
    /// What fired, in order.
    pub applied: Vec<Application>,
}

/// Rewrites a model whose external data is in `folder`.
pub fn rewrite(model: &ModelProto, folder: &Arc<Path>, options: &Options) -> Rewritten {
    let mut model = model.clone();
    let opsets = Opsets::new(&model.opset_import);
    let names = Names::default();
    if let Some(graph) = &model.graph {
        names.take(graph);
    }
    let mut applied = Vec::new();
    inline::inline_calls(&mut model, &names, options, &mut applied);
    let functions = model.functions.clone();
    let unknowns = Unknowns::default();
    let around = Surroundings {
        opsets: &opsets,
        functions: Functions::new(&functions),
        names: &names,
        unknowns: &unknowns,
        target: options.target,
        inputs_are_constant: model.ir_version.unwrap_or(0) < 4,
        fold_limit: options.fold_limit,
    };
    let mut run = Run {
        options,
        around: &around,
        folder,
        applied,
    };
    if let Some(graph) = &mut model.graph {
        run.body(graph, &Facts::default(), "");
    }
    let applied = run.applied;
    inline::remove_unused(&mut model);
    let applied = rewrite_functions(&mut model, &around, folder, options, applied);
    if options.target != Target::Standard {
        fused::import(&mut model);
    }
    Rewritten { model, applied }
}

/// Rewrites the bodies of functions that stay; gives what fired so far and there.
fn rewrite_functions(
    model: &mut ModelProto,
    around: &Surroundings,
    folder: &Arc<Path>,
    options: &Options,
    mut applied: Vec<Application>,
) -> Vec<Application> {
    let partly_called = local_functions::partly_called(model);
    for n in 0..model.functions.len() {
        let function = &model.functions[n];
        if partly_called.contains(&n) {
            continue;
        }
        let Some(mut body) = local_functions::body(function, around) else {
            continue;
        };
        let path = format!("{}.{}/", function.domain, function.name);
        let names = Names::default();
        names.take(&body);
        let before = applied.len();
        let mut run = Run {
            options,
            around: &Surroundings {
                opsets: &Opsets::new(&function.opset_import),
                functions: around.functions.clone(),
                names: &names,
                unknowns: around.unknowns,
                target: around.target,
                inputs_are_constant: true,
                fold_limit: around.fold_limit,
            },
            folder,
            applied,
        };
        run.body(&mut body, &Facts::default(), &path);
        applied = run.applied;
        if applied.len() > before {
            let function = &mut model.functions[n];
            function.node = body.node;
            function.value_info = body.value_info;
        }
    }
    applied
}

struct Run<'a> {
    options: &'a Options,
    around: &'a Surroundings<'a>,
    folder: &'a Arc<Path>,
    applied: Vec<Application>,
}

/// Sweeps over a body before giving up: rules that undo each other would never end.
const MAX_SWEEPS: usize = 200;

impl Run<'_> {
    fn body(&mut self, body: &mut GraphProto, outer: &Facts, path: &str) {
        let order: Vec<String> = body.initializer.iter().map(|t| t.name.clone()).collect();
        let at_first: BTreeSet<String> = order.iter().cloned().collect();
        // A body inside of such a file holds its constants as nodes.
        let lifts = self.around.inputs_are_constant && !path.is_empty();
        let stored = |proto: crate::proto::TensorProto| {
            (
                proto.name.clone(),
                Arc::new(Stored::new(proto, self.folder)),
            )
        };
        let mut constants: Constants = std::mem::take(&mut body.initializer)
            .into_iter()
            .map(stored)
            .collect();
        if lifts {
            local_functions::lift(body, &mut constants, self.folder);
        }
        let replaceable = !self.around.inputs_are_constant;
        dead::remove(body, &mut constants, replaceable);
        for _ in 0..MAX_SWEEPS {
            let mut changed = self.sweep(body, &mut constants, outer, path);
            if !changed {
                changed = self.inner(body, &constants, outer, path);
            }
            if !changed {
                break;
            }
            dead::remove(body, &mut constants, replaceable);
        }
        if self.around.inputs_are_constant && path.is_empty() {
            declare(body, &constants);
        }
        let place: BTreeMap<&str, usize> = order
            .iter()
            .enumerate()
            .map(|(n, name)| (name.as_str(), n))
            .collect();
        let mut last: Vec<(usize, Arc<Stored>)> = constants
            .into_iter()
            .map(|(name, stored)| {
                (
                    place.get(name.as_str()).copied().unwrap_or(usize::MAX),
                    stored,
                )
            })
            .collect();
        last.sort_by_key(|(n, _)| *n);
        body.initializer = last
            .into_iter()
            .map(|(_, stored)| stored.proto().clone())
            .collect();
        if lifts {
            local_functions::lower(body, &at_first);
        }
        drop_stale_types(body);
    }

    /// One pass over the nodes; whether anything changed.
    fn sweep(
        &mut self,
        body: &mut GraphProto,
        constants: &mut Constants,
        outer: &Facts,
        path: &str,
    ) -> bool {
        let mut patches = Vec::new();
        {
            let scope = Scope::new(body, constants, outer, self.around);
            let mut touched = BTreeSet::new();
            let mut gone: BTreeSet<String> = BTreeSet::new();
            let mut used: BTreeSet<String> = BTreeSet::new();
            for n in 0..body.node.len() {
                if touched.contains(&n) {
                    continue;
                }
                let Some((rule, patch)) = self.first_patch(&scope, n, path) else {
                    continue;
                };
                let own = |set: BTreeSet<&str>| {
                    set.into_iter().map(str::to_string).collect::<BTreeSet<_>>()
                };
                let (goes, uses) = (own(patch.gone(&scope)), own(patch.uses()));
                let clash = patch.remove.iter().any(|n| touched.contains(n))
                    || !goes.is_disjoint(&used)
                    || !uses.is_disjoint(&gone);
                if clash {
                    continue;
                }
                if self
                    .options
                    .limit
                    .is_some_and(|limit| self.applied.len() >= limit)
                {
                    break;
                }
                let at = patch.remove.iter().max().copied().unwrap_or(n);
                self.applied.push(Application {
                    rule,
                    site: site(&scope, at, path),
                    origin: crate::evaluate::label(scope.node(at)),
                });
                touched.extend(patch.remove.iter().copied());
                gone.extend(goes);
                used.extend(uses);
                patches.push(patch);
            }
        }
        let changed = !patches.is_empty();
        // Far more than folding may store again.
        let filled_from = 4 * self.options.fold_limit + 4096;
        let names = self.around.names;
        patch::apply(body, constants, patches, names, filled_from);
        changed
    }

    fn first_patch(&self, scope: &Scope, n: usize, path: &str) -> Option<(&'static str, Patch)> {
        #[cfg(test)]
        let planted = self.options.planted;
        #[cfg(not(test))]
        let planted: &[Rule] = &[];
        for rule in planted.iter().chain(RULES.iter().copied().flatten()) {
            if self.options.without.contains(rule.name) {
                continue;
            }
            let Some(patch) = (rule.at)(scope, n) else {
                continue;
            };
            let at = patch.remove.iter().max().copied().unwrap_or(n);
            let key = (rule.name.to_string(), site(scope, at, path));
            if !self.options.refused.contains(&key) {
                return Some((rule.name, patch));
            }
        }
        None
    }

    /// Rewrites the bodies inside; whether anything changed.
    fn inner(
        &mut self,
        body: &mut GraphProto,
        constants: &Constants,
        outer: &Facts,
        path: &str,
    ) -> bool {
        let before = self.applied.len();
        if body.node.iter().all(|node| bodies(node).next().is_none()) {
            return false;
        }
        let facts = Scope::new(body, constants, outer, self.around)
            .facts()
            .clone();
        for node in &mut body.node {
            // What cannot be run is not changed: nothing could be proven of it.
            if !is_known(&self.around.functions, node) {
                continue;
            }
            let path = format!("{path}{}/", node.output.first().map_or("", String::as_str));
            for inner in bodies_mut(node) {
                self.body(inner, &facts, &path);
            }
        }
        self.applied.len() > before
    }
}

fn site(scope: &Scope, n: usize, path: &str) -> String {
    format!(
        "{path}{}",
        scope.node(n).output.first().map_or("", String::as_str)
    )
}

/// Files before version 4 name every initializer among the inputs.
fn declare(body: &mut GraphProto, constants: &Constants) {
    let given: BTreeSet<String> = body.input.iter().map(|i| i.name.clone()).collect();
    for (name, stored) in constants {
        if !given.contains(name) {
            body.input.push(dead::info(name, stored));
        }
    }
}

/// Drops types of values that are no more.
fn drop_stale_types(body: &mut GraphProto) {
    let mut alive: BTreeSet<&str> = body
        .node
        .iter()
        .flat_map(|n| &n.output)
        .map(String::as_str)
        .collect();
    alive.extend(body.initializer.iter().map(|t| t.name.as_str()));
    alive.extend(body.input.iter().map(|i| i.name.as_str()));
    let kept: Vec<bool> = body
        .value_info
        .iter()
        .map(|i| alive.contains(i.name.as_str()))
        .collect();
    let mut kept = kept.into_iter();
    body.value_info.retain(|_| kept.next().unwrap_or(true));
}

/// Names that are read though nothing computes them, in a body and the bodies inside; a sound model has none.
pub fn undefined(body: &GraphProto) -> Vec<String> {
    captured(body)
        .into_iter()
        .filter(|n| !n.is_empty())
        .map(str::to_string)
        .collect()
}
