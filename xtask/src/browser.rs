//! The browser in which the notebook's widget is tested: found, or installed where Debian packages can be installed.

use crate::command::{display, run_quiet, run_shown};
use anyhow::{Result, bail};
use std::process::Command;

/// Names under which systems have it; the tests look for the same ones.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Makes sure that there is a Chromium. If there is none, installs it with `apt-get`, which needs root.
pub fn require() -> Result<()> {
    for name in NAMES {
        if run_quiet(Command::new(name).arg("--version"))?.is_some_and(|done| done.success) {
            return Ok(());
        }
    }
    let user = run_quiet(Command::new("id").arg("-u"))?;
    let is_root = user.is_some_and(|done| done.text.trim() == "0");
    if !is_root || run_quiet(Command::new("apt-get").arg("--version"))?.is_none() {
        bail!("the widget's tests need Chromium: on Debian `apt-get install chromium`");
    }
    println!("Installing Chromium ...");
    for arguments in [&["update", "-q"][..], &["install", "-q", "-y", "chromium"]] {
        let mut command = Command::new("apt-get");
        command
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive");
        let done = run_shown(&mut command)?;
        if !done.success {
            bail!("`{}` ended with {}", display(&command), done.ending);
        }
    }
    Ok(())
}
