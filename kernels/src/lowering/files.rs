//! Kernels of a program as C files.
//!
//! Kernels that share functions go into one file, since each file has its own copy of every function that its
//! kernels call.

use super::{PLACEHOLDER, Source, head};
use crate::compile::SourceUnit;
use crate::templates::functions::{Functions, Piece};
use std::collections::BTreeSet;

/// C text of one file that compiles in a second or two.
const FILE_BYTES: usize = 60_000;

/// Sources as files of similar length, and each source's file.
pub(super) fn files(sources: &[Source]) -> (Vec<SourceUnit>, Vec<usize>) {
    let texts: Vec<&str> = sources.iter().map(|source| source.text.as_str()).collect();
    let functions = Functions::new(&texts, PLACEHOLDER);
    let mut units: Vec<SourceUnit> = Vec::new();
    let mut unit_of = vec![0; sources.len()];
    let mut left: Vec<usize> = (0..sources.len()).collect();
    while !left.is_empty() {
        let first = left.remove(0);
        let mut members = vec![first];
        let mut file = File::new(&functions);
        file.add(first);
        while file.bytes <= FILE_BYTES {
            let Some(at) = file.nearest(&left) else {
                break;
            };
            let next = left.remove(at);
            file.add(next);
            members.push(next);
        }
        members.sort_unstable();
        for member in &members {
            unit_of[*member] = units.len();
        }
        units.push(file.unit(sources, &members));
    }
    (units, unit_of)
}

/// A file that kernels are added to.
struct File<'a> {
    functions: &'a Functions,
    /// The functions that its kernels share.
    shared: BTreeSet<usize>,
    bytes: usize,
}

impl<'a> File<'a> {
    fn new(functions: &'a Functions) -> File<'a> {
        File {
            functions,
            shared: BTreeSet::new(),
            bytes: 0,
        }
    }

    /// Bytes that a kernel has in common with the file, and bytes that it would add.
    fn bytes_of(&self, kernel: usize) -> (usize, usize) {
        let mut known = 0;
        let mut new = 0;
        for piece in &self.functions.kernels[kernel] {
            match piece {
                Piece::Own(text) => new += text.len(),
                Piece::Shared(id) if self.shared.contains(id) => {
                    known += self.functions.shared[*id].len();
                }
                Piece::Shared(id) => new += self.functions.shared[*id].len(),
            }
        }
        (known, new)
    }

    fn add(&mut self, kernel: usize) {
        self.bytes += self.bytes_of(kernel).1;
        for piece in &self.functions.kernels[kernel] {
            if let Piece::Shared(id) = piece {
                self.shared.insert(*id);
            }
        }
    }

    /// Position of the kernel that has most in common with the file, among those that are left; the first if several
    /// are equal.
    fn nearest(&self, left: &[usize]) -> Option<usize> {
        let mut nearest: Option<(usize, f64)> = None;
        for (at, kernel) in left.iter().enumerate() {
            let (known, new) = self.bytes_of(*kernel);
            let share = known as f64 / (known + new).max(1) as f64;
            if nearest.is_none_or(|(_, most)| share > most) {
                nearest = Some((at, share));
            }
        }
        nearest.map(|(at, _)| at)
    }

    fn unit(&self, sources: &[Source], members: &[usize]) -> SourceUnit {
        let mut text = head();
        let mut written = BTreeSet::new();
        for source in members {
            let Source { comment, name, .. } = &sources[*source];
            text.push_str(comment);
            for piece in &self.functions.kernels[*source] {
                match piece {
                    Piece::Own(own) => text.push_str(&own.replace(PLACEHOLDER, name)),
                    Piece::Shared(id) if written.insert(*id) => {
                        text.push_str(&self.functions.shared[*id]);
                    }
                    Piece::Shared(_) => {}
                }
            }
            text.push('\n');
        }
        let symbols = members.iter().flat_map(|m| sources[*m].symbols.clone());
        SourceUnit {
            name: members
                .first()
                .map_or_else(String::new, |m| sources[*m].name.clone()),
            source: text,
            symbols: symbols.collect(),
        }
    }
}
