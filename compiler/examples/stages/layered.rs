//! Where the boxes and arrows of a diagram go: boxes in rows, each below all that it reads.
//!
//! The method of Sugiyama, Tagawa and Toda (IEEE Trans. SMC 11, 1981): boxes get rows, an arrow that skips rows
//! gets a place in each of them, places are ordered so that few arrows cross, and then moved below each other.
//! Owns positions, never what is drawn there. Numbers are added, multiplied and divided only, so every
//! machine finds the same ones.

/// A box.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub width: f64,
    pub height: f64,
}

/// What a box makes, and the boxes that read it; all of them come later in the list of boxes.
#[derive(Clone, Debug)]
pub struct Value {
    pub from: usize,
    pub to: Vec<usize>,
}

/// Distances.
#[derive(Clone, Copy, Debug)]
pub struct Spacing {
    /// Between boxes of a row.
    pub across: f64,
    /// Between rows.
    pub between: f64,
    /// Boxes of a row together, unless one alone is wider.
    pub widest: f64,
}

/// A stretch of an arrow: down to `leave`, in a curve to `arrive`, down to its end.
#[derive(Clone, Debug)]
pub struct Stretch {
    pub value: usize,
    pub from: (f64, f64),
    pub leave: f64,
    pub arrive: f64,
    pub to: (f64, f64),
    /// Whether it ends at a box.
    pub ends: bool,
    /// The boxes that it leads to.
    pub serves: Vec<usize>,
}

/// A finished layout.
#[derive(Debug)]
pub struct Layout {
    /// The upper left corner of each box.
    pub corners: Vec<(f64, f64)>,
    pub stretches: Vec<Stretch>,
    /// Where the arrow of each value leaves its box.
    pub exits: Vec<(f64, f64)>,
    pub width: f64,
    pub height: f64,
}

/// Room of an arrow that passes a row.
const LANE: f64 = 12.0;
/// Sweeps in which rows are ordered, or moved, one after the other.
const N_SWEEPS: usize = 24;

/// Lays boxes out.
pub fn lay_out(sizes: &[Size], values: &[Value], spacing: &Spacing) -> Layout {
    let rows = rows(sizes, values, spacing);
    let mut places = Places::new(sizes, values, &rows);
    places.order();
    places.move_below_each_other(spacing.across);
    places.finish(sizes, values, spacing)
}

/// The row of each box: the first one below all that it reads, if there is room. A box that reads nothing
/// comes as closely above its first reader as there is room.
fn rows(sizes: &[Size], values: &[Value], spacing: &Spacing) -> Vec<usize> {
    let n = sizes.len();
    let mut readers = vec![Vec::new(); n];
    let mut sources = vec![Vec::new(); n];
    for value in values {
        for to in &value.to {
            readers[value.from].push(*to);
            sources[*to].push(value.from);
        }
    }
    let mut below = vec![0usize; n];
    for i in (0..n).rev() {
        below[i] = readers[i].iter().map(|r| below[*r] + 1).max().unwrap_or(0);
    }
    let given = |i: usize| sources[i].is_empty();
    let mut row: Vec<Option<usize>> = vec![None; n];
    let mut r = 1;
    while (0..n).any(|i| row[i].is_none() && !given(i)) {
        let above = |i: usize| given(i) || row[i].is_some_and(|found| found < r);
        let waiting = (0..n).filter(|i| row[*i].is_none() && !given(*i));
        let mut ready: Vec<usize> = waiting
            .filter(|i| sources[*i].iter().all(|s| above(*s)))
            .collect();
        ready.sort_by_key(|i| (n - below[*i], *i));
        let mut width = 0.0;
        for i in ready {
            if width == 0.0 || width + sizes[i].width <= spacing.widest {
                row[i] = Some(r);
                width += sizes[i].width + spacing.across;
            }
        }
        r += 1;
    }
    let mut rows: Vec<usize> = row.iter().map(|r| r.unwrap_or(0)).collect();
    for i in (0..n).filter(|i| row[*i].is_none()) {
        let first = readers[i].iter().map(|to| rows[*to]).min().unwrap_or(1);
        rows[i] = first - 1;
        let has_room = |r: &usize| {
            let others = (0..n).filter(|o| *o != i && (row[*o].is_some() || *o < i));
            let widths = others.filter(|o| rows[*o] == *r).map(|o| sizes[o].width);
            let width = widths.map(|w| w + spacing.across).sum::<f64>() + sizes[i].width;
            width <= 0.7 * spacing.widest
        };
        let found = (0..first).rev().find(has_room);
        rows[i] = found.unwrap_or(first - 1);
    }
    rows
}

