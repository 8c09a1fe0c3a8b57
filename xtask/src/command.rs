//! Runs a child process: shows its output as it comes, and keeps it.
//!
//! Knows nothing of what the commands mean.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread;

/// What a finished command left behind.
pub struct Finished {
    /// Whether it exited with status 0.
    pub success: bool,
    /// How it ended, in words (`exit status: 1`, `signal: 9`).
    pub ending: String,
    /// Standard output and standard error, each in its own order, output first.
    pub text: String,
}

/// Runs `command` to its end without input, copying its output to ours line by line.
pub fn run_shown(command: &mut Command) -> Result<Finished> {
    let name = display(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{name}`"))?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("`{name}` started without its output pipes");
    };
    let errors = thread::spawn(move || copy_lines(stderr, std::io::stderr()));
    let mut text = copy_lines(stdout, std::io::stdout());
    text.push_str(&errors.join().unwrap_or_default());
    let status = child
        .wait()
        .with_context(|| format!("cannot wait for `{name}`"))?;
    Ok(Finished {
        success: status.success(),
        ending: status.to_string(),
        text,
    })
}

/// Runs `command` without showing anything; `Ok(None)` where the program does not exist.
pub fn run_quiet(command: &mut Command) -> Result<Option<Finished>> {
    match command.stdin(Stdio::null()).output() {
        Ok(out) => {
            let mut text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&out.stderr));
            let ending = out.status.to_string();
            Ok(Some(Finished {
                success: out.status.success(),
                ending,
                text,
            }))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot start `{}`", display(command))),
    }
}

/// The command as a person would type it.
pub fn display(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Copies `from` to `to` by lines and returns all of it. A closed `to` does not stop the reading:
/// the child must never block on a full pipe.
fn copy_lines(from: impl Read, mut to: impl Write) -> String {
    let mut reader = BufReader::new(from);
    let mut all = String::new();
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(n) if n > 0) {
        let _ = to.write_all(&line);
        all.push_str(&String::from_utf8_lossy(&line));
        line.clear();
    }
    let _ = to.flush();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_both_streams_and_the_ending() {
        let done = run_shown(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]))
            .expect("sh starts");
        assert!(!done.success);
        assert_eq!(done.text, "out\nerr\n");
        assert_eq!(done.ending, "exit status: 3");
    }

    #[test]
    fn a_missing_program_is_told_apart() {
        assert!(
            run_quiet(&mut Command::new("no-such-program-here"))
                .expect("no error")
                .is_none()
        );
        let error = run_shown(&mut Command::new("no-such-program-here"))
            .err()
            .expect("an error");
        assert!(
            error
                .to_string()
                .contains("cannot start `no-such-program-here`")
        );
    }
}
