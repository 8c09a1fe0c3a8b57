//! Tests of finding a compiler, probing the CPU, compiling and caching.
//!
//! Each test has its own cache folder. The compiler is the system's, reached
//! through a script that counts its runs where the count matters.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use kernels::cache::{Cache, CacheSettings, EntryKind, FOOTER_BYTES, Key};
use kernels::compile::{CompileError, CompileOptions, SourceUnit, compile};
use kernels::features::{self, CpuTarget, Isa};
use kernels::progress::{Progress, Silent, UnitReady};
use kernels::run::Module;
use kernels::toolchain::{self, Search};

/// Collects what a listener hears.
#[derive(Default)]
struct Heard {
    warnings: Vec<String>,
    units: Vec<(String, usize, usize, bool)>,
}

impl Progress for Heard {
    fn warn(&mut self, message: &str) {
        self.warnings.push(message.to_string());
    }

    fn unit_ready(&mut self, unit: &UnitReady<'_>) {
        self.units
            .push((unit.name.to_string(), unit.done, unit.total, unit.cached));
    }
}

fn options_in(root: &Path) -> CompileOptions {
    let cache = Cache::at(root, 1 << 30).unwrap();
    let toolchain = toolchain::find(&Search::from_environment(), &cache).unwrap();
    let target = CpuTarget::for_isa(Isa::Portable, toolchain.family());
    CompileOptions {
        toolchain,
        target,
        cache,
        jobs: 2,
    }
}

/// A kernel that stores `value` into its first buffer.
fn storing_unit(name: &str, value: i32) -> SourceUnit {
    SourceUnit {
        name: name.to_string(),
        source: format!(
            "void {name}(void *const *buf, void *scratch, long tid, long nt) {{\n\
             if (tid == 0) *(int *)buf[0] = {value};\n}}\n"
        ),
        symbols: vec![name.to_string()],
    }
}

fn stored_value(module: &Arc<Module>, symbol: &str) -> i32 {
    let mut value = 0i32;
    let buffers = [(&raw mut value).cast()];
    let function = module.function(symbol).unwrap();
    call(&function, &buffers);
    value
}

#[allow(unsafe_code)]
fn call(function: &kernels::run::Function, buffers: &[*mut std::ffi::c_void]) {
    // SAFETY: `storing_unit` kernels write one int through their first buffer.
    unsafe { function.call(buffers.as_ptr(), std::ptr::null_mut(), 0, 1) }
}

/// A compiler that appends a line to `<folder>/log` at each run.
fn counting_compiler(folder: &Path) -> PathBuf {
    let script = folder.join("counting-cc");
    let log = folder.join("log");
    fs::write(
        &script,
        format!(
            "#!/bin/sh\necho run >> '{}'\nexec cc \"$@\"\n",
            log.display()
        ),
    )
    .unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

fn compiler_runs(folder: &Path) -> usize {
    fs::read_to_string(folder.join("log")).map_or(0, |log| log.lines().count())
}

fn search_for(command: &str) -> Search {
    Search {
        explicit: Some(command.to_string()),
        ..Search::from_environment()
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for item in fs::read_dir(folder).into_iter().flatten().flatten() {
        if item.path().is_dir() {
            files.extend(files_below(&item.path()));
        } else {
            files.push(item.path());
        }
    }
    files
}

#[test]
fn missing_compiler_is_one_clear_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let nowhere = Search {
        explicit: None,
        path: folder.path().join("nothing").into(),
        python: None,
    };
    let message = toolchain::find(&nowhere, &cache).unwrap_err().to_string();
    for part in [
        "cc (",
        "gcc (",
        "clang (",
        "python -m ziglang cc (",
        "apt install gcc",
        "pip install ziglang",
        "SHORTHAUL_CC",
    ] {
        assert!(message.contains(part), "'{part}' missing in: {message}");
    }
}

#[test]
fn a_named_compiler_that_fails_is_not_replaced_by_another() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    for (command, part) in [
        ("no-such-compiler -O2", "not a program on the path"),
        ("false", "failed with exit status: 1"),
        ("cc 'unclosed", "quotes are not closed"),
    ] {
        let message = toolchain::find(&search_for(command), &cache)
            .unwrap_err()
            .to_string();
        assert!(message.contains("SHORTHAUL_CC"), "{message}");
        assert!(message.contains(part), "'{part}' missing in: {message}");
    }
}

