//! Finds the C compiler that turns emitted text into kernels.
//!
//! Owns the search order (`SHORTHAUL_CC`, `cc`, `gcc`, `clang`, the `ziglang`
//! wheel), the check that a candidate really builds a shared library, and the
//! compiler's identity, which is part of every cache key. A successful probe is
//! kept in the cache under the compiler file's path, size and time, so a warm
//! start runs no process. Never chooses code generation flags: see `features`.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::UNIX_EPOCH;

use crate::cache::{Cache, EntryKind, Key};

/// Why no C compiler can be used.
#[derive(Debug, thiserror::Error)]
pub enum ToolchainError {
    /// Every candidate was missing or broken.
    #[error(
        "no working C compiler was found; tried {}. Install gcc (for example `apt install gcc`), \
         or `pip install ziglang`, or set SHORTHAUL_CC to a C compiler",
        tried.join("; ")
    )]
    NotFound {
        /// One clause per candidate: what was run and how it failed.
        tried: Vec<String>,
    },
    /// Every candidate for C++ was missing or broken.
    #[error(
        "no working C++ compiler was found; tried {}. Install g++ (for example `apt install g++`), \
         or set SHORTHAUL_CXX to a C++ compiler",
        tried.join("; ")
    )]
    NoCxx {
        /// One clause per candidate: what was run and how it failed.
        tried: Vec<String>,
    },
    /// The compiler the user named does not work; no other is tried.
    #[error(
        "{variable} is '{setting}' but {problem}; set it to a compiler \
         (gcc or clang, arguments allowed) or unset it"
    )]
    Explicit {
        /// `SHORTHAUL_CC` or `SHORTHAUL_CXX`.
        variable: &'static str,
        /// Its value.
        setting: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// The dialect of options a compiler understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// GCC, and anything that does not say what it is.
    Gcc,
    /// Clang and compilers built on it.
    Clang,
    /// `zig cc`: Clang with Zig's driver in front.
    Zig,
}

/// A C compiler that was seen to work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toolchain {
    command: Vec<OsString>,
    family: Family,
    identity: String,
}

impl Toolchain {
    /// The program and its fixed arguments.
    pub fn command_line(&self) -> &[OsString] {
        &self.command
    }

    /// The option dialect.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Version and target, as the compiler reports them, and its fixed arguments;
    /// equal identities compile equal sources to interchangeable code.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// One line for reports, such as `/usr/bin/cc: cc (Debian 12.2.0) 12.2.0`.
    pub fn describe(&self) -> String {
        let version = self.identity.lines().next().unwrap_or_default();
        format!("{}: {version}", display_command(&self.command))
    }

    /// A process that compiles, once arguments are added. Messages are in English.
    pub fn process(&self) -> Command {
        process(&self.command)
    }
}

/// Where to look for a compiler.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// `SHORTHAUL_CC`: a command with optional arguments, quoted as in a shell.
    pub explicit: Option<String>,
    /// `PATH`.
    pub path: OsString,
    /// The Python interpreter to ask for the `ziglang` wheel first; `python3` and
    /// `python` on the path are asked next.
    pub python: Option<PathBuf>,
}

impl Search {
    /// Reads the search settings for a C compiler from the environment.
    pub fn from_environment() -> Self {
        Self::of_variable("SHORTHAUL_CC")
    }

    /// Reads the search settings for a C++ compiler from the environment.
    pub fn cxx_from_environment() -> Self {
        Self::of_variable("SHORTHAUL_CXX")
    }

    fn of_variable(variable: &str) -> Self {
        Search {
            explicit: env::var(variable)
                .ok()
                .filter(|text| !text.trim().is_empty()),
            path: env::var_os("PATH").unwrap_or_default(),
            python: None,
        }
    }
}

