"""How tensors lie in memory: copies with given strides, and tensors that share bytes.

Owns these two facts and nothing else.
"""

from __future__ import annotations

import torch


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy whose dimensions lie in memory in the order of eager's result, without gaps."""
    dense = [0] * tensor.dim()
    step = 1
    for i in sorted(reversed(range(tensor.dim())), key=lambda i: stride[i]):
        dense[i] = step
        step *= max(tensor.shape[i], 1)
    copy = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def overlap(inputs, written: list[int]) -> bool:
    """Whether eager would read a value that was written through another input."""
    spans = [_span(value) if isinstance(value, torch.Tensor) else None for value in inputs]
    return any(
        k != i and span and span[0] < spans[i][1] and spans[i][0] < span[1]
        for i in written
        for k, span in enumerate(spans)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


__all__ = ["overlap", "with_stride"]