/// Boxes, and arrows where they pass a row.
struct Places {
    rows: Vec<Vec<usize>>,
    row: Vec<usize>,
    width: Vec<f64>,
    /// Middles.
    x: Vec<f64>,
    n_boxes: usize,
    links: Vec<Link>,
}

/// From a place to one in the next row.
struct Link {
    id: usize,
    from: usize,
    to: usize,
    value: usize,
    serves: Vec<usize>,
}

impl Places {
    fn new(sizes: &[Size], values: &[Value], rows: &[usize]) -> Places {
        let mut places = Places {
            rows: vec![Vec::new(); rows.iter().max().map_or(0, |r| r + 1)],
            row: rows.to_vec(),
            width: sizes.iter().map(|s| s.width).collect(),
            x: vec![0.0; sizes.len()],
            n_boxes: sizes.len(),
            links: Vec::new(),
        };
        for (i, r) in rows.iter().enumerate() {
            places.rows[*r].push(i);
        }
        for (n, value) in values.iter().enumerate() {
            places.link(n, value);
        }
        places
    }

    /// One line through all rows to the last reader, from which the others branch off.
    fn link(&mut self, n: usize, value: &Value) {
        let last = value.to.iter().map(|to| self.row[*to]).max().unwrap_or(0);
        let mut at = value.from;
        for r in self.row[value.from] + 1..=last {
            let here = value.to.iter().filter(|to| self.row[**to] == r);
            for to in here.copied().collect::<Vec<_>>() {
                self.push_link(n, (at, to), vec![to]);
            }
            if r < last {
                let passes = self.row.len();
                self.row.push(r);
                self.width.push(LANE);
                self.x.push(0.0);
                self.rows[r].push(passes);
                let later = value.to.iter().filter(|to| self.row[**to] > r);
                let later = later.copied().collect();
                self.push_link(n, (at, passes), later);
                at = passes;
            }
        }
    }

    fn push_link(&mut self, value: usize, (from, to): (usize, usize), serves: Vec<usize>) {
        let id = self.links.len();
        self.links.push(Link {
            id,
            from,
            to,
            value,
            serves,
        });
    }

    /// Orders each row by the middle of what its places are linked to, down and up, and keeps the best order.
    fn order(&mut self) {
        let mut best = (self.n_crossings(), self.rows.clone());
        for sweep in 0..N_SWEEPS {
            let n_rows = self.rows.len();
            let down = sweep % 2 == 0;
            for step in 1..n_rows {
                let r = if down { step } else { n_rows - 1 - step };
                self.order_row(r, down);
            }
            self.swap_neighbours();
            let found = self.n_crossings();
            if found < best.0 {
                best = (found, self.rows.clone());
            }
        }
        self.rows = best.1;
    }

    fn order_row(&mut self, r: usize, by_above: bool) {
        let rank = self.ranks();
        let key = |i: usize| {
            let linked = self.links.iter().filter_map(|l| match by_above {
                true => (l.to == i).then_some(l.from),
                false => (l.from == i).then_some(l.to),
            });
            let linked: Vec<usize> = linked.collect();
            match linked.len() {
                0 => rank[i] as f64,
                n => linked.iter().map(|l| rank[*l] as f64).sum::<f64>() / n as f64,
            }
        };
        let mut keyed: Vec<(f64, usize)> = self.rows[r].iter().map(|i| (key(*i), *i)).collect();
        keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.rows[r] = keyed.into_iter().map(|(_, i)| i).collect();
    }

    fn swap_neighbours(&mut self) {
        for r in 0..self.rows.len() {
            for n in 1..self.rows[r].len() {
                let before = self.n_crossings();
                self.rows[r].swap(n - 1, n);
                if self.n_crossings() >= before {
                    self.rows[r].swap(n - 1, n);
                }
            }
        }
    }

    /// The position of each place in its row.
    fn ranks(&self) -> Vec<usize> {
        let mut rank = vec![0; self.row.len()];
        for row in &self.rows {
            for (n, i) in row.iter().enumerate() {
                rank[*i] = n;
            }
        }
        rank
    }

