"""What was measured: versions of the package, of its peers and of the C compiler."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import shorthaul

#: Peers whose versions are recorded, without importing them.
_PACKAGES = ("jax", "onnxruntime", "torchvision", "timm", "transformers")


def versions() -> dict[str, str]:
    """By name; what is not installed or not known is left out."""
    found = {"torch": torch.__version__, "shorthaul": shorthaul.__version__}
    if commit := _commit(Path(shorthaul.__file__).resolve()):
        found["commit"] = commit
    found["python"] = platform.python_version()
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if compiler := _compiler():
        found["c_compiler"] = compiler
    return found


def _commit(file: Path) -> str | None:
    """The commit of the checkout that holds this file, if it is tracked there."""
    if not _said("git", "-C", str(file.parent), "ls-files", "--", file.name):
        return None
    commit = _said("git", "-C", str(file.parent), "rev-parse", "--short=12", "HEAD")
    changed = _said(
        "git", "-C", str(file.parent), "status", "--porcelain", "--untracked-files=no", "--", "."
    )
    return f"{commit} with changes" if commit and changed else commit


def _compiler() -> str | None:
    """The first line of the version of the compiler that makes Shorthaul's kernels."""
    named = shlex.split(os.environ.get("SHORTHAUL_CC", ""))
    found = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    command = named or ([found] if found else [])
    return (_said(*command, "--version") or "").partition("\n")[0] or None if command else None


def _said(*command: str) -> str | None:
    """What a program prints; nothing where there is none or where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=20, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
