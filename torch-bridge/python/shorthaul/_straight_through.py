"""``shorthaul::straight_through(y, v)``: the value is y, and the gradient goes to v.

Owns the operator as PyTorch sees it. Kernels never compute v in the forward pass. A term that is
zero but for its gradient, ``v - v.detach()``, is no way to write it: a compiler may contract a
product and the difference, and then this is a rounding error instead of zero.
"""

from __future__ import annotations

import torch

from ._errors import ShorthaulError

torch.library.define("shorthaul::straight_through", "(Tensor y, Tensor v) -> Tensor")


@torch.library.impl("shorthaul::straight_through", "CompositeExplicitAutograd")
def _straight_through(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return y.clone()


torch.library.register_fake("shorthaul::straight_through", _straight_through)


def _straight_back(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    if torch.is_grad_enabled():
        # What was saved for the function's backward pass is a constant in v.
        raise ShorthaulError(
            "a custom autograd.Function inside of a gradient cannot be differentiated once more; "
            "call the original module for derivatives of this order"
        )
    return None, gradient


torch.library.register_autograd("shorthaul::straight_through", _straight_back)

#: ``y`` and ``v`` have the same type and sizes.
straight_through = torch.ops.shorthaul.straight_through

__all__ = ["straight_through"]