/// Finds the first working compiler in the search order.
///
/// # Errors
/// If no compiler works: all that were tried, with what each said.
pub fn find(search: &Search, cache: &Cache) -> Result<Toolchain, ToolchainError> {
    if let Some(setting) = &search.explicit {
        return find_explicit("SHORTHAUL_CC", setting, search, cache);
    }
    let mut tried = Vec::new();
    for name in ["cc", "gcc", "clang"] {
        match probe_command(&[OsString::from(name)], search, cache) {
            Ok(toolchain) => return Ok(toolchain),
            Err(problem) => tried.push(format!("{name} ({problem})")),
        }
    }
    match find_zig(search, cache) {
        Ok(toolchain) => Ok(toolchain),
        Err(problem) => {
            tried.push(format!("python -m ziglang cc ({problem})"));
            Err(ToolchainError::NotFound { tried })
        }
    }
}

/// Finds a C++ compiler: `SHORTHAUL_CXX`, `c++`, `g++`, `clang++`. It is asked for with `-x c++`.
///
/// # Errors
/// As [`find`].
pub fn find_cxx(search: &Search, cache: &Cache) -> Result<Toolchain, ToolchainError> {
    if let Some(setting) = &search.explicit {
        return find_explicit("SHORTHAUL_CXX", setting, search, cache);
    }
    let mut tried = Vec::new();
    for name in ["c++", "g++", "clang++"] {
        match probe_command(&[OsString::from(name)], search, cache) {
            Ok(toolchain) => return Ok(toolchain),
            Err(problem) => tried.push(format!("{name} ({problem})")),
        }
    }
    Err(ToolchainError::NoCxx { tried })
}

/// The compiler that the user named in `variable`.
fn find_explicit(
    variable: &'static str,
    setting: &str,
    search: &Search,
    cache: &Cache,
) -> Result<Toolchain, ToolchainError> {
    let explicit_error = |problem: String| ToolchainError::Explicit {
        variable,
        setting: setting.to_string(),
        problem,
    };
    let words = shlex::split(setting)
        .filter(|words| !words.is_empty())
        .ok_or_else(|| explicit_error("its quotes are not closed".into()))?;
    let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    probe_command(&words, search, cache).map_err(explicit_error)
}

