//! Progress of long work: one line on standard error, which is overwritten, and removed at the end.
//!
//! Only on terminals, and never with `--quiet`: logs and pipes stay free of it.

use std::io::{self, IsTerminal, Write};
use std::time::Instant;

/// The line. It goes when this is dropped.
pub struct Progress {
    is_on: bool,
    start: Instant,
}

/// Carriage return, then the code that clears the rest of the line.
const CLEAR: &str = "\r\x1b[2K";

impl Progress {
    /// A line that is not there yet.
    pub fn new(quiet: bool) -> Progress {
        Progress {
            is_on: !quiet && io::stderr().is_terminal(),
            start: Instant::now(),
        }
    }

    /// Shows what goes on from now.
    pub fn stage(&mut self, what: &str) {
        if self.is_on {
            let seconds = self.start.elapsed().as_secs_f64();
            let mut line = io::stderr().lock();
            // A terminal that is gone is no reason to stop.
            let _ = write!(line, "{CLEAR}{seconds:6.1} s  {what} …").and_then(|()| line.flush());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_on {
            let _ = write!(io::stderr(), "{CLEAR}");
        }
    }
}

/// Takes the line away when the program is interrupted.
pub fn clear() {
    if io::stderr().is_terminal() {
        let _ = write!(io::stderr(), "{CLEAR}");
    }
}
