//! What stays in registers between the phases of a row.
//!
//! Owns the conditions: every access meets the value at the same point of the same loops, so the
//! thread that made it is the one that needs it. Never decides sizes of groups.

use super::loops::points;
use super::{Class, Home, Kept, Leaf, moved_by};
use graph::{ContainerId, Reduction};
use kernels::emit::body::Array;
use kernels::emit::index::Loop;
use kernels::emit::values::{Address, Op, Values};
use std::collections::{BTreeMap, BTreeSet};

/// A leaf, the loops around it and its values.
pub(super) struct Seen<'a> {
    pub(super) leaf: &'a Leaf,
    pub(super) values: Values,
}

/// One access of one leaf.
struct Met<'a> {
    leaf: usize,
    address: &'a Address,
    /// The conflict resolution of a write; `None` for a read.
    write: Option<Option<Reduction>>,
}

/// The leaves' values under the loops around them.
pub(super) fn seen<'a>(
    leaves: &'a [Leaf],
    around: &[Loop],
    arrays: &BTreeMap<ContainerId, Array>,
) -> Vec<Seen<'a>> {
    let one = |leaf: &'a Leaf| {
        let all = around.iter().chain(&leaf.spread).chain(&leaf.inner);
        let loops: Vec<Loop> = all.cloned().collect();
        Seen {
            leaf,
            values: Values::new(&loops, &leaf.statements, arrays),
        }
    };
    leaves.iter().map(one).collect()
}

fn loads(values: &Values) -> impl Iterator<Item = &Address> {
    values.values.iter().filter_map(|v| match &v.op {
        Op::Load(a) => Some(a),
        _ => None,
    })
}

/// Containers written in the kernel.
pub(super) fn written(seen: &[Seen]) -> BTreeSet<ContainerId> {
    let effects = seen.iter().flat_map(|s| &s.values.effects);
    effects.map(|e| e.address.container).collect()
}

/// Where what the kernel writes is read by later leaves; containers that no leaf reads have no home.
pub(super) fn homes(
    seen: &[Seen],
    around: &[Loop],
    classes: &[Class],
    arrays: &BTreeMap<ContainerId, Array>,
) -> BTreeMap<ContainerId, Home> {
    let mut homes = BTreeMap::new();
    for id in written(seen) {
        let met = accesses(seen, id);
        if met.iter().all(|m| m.write.is_some()) {
            continue;
        }
        let array = &arrays[&id];
        let home = home(seen, &met, around, classes, array);
        match home {
            Some(home) => homes.insert(id, home),
            None if array.local => homes.insert(id, Home::Shared),
            None => None,
        };
    }
    homes
}

fn accesses<'a>(seen: &'a [Seen], id: ContainerId) -> Vec<Met<'a>> {
    let mut met = Vec::new();
    for (leaf, s) in seen.iter().enumerate() {
        let read = loads(&s.values).filter(|a| a.container == id);
        met.extend(read.map(|address| Met {
            leaf,
            address,
            write: None,
        }));
        let effects = s.values.effects.iter();
        let writes = effects.filter(|e| e.address.container == id);
        met.extend(writes.map(|e| Met {
            leaf,
            address: &e.address,
            write: Some(e.conflict),
        }));
    }
    met
}

fn home(
    seen: &[Seen],
    met: &[Met],
    around: &[Loop],
    classes: &[Class],
    array: &Array,
) -> Option<Home> {
    let first = met.first()?;
    let plain = |a: &Address| a.gather.is_empty() && a.guards.is_empty();
    let alike = |m: &Met| plain(m.address) && m.address.offset == first.address.offset;
    // What is read before it is written comes from elsewhere.
    let begins = met.iter().map(|m| m.leaf).min()?;
    let written_first = met.iter().any(|m| m.leaf == begins && m.write.is_some())
        && !met.iter().any(|m| m.leaf == begins && m.write.is_none());
    if !met.iter().all(alike) || !written_first {
        return None;
    }
    let conflicts = met.iter().filter_map(|m| m.write.flatten()).count();
    if conflicts > 0 && met.iter().filter(|m| m.write.is_some()).count() > 1 {
        return None;
    }
    let offset = &first.address.offset;
    let fixed = |m: &Met| {
        let leaf = seen[m.leaf].leaf;
        !moved_by(offset, &leaf.spread) && !moved_by(offset, &leaf.inner)
    };
    if met.iter().all(fixed) {
        let covers = array.local || conflicts == 0 || points(around) == array.len;
        return covers.then_some(Home::Uniform);
    }
    let class = seen[first.leaf].leaf.class?;
    let same = |m: &Met| {
        let leaf = seen[m.leaf].leaf;
        leaf.class == Some(class) && !moved_by(offset, &leaf.inner)
    };
    let moving = classes[class].loops.iter();
    let moving = moving.filter(|l| moved_by(offset, std::slice::from_ref(l)));
    let made: i64 = moving.map(|l| l.size).product();
    let outside = if array.local { 1 } else { points(around) };
    let covers = conflicts == 0 || made * outside == array.len;
    (met.iter().all(same) && covers).then_some(Home::Registers(class))
}

/// Loads that several leaves make of the same elements, and those that no point changes.
pub(super) fn kept(seen: &[Seen], points: &[Loop], classes: &[Class]) -> Vec<Kept> {
    let written = written(seen);
    let mut found: Vec<(Kept, usize)> = Vec::new();
    for s in seen {
        for address in loads(&s.values) {
            let simple = address.gather.is_empty() && !written.contains(&address.container);
            let parts = || {
                let guards = address.guards.iter().map(|g| &g.index);
                guards.chain([&address.offset])
            };
            let moved = |loops: &[Loop]| parts().any(|e| moved_by(e, loops));
            if !simple || moved(&s.leaf.inner) {
                continue;
            }
            let class = match s.leaf.class {
                _ if !moved(&s.leaf.spread) => None,
                Some(class) => Some(class),
                None => continue,
            };
            if let Some(class) = class {
                let last = classes[class].loops.last();
                let apart = last.is_some_and(|l| !moved(std::slice::from_ref(l)));
                if classes[class].vector > 1 && apart {
                    continue;
                }
            }
            let kept = Kept {
                address: address.clone(),
                class,
                hoisted: !moved(points),
            };
            match found.iter_mut().find(|(k, _)| *k == kept) {
                Some((_, n)) => *n += 1,
                None => found.push((kept, 1)),
            }
        }
    }
    let worth = |(k, n): &(Kept, usize)| *n > 1 || k.hoisted;
    let kept = found.into_iter().filter(worth);
    kept.map(|(k, _)| k).collect()
}
