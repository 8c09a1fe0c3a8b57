//! Recipes as files: every decision of a model's programs in readable TOML, and what a person told the compiler to
//! decide otherwise.
//!
//! A file has one section for each program of the model. Each entry names a decision and says whether it was
//! `applied`; an entry with `take` tells the compiler what to do, the others are for the reader. A section is
//! found again by the structure of its program, in which sizes are not counted; where no structure is the same,
//! by the nodes that its entries name. Nothing here decides about a graph.

use fusion::Decision;
use graph::{Blocking, Graph, Node, NodeKind, Place, Recipe, Rewrite, Stage};
use kernels::lowering::KernelInfo;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write;

/// The form of the files that this version reads and writes.
const FORMAT: u32 = 1;

/// The version in which a file was written.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why a text is no recipe.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecipeError {
    /// It is damaged, or something else.
    #[error("this is not a recipe of Shorthaul: {0}")]
    Damaged(String),
    /// Another form.
    #[error(
        "this recipe has format {found}, and this version of Shorthaul reads format {FORMAT}; write it \
         again with `shorthaul.recipe`"
    )]
    Format {
        /// The form of the file.
        found: u32,
    },
    /// A name that is none of ours.
    #[error(
        "this is not a recipe of Shorthaul: no {what} is called `{name}` (the decision about \
         `{container}`)"
    )]
    Name {
        /// What it should name.
        what: &'static str,
        /// The name.
        name: String,
        /// Which entry.
        container: String,
    },
}

/// Something that a recipe says and that could not be done.
#[derive(Clone, Debug, PartialEq)]
pub struct Unmet {
    /// The place of the decision.
    pub place: Place,
    /// What it says: do it, or leave it.
    pub take: bool,
    /// The reason, where the decision still exists.
    pub reason: Option<String>,
}

impl Unmet {
    /// What could not be done, and why.
    pub fn sentence(&self) -> String {
        let what = match self.take {
            true => "asks for",
            false => "forbids",
        };
        match &self.reason {
            Some(reason) => format!(
                "the recipe {what} {}, which is not possible: {reason}",
                self.place
            ),
            None => format!(
                "the recipe {what} {}, but there is no decision in this program about it",
                self.place
            ),
        }
    }
}

/// What a recipe says and the decisions do not follow.
pub fn unmet(recipe: &Recipe, decisions: &[Decision]) -> Vec<Unmet> {
    let of_place = |(place, take): (&Place, bool)| {
        let decision = decisions.iter().rfind(|d| d.place == *place);
        match decision {
            Some(d) if d.is_applied() == take => None,
            found => Some(Unmet {
                place: place.clone(),
                take,
                reason: found.map(|d| d.reason().unwrap_or_else(|| "it is always done".into())),
            }),
        }
    };
    recipe.iter().filter_map(of_place).collect()
}

/// What a recipe says about the blocking of contractions and lowering did not do, in sentences.
pub fn uncut(recipe: &Recipe, kernels: &[KernelInfo]) -> Vec<String> {
    let of_place = |(place, blocking): (&Place, &Blocking)| {
        let cuts = kernels.iter().filter_map(|k| k.cuts.as_ref());
        match cuts.clone().find(|c| c.place == *place) {
            Some(found) if found.cuts.blocking == *blocking => None,
            Some(found) => Some(format!(
                "the recipe asks for {place} as {blocking}, which is not possible for these sizes: its blocking is {}",
                found.cuts.blocking
            )),
            None if kernels.iter().any(|k| k.uncut.as_ref() == Some(place)) => Some(format!(
                "the recipe asks for {place}, which is not possible: contractions of 16-bit numbers are cut by \
                 their cost model"
            )),
            None => Some(format!(
                "the recipe asks for {place}, about which there is no decision in this program"
            )),
        }
    };
    recipe.blockings().filter_map(of_place).collect()
}

/// What makes a program the same one: operators, containers and origins in order, sizes left out.
pub fn fingerprint(graph: &Graph) -> String {
    let mut digest = Sha256::new();
    let mut add = |text: &str| {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    };
    graph.visit_nodes(&mut |node: &Node| {
        add(node.stage.name());
        add(match &node.kind {
            NodeKind::Library(library) => &library.op,
            NodeKind::Map(_) => "map",
            NodeKind::Tasklet(_) => "tasklet",
        });
        add(&node.origin.node);
        add(&node.origin.module);
        for id in node.writes() {
            let container = graph.container(id);
            add(&container.name);
            add(&container.dtype.to_string());
        }
    });
    let bytes = digest.finalize();
    bytes[..8].iter().map(|b| format!("{b:02x}")).collect()
}

