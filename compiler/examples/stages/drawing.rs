//! Diagrams and bars as SVG texts, on a white ground, so that they can be read on dark pages too.
//!
//! Owns colours, fonts and the legend; `layered` decides where boxes go.

use super::layered::{Layout, Size, Spacing, Stretch, Value, lay_out};
use std::fmt::Write;

/// What a box stands for, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Forward,
    Backward,
    ForwardContraction,
    BackwardContraction,
    /// What the caller gives or gets.
    Outside,
}

/// A box: a title and lines below it.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub title: String,
    pub lines: Vec<String>,
    pub look: Look,
    /// Whether it belongs to the backward pass.
    pub backward: bool,
}

/// Boxes and the values between them.
#[derive(Clone, Debug, Default)]
pub struct Diagram {
    pub title: String,
    pub boxes: Vec<Drawn>,
    pub values: Vec<Value>,
    /// What is written beside the arrow of each value.
    pub labels: Vec<String>,
}

/// Width of a page of the guide.
pub const PAGE: f64 = 740.0;
const MARGIN: f64 = 12.0;
const LEGEND: f64 = 34.0;
const LINE: f64 = 15.0;
const HEAD: f64 = 9.0;
/// Width of a character: the largest in titles; in lines, that of every font whose characters have one width.
const TITLE_CHARACTER: f64 = 7.4;
const CHARACTER: f64 = 6.65;
/// Most characters of a line.
pub const LINE_CHARACTERS: usize = 27;

const TEXT: &str = "#1b1f24";
const FORWARD: &str = "#41618f";
const BACKWARD: &str = "#a8631c";
const KEPT: &str = "#2f855a";
const GREY: &str = "#d1d5db";

impl Look {
    fn fill(self) -> &'static str {
        match self {
            Look::Forward => "#eaf1fb",
            Look::Backward => "#fdf1e3",
            Look::ForwardContraction => "#bfd5f5",
            Look::BackwardContraction => "#f8cf9f",
            Look::Outside => "#ffffff",
        }
    }

    fn stroke(self) -> &'static str {
        match self {
            Look::Forward | Look::ForwardContraction => FORWARD,
            Look::Backward | Look::BackwardContraction => BACKWARD,
            Look::Outside => "#6b7280",
        }
    }
}

impl Drawn {
    fn size(&self) -> Size {
        let lines = self.lines.iter().map(|line| characters(line) * CHARACTER);
        let widest = lines.fold(characters(&self.title) * TITLE_CHARACTER, f64::max);
        Size {
            width: widest + 20.0,
            height: LINE * (1 + self.lines.len()) as f64 + 12.0,
        }
    }

    fn draw(&self, svg: &mut String, (x, y): (f64, f64)) {
        let size = self.size();
        let round = if self.look == Look::Outside {
            13.0
        } else {
            4.0
        };
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"{round}\" fill=\"{}\" stroke=\"{}\"/>",
            number(x),
            number(y),
            number(size.width),
            number(size.height),
            self.look.fill(),
            self.look.stroke()
        );
        let middle = x + size.width / 2.0;
        text(svg, (middle, y + LINE + 2.0), "class=\"t\"", &self.title);
        for (n, line) in self.lines.iter().enumerate() {
            let y = y + LINE * (n + 2) as f64 + 2.0;
            text(svg, (x + 10.0, y), "class=\"l\"", line);
        }
    }
}

impl Diagram {
    /// The picture.
    pub fn svg(&self) -> String {
        let sizes: Vec<Size> = self.boxes.iter().map(Drawn::size).collect();
        let labelled = self.labels.iter().any(|label| !label.is_empty());
        let spacing = Spacing {
            across: 16.0,
            between: if labelled { 52.0 } else { 34.0 },
            widest: PAGE - 2.0 * MARGIN - 156.0,
        };
        let layout = lay_out(&sizes, &self.values, &spacing);
        let width = (layout.width + 2.0 * MARGIN).max(PAGE);
        let height = layout.height + LEGEND + 2.0 * MARGIN;
        let mut svg = opened(&self.title, (width, height));
        legend(&mut svg, &self.legend());
        let left = (width - layout.width) / 2.0;
        let _ = writeln!(
            svg,
            "<g transform=\"translate({} {})\">",
            number(left),
            number(LEGEND + MARGIN)
        );
        for stretch in &layout.stretches {
            arrow(&mut svg, stretch, self.colour(stretch));
        }
        for (drawn, corner) in self.boxes.iter().zip(&layout.corners) {
            drawn.draw(&mut svg, *corner);
        }
        if labelled {
            self.label_arrows(&mut svg, &layout);
        }
        svg.push_str("</g>\n</svg>\n");
        svg
    }