#[test]
fn a_compiler_that_cannot_link_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("cc");
    fs::write(
        &broken,
        "#!/bin/sh\ncase $1 in --version|-dumpmachine) echo fake;; *) echo no linker >&2; exit 3;; esac\n",
    )
    .unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    let cache = Cache::at(&folder.path().join("cache"), 1 << 30).unwrap();
    let only_broken = Search {
        explicit: None,
        path: folder.path().into(),
        python: None,
    };
    let message = toolchain::find(&only_broken, &cache)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("cannot build a shared library"),
        "{message}"
    );
    assert!(message.contains("no linker"), "{message}");
}

#[test]
fn arguments_in_the_compiler_setting_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let found = toolchain::find(&search_for("cc -DNAME='a b'"), &cache).unwrap();
    assert_eq!(found.command_line()[1], "-DNAME=a b");
}

#[test]
fn a_warm_start_runs_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = counting_compiler(folder.path());
    let search = search_for(compiler.to_str().unwrap());
    let start = || {
        let cache = Cache::at(&folder.path().join("cache"), 1 << 30).unwrap();
        let toolchain = toolchain::find(&search, &cache).unwrap();
        let target = features::detect(&toolchain, None, &cache).unwrap();
        let options = CompileOptions {
            toolchain,
            target,
            cache,
            jobs: 2,
        };
        let modules = compile(&[storing_unit("k", 7)], &options, &mut Silent).unwrap();
        assert_eq!(stored_value(&modules[0], "k"), 7);
        options.toolchain
    };
    let cold = start();
    let runs = compiler_runs(folder.path());
    assert!(
        runs >= 4,
        "version, target, trial, probe and kernel: {runs}"
    );
    let warm = start();
    assert_eq!(compiler_runs(folder.path()), runs);
    assert_eq!(cold, warm);
    // An updated compiler is looked at again.
    let text = fs::read_to_string(&compiler).unwrap();
    fs::write(&compiler, text + "# newer\n").unwrap();
    start();
    assert!(compiler_runs(folder.path()) > runs);
}

#[test]
fn a_forced_isa_is_used_and_an_impossible_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = options_in(folder.path());
    let target = features::detect(&options.toolchain, Some(Isa::Portable), &options.cache).unwrap();
    assert_eq!((target.isa, target.vector_width_f32), (Isa::Portable, 4));
    // The trial of a compiler has no float, the probe of the CPU has.
    let broken = toolchain::find(&search_for("cc -Dfloat=nonsense"), &options.cache).unwrap();
    let message = features::detect(&broken, Some(Isa::Portable), &options.cache)
        .unwrap_err()
        .to_string();
    assert!(message.contains("portable"), "{message}");
}

#[test]
fn equal_sources_are_compiled_once_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let options = options_in(folder.path());
    let units = [
        storing_unit("a", 1),
        storing_unit("b", 2),
        storing_unit("a", 1),
    ];
    let mut cold = Heard::default();
    let modules = compile(&units, &options, &mut cold).unwrap();
    assert!(Arc::ptr_eq(&modules[0], &modules[2]));
    assert_eq!(stored_value(&modules[0], "a"), 1);
    assert_eq!(stored_value(&modules[1], "b"), 2);
    assert_eq!(cold.units.len(), 2);
    assert!(
        cold.units
            .iter()
            .all(|(_, _, total, cached)| *total == 2 && !cached)
    );
    assert_eq!(cold.units[1].1, 2);
    let mut warm = Heard::default();
    compile(&units, &options, &mut warm).unwrap();
    assert!(warm.units.iter().all(|(_, _, _, cached)| *cached));
}

#[test]
fn flags_are_part_of_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options_in(folder.path());
    compile(&[storing_unit("k", 1)], &options, &mut Silent).unwrap();
    options.target.cflags.push("-DOTHER".into());
    let mut heard = Heard::default();
    compile(&[storing_unit("k", 1)], &options, &mut heard).unwrap();
    assert!(!heard.units[0].3);
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let options = options_in(folder.path());
    let unit = [storing_unit("k", 5)];
    let path = compile(&unit, &options, &mut Silent).unwrap()[0]
        .path()
        .to_path_buf();
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let damages = [
        whole[..whole.len() / 2].to_vec(),
        whole[..whole.len() - FOOTER_BYTES].to_vec(),
        flipped,
        Vec::new(),
    ];
    for damage in damages {
        // A new file: the old one may still be mapped.
        fs::remove_file(&path).unwrap();
        fs::write(&path, damage).unwrap();
        let mut heard = Heard::default();
        let modules = compile(&unit, &options, &mut heard).unwrap();
        assert!(!heard.units[0].3, "a damaged entry was believed");
        assert_eq!(stored_value(&modules[0], "k"), 5);
        let mut again = Heard::default();
        compile(&unit, &options, &mut again).unwrap();
        assert!(again.units[0].3, "the damaged entry was not replaced");
    }
}