/// Looks for the `ziglang` wheel in each Python; the wheel's program is then
/// called directly, without Python.
fn find_zig(search: &Search, cache: &Cache) -> Result<Toolchain, String> {
    const ASK: &str =
        "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))";
    let named = ["python3", "python"]
        .iter()
        .filter_map(|name| resolve(OsStr::new(name), &search.path));
    let mut problem = "no Python on the path".to_string();
    for python in search.python.iter().cloned().chain(named) {
        let memo = stat_line(&python).map(|stat| Key::new(&["ziglang", &stat]));
        let remembered = memo
            .and_then(|key| cache.read(EntryKind::Probe, &key))
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .filter(|zig| Path::new(zig).is_file());
        let zig = match remembered {
            Some(zig) => zig,
            None => match run_for_output(process(&[python.clone().into()]).args(["-c", ASK])) {
                Ok(output) => output.trim().to_string(),
                Err(_) => {
                    problem = format!("{} has no module ziglang", python.display());
                    continue;
                }
            },
        };
        match probe_command(&[OsString::from(&zig), "cc".into()], search, cache) {
            Ok(toolchain) => {
                if let Some(key) = memo {
                    // Not remembering costs one process at the next start.
                    let _ = cache.write(EntryKind::Probe, &key, zig.as_bytes());
                }
                return Ok(toolchain);
            }
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

/// Resolves, identifies and tries out one command.
fn probe_command(words: &[OsString], search: &Search, cache: &Cache) -> Result<Toolchain, String> {
    let program = resolve(&words[0], &search.path).ok_or_else(|| {
        format!(
            "'{}' is not a program on the path",
            words[0].to_string_lossy()
        )
    })?;
    let mut command = words.to_vec();
    command[0] = program.into_os_string();
    let memo = memo_key(&command, &search.path);
    if let Some(key) = &memo
        && let Some(toolchain) = recall(&command, key, cache)
    {
        return Ok(toolchain);
    }
    let identity = identify(&command)?;
    let toolchain = Toolchain {
        family: family(&command, &identity),
        command,
        identity,
    };
    try_out(&toolchain, cache)?;
    if let Some(key) = &memo {
        // Not remembering costs three processes at the next start.
        let _ = cache.write(EntryKind::Probe, key, toolchain.identity.as_bytes());
    }
    Ok(toolchain)
}

fn recall(command: &[OsString], key: &Key, cache: &Cache) -> Option<Toolchain> {
    let identity = String::from_utf8(cache.read(EntryKind::Probe, key)?).ok()?;
    Some(Toolchain {
        command: command.to_vec(),
        family: family(command, &identity),
        identity,
    })
}

/// The key of a probe: every word, and path, size and time of each word that is a
/// program (so `ccache gcc` is probed again when gcc changes).
fn memo_key(command: &[OsString], path: &OsStr) -> Option<Key> {
    let mut parts = vec!["toolchain".to_string()];
    for (position, word) in command.iter().enumerate() {
        parts.push(word.to_string_lossy().into_owned());
        if word.to_string_lossy().starts_with('-') {
            continue;
        }
        match resolve(word, path) {
            Some(file) => parts.push(stat_line(&file)?),
            None if position == 0 => return None,
            None => {}
        }
    }
    Some(Key::new(&parts))
}

fn stat_line(path: &Path) -> Option<String> {
    let real = fs::canonicalize(path).ok()?;
    let meta = fs::metadata(&real).ok()?;
    let time = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!(
        "{} {} {}",
        real.display(),
        meta.len(),
        time.as_nanos()
    ))
}

/// The file a shell would run for `program`.
fn resolve(program: &OsStr, path: &OsStr) -> Option<PathBuf> {
    let given = Path::new(program);
    if given.components().count() > 1 {
        return is_program(given).then(|| given.to_path_buf());
    }
    env::split_paths(path)
        .map(|folder| folder.join(given))
        .find(|candidate| is_program(candidate))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn identify(command: &[OsString]) -> Result<String, String> {
    let version = run_for_output(process(command).arg("--version"))?;
    let target = run_for_output(process(command).arg("-dumpmachine"))?;
    let arguments = display_command(&command[1..]);
    // The arguments count: `cc -m32` is not `cc`.
    Ok(format!(
        "{}\ntarget {}\narguments {arguments}",
        version.trim(),
        target.trim()
    ))
}

fn family(command: &[OsString], identity: &str) -> Family {
    let is_zig = command.iter().any(|word| {
        Path::new(word)
            .file_name()
            .is_some_and(|name| name == "zig" || name == "ziglang")
    });
    if is_zig {
        Family::Zig
    } else if identity.to_ascii_lowercase().contains("clang") {
        Family::Clang
    } else {
        Family::Gcc
    }
}

/// Builds the smallest shared library, which shows that assembler, linker and
/// start files are there too.
fn try_out(toolchain: &Toolchain, cache: &Cache) -> Result<(), String> {
    let folder = cache.work_folder().map_err(|error| error.to_string())?;
    let source = folder.path().join("probe.c");
    fs::write(&source, "int shorthaul_probe(void) { return 0; }\n")
        .map_err(|error| format!("cannot write {}: {error}", source.display()))?;
    run_for_output(
        toolchain
            .process()
            .args(["-O1", "-fPIC", "-shared", "-o"])
            .arg(folder.path().join("probe.so"))
            .arg(&source),
    )
    .map(drop)
    .map_err(|problem| format!("it cannot build a shared library: {problem}"))
}

fn process(command: &[OsString]) -> Command {
    let mut process = Command::new(&command[0]);
    process
        .args(&command[1..])
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    process
}

/// Runs to the end; the error is a clause with the first line of complaint.
fn run_for_output(process: &mut Command) -> Result<String, String> {
    let program = process.get_program().to_string_lossy().into_owned();
    let output = process
        .output()
        .map_err(|error| format!("{program} does not start: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let line = complaint.lines().find(|line| !line.trim().is_empty());
    Err(format!(
        "{program} failed with {}{}",
        output.status,
        line.map(|line| format!(": {line}")).unwrap_or_default()
    ))
}

fn display_command(command: &[OsString]) -> String {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}