/// A recipe as it is in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeFile {
    /// The form of the file.
    pub format: u32,
    /// The version of Shorthaul that wrote it.
    pub shorthaul: String,
    /// The model's class.
    #[serde(default)]
    pub model: String,
    /// One section for each program of the model.
    #[serde(default, rename = "program")]
    pub programs: Vec<Section>,
}

/// The decisions of one program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// The program's structure, as [`fingerprint`] gives it.
    pub structure: String,
    /// Whether it has a backward pass.
    pub training: bool,
    /// Its decisions, in order.
    #[serde(default, rename = "decision")]
    pub decisions: Vec<Entry>,
}

/// One decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The rewrite, by name.
    pub kind: String,
    /// `forward`, `backward` or `optimizer`.
    pub stage: String,
    /// The node that writes the container.
    pub node: String,
    /// The module of that node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// The container.
    pub container: String,
    /// If the decision joins two kernels, a container that the first one writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<String>,
    /// What the compiler did when the file was written.
    pub applied: bool,
    /// What to do, where that was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub take: Option<bool>,
    /// How a contraction is cut into blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocking: Option<String>,
    /// The order of dimensions in memory that a layout has, slowest first: `0.2.3.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<String>,
    /// What happened, in a sentence: a comment in the file, and not read again.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sentence: String,
}

impl Entry {
    /// The entry of a place, what the compiler did there, and what it was told.
    pub fn of_place(place: &Place, applied: bool, take: Option<bool>) -> Entry {
        Entry {
            kind: place.rewrite.name().into(),
            stage: place.stage.name().into(),
            node: place.node.clone(),
            module: place.module.clone(),
            container: place.container.clone(),
            other: place.other.clone(),
            applied,
            take,
            blocking: None,
            order: None,
            sentence: String::new(),
        }
    }

    /// How the contraction is cut.
    ///
    /// # Errors
    /// [`RecipeError::Name`] if the text is no blocking.
    pub fn cut(&self) -> Result<Blocking, RecipeError> {
        let text = self.blocking.as_deref().unwrap_or_default();
        Blocking::parse(text).ok_or_else(|| RecipeError::Name {
            what: "blocking",
            name: text.into(),
            container: self.container.clone(),
        })
    }

    /// Returns the entry with an order of dimensions in memory.
    pub fn with_order(self, order: &[usize]) -> Entry {
        let dims: Vec<String> = order.iter().map(ToString::to_string).collect();
        Entry {
            order: Some(dims.join(".")),
            ..self
        }
    }

    /// The order of dimensions in memory, if it has one.
    ///
    /// # Errors
    /// [`RecipeError::Name`] if the text is no list of dimensions.
    pub fn dimensions(&self) -> Result<Option<Vec<usize>>, RecipeError> {
        let Some(text) = &self.order else {
            return Ok(None);
        };
        let dims: Result<Vec<usize>, _> = text.split('.').map(str::parse).collect();
        dims.map(Some).map_err(|_| RecipeError::Name {
            what: "order of dimensions",
            name: text.clone(),
            container: self.container.clone(),
        })
    }

    /// The place of the entry.
    ///
    /// # Errors
    /// [`RecipeError::Name`].
    pub fn place(&self) -> Result<Place, RecipeError> {
        let unknown = |what: &'static str, name: &str| RecipeError::Name {
            what,
            name: name.into(),
            container: self.container.clone(),
        };
        Ok(Place {
            rewrite: Rewrite::from_name(&self.kind).ok_or_else(|| unknown("kind", &self.kind))?,
            stage: Stage::from_name(&self.stage).ok_or_else(|| unknown("stage", &self.stage))?,
            node: self.node.clone(),
            module: self.module.clone(),
            container: self.container.clone(),
            other: self.other.clone(),
        })
    }
}

/// What a recipe says about one program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen {
    /// The decisions that its section changes.
    pub recipe: Recipe,
    /// Whether it has a section for such a program at all.
    pub is_for_program: bool,
}

impl RecipeFile {
    /// A recipe of this version for a model.
    pub fn new(model: &str, programs: Vec<Section>) -> RecipeFile {
        RecipeFile {
            format: FORMAT,
            shorthaul: VERSION.into(),
            model: model.into(),
            programs,
        }
    }

    /// Reads a text.
    ///
    /// # Errors
    /// A text that is no recipe, one of another form, and names that Shorthaul does not know.
    pub fn parse(text: &str) -> Result<RecipeFile, RecipeError> {
        let damaged = |e: toml::de::Error| {
            let line = e.span().map(|s| text[..s.start].lines().count().max(1));
            let at = line.map_or(String::new(), |n| format!(" (line {n})"));
            RecipeError::Damaged(format!("{}{at}", e.message()))
        };
        // Checks the format first, since the rest may be written in another one.
        let table: toml::Table = text.parse().map_err(damaged)?;
        let found = table.get("format").and_then(toml::Value::as_integer);
        let found = found.ok_or_else(|| RecipeError::Damaged("it has no `format`".into()))?;
        if found != i64::from(FORMAT) {
            let found = u32::try_from(found).unwrap_or(0);
            return Err(RecipeError::Format { found });
        }
        let file: RecipeFile = toml::from_str(text).map_err(damaged)?;
        for entry in file.programs.iter().flat_map(|p| &p.decisions) {
            if entry.place()?.rewrite == Rewrite::Blocking {
                entry.cut()?;
            }
            entry.dimensions()?;
        }
        Ok(file)
    }

