//! The layering check: compares every room's Cargo.toml with the dependency table of
//! ARCHITECTURE.md.
//!
//! The table is the only place where the rule is written. Its columns are the room, what it owns,
//! what its code may depend on and what its tests may use in addition. Except in the second column, a name in
//! backticks is a room and everything else is prose. A room without Rust code has no Cargo.toml; its row
//! names no other room.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use toml::Table;

/// The cells of the table's header row.
const HEADER: [&str; 4] = ["room", "owns", "may depend on", "its tests may also use"];

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Allowed {
    code: BTreeSet<String>,
    tests: BTreeSet<String>,
}

/// Our crates by the names under which a Cargo.toml can mention them.
struct Crates {
    /// Package name → room.
    room_of_package: BTreeMap<String, String>,
    /// Key in `[workspace.dependencies]` → package name.
    package_of_key: BTreeMap<String, String>,
}

/// Every breach of the table under `root`, one sentence each; empty when the table holds.
pub fn breaches(root: &Path) -> Result<Vec<String>> {
    let page = read(&root.join("ARCHITECTURE.md"))?;
    let mut rules = parse_table(&page)?;
    rules.retain(|room, allowed| !allowed.is_empty() || !is_without_rust(&root.join(room)));
    let workspace = parse_toml(&root.join("Cargo.toml"))?;
    let mut manifests = BTreeMap::new();
    for room in members(&workspace)? {
        let manifest = parse_toml(&root.join(&room).join("Cargo.toml"))?;
        manifests.insert(room, manifest);
    }
    Ok(compare(&rules, &workspace, &manifests))
}

fn compare(
    rules: &BTreeMap<String, Allowed>,
    workspace: &Table,
    manifests: &BTreeMap<String, Table>,
) -> Vec<String> {
    let crates = Crates::new(workspace, manifests);
    let mut found = Vec::new();
    for room in rules.keys().filter(|room| !manifests.contains_key(*room)) {
        found.push(format!(
            "the table has a row for `{room}`, which is not a member of the workspace"
        ));
    }
    for (room, manifest) in manifests {
        let Some(allowed) = rules.get(room) else {
            found.push(format!(
                "`{room}` has no row in the dependency table of ARCHITECTURE.md"
            ));
            continue;
        };
        for (section, entries) in dependency_sections(manifest) {
            let in_tests = section == "dev-dependencies";
            for used in entries
                .iter()
                .filter_map(|(key, entry)| crates.room(key, entry))
            {
                let legal =
                    allowed.code.contains(used) || (in_tests && allowed.tests.contains(used));
                if !legal && used != room {
                    found.push(format!(
                        "{room}/Cargo.toml: [{section}] names `{used}`; the table of \
                         ARCHITECTURE.md allows {}",
                        allowed.describe(in_tests)
                    ));
                }
            }
        }
    }
    found
}

/// Whether a room exists and has no Rust code.
fn is_without_rust(room: &Path) -> bool {
    room.is_dir() && !room.join("Cargo.toml").exists()
}

impl Allowed {
    fn is_empty(&self) -> bool {
        self.code.is_empty() && self.tests.is_empty()
    }

    fn describe(&self, in_tests: bool) -> String {
        let tests = self.tests.iter().filter(|_| in_tests);
        let rooms: Vec<&str> = self.code.iter().chain(tests).map(String::as_str).collect();
        if rooms.is_empty() {
            "none of our crates".to_owned()
        } else {
            rooms.join(", ")
        }
    }
}

impl Crates {
    fn new(workspace: &Table, manifests: &BTreeMap<String, Table>) -> Self {
        let name =
            |manifest: &Table| Some(manifest.get("package")?.get("name")?.as_str()?.to_owned());
        let room_of_package = manifests
            .iter()
            .filter_map(|(room, manifest)| Some((name(manifest)?, room.clone())))
            .collect();
        let shared = workspace
            .get("workspace")
            .and_then(|w| w.get("dependencies"));
        let package_of_key = shared
            .and_then(toml::Value::as_table)
            .into_iter()
            .flatten()
            .map(|(key, entry)| (key.clone(), package_name(key, entry)))
            .collect();
        Crates {
            room_of_package,
            package_of_key,
        }
    }

