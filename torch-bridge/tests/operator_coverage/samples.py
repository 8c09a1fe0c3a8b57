"""Which operators of ``op_db`` are in scope, and which of their samples are run.

Owns the scope that the page states. Never runs an operator.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: How many samples of an operator are run.
N_SAMPLES = 6

#: How many of an operator's samples are looked at.
_N_SEEN = 400

#: Samples of one kind that are tried until one gives a result that is not empty.
_N_TRIED = 6

#: Elements that all tensors of a sample may have together.
_LARGEST = 200_000

#: Families that are out of scope, by how their names begin, and why.
FACTORIZATION = "factorization or solver"
_OUT_OF_SCOPE = {
    "fft.": "complex numbers",
    "linalg.": FACTORIZATION,
    "sparse.": "sparse tensors",
    "masked.": None,
    "signal.": None,
}

#: Members of ``linalg`` that factor and solve nothing.
_PLAIN_LINALG = frozenset(
    "cross det diagonal matrix_norm matrix_power multi_dot norm vander vecdot vector_norm".split()
)

#: Factorizations and solvers with names of their own.
_FACTORIZATIONS = frozenset(
    "cholesky cholesky_inverse cholesky_solve geqrf logdet lu lu_solve lu_unpack matrix_exp ormqr "
    "pca_lowrank pinverse qr svd svd_lowrank symeig triangular_solve".split()
)

#: Operators on complex numbers, also where a sample's own tensors are real.
_COMPLEX = frozenset("stft istft view_as_complex complex polar cdouble cfloat chalf".split())

#: Where PyTorch keeps whether flags of its backends may be set.
_MAY_SET = "__allow_nonbracketed_mutation_flag"


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among a sample's operands."""

    position: int


@dataclass(frozen=True)
class Sample:
    """One call of an operator: its tensors, and its operands with slots in their places."""

    tensors: list[torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]


def name_of(op) -> str:
    """An operator's name in the page, with its variant."""
    variant = f" ({op.variant_test_name})" if op.variant_test_name else ""
    return op.name + variant


def operators() -> dict[str, Any]:
    """Every operator of the database that takes float32, by name, in alphabetic order."""
    may_set = getattr(torch.backends, _MAY_SET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    # The import forbids the whole process to set flags of PyTorch's backends.
    setattr(torch.backends, _MAY_SET, may_set)
    # Operators with random numbers come in a wrapper that saves and restores the generator's state,
    # which no graph holds; what is asked here is the operator.
    database.wrapper_set_seed = _without_seed
    found = {name_of(op): op for op in database.op_db if torch.float32 in op.dtypes}
    return dict(sorted(found.items()))


def _without_seed(op, *args, **kwargs):
    return op(*args, **kwargs)


def out_of_scope(op) -> str | None:
    """Why the page does not count an operator; ``None`` where it does."""
    if op.name in _FACTORIZATIONS:
        return FACTORIZATION
    if op.name in _COMPLEX:
        return "complex numbers"
    if op.name.startswith("linalg.") and op.name.removeprefix("linalg.") in _PLAIN_LINALG:
        return None
    if "sparse" in op.name:
        return "sparse tensors"
    for prefix, reason in _OUT_OF_SCOPE.items():
        if op.name.startswith(prefix):
            return reason
    return None


def samples_of(op) -> list[list[Sample]]:
    """At most ``N_SAMPLES`` kinds of operands, smallest first, with a few samples of each.

    The later ones of a kind are for results that turn out to be empty.
    """
    by_kind: dict[tuple, list[tuple[int, int, Sample]]] = {}
    for i, sample in enumerate(itertools.islice(_all_samples(op), _N_SEEN)):
        size = sum(tensor.numel() for tensor in sample.tensors)
        if all(tensor.numel() for tensor in sample.tensors) and size <= _LARGEST:
            by_kind.setdefault(_kind(sample), []).append((size, i, sample))
    kinds = [sorted(found, key=lambda one: one[:2]) for found in by_kind.values()]
    kinds.sort(key=lambda found: found[0][:2])
    return [[sample for _, _, sample in found[:_N_TRIED]] for found in kinds[:N_SAMPLES]]


def _all_samples(op) -> Iterator[Sample]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            tensors: list[torch.Tensor] = []
            operands = ((made.input, *made.args), made.kwargs)
            args, kwargs = _slotted(operands, tensors)
            yield Sample(tensors, args, kwargs)


def _slotted(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The same structure with a slot for each tensor, which goes to ``tensors``."""

    def slot(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    return pytree.tree_map(slot, tree)


def _kind(sample: Sample) -> tuple:
    """What makes two samples alike: ranks, types, names and numbers of operands."""
    ranks = tuple((tensor.dim(), tensor.dtype) for tensor in sample.tensors)
    leaves, structure = pytree.tree_flatten((sample.args[1:], sample.kwargs))
    flags = tuple(
        leaf if isinstance(leaf, (bool, str, type(None), torch.dtype)) else type(leaf).__name__
        for leaf in leaves
    )
    return ranks, str(structure), str(flags)


def is_complex(sample: Sample) -> bool:
    """Whether complex numbers go in."""
    return any(tensor.is_complex() for tensor in sample.tensors)