    /// Labels of neighbouring arrows are on two levels.
    fn label_arrows(&self, svg: &mut String, layout: &Layout) {
        for (n, (x, y)) in layout.exits.iter().enumerate() {
            let before = layout.exits.iter().zip(&self.values);
            let before = before.filter(|(exit, v)| v.from == self.values[n].from && exit.0 < *x);
            let level = before.count() % 2;
            let y = y + 12.0 + 12.0 * level as f64;
            text(svg, (x + 4.0, y), "class=\"b\"", &self.labels[n]);
        }
    }

    /// Values that only the backward pass still reads are kept for it.
    fn colour(&self, stretch: &Stretch) -> &'static str {
        let from = &self.boxes[self.values[stretch.value].from];
        let later = stretch.serves.iter().all(|to| self.boxes[*to].backward);
        match (from.backward, later) {
            (true, _) => BACKWARD,
            (false, true) => KEPT,
            (false, false) => FORWARD,
        }
    }

    fn legend(&self) -> Vec<Entry> {
        let mut shown = looks(|look| self.boxes.iter().any(|b| b.look == look));
        if self.boxes.iter().any(|b| b.backward) {
            shown.push(Entry::Line("kept for the backward pass"));
        }
        shown
    }
}

/// An entry of a legend.
enum Entry {
    Square(&'static str, &'static str, &'static str),
    Line(&'static str),
}

/// Entries for the colours that occur.
fn looks(has: impl Fn(Look) -> bool) -> Vec<Entry> {
    let all = [
        (Look::Forward, "forward"),
        (Look::ForwardContraction, "forward contraction"),
        (Look::Backward, "backward"),
        (Look::BackwardContraction, "backward contraction"),
    ];
    let shown = all.into_iter().filter(|(look, _)| has(*look));
    shown
        .map(|(look, name)| Entry::Square(look.fill(), look.stroke(), name))
        .collect()
}

/// A pair of bars: what a kernel computes, in the colour of its pass, and what it moves, in grey.
#[derive(Clone, Debug)]
pub struct Bar {
    pub title: String,
    pub lines: Vec<String>,
    pub look: Look,
    pub computing: f64,
    pub moving: f64,
    /// What is written behind them.
    pub label: String,
}

/// Pairs of bars below each other, the longest over the width of the page.
pub fn bars(title: &str, bars: &[Bar]) -> String {
    let room = PAGE - 2.0 * MARGIN - 80.0;
    let longer = |b: &Bar| b.computing.max(b.moving);
    let longest = bars.iter().map(longer).fold(1e-9, f64::max);
    let height_of = |b: &Bar| LINE * (b.lines.len() + 1) as f64 + 34.0;
    let height = LEGEND + MARGIN + bars.iter().map(height_of).sum::<f64>();
    let mut svg = opened(title, (PAGE, height));
    let mut shown = looks(|look| bars.iter().any(|b| b.look == look));
    shown.push(Entry::Square(GREY, "#6b7280", "moving bytes"));
    legend(&mut svg, &shown);
    let mut y = LEGEND + MARGIN;
    for bar in bars {
        text(&mut svg, (MARGIN, y + 10.0), "class=\"s\"", &bar.title);
        for (n, line) in bar.lines.iter().enumerate() {
            let y = y + 10.0 + LINE * (n + 1) as f64;
            text(&mut svg, (MARGIN, y), "class=\"l\"", line);
        }
        let top = y + LINE * (bar.lines.len() + 1) as f64;
        let own = (bar.look.fill(), bar.look.stroke());
        let pair = [(bar.computing, own), (bar.moving, (GREY, "#6b7280"))];
        for (n, (length, (fill, stroke))) in pair.into_iter().enumerate() {
            let _ = writeln!(
                svg,
                "<rect x=\"{MARGIN}\" y=\"{}\" width=\"{}\" height=\"9\" fill=\"{fill}\" stroke=\"{stroke}\"/>",
                number(top + 9.0 * n as f64),
                number((room * length / longest).max(1.0))
            );
        }
        let behind = MARGIN + room * longer(bar) / longest + 8.0;
        text(&mut svg, (behind, top + 13.0), "class=\"l\"", &bar.label);
        y += height_of(bar);
    }
    svg.push_str("</svg>\n");
    svg
}

fn opened(title: &str, (width, height): (f64, f64)) -> String {
    let (width, height) = (number(width), number(height));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n<title>{}</title>\n",
        escaped(title)
    );
    let _ = writeln!(
        svg,
        "<style>text{{fill:{TEXT}}}\
         .t,.s{{font:bold 12.5px system-ui,sans-serif}}.t{{text-anchor:middle}}\
         .l{{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}\
         .b{{font:10.5px system-ui,sans-serif;paint-order:stroke;stroke:#fff;stroke-width:3px}}\
         .k{{font:12px system-ui,sans-serif}}</style>"
    );
    for (name, colour) in [("f", FORWARD), ("r", BACKWARD), ("k", KEPT)] {
        let _ = writeln!(
            svg,
            "<defs><marker id=\"{name}\" viewBox=\"0 0 8 8\" refX=\"7.5\" refY=\"4\" markerWidth=\"7\" \
             markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"{colour}\"/></marker></defs>"
        );
    }
    let _ = writeln!(
        svg,
        "<rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#ffffff\"/>"
    );
    svg
}

/// Squares and lines in the colours of the picture, with their meaning.
fn legend(svg: &mut String, shown: &[Entry]) {
    let mut x = MARGIN;
    for entry in shown {
        let at = number(x);
        let name = match entry {
            Entry::Square(fill, stroke, name) => {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{at}\" y=\"12\" width=\"14\" height=\"14\" rx=\"2\" fill=\"{fill}\" stroke=\"{stroke}\"/>"
                );
                name
            }
            Entry::Line(name) => {
                let _ = writeln!(
                    svg,
                    "<path d=\"M{at} 19h16\" stroke=\"{KEPT}\" stroke-width=\"2\"/>"
                );
                name
            }
        };
        text(svg, (x + 20.0, 23.0), "class=\"k\"", name);
        x += 20.0 + characters(name) * 6.9 + 12.0;
    }
}