    /// What the recipe says about a step. Takes the section of the same structure. Without one, takes the section with
    /// most decisions about nodes of the step, if these are at least half of its decisions.
    ///
    /// # Errors
    /// Names that Shorthaul does not know.
    pub fn for_step(&self, step: &Graph, is_training: bool) -> Result<Chosen, RecipeError> {
        let structure = fingerprint(step);
        let same = self.programs.iter().find(|p| p.structure == structure);
        let similar = || {
            let mut nodes: BTreeSet<(String, String)> = BTreeSet::new();
            step.visit_nodes(&mut |n| {
                nodes.insert((n.origin.node.clone(), n.origin.module.clone()));
            });
            let like = self.programs.iter().filter(|p| p.training == is_training);
            let shared = like.map(|p| {
                let known = |e: &&Entry| nodes.contains(&(e.node.clone(), e.module.clone()));
                (p.decisions.iter().filter(known).count(), p)
            });
            let enough = shared.filter(|(n, p)| *n > 0 && 2 * n >= p.decisions.len());
            enough.max_by_key(|(n, _)| *n).map(|(_, p)| p)
        };
        let Some(section) = same.or_else(similar) else {
            return Ok(Chosen::default());
        };
        let mut recipe = Recipe::default();
        for entry in &section.decisions {
            let place = entry.place()?;
            match (place.rewrite, entry.take, entry.dimensions()?) {
                (Rewrite::Blocking, Some(true), _) => recipe.cut(place, entry.cut()?),
                (Rewrite::Blocking, _, _) | (_, None, _) => {}
                (Rewrite::Layout, Some(true), Some(order)) => recipe.lay_out(place, order),
                (_, Some(take), _) => recipe.tell(place, take),
            }
        }
        Ok(Chosen {
            recipe,
            is_for_program: true,
        })
    }

    /// The text of the file: a comment line before each decision says what it does.
    pub fn text(&self) -> String {
        let mut text = String::from(HEAD);
        let _ = writeln!(text, "format = {}", self.format);
        let _ = writeln!(text, "shorthaul = {}", quoted(&self.shorthaul));
        let _ = writeln!(text, "model = {}", quoted(&self.model));
        for program in &self.programs {
            let _ = writeln!(text, "\n[[program]]");
            let _ = writeln!(text, "structure = {}", quoted(&program.structure));
            let _ = writeln!(text, "training = {}", program.training);
            for entry in &program.decisions {
                text.push('\n');
                if !entry.sentence.is_empty() {
                    let line: Vec<&str> = entry.sentence.split_whitespace().collect();
                    let _ = writeln!(text, "# {}", line.join(" "));
                }
                let _ = writeln!(text, "[[program.decision]]");
                let other = entry.other.as_ref();
                let strings = [
                    ("kind", Some(&entry.kind)),
                    ("stage", Some(&entry.stage)),
                    ("node", Some(&entry.node)),
                    ("module", Some(&entry.module).filter(|m| !m.is_empty())),
                    ("container", Some(&entry.container)),
                    ("other", other),
                ];
                for (key, value) in strings {
                    if let Some(value) = value {
                        let _ = writeln!(text, "{key} = {}", quoted(value));
                    }
                }
                let _ = writeln!(text, "applied = {}", entry.applied);
                let told = [("blocking", &entry.blocking), ("order", &entry.order)];
                for (key, value) in told {
                    if let Some(value) = value {
                        let _ = writeln!(text, "{key} = {}", quoted(value));
                    }
                }
                if let Some(take) = entry.take {
                    let _ = writeln!(text, "take = {take}");
                }
            }
        }
        text
    }
}

const HEAD: &str = "\
# Recipe of Shorthaul: what was decided about a model's kernels, one entry for each decision.
# `applied` says what the compiler did. A line `take = true` asks for a decision that would be refused
# for its cost, `take = false` forbids one; entries without `take` are left to the compiler. Of an entry of the
# kind `blocking`, `take = true` asks for the numbers in `blocking`; of one of the kind `layout`, for the order of
# dimensions in memory in `order`, slowest first.

";

fn quoted(text: &str) -> String {
    toml::Value::String(text.into()).to_string()
}

#[cfg(test)]
mod tests;
