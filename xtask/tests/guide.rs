//! The guide builds as a website, and every link in it leads to a file and a heading of that website.
//!
//! Reads `docs`, and writes the website to the folder `guide` in Cargo's folder for tests.

use mdbook_driver::MDBook;
use mdbook_driver::book::BookItem;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The folder of the guide's `book.toml`.
fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// An empty folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("the old folder goes");
    }
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// A copy of the guide's sources, which a test may damage.
fn copy_of_the_guide(name: &str) -> PathBuf {
    let (copy, sources) = (folder(name), docs().join("src"));
    fs::create_dir_all(copy.join("src")).expect("a folder");
    fs::copy(docs().join("book.toml"), copy.join("book.toml")).expect("book.toml");
    for entry in fs::read_dir(sources).expect("docs/src") {
        let entry = entry.expect("a file");
        fs::copy(entry.path(), copy.join("src").join(entry.file_name())).expect("a copy");
    }
    copy
}

/// Builds a book into `website`, and returns the HTML file of each page.
fn build(book: &Path, website: &Path) -> Result<Vec<String>, String> {
    let mut book = MDBook::load(book).map_err(|error| format!("{error:#}"))?;
    book.config.build.build_dir = website.to_path_buf();
    book.build().map_err(|error| format!("{error:#}"))?;
    let pages = book.iter().filter_map(|item| match item {
        BookItem::Chapter(chapter) => chapter.path.as_ref(),
        _ => None,
    });
    let files = pages.map(|page| page.with_extension("html"));
    Ok(files
        .map(|file| file.to_string_lossy().into_owned())
        .collect())
}

/// The values of an attribute in a page, in order.
fn values<'a>(html: &'a str, attribute: &str) -> Vec<&'a str> {
    let opening = format!(" {attribute}=\"");
    let parts = html.split(opening.as_str()).skip(1);
    parts
        .filter_map(|part| Some(part.split_once('"')?.0))
        .collect()
}

/// `file` in place of `folder/../file`.
fn without_detours(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(found.pop()),
            part => found.push(part),
        }
    }
    found
}

/// Every link of the pages that leads to no file or no heading of the website.
fn broken_links(website: &Path, pages: &[String]) -> Vec<String> {
    let mut texts = BTreeMap::new();
    for page in pages {
        let html = fs::read_to_string(website.join(page)).expect("the page is written");
        texts.insert(PathBuf::from(page), html);
    }
    let ids_of = |html| BTreeSet::from_iter(values(html, "id"));
    let ids: BTreeMap<&Path, BTreeSet<&str>> = texts
        .iter()
        .map(|(page, html)| (page.as_path(), ids_of(html)))
        .collect();
    let mut broken = Vec::new();
    for (page, html) in &texts {
        let links = [values(html, "href"), values(html, "src")].concat();
        for link in links.into_iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => without_detours(&page.with_file_name(file)),
            };
            let headings = ids.get(target.as_path());
            let has_heading = headings.is_some_and(|headings| headings.contains(heading));
            if !website.join(&target).is_file() || !(heading.is_empty() || has_heading) {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    // A picture may be a link to itself.
    broken.sort();
    broken.dedup();
    broken
}

#[test]
fn the_guide_builds_and_its_links_lead_somewhere() {
    let website = folder("guide");
    let pages = build(&docs(), &website).expect("the guide builds");
    assert!(pages.len() > 15, "{pages:?}");
    assert_eq!(broken_links(&website, &pages), Vec::<String>::new());
    let stages = fs::read_to_string(website.join("stages.html")).expect("a page");
    let pictures = values(&stages, "src");
    assert!(pictures.contains(&"stages-fuse.svg"), "{pictures:?}");
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let (copy, website) = (copy_of_the_guide("broken"), folder("broken-guide"));
    let links = "[a](no-such-page.md) [b](onnx.md#no-such-heading) ![c](no-such-picture.svg)";
    let page = copy.join("src/gpu.md");
    let text = fs::read_to_string(&page).expect("a page");
    fs::write(&page, format!("{text}\n{links}\n")).expect("a page");
    let pages = build(&copy, &website).expect("it builds");
    let broken = broken_links(&website, &pages);
    let named = |link| broken.contains(&format!("gpu.html: {link}"));
    assert!(named("onnx.html#no-such-heading"), "{broken:?}");
    assert!(named("no-such-picture.svg"), "{broken:?}");
    assert_eq!(broken.len(), 3, "{broken:?}");
}

#[test]
fn a_missing_page_stops_the_build() {
    let copy = copy_of_the_guide("missing");
    let page = copy.join("src/gpu.md");
    fs::remove_file(&page).expect("a page goes");
    let error = build(&copy, &folder("missing-guide")).expect_err("gpu.md is not there");
    assert!(error.contains("gpu.md"), "{error}");
    assert!(!page.exists(), "the build made an empty page");
}