fn arrow(svg: &mut String, stretch: &Stretch, colour: &str) {
    let ((x0, y0), (x1, y1)) = (stretch.from, stretch.to);
    // A straight end gives the head its direction.
    let arrive = stretch.arrive - if stretch.ends { HEAD } else { 0.0 };
    let half = (stretch.leave + arrive) / 2.0;
    let path = match x0 == x1 {
        true => format!("M{} {}V{}", number(x0), number(y0), number(y1)),
        false => format!(
            "M{} {}V{}C{} {} {} {} {} {}V{}",
            number(x0),
            number(y0),
            number(stretch.leave),
            number(x0),
            number(half),
            number(x1),
            number(half),
            number(x1),
            number(arrive),
            number(y1)
        ),
    };
    let head = match (stretch.ends, colour) {
        (false, _) => "",
        (true, FORWARD) => " marker-end=\"url(#f)\"",
        (true, BACKWARD) => " marker-end=\"url(#r)\"",
        (true, _) => " marker-end=\"url(#k)\"",
    };
    let _ = writeln!(
        svg,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.4\"{head}/>"
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), style: &str, content: &str) {
    let (x, y) = (number(x), number(y));
    let content = escaped(content);
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" {style}>{content}</text>");
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

fn characters(text: &str) -> f64 {
    text.chars().count() as f64
}

/// A number with at most one digit after the point.
fn number(x: f64) -> String {
    let tenths = (x * 10.0).round() / 10.0;
    // No "-0".
    format!("{}", tenths + 0.0)
}

/// A text in lines of at most [`LINE_CHARACTERS`], broken at spaces; with too many lines, the last one ends in dots.
pub fn wrapped(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let fits =
            |line: &String| line.chars().count() + 1 + word.chars().count() <= LINE_CHARACTERS;
        match lines.last_mut() {
            Some(line) if fits(line) => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("  {word}")),
            None => lines.push(word.to_string()),
        }
    }
    if lines.len() > most {
        lines.truncate(most);
        if let Some(last) = lines.last_mut() {
            last.push_str(" …");
        }
    }
    lines
}
