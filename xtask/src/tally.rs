//! Reads the last lines of the test runners of cargo and pytest, and adds their counts.

use std::fmt;
use std::ops::AddAssign;

/// Numbers of checks by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Checks that held.
    pub passed: u64,
    /// Checks that did not hold, errors included.
    pub failed: u64,
    /// Checks that did not run.
    pub skipped: u64,
}

impl Tally {
    /// One check with a known outcome.
    pub fn one(passed: bool) -> Self {
        Tally {
            passed: u64::from(passed),
            failed: u64::from(!passed),
            skipped: 0,
        }
    }

    /// Sums every `test result:` line of a `cargo test` run.
    pub fn of_cargo_test(output: &str) -> Self {
        let mut sum = Tally::default();
        for line in output
            .lines()
            .filter_map(|line| line.trim().strip_prefix("test result:"))
        {
            // "ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s"
            let counts = line.split_once('.').map_or("", |(_, counts)| counts);
            sum += Tally::of_counts(counts.split(';'));
        }
        sum
    }

    /// Reads pytest's last summary line, with or without its frame of `=`.
    pub fn of_pytest(output: &str) -> Self {
        let summary = output.lines().rev().find_map(|line| {
            // "==== 2 failed, 10 passed, 1 skipped, 1 error in 3.21s ===="
            let (counts, _) = line.trim_matches(['=', ' ']).rsplit_once(" in ")?;
            let tally = Tally::of_counts(counts.split(','));
            (tally != Tally::default()).then_some(tally)
        });
        summary.unwrap_or_default()
    }

    /// Reads pieces such as `3 passed` or `2 errors`; pieces of another form count nothing.
    fn of_counts<'a>(pieces: impl Iterator<Item = &'a str>) -> Self {
        let mut tally = Tally::default();
        for piece in pieces {
            let Some((number, word)) = piece.trim().split_once(' ') else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match word {
                "passed" => tally.passed += number,
                "failed" | "error" | "errors" | "xpassed" => tally.failed += number,
                "ignored" | "skipped" | "xfailed" => tally.skipped += number,
                _ => {}
            }
        }
        tally
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_test_runs_are_summed() {
        let output = "\
running 3 tests
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 2 tests
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s
";
        let want = Tally {
            passed: 4,
            failed: 1,
            skipped: 1,
        };
        assert_eq!(Tally::of_cargo_test(output), want);
        assert_eq!(want.to_string(), "4 passed, 1 failed");
    }

    #[test]
    fn a_run_that_never_reached_a_test_counts_nothing() {
        assert_eq!(
            Tally::of_cargo_test("error: could not compile `graph`"),
            Tally::default()
        );
        assert_eq!(Tally::of_pytest("no tests ran in 0.01s"), Tally::default());
    }

    #[test]
    fn pytest_summaries_are_read() {
        let framed = "x\n==== 2 failed, 10 passed, 1 skipped, 1 error in 3.21s ====\n";
        assert_eq!(
            Tally::of_pytest(framed),
            Tally {
                passed: 10,
                failed: 3,
                skipped: 1
            }
        );
        let long = "12 passed, 3 warnings in 65.20s (0:01:05)\nsome exit message in between";
        assert_eq!(
            Tally::of_pytest(long),
            Tally {
                passed: 12,
                failed: 0,
                skipped: 0
            }
        );
    }
}