#[test]
fn every_refused_kernel_is_named_with_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let options = options_in(folder.path());
    let mut bad = storing_unit("softmax/bad", 1);
    bad.source = "void x( { this is not C }".into();
    let mut worse = bad.clone();
    worse.name = "worse".into();
    worse.source.push_str(" int y = ;");
    let error = compile(
        &[bad.clone(), storing_unit("fine", 1), worse],
        &options,
        &mut Silent,
    )
    .unwrap_err();
    let CompileError::Refused(failures) = &error else {
        panic!("unexpected: {error}");
    };
    assert_eq!(failures.len(), 2);
    let kept = failures[0].source_path.as_ref().unwrap();
    assert_eq!(fs::read_to_string(kept).unwrap(), bad.source);
    let message = error.to_string();
    for part in ["softmax/bad", "worse", "error:", kept.to_str().unwrap()] {
        assert!(message.contains(part), "'{part}' missing in: {message}");
    }
    let left = files_below(&options.cache.root().join("work"));
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn a_missing_kernel_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut unit = storing_unit("here", 1);
    unit.symbols.push("absent".into());
    let message = compile(&[unit], &options_in(folder.path()), &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(message.contains("does not define 'absent'"), "{message}");
}

#[test]
fn an_unusable_cache_folder_warns_once_and_work_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let settings = CacheSettings {
        cache_dir: Some(file.join("cache").into()),
        ..CacheSettings::default()
    };
    let mut heard = Heard::default();
    let cache = Cache::open(&settings, &mut heard).unwrap();
    Cache::open(&settings, &mut heard).unwrap();
    assert_eq!(heard.warnings.len(), 1);
    assert!(heard.warnings[0].contains("SHORTHAUL_CACHE_DIR"));
    assert!(cache.is_temporary());
    let root = cache.root().to_path_buf();
    let mut options = options_in(folder.path());
    options.cache = cache;
    let modules = compile(&[storing_unit("k", 3)], &options, &mut heard).unwrap();
    drop(options);
    assert!(!root.exists(), "the temporary folder outlives the cache");
    assert_eq!(stored_value(&modules[0], "k"), 3);
}

#[test]
fn the_cache_folder_follows_the_environment() {
    let mut settings = CacheSettings {
        cache_dir: Some("/a".into()),
        xdg_cache_home: Some("/b".into()),
        home: Some("/c".into()),
        limit: None,
    };
    assert_eq!(settings.folder().unwrap(), Path::new("/a"));
    settings.cache_dir = None;
    assert_eq!(settings.folder().unwrap(), Path::new("/b/shorthaul"));
    settings.xdg_cache_home = None;
    assert_eq!(settings.folder().unwrap(), Path::new("/c/.cache/shorthaul"));
    settings.home = None;
    assert_eq!(settings.folder(), None);
}

#[test]
fn a_nonsensical_limit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (limit, fine) in [("4G", true), ("17", true), ("x", false), ("-1", false)] {
        let settings = CacheSettings {
            cache_dir: Some(folder.path().into()),
            limit: Some(limit.into()),
            ..CacheSettings::default()
        };
        let opened = Cache::open(&settings, &mut Silent);
        assert_eq!(opened.is_ok(), fine, "{limit}");
    }
}

/// Sets its times as if nobody had touched it for two days.
fn make_old(path: &Path) {
    let then = SystemTime::now() - Duration::from_secs(48 * 3600);
    fs::File::open(path).unwrap().set_modified(then).unwrap();
}

#[test]
fn kernels_that_cannot_be_kept_are_used_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let options = options_in(folder.path());
    for group in 0..=255u8 {
        // What stands in the way of every entry's folder.
        let path = options.cache.root().join(format!("lib/{group:02x}"));
        fs::write(path, "").unwrap();
    }
    let mut heard = Heard::default();
    let modules = compile(&[storing_unit("k", 4)], &options, &mut heard).unwrap();
    assert_eq!(stored_value(&modules[0], "k"), 4);
    let [warning] = heard.warnings.as_slice() else {
        panic!("{:?}", heard.warnings)
    };
    assert!(warning.contains("not kept"), "{warning}");
}