    fn n_crossings(&self) -> usize {
        let rank = self.ranks();
        let crosses = |a: &Link, b: &Link| {
            self.row[a.from] == self.row[b.from]
                && (rank[a.from] < rank[b.from] && rank[a.to] > rank[b.to]
                    || rank[a.from] > rank[b.from] && rank[a.to] < rank[b.to])
        };
        let pairs = self.links.iter().enumerate();
        pairs
            .map(|(n, a)| self.links[..n].iter().filter(|b| crosses(a, b)).count())
            .sum()
    }

    /// Moves each place towards the middle of what it is linked to, as far as its neighbours in the row let it.
    fn move_below_each_other(&mut self, across: f64) {
        for r in 0..self.rows.len() {
            let wanted: Vec<(f64, f64)> = self.rows[r].iter().map(|_| (0.0, 1.0)).collect();
            self.move_row(r, &wanted, across);
        }
        for sweep in 0..4 * N_SWEEPS {
            let n_rows = self.rows.len();
            for step in 0..n_rows {
                let r = if sweep % 2 == 0 {
                    step
                } else {
                    n_rows - 1 - step
                };
                let wanted: Vec<(f64, f64)> =
                    self.rows[r].iter().map(|i| self.wanted(*i)).collect();
                self.move_row(r, &wanted, across);
            }
        }
        let left = |i: usize| self.x[i] - self.width[i] / 2.0;
        let least = (0..self.x.len()).map(left).fold(f64::INFINITY, f64::min);
        self.x.iter_mut().for_each(|x| *x -= least);
    }

    /// Where a place wants to be, and how much; straight lines through rows matter most.
    fn wanted(&self, i: usize) -> (f64, f64) {
        let passes = |i: usize| i >= self.n_boxes;
        let mut sum = (self.x[i] * 0.01, 0.01);
        for link in &self.links {
            let other = match (link.from == i, link.to == i) {
                (true, _) => link.to,
                (_, true) => link.from,
                _ => continue,
            };
            let weight = match (passes(i), passes(other)) {
                (true, true) => 8.0,
                (false, false) => 1.0,
                _ => 2.0,
            };
            sum = (sum.0 + weight * self.x[other], sum.1 + weight);
        }
        (sum.0 / sum.1, sum.1)
    }

    /// The positions nearest to the wanted ones, weighted squares added up, that keep the order and the
    /// distances of a row: neighbours that want to pass each other form a block (isotonic regression).
    fn move_row(&mut self, r: usize, wanted: &[(f64, f64)], across: f64) {
        let row = &self.rows[r];
        let mut offsets = Vec::new();
        let mut offset = 0.0;
        for (n, i) in row.iter().enumerate() {
            if n > 0 {
                let lanes = row[n - 1] >= self.n_boxes && *i >= self.n_boxes;
                let gap = if lanes { 0.0 } else { across };
                offset += (self.width[row[n - 1]] + self.width[*i]) / 2.0 + gap;
            }
            offsets.push(offset);
        }
        // Blocks: position of the first, weight, number of places.
        let mut blocks: Vec<(f64, f64, usize)> = Vec::new();
        for ((x, weight), offset) in wanted.iter().zip(&offsets) {
            let mut block = (x - offset, *weight, 1);
            while let Some(last) = blocks.pop_if(|last| last.0 > block.0) {
                let weight = last.1 + block.1;
                let x = (last.0 * last.1 + block.0 * block.1) / weight;
                block = (x, weight, last.2 + block.2);
            }
            blocks.push(block);
        }
        let firsts = blocks
            .iter()
            .flat_map(|(x, _, n)| std::iter::repeat_n(*x, *n));
        let found: Vec<f64> = firsts.zip(&offsets).map(|(x, o)| x + o).collect();
        for (i, x) in self.rows[r].iter().zip(found) {
            self.x[*i] = x;
        }
    }