    /// The room that a dependency entry means, if it is one of ours.
    fn room(&self, key: &str, entry: &toml::Value) -> Option<&str> {
        let inherited = entry.get("workspace").and_then(toml::Value::as_bool) == Some(true);
        let package = match self.package_of_key.get(key) {
            Some(package) if inherited => package.clone(),
            _ => package_name(key, entry),
        };
        self.room_of_package.get(&package).map(String::as_str)
    }
}

fn package_name(key: &str, entry: &toml::Value) -> String {
    entry
        .get("package")
        .and_then(toml::Value::as_str)
        .unwrap_or(key)
        .to_owned()
}

/// The dependency tables of a manifest by kind, those under `[target.…]` included.
fn dependency_sections(manifest: &Table) -> Vec<(&'static str, &Table)> {
    let targets = manifest
        .get("target")
        .and_then(toml::Value::as_table)
        .into_iter()
        .flatten();
    let mut places = vec![manifest];
    places.extend(targets.filter_map(|(_, target)| target.as_table()));
    let mut sections = Vec::new();
    for place in places {
        for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
            if let Some(entries) = place.get(kind).and_then(toml::Value::as_table) {
                sections.push((kind, entries));
            }
        }
    }
    sections
}

/// Reads the table whose header row is [`HEADER`].
fn parse_table(page: &str) -> Result<BTreeMap<String, Allowed>> {
    let rows = page.lines().map(cells);
    let mut rows = rows
        .skip_while(|row| !row.iter().eq(HEADER.iter()))
        .skip(2)
        .peekable();
    if rows.peek().is_none() {
        bail!(
            "ARCHITECTURE.md has no table headed `| {} |`",
            HEADER.join(" | ")
        );
    }
    let mut rules = BTreeMap::new();
    for row in rows.take_while(|row| !row.is_empty()) {
        let [room, _owns, code, tests] = row.as_slice() else {
            bail!(
                "the dependency table has a row of {} cells, not 4: {row:?}",
                row.len()
            );
        };
        let names = backticked(room);
        let Some(room) = names.first().filter(|_| names.len() == 1) else {
            bail!("the first cell of a row names one room in backticks, not {room:?}");
        };
        let allowed = Allowed {
            code: backticked(code).into_iter().collect(),
            tests: backticked(tests).into_iter().collect(),
        };
        if rules.insert(room.clone(), allowed).is_some() {
            bail!("the dependency table has two rows for `{room}`");
        }
    }
    for (room, allowed) in &rules {
        for used in allowed.code.iter().chain(&allowed.tests) {
            if !rules.contains_key(used) {
                bail!("the table lets `{room}` use `{used}`, which has no row of its own");
            }
        }
    }
    Ok(rules)
}

/// The cells of a markdown table row; none for a line that is not one.
fn cells(line: &str) -> Vec<String> {
    let row = line
        .trim()
        .strip_prefix('|')
        .and_then(|rest| rest.strip_suffix('|'));
    row.map_or_else(Vec::new, |row| {
        row.split('|').map(|cell| cell.trim().to_owned()).collect()
    })
}

