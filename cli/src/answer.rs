//! What a command has to say, and whether the answer is yes: exit codes 0 and 3.

/// The end of a command that could do its work.
pub struct Answer {
    /// For standard output.
    pub text: String,
    /// No: problems were found, files differ.
    pub is_yes: bool,
}

impl Answer {
    /// Done, or nothing is wrong.
    pub fn yes(text: String) -> Answer {
        Answer { text, is_yes: true }
    }

    /// Yes or no.
    pub fn new(text: String, is_yes: bool) -> Answer {
        Answer { text, is_yes }
    }
}