    fn finish(&self, sizes: &[Size], values: &[Value], spacing: &Spacing) -> Layout {
        let mut tops = Vec::new();
        let mut height = 0.0;
        for row in &self.rows {
            let boxes = row.iter().filter(|i| **i < self.n_boxes);
            let tallest = boxes.map(|i| sizes[*i].height).fold(0.0, f64::max);
            tops.push((height, height + tallest));
            height += tallest + spacing.between;
        }
        let rows = |i: usize| tops[self.row[i]];
        let corner = |i: usize| {
            let (top, bottom) = rows(i);
            let y = (top + bottom - sizes[i].height) / 2.0;
            (self.x[i] - sizes[i].width / 2.0, y)
        };
        let corners: Vec<(f64, f64)> = (0..self.n_boxes).map(corner).collect();
        let exit = |(n, value): (usize, &Value)| {
            let (i, x) = (
                value.from,
                self.port(value.from, sizes, |l| l.value, n, true),
            );
            (x, corners[i].1 + sizes[i].height)
        };
        let exits: Vec<(f64, f64)> = values.iter().enumerate().map(exit).collect();
        let stretch = |link: &Link| {
            let ends = link.to < self.n_boxes;
            let from = match link.from < self.n_boxes {
                true => exits[link.value],
                false => (self.x[link.from], rows(link.from).0),
            };
            let to = match ends {
                true => {
                    let x = self.port(link.to, sizes, |l| l.id, link.id, false);
                    (x, corners[link.to].1)
                }
                false => (self.x[link.to], rows(link.to).0),
            };
            Stretch {
                value: link.value,
                from,
                leave: rows(link.from).1,
                arrive: rows(link.to).0,
                to,
                ends,
                serves: link.serves.clone(),
            }
        };
        let right = |i: usize| self.x[i] + self.width[i] / 2.0;
        Layout {
            stretches: self.links.iter().map(stretch).collect(),
            exits,
            corners,
            width: (0..self.x.len()).map(right).fold(0.0, f64::max),
            height: height - spacing.between,
        }
    }

    /// Where an arrow leaves or reaches a box: those of one side are spread evenly, in the order of their other ends.
    fn port(
        &self,
        i: usize,
        sizes: &[Size],
        name: impl Fn(&Link) -> usize,
        wanted: usize,
        leaves: bool,
    ) -> f64 {
        let mut ends: Vec<(usize, f64)> = Vec::new();
        for link in &self.links {
            let (own, other) = match leaves {
                true => (link.from, link.to),
                false => (link.to, link.from),
            };
            if own == i && ends.iter().all(|(n, _)| *n != name(link)) {
                ends.push((name(link), self.x[other]));
            }
        }
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let n = ends.iter().position(|(n, _)| *n == wanted).unwrap_or(0);
        let part = (n + 1) as f64 / (ends.len() + 1) as f64;
        self.x[i] + sizes[i].width * (part - 0.5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of boxes of which each reads the one before and some earlier ones.
    fn laid_out() -> (Vec<Size>, Layout) {
        let size = |n: usize| Size {
            width: 80.0 + 10.0 * (n % 5) as f64,
            height: 20.0 + 7.0 * (n % 3) as f64,
        };
        let sizes: Vec<Size> = (0..14).map(size).collect();
        let value = |from: usize| Value {
            from,
            to: (from + 1..14)
                .filter(|to| [1, 4, 6].contains(&(to - from)))
                .collect(),
        };
        let values: Vec<Value> = (0..13).filter(|n| n % 4 != 3).map(value).collect();
        let spacing = Spacing {
            across: 16.0,
            between: 30.0,
            widest: 300.0,
        };
        let layout = lay_out(&sizes, &values, &spacing);
        (sizes, layout)
    }

    #[test]
    fn boxes_do_not_overlap() {
        let (sizes, layout) = laid_out();
        for (i, (x, y)) in layout.corners.iter().enumerate() {
            assert!(
                *x >= -1e-9 && x + sizes[i].width <= layout.width + 1e-9,
                "{i}"
            );
            for (j, (u, v)) in layout.corners.iter().enumerate().take(i) {
                let beside = x + sizes[i].width <= *u || u + sizes[j].width <= *x;
                let below = y + sizes[i].height <= *v || v + sizes[j].height <= *y;
                assert!(beside || below, "{i} and {j}");
            }
        }
    }

    #[test]
    fn arrows_lead_down_and_pass_no_box() {
        let (sizes, layout) = laid_out();
        assert!(layout.stretches.iter().any(|s| !s.ends), "some skip a row");
        for s in &layout.stretches {
            assert!(s.from.1 <= s.leave && s.leave < s.arrive && s.arrive <= s.to.1);
            // A stretch is straight within rows, and no box lies between rows.
            for ((x, y), size) in layout.corners.iter().zip(&sizes) {
                let inside = |at: f64| *x < at && at < x + size.width;
                let meets = |from: f64, to: f64| from < y + size.height && *y < to;
                assert!(!(inside(s.from.0) && meets(s.from.1, s.leave)), "{s:?}");
                assert!(!(inside(s.to.0) && meets(s.arrive, s.to.1)), "{s:?}");
            }
        }
    }
}