/// The words in backticks.
fn backticked(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// The folders of the workspace's members.
pub fn members(workspace: &Table) -> Result<Vec<String>> {
    let listed = workspace.get("workspace").and_then(|w| w.get("members"));
    let Some(listed) = listed.and_then(toml::Value::as_array) else {
        bail!("Cargo.toml lists no workspace members");
    };
    Ok(listed
        .iter()
        .filter_map(|member| member.as_str().map(str::to_owned))
        .collect())
}

/// Reads a TOML file.
pub fn parse_toml(path: &Path) -> Result<Table> {
    read(path)?
        .parse()
        .with_context(|| format!("cannot read {} as TOML", path.display()))
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Rooms

| room | owns | may depend on | its tests may also use |
|---|---|---|---|
| `graph` | the graph | nothing of ours | nothing |
| `ops` | operators (trait `Op`) | `graph` | nothing |
| `fusion` | fusion | `graph`, `ops` | `models` |
| `models` | networks | `graph`, `ops` | nothing |

| another | table | here | too |
|---|---|---|---|
| `x` | x | `y` | `z` |
";

    const WORKSPACE: &str = "\
[workspace.dependencies]
graph = { package = \"shorthaul-graph\", path = \"graph\" }
ops = { package = \"shorthaul-ops\", path = \"ops\" }
models = { package = \"shorthaul-models\", path = \"models\" }
fusion = { package = \"shorthaul-fusion\", path = \"fusion\" }
";

    /// The sentences found when `fusion`'s manifest holds `body` and nobody else depends on us.
    fn found_in_fusion(body: &str) -> Vec<String> {
        let manifest = |room: &str, body: &str| {
            let text = format!("[package]\nname = \"shorthaul-{room}\"\n{body}");
            (room.to_owned(), text.parse::<Table>().expect("a manifest"))
        };
        let manifests = ["graph", "ops", "models"]
            .into_iter()
            .map(|room| manifest(room, ""));
        let manifests = manifests.chain([manifest("fusion", body)]).collect();
        let rules = parse_table(PAGE).expect("a table");
        compare(&rules, &WORKSPACE.parse().expect("a workspace"), &manifests)
    }

    #[test]
    fn what_the_table_allows_is_silent() {
        let body = "[dependencies]\ngraph.workspace = true\nserde = \"1\"\n\
                    [dev-dependencies]\nmodels.workspace = true\n";
        assert_eq!(found_in_fusion(body), Vec::<String>::new());
    }

    #[test]
    fn a_forbidden_edge_is_named() {
        assert_eq!(
            found_in_fusion("[dependencies]\nmodels.workspace = true\n"),
            [
                "fusion/Cargo.toml: [dependencies] names `models`; the table of ARCHITECTURE.md \
              allows graph, ops"
            ]
        );
    }

    #[test]
    fn an_edge_cannot_hide() {
        let hidden = [
            "[dependencies]\nm = { package = \"shorthaul-models\", path = \"../models\" }\n",
            "[dependencies]\nshorthaul-models = { path = \"../models\" }\n",
            "[build-dependencies]\nmodels.workspace = true\n",
            "[target.'cfg(unix)'.dependencies]\nmodels.workspace = true\n",
        ];
        for body in hidden {
            assert_eq!(found_in_fusion(body).len(), 1, "{body}");
        }
    }

    #[test]
    fn a_room_without_a_row_is_named() {
        let manifests = ["graph", "ops", "models", "fusion", "extra"].map(|room| {
            let text = format!("[package]\nname = \"shorthaul-{room}\"\n");
            (room.to_owned(), text.parse::<Table>().expect("a manifest"))
        });
        let rules = parse_table(PAGE).expect("a table");
        let found = compare(&rules, &Table::new(), &BTreeMap::from(manifests));
        assert_eq!(
            found,
            ["`extra` has no row in the dependency table of ARCHITECTURE.md"]
        );
    }

    #[test]
    fn a_folder_without_rust_is_a_room_too() {
        let root = std::env::temp_dir().join(format!("xtask-rooms-{}", std::process::id()));
        let room = root.join("notebooks");
        assert!(!is_without_rust(&room));
        std::fs::create_dir_all(&room).expect("a folder");
        assert!(is_without_rust(&room));
        std::fs::write(room.join("Cargo.toml"), "").expect("a manifest");
        assert!(!is_without_rust(&room));
        std::fs::remove_dir_all(&root).expect("the folder goes");
    }

    #[test]
    fn a_broken_table_is_an_error() {
        let error = |page: &str| {
            parse_table(page)
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default()
        };
        assert!(error("# no table").contains("has no table headed"));
        assert!(error(&PAGE.replace("`models` |\n", "`model` |\n")).contains("no row of its own"));
        assert!(error(&PAGE.replace("| `ops` |", "| `graph` |")).contains("two rows for `graph`"));
    }
}
