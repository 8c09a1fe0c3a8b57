"""CUDA devices as Shorthaul sees them: ``shorthaul.cuda.available()``, ``shorthaul.cuda.info()``.

Owns the search for NVRTC among Python's packages, and the sentences about what is missing.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import _native


@dataclass(frozen=True)
class Device:
    """A CUDA device. ``arch``: the architecture of its kernels, ``None`` if there are none."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    arch: str | None


@dataclass(frozen=True)
class Info:
    """The CUDA parts of this machine; ``problems`` has a sentence for each that is missing."""

    driver: str | None = None
    nvrtc: str | None = None
    devices: tuple[Device, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def available(self) -> bool:
        """Whether a module on a CUDA device can be compiled and run."""
        return not self.problems

    def __str__(self) -> str:
        lines = []
        if self.driver:
            lines.append(f"CUDA driver {self.driver}")
        if self.nvrtc:
            lines.append(f"NVRTC {self.nvrtc}")
        for device in self.devices:
            major, minor = device.capability
            code = f"kernels for {device.arch}" if device.arch else "no kernels for it"
            lines.append(
                f"cuda:{device.ordinal} {device.name}, compute capability {major}.{minor}, "
                f"{device.memory_bytes / 2**30:.0f} GiB: {code}"
            )
        lines.extend(self.problems)
        return "\n".join(lines)


def info() -> Info:
    """Returns driver, devices and NVRTC, and if CUDA kernels cannot run, sentences that say why."""
    driver, devices, nvrtc, problems = None, (), None, []
    try:
        driver, rows = _native.cuda_devices()
        devices = tuple(Device(*row) for row in rows)
        if not any(device.arch for device in devices):
            problems.append(
                "no device has compute capability 8.x or 9.0, for which Shorthaul has kernels"
            )
    except _native.CompileFailure as error:
        problems.append(str(error))
    try:
        nvrtc, _ = _native.nvrtc_version(nvrtc_folders())
    except _native.CompileFailure as error:
        problems.append(str(error))
    if torch.version.cuda is None:
        problems.append(
            f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build of PyTorch"
        )
    return Info(driver, nvrtc, devices, tuple(problems))


def available() -> bool:
    """Whether modules on CUDA devices can be compiled and run; ``info()`` says why not."""
    return info().available


def nvrtc_folders() -> list[str]:
    """Folders that may hold NVRTC, cuBLASLt, cuDNN: of the wheels, of PyTorch, of a toolkit."""
    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        folders.extend(sorted(Path(root).glob("*/lib"), reverse=True))
    folders.append(Path(torch.__file__).resolve().parent / "lib")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable]) / "lib64")
    return [str(folder) for folder in folders if folder.is_dir()]


__all__ = ["Device", "Info", "available", "info"]
