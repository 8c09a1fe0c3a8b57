//! Which group of units feeds which, derived from the containers they read and write.

use super::Group;
use graph::ContainerId;
use std::collections::{BTreeMap, BTreeSet};

/// Who feeds whom.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Links {
    /// The groups that read what a group writes, for each group.
    pub after: Vec<BTreeSet<usize>>,
    /// The group that writes each container.
    pub writer: BTreeMap<ContainerId, usize>,
    /// The groups that read it.
    pub readers: BTreeMap<ContainerId, BTreeSet<usize>>,
    /// Whether no two groups write the same container.
    is_written_once: bool,
}

impl Links {
    pub fn new(groups: &[Option<Group>]) -> Links {
        let mut links = Links {
            after: vec![BTreeSet::new(); groups.len()],
            writer: BTreeMap::new(),
            readers: BTreeMap::new(),
            is_written_once: true,
        };
        for (at, group) in groups.iter().enumerate() {
            for id in group.iter().flat_map(|g| &g.writes) {
                links.is_written_once &= links.writer.insert(*id, at).is_none();
            }
            for id in group.iter().flat_map(|g| &g.reads) {
                links.readers.entry(*id).or_default().insert(at);
            }
        }
        for (id, readers) in &links.readers {
            if let Some(w) = links.writer.get(id) {
                links.after[*w].extend(readers.iter().filter(|r| *r != w));
            }
        }
        links
    }

    /// What [`Links::new`] gives after group `b`, which was `taken`, has become a part of group `a`.
    pub fn join(&mut self, groups: &[Option<Group>], a: usize, (b, taken): (usize, &Group)) {
        if !self.is_written_once {
            *self = Links::new(groups);
            return;
        }
        self.writer.extend(taken.writes.iter().map(|id| (*id, a)));
        for id in &taken.reads {
            let readers = self.readers.entry(*id).or_default();
            readers.remove(&b);
            readers.insert(a);
        }
        let moved = std::mem::take(&mut self.after[b]);
        self.after[a].extend(moved);
        for after in &mut self.after {
            if after.remove(&b) {
                after.insert(a);
            }
        }
        self.after[a].remove(&a);
    }

    /// Whether some other group must run between the two, in either direction.
    pub fn path_through_another(&self, a: usize, b: usize) -> bool {
        self.reaches_indirectly(a, b) || self.reaches_indirectly(b, a)
    }

    fn reaches_indirectly(&self, from: usize, to: usize) -> bool {
        let mut stack: Vec<usize> = self.after[from]
            .iter()
            .copied()
            .filter(|n| *n != to)
            .collect();
        let mut is_seen = vec![false; self.after.len()];
        for n in &stack {
            is_seen[*n] = true;
        }
        while let Some(n) = stack.pop() {
            for next in &self.after[n] {
                if *next == to {
                    return true;
                }
                if !std::mem::replace(&mut is_seen[*next], true) {
                    stack.push(*next);
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::text_graph as graph;

    const CONTAINERS: &str = "%x: f32[8] input
        %a: f32[8]
        %b: f32[8]
        %c: f32[8]
        %d: f32[8]
        %y: f32[8]";
    const MAPS: &str = "map [i < 8] { tasklet %a[i] = exp($0) from %x[i] }
        map [i < 8] { tasklet %b[i] = $0 * 2.0 from %a[i] }
        map [i < 8] { tasklet %c[i] = $0 + $1 from %a[i], %x[i] }
        map [i < 8] { tasklet %d[i] = $0 + $1 from %b[i], %c[i] }
        map [i < 8] { tasklet %y[i] = $0 + $1 from %d[i], %a[i] }";

    #[test]
    fn joined_links_are_those_of_the_joined_groups() {
        let g = graph(CONTAINERS, MAPS, "%y");
        let nodes = &g.single_state().expect("one state").nodes;
        let single = |(at, node): (usize, &graph::Node)| Some(Group::new(&g, at, node.clone()));
        for (first, second) in [([0, 1], [0, 2]), ([3, 4], [2, 3]), ([1, 3], [0, 4])] {
            let mut groups: Vec<Option<Group>> = nodes.iter().enumerate().map(single).collect();
            let mut links = Links::new(&groups);
            for [a, b] in [first, second] {
                let taken = groups[b].take().expect("it is there");
                let kept = groups[a].take().expect("it is there");
                groups[a] = Some(kept.united(&taken));
                links.join(&groups, a, (b, &taken));
                assert_eq!(links, Links::new(&groups), "{b} in {a}");
            }
        }
    }

    #[test]
    fn a_detour_is_found_before_and_after_a_join() {
        let g = graph(CONTAINERS, MAPS, "%y");
        let nodes = &g.single_state().expect("one state").nodes;
        let single = |(at, node): (usize, &graph::Node)| Some(Group::new(&g, at, node.clone()));
        let mut groups: Vec<Option<Group>> = nodes.iter().enumerate().map(single).collect();
        let mut links = Links::new(&groups);
        assert!(links.path_through_another(0, 3) && links.path_through_another(3, 0));
        assert!(!links.path_through_another(0, 1));
        let taken = groups[3].take().expect("it is there");
        let kept = groups[1].take().expect("it is there");
        groups[1] = Some(kept.united(&taken));
        links.join(&groups, 1, (3, &taken));
        // Now the third runs between.
        assert!(links.path_through_another(0, 1));
    }
}
