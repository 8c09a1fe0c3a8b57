//! What fusion did, what it refused and why: the sentences reports and recipes show.

use graph::Origin;

/// One rewrite applied or refused at one place.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The rewrite (`inline`, `fuse`, `epilogue`).
    pub rewrite: &'static str,
    /// Where.
    pub origin: String,
    /// What happened, or why not, in a sentence.
    pub sentence: String,
    /// Whether it was applied.
    pub applied: bool,
    /// Bytes not moved because of it; of a refusal, what it would have saved, as far as is known.
    pub bytes: i64,
}

impl Decision {
    /// A rewrite that was applied.
    pub fn applied(rewrite: &'static str, origin: &Origin, sentence: String, bytes: i64) -> Self {
        Decision {
            rewrite,
            origin: origin.to_string(),
            sentence,
            applied: true,
            bytes,
        }
    }

    /// A rewrite that was refused.
    pub fn refused(rewrite: &'static str, origin: &Origin, sentence: String, bytes: i64) -> Self {
        Decision {
            rewrite,
            origin: origin.to_string(),
            sentence,
            applied: false,
            bytes,
        }
    }
}
