//! Which candidate computes a product, and why.
//!
//! Owns the choice by a table or by decree, and its sentence. The same table and product give the same
//! choice. Never measures.

use super::operation::Operation;
use super::table::{Candidate, Key, Table};
use std::fmt;
use std::sync::Arc;

/// How products are chosen for a program.
#[derive(Clone, Debug, Default)]
pub enum Products {
    /// Our own kernels, for all.
    #[default]
    Own,
    /// The fastest of a table's candidates; our own kernels for what it does not have.
    Measured(Arc<Table>),
    /// One candidate wherever it is possible, else our own kernels: how tables are measured.
    Every {
        /// Which.
        candidate: Candidate,
        /// Bytes of workspace of every product of the library.
        workspace_bytes: usize,
        /// What the library offers; everything, where no library is asked.
        offers: Offers,
    },
}

/// How many algorithms the library offers for a product, at most as many as asked for; else its words.
#[derive(Clone, Default)]
pub struct Offers(Option<Arc<Ask>>);

type Ask = dyn Fn(&Operation, usize) -> Result<usize, String> + Send + Sync;

impl Offers {
    /// `library` lists algorithms of a product, at most as many as its second argument says.
    pub fn new(
        library: impl Fn(&Operation, usize) -> Result<usize, String> + Send + Sync + 'static,
    ) -> Offers {
        Offers(Some(Arc::new(library)))
    }
}

impl fmt::Debug for Offers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(_) => "Offers(of a library)",
            None => "Offers(everything)",
        })
    }
}

/// What was chosen for a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The product or convolution and its rest; `None` where it is neither, and so our own kernel's.
    pub key: Option<Key>,
    /// What computes it.
    pub candidate: Candidate,
    /// Why.
    pub reason: String,
    /// Entries of [`crate::lower::CudaProgram::maps`] that it takes, from its own on.
    pub n_maps: usize,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.candidate, self.reason)
    }
}

impl Products {
    /// Bytes of workspace of every product of the library.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Products::Own => 0,
            Products::Measured(table) => table.workspace_bytes,
            Products::Every {
                workspace_bytes, ..
            } => *workspace_bytes,
        }
    }

    /// Checks that the library has an algorithm of that rank. A table's rank is believed here; the program's loading
    /// checks it.
    ///
    /// # Errors
    /// Why it has none.
    pub fn offers(&self, operation: &Operation, rank: usize) -> Result<(), String> {
        let Products::Every {
            offers: Offers(Some(ask)),
            ..
        } = self
        else {
            return Ok(());
        };
        match ask(operation, rank + 1)? {
            offered if offered > rank => Ok(()),
            offered => Err(format!("{} offers {offered}", operation.library())),
        }
    }

    /// The candidate for a product. `can` says why a candidate is not possible; our own kernel always is.
    pub fn choose(&self, key: Key, can: &dyn Fn(Candidate) -> Result<(), String>) -> Choice {
        let (candidate, reason) = match self {
            Products::Own => (Candidate::Own, "no table of times is given".to_string()),
            Products::Every { candidate, .. } => match can(*candidate) {
                Ok(()) => (*candidate, "asked for everywhere".to_string()),
                Err(why) => {
                    let reason = format!("{candidate} cannot compute it: {why}");
                    (Candidate::Own, reason)
                }
            },
            Products::Measured(table) => fastest(table, &key, can),
        };
        Choice {
            key: Some(key),
            candidate,
            reason,
            n_maps: 1,
        }
    }
}

fn fastest(
    table: &Table,
    key: &Key,
    can: &dyn Fn(Candidate) -> Result<(), String>,
) -> (Candidate, String) {
    let file = table.path().display();
    let all = table.candidates(key);
    let possible = all.iter().filter(|m| can(m.candidate).is_ok());
    // The first of equals, as `min_by` says.
    let best = possible.min_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
    match best {
        Some(best) => {
            let others = all.iter().filter(|m| m.candidate != best.candidate);
            let others: Vec<String> = others
                .map(|m| format!("{} {} us", m.candidate, m.microseconds))
                .collect();
            let against = match others.is_empty() {
                true => "nothing else was measured".to_string(),
                false => format!("against {}", others.join(", ")),
            };
            let time = best.microseconds;
            (best.candidate, format!("{time} us in {file}, {against}"))
        }
        None => (Candidate::Own, format!("{file} has no time for it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const TABLE: &str = r#"{"format": "shorthaul products", "version": 1,
        "machine": {"device": "D", "driver": "13.0", "cublaslt": "13.0.0"}, "workspace_bytes": 64,
        "entries": [{"product": "p", "rest": "bias", "candidates": [
            {"kind": "own", "microseconds": 3},
            {"kind": "library", "rank": 2, "microseconds": 1.5},
            {"kind": "library", "rank": 5, "microseconds": 1.5},
            {"kind": "library_then_map", "rank": 0, "microseconds": 2}]}]}"#;

    fn key(rest: &str) -> Key {
        Key {
            product: "p".into(),
            rest: rest.into(),
        }
    }

    #[test]
    fn the_first_of_the_fastest_that_can_be_is_taken() {
        let table = Table::parse(Path::new("t.json"), TABLE).unwrap();
        let products = Products::Measured(Arc::new(table));
        let any = products.choose(key("bias"), &|_| Ok(()));
        assert_eq!(any.candidate, Candidate::Library(2));
        assert!(
            any.reason
                .starts_with("1.5 us in t.json, against our own kernel 3 us, ")
        );
        let no = || Err("it has a rest".to_string());
        let unfused = |c| match c {
            Candidate::Library(_) => no(),
            _ => Ok(()),
        };
        let second = products.choose(key("bias"), &unfused);
        assert_eq!(second.candidate, Candidate::LibraryThenMap(0));
        let absent = products.choose(key("nothing"), &|_| Ok(()));
        assert_eq!(absent.candidate, Candidate::Own);
        assert_eq!(
            absent.to_string(),
            "our own kernel: t.json has no time for it"
        );
        assert_eq!(products.workspace_bytes(), 64);
    }

    #[test]
    fn what_is_asked_for_everywhere_is_taken_where_it_can_be() {
        let products = Products::Every {
            candidate: Candidate::Library(1),
            workspace_bytes: 8,
            offers: Offers::default(),
        };
        assert_eq!(
            products.choose(key("bias"), &|_| Ok(())).candidate,
            Candidate::Library(1)
        );
        let only = |c| {
            (c == Candidate::Own)
                .then_some(())
                .ok_or("cuX offers 1".to_string())
        };
        let own = products.choose(key("bias"), &only);
        assert_eq!(own.candidate, Candidate::Own);
        assert!(
            own.reason
                .contains("the library's algorithm 1 cannot compute it: cuX offers 1")
        );
        assert_eq!(
            Products::Own.choose(key("bias"), &|_| Ok(())).candidate,
            Candidate::Own
        );
    }
}
