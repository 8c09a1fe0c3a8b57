//! Which group of units feeds which, derived from the containers they read and write.

use super::Group;
use graph::ContainerId;
use std::collections::{BTreeMap, BTreeSet};

/// Who feeds whom.
pub(super) struct Links {
    /// The groups that read what a group writes, for each group.
    pub after: Vec<BTreeSet<usize>>,
    /// The group that writes each container.
    pub writer: BTreeMap<ContainerId, usize>,
    /// The groups that read it.
    pub readers: BTreeMap<ContainerId, BTreeSet<usize>>,
}

impl Links {
    pub fn new(groups: &[Option<Group>]) -> Links {
        let mut links = Links {
            after: vec![BTreeSet::new(); groups.len()],
            writer: BTreeMap::new(),
            readers: BTreeMap::new(),
        };
        for (at, group) in groups.iter().enumerate() {
            for id in group.iter().flat_map(|g| &g.writes) {
                links.writer.insert(*id, at);
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
        let mut seen: BTreeSet<usize> = stack.iter().copied().collect();
        while let Some(n) = stack.pop() {
            for next in &self.after[n] {
                if *next == to {
                    return true;
                }
                if seen.insert(*next) {
                    stack.push(*next);
                }
            }
        }
        false
    }
}
