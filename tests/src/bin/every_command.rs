//! `every-command FILE…`: the problems that the program's commands have with ONNX files, one a line.
//!
//! Without arguments it serves `tests/tests/hostile_files.rs`, which does not trust this process to survive: each
//! file comes on standard input after its length (8 bytes, little-endian); the answer is lines `passed COMMAND`
//! and `problem SENTENCE`, then `done KIB` with the most memory that was in use at once.

use std::io::{Read, Write};
use std::process::ExitCode;
use tests::every_command::every_command;

fn main() -> ExitCode {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let done = match paths.is_empty() {
        true => serve(),
        false => look_at(&paths),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn look_at(paths: &[String]) -> std::io::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for path in paths {
        let outcome = every_command(&std::fs::read(path)?);
        println!("{path}: results of {}", outcome.passed.join(", "));
        for problem in outcome.problems {
            println!("{path}: {problem}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn serve() -> std::io::Result<ExitCode> {
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    loop {
        let mut length = [0; 8];
        if input.read_exact(&mut length).is_err() {
            return Ok(ExitCode::SUCCESS);
        }
        let mut bytes = Vec::new();
        let length = u64::from_le_bytes(length);
        (&mut input).take(length).read_to_end(&mut bytes)?;
        forget_most_memory()?;
        let outcome = every_command(&bytes);
        for command in outcome.passed {
            writeln!(output, "passed {command}")?;
        }
        for problem in outcome.problems {
            writeln!(output, "problem {}", problem.replace('\n', " "))?;
        }
        writeln!(output, "done {}", most_memory_kib()?)?;
        output.flush()?;
    }
}

/// Has the system measure the most memory anew from now on.
fn forget_most_memory() -> std::io::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5")
}

/// The most memory that was in use at once since [`forget_most_memory`].
fn most_memory_kib() -> std::io::Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let number = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| std::io::Error::other("/proc/self/status has no VmHWM"))
}