#[test]
fn trimming_removes_the_entries_unused_for_longest() {
    let folder = tempfile::tempdir().unwrap();
    let payload = vec![1u8; 1000];
    let cache = Cache::at(folder.path(), 2 * (1000 + FOOTER_BYTES as u64)).unwrap();
    let keys: Vec<Key> = (0..4).map(|i| Key::new(&[[i as u8]])).collect();
    for (age, key) in keys.iter().enumerate() {
        let path = cache.write(EntryKind::Library, key, &payload).unwrap();
        let used = SystemTime::now() - Duration::from_secs(100 - age as u64);
        fs::File::options()
            .append(true)
            .open(path)
            .unwrap()
            .set_modified(used)
            .unwrap();
    }
    // Reading renews: the oldest becomes the newest.
    assert!(cache.read(EntryKind::Library, &keys[0]).is_some());
    let abandoned = cache.root().join("work").join("compile-abandoned");
    fs::create_dir(&abandoned).unwrap();
    fs::write(abandoned.join("kernel.c"), "x").unwrap();
    make_old(&abandoned);
    cache.trim();
    let kept: Vec<bool> = keys
        .iter()
        .map(|key| cache.read(EntryKind::Library, key).is_some())
        .collect();
    assert_eq!(kept, [true, false, false, true]);
    assert!(!abandoned.exists());
}

#[test]
fn threads_racing_for_one_entry_all_get_it() {
    let folder = tempfile::tempdir().unwrap();
    options_in(folder.path());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let options = options_in(folder.path());
                let modules = compile(&[storing_unit("k", 9)], &options, &mut Silent).unwrap();
                assert_eq!(stored_value(&modules[0], "k"), 9);
            });
        }
    });
    let libraries = files_below(&Cache::at(folder.path(), 0).unwrap().root().join("lib"));
    assert_eq!(libraries.len(), 1, "{libraries:?}");
}

const CHILD_FOLDER: &str = "SHORTHAUL_TEST_CHILD_FOLDER";

/// Runs one test of this program again in a child that sees `folder`.
fn child(test: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD_FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn processes_racing_for_entries_all_get_them() {
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        let options = options_in(Path::new(&folder));
        let units: Vec<_> = (0..4).map(|i| storing_unit(&format!("k{i}"), i)).collect();
        let modules = compile(&units, &options, &mut Silent).unwrap();
        for (i, module) in modules.iter().enumerate() {
            assert_eq!(stored_value(module, &format!("k{i}")), i as i32);
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            child("processes_racing_for_entries_all_get_them", folder.path())
                .spawn()
                .unwrap()
        })
        .collect();
    for running in children {
        let output = running.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
    }
    let root = Cache::at(folder.path(), 0).unwrap().root().to_path_buf();
    assert_eq!(files_below(&root.join("lib")).len(), 4);
    assert_eq!(files_below(&root.join("work")).len(), 0);
}

#[test]
fn a_write_that_fails_midway_leaves_nothing() {
    let name = "a_write_that_fails_midway_leaves_nothing";
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        let cache = Cache::at(Path::new(&folder), 1 << 30).unwrap();
        let error = cache
            .write(EntryKind::Library, &Key::new(&["big"]), &vec![0; 4 << 20])
            .unwrap_err()
            .to_string();
        assert!(error.contains(folder.to_str().unwrap()), "{error}");
        assert!(error.contains("SHORTHAUL_CACHE_DIR"), "{error}");
        assert_eq!(files_below(cache.root()), Vec::<PathBuf>::new());
        println!("write failed as it should");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    // A limit on file size stands in for a full disk: writing stops midway.
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\""])
        .arg(program)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD_FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("write failed as it should"), "{said}");
}

#[test]
fn a_full_disk_is_named() {
    let error = kernels::cache::CacheError::Write {
        path: "/somewhere/entry.so".into(),
        source: std::io::Error::from(std::io::ErrorKind::StorageFull),
    };
    let message = error.to_string();
    assert!(message.starts_with("the disk is full"), "{message}");
    assert!(message.contains("/somewhere/entry.so"), "{message}");
}
