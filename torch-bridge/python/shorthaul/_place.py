"""Where the kernels of a call run: on the CPU, on a CUDA device, or in the emulator.

Owns the rule that all tensors of a call are on one device, and what differs between places: where
blocks of memory come from, the stream, the alignment that kernels need. Never compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._errors import CapturingError, InputError

#: What ``shorthaul.module`` takes as ``backend``.
BACKENDS = ("auto", "cuda-emulated")

#: Bytes: the widest access of a CUDA kernel. PyTorch's own blocks start at multiples of 512.
_CUDA_ALIGNMENT = 16

#: How many tensors a message names.
_NAMED = 4


@dataclass(frozen=True)
class Place:
    """A device, and whether its kernels are CUDA text that the CPU executes."""

    device: torch.device
    is_emulated: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether kernels are enqueued on a stream."""
        return self.device.type == "cuda"

    @property
    def runs_cuda_text(self) -> bool:
        """Whether programs are compiled to CUDA text."""
        return self.is_cuda or self.is_emulated

    def stream(self) -> int:
        """The handle of PyTorch's current stream; 0 where there are none."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.is_cuda else 0

    def aligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, contiguous, at an address that kernels can read vectors from."""
        tensor = tensor.contiguous()
        if self.runs_cuda_text and tensor.data_ptr() % _CUDA_ALIGNMENT:
            return tensor.clone()
        return tensor

    def seed(self) -> torch.Tensor:
        """A seed from PyTorch's generator, where kernels read it: nothing waits for it."""
        return torch.empty((), dtype=torch.int64, device=self.device).random_(2**62)

    def refuse_capture(self, name: str) -> None:
        """Compiling loads code and allocates, which would break a capture that is under way."""
        if self.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CapturingError(
                f"{name} would have to be compiled for these inputs while a CUDA graph is being "
                f"captured; call it once with the same shapes, dtypes and modes before the "
                f"capture, in the warm-up that `torch.cuda.graph` requires (forward and backward)"
            )


def place_of(tensors: list[tuple[str, torch.Tensor]], backend: str) -> Place:
    """The one place of all named tensors. Raises ``InputError`` that names those that differ."""
    for name, tensor in tensors:
        if tensor.layout != torch.strided:
            raise InputError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}; Shorthaul takes dense "
                f"tensors: convert it with `.to_dense()`"
            )
    devices: dict[torch.device, list[str]] = {}
    for name, tensor in tensors:
        devices.setdefault(tensor.device, []).append(name)
    if len(devices) > 1:
        described = "; ".join(f"on {device}: {_named(names)}" for device, names in devices.items())
        raise InputError(
            f"the tensors of a call must be on one device, but there are {described}. Move the "
            f"inputs or the model with `.to(device)`"
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"{_named(devices[device])} on {device}, but Shorthaul runs on the CPU and on CUDA "
            f"devices. Move the inputs and the model with `.to(device)`"
        )
    if backend == "cuda-emulated" and device.type != "cpu":
        raise InputError(
            f"{_named(devices[device])} on {device}, but backend='cuda-emulated' executes CUDA "
            f"text on the CPU and takes CPU tensors; leave `backend` out to run on the device"
        )
    return Place(device, backend == "cuda-emulated")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def named_tensors(leaves: list[Any], slots: dict) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call with what messages call them."""
    arguments = [
        (f"argument {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
    ]
    own = ((name, tensors[key]) for name, (tensors, key) in slots.items())
    return arguments + [(f"`{name}`", tensor) for name, tensor in own if tensor is not None]
