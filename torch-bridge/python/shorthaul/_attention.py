"""Attention by PyTorch's own operators, called between the launches of a CUDA program.

Owns the calls: which operator a kind of candidate is, its arguments in both passes, and the tensors
that are views of a program's memory. The operators return results of their own, which are copied to
where the program wants them. In the emulator every kind is PyTorch's operator for the CPU, which
keeps the same sums. Never decides what is called: tables do, see ``products.py``.

All of it is legal while a CUDA graph is captured: nothing waits, and what operators allocate comes
from PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_aten = torch.ops.aten

#: PyTorch's memory-efficient operator keeps sums for a multiple of this many rows.
_EFFICIENT_ROWS = 32


@dataclass(frozen=True)
class Operand:
    """A view of one of a pass's blocks: ``slot`` (a tensor), ``scratch`` or ``saved`` (bytes)."""

    block: str
    place: int
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self, slots: list, scratch: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """The operand, without a copy."""
        if self.block == "slot":
            flat = slots[self.place].view(-1)
        else:
            assert self.block in ("scratch", "saved"), f"operands do not lie in {self.block}"
            steps = zip(self.sizes, self.strides, strict=True)
            elements = self.offset + 1 + sum((size - 1) * stride for size, stride in steps)
            block = scratch if self.block == "scratch" else saved
            n_bytes = elements * self.dtype.itemsize
            flat = block[self.place : self.place + n_bytes].view(self.dtype)
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Call:
    """One call of a pass: operands by role."""

    kind: str
    is_gradient: bool
    is_causal: bool
    scale: float
    operands: dict[str, Operand]

    def run(self, slots: list, scratch: torch.Tensor, saved: torch.Tensor) -> None:
        """Enqueues the operator on the current stream, and the copies of its results."""
        given = {
            role: operand.tensor(slots, scratch, saved) for role, operand in self.operands.items()
        }
        with torch.no_grad():
            if self.is_gradient:
                results = zip(("dq", "dk", "dv"), self._backward(given), strict=True)
            else:
                results = zip(("y", "lse"), self._forward(given), strict=True)
            for role, result in results:
                # Gradients that nobody wants and sums that no backward pass reads have no place.
                if role in given:
                    given[role].copy_(result)

    def _forward(self, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (given.get(role) for role in ("q", "k", "v", "mask"))
        forward = FORWARD["cpu" if given["q"].device.type == "cpu" else self.kind]
        return forward(*operands, self.is_causal, self.scale, "lse" in given)

    def _backward(self, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        operands = (given.get(role) for role in ("dy", "q", "k", "v", "mask", "y", "lse"))
        backward = BACKWARD["cpu" if given["q"].device.type == "cpu" else self.kind]
        return backward(*operands, self.is_causal, self.scale)


def calls_of(rows: list[tuple]) -> list[Call]:
    """The calls of a pass, from the rows that the native half gives."""

    def operand(row):
        role, block, place, dtype, offset, sizes, strides = row
        return role, Operand(
            block, place, getattr(torch, dtype), offset, tuple(sizes), tuple(strides)
        )

    return [
        Call(kind, is_gradient, is_causal, scale, dict(map(operand, operands)))
        for kind, is_gradient, is_causal, scale, operands in rows
    ]


def operators(
    calls: list[Call], slots: Callable[[], list], scratch: torch.Tensor, saved: torch.Tensor
) -> Callable[[int], None] | None:
    """The function by which the native half makes the n-th call; ``slots`` gives its tensors."""
    if not calls:
        return None
    tensors = slots()
    return lambda n: calls[n].run(tensors, scratch, saved)


def _whole(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A mask for every head of every sequence, without a copy."""
    return None if mask is None else mask.expand(*q.shape[:3], k.shape[2])


# -- Forward: q, k, v `[batch, heads, rows, width]`, mask → y, lse `[batch, heads, rows]`.


def _cpu_forward(q, k, v, mask, is_causal, scale, keeps_sums):
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=_whole(mask, q, k), scale=scale
    )


def _flash_forward(q, k, v, mask, is_causal, scale, keeps_sums):
    assert mask is None, "a table's row for flash attention has no mask"
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]


def _efficient_forward(q, k, v, mask, is_causal, scale, keeps_sums):
    y, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _whole(mask, q, k), keeps_sums, 0.0, is_causal, scale=scale
    )
    return y, lse[..., : q.shape[2]]


def _cudnn_forward(q, k, v, mask, is_causal, scale, keeps_sums):
    y, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, _whole(mask, q, k), keeps_sums, 0.0, is_causal, scale=scale
    )
    return y, lse.squeeze(-1) if keeps_sums else lse


# -- Backward: dy, q, k, v, mask, y, lse → dq, dk, dv. Nothing is dropped, so nobody reads the
# generator's state that the operators want.


def _cpu_backward(dy, q, k, v, mask, y, lse, is_causal, scale):
    mask = _whole(mask, q, k)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, y, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _flash_backward(dy, q, k, v, mask, y, lse, is_causal, scale):
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    rows, columns = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, y, lse, None, None, rows, columns, 0.0, is_causal, state, unused, scale=scale
    )


def _efficient_backward(dy, q, k, v, mask, y, lse, is_causal, scale):
    rows = lse.shape[-1]
    kept = -(-rows // _EFFICIENT_ROWS) * _EFFICIENT_ROWS
    if kept != rows:
        # The forward operator leaves infinity as the sums of rows that do not exist.
        lse = torch.nn.functional.pad(lse, (0, kept - rows), value=float("inf"))
    state = torch.empty((), dtype=torch.int64, device=q.device)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        dy,
        q,
        k,
        v,
        _whole(mask, q, k),
        y,
        lse,
        state,
        state,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return grads[:3]


def _cudnn_backward(dy, q, k, v, mask, y, lse, is_causal, scale):
    state = torch.empty((), dtype=torch.int64, device=q.device)
    rows, columns = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        dy,
        q,
        k,
        v,
        y,
        lse.unsqueeze(-1),
        state,
        state,
        _whole(mask, q, k),
        None,
        None,
        rows,
        columns,
        0.0,
        is_causal,
        scale=scale,
    )


#: By kind of candidate; ``cpu`` stands for all of them in the emulator.
FORWARD = {
    "cpu": _cpu_forward,
    "torch_flash": _flash_forward,
    "torch_efficient": _efficient_forward,
    "torch_cudnn": _cudnn_forward,
}
BACKWARD = {
    "cpu": _cpu_backward,
    "torch_flash": _flash_backward,
    "torch_efficient": _efficient_backward,
    "torch_cudnn": _cudnn_backward,
}
