//! The cheapest cut between two ends of a directed graph (Dinic's algorithm): what is on which side.

use std::collections::VecDeque;

/// A capacity no cheapest cut contains, as long as all others sum to less.
pub const UNCUT: u64 = 1 << 60;

/// The end whose side [`Network::side`] gives.
pub const SOURCE: usize = 0;
/// The other end.
pub const SINK: usize = 1;

/// A directed graph with capacities; vertices 0 and 1 are the ends.
#[derive(Debug)]
pub struct Network {
    /// Edges in pairs: one and its reverse, each with its end and what is left of its capacity.
    edges: Vec<(usize, u64)>,
    from: Vec<Vec<usize>>,
}

impl Network {
    /// The two ends and nothing else.
    pub fn new() -> Network {
        Network {
            edges: Vec::new(),
            from: vec![Vec::new(); 2],
        }
    }

    /// Adds a vertex.
    pub fn vertex(&mut self) -> usize {
        self.from.push(Vec::new());
        self.from.len() - 1
    }

    /// An edge that costs its capacity if `from` is on the source's side and `to` is not.
    pub fn edge(&mut self, from: usize, to: usize, capacity: u64) {
        for (from, to, capacity) in [(from, to, capacity), (to, from, 0)] {
            self.from[from].push(self.edges.len());
            self.edges.push((to, capacity));
        }
    }

    /// Returns whether a cheapest cut leaves a vertex on the source's side, for each vertex: of all such cuts, the one
    /// with the fewest vertices there.
    pub fn side(mut self) -> Vec<bool> {
        loop {
            let levels = self.levels();
            if levels[SINK].is_none() {
                return levels.iter().map(Option::is_some).collect();
            }
            let mut next = vec![0; self.from.len()];
            while self.push(&levels, &mut next) > 0 {}
        }
    }

    /// Distances from the source along edges with capacity left.
    fn levels(&self) -> Vec<Option<usize>> {
        let mut levels = vec![None; self.from.len()];
        levels[SOURCE] = Some(0);
        let mut open = VecDeque::from([SOURCE]);
        while let Some(at) = open.pop_front() {
            let level = levels[at].map(|l| l + 1);
            for edge in &self.from[at] {
                let (to, left) = self.edges[*edge];
                if left > 0 && levels[to].is_none() {
                    levels[to] = level;
                    open.push_back(to);
                }
            }
        }
        levels
    }

    /// Sends what fits along one shortest path; 0 if there is none left.
    fn push(&mut self, levels: &[Option<usize>], next: &mut [usize]) -> u64 {
        let mut path: Vec<usize> = Vec::new();
        let mut at = SOURCE;
        while at != SINK {
            let Some(edge) = self.from[at].get(next[at]).copied() else {
                // A dead end: back, and past the edge that led here.
                let Some(back) = path.pop() else { return 0 };
                at = self.edges[back ^ 1].0;
                next[at] += 1;
                continue;
            };
            let (to, left) = self.edges[edge];
            if left > 0 && levels[to].is_some() && levels[to] == levels[at].map(|l| l + 1) {
                path.push(edge);
                at = to;
            } else {
                next[at] += 1;
            }
        }
        let sent = path.iter().map(|e| self.edges[*e].1).min().unwrap_or(0);
        for edge in path {
            self.edges[edge].1 -= sent;
            self.edges[edge ^ 1].1 += sent;
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_edges_are_cut() {
        let mut network = Network::new();
        let [a, b, c] = [(); 3].map(|()| network.vertex());
        network.edge(SOURCE, a, 5);
        network.edge(SOURCE, b, 4);
        network.edge(a, c, 2);
        network.edge(b, c, UNCUT);
        network.edge(a, b, 1);
        network.edge(c, SINK, 8);
        assert_eq!(network.side(), [true, false, true, false, false]);
    }

    #[test]
    fn without_a_way_everything_the_source_reaches_is_on_its_side() {
        let mut network = Network::new();
        let [a, b] = [(); 2].map(|()| network.vertex());
        network.edge(SOURCE, a, 1);
        network.edge(b, SINK, 1);
        assert_eq!(network.side(), [true, false, true, false]);
    }
}
