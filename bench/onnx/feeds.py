"""What is fed to a model: deterministic inputs for each setting of sizes and each seed.

Owns the list of runs by which two models are compared.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.str_,
}
WORDS = np.array(["", "a", "b", "Straße", "a b"], dtype=object)

# What the planted run puts into the first elements of every floating-point input.
PLANTED = (np.nan, np.inf, -np.inf, -0.0, 1e-40, 1e30, -1e30)


@dataclass(frozen=True)
class Run:
    """One set of inputs: a name, the sizes, the seed, and whether special values are planted."""

    name: str
    sizes: dict[str, int]
    seed: int
    planted: bool = False
    overriding: bool = False


def runs(entry: dict, n_seeds: int) -> list[Run]:
    """The runs of a file of the zoo: every setting with every seed, then the special ones."""
    found = [
        Run(f"sizes {i}, seed {seed}", sizes, seed)
        for i, sizes in enumerate(entry["sizes"])
        for seed in range(n_seeds)
    ]
    first = entry["sizes"][0]
    found.append(Run("planted", first, 0, planted=True))
    if entry["overrides"]:
        found.append(Run("overridden", first, 0, overriding=True))
    return found


def feed(run: Run, entry: dict, inputs: list[tuple[str, str, list]]) -> dict[str, np.ndarray]:
    """Arrays by name for ``inputs``: name, ONNX Runtime's type, dimensions."""
    arrays = {}
    for name, kind, dims in inputs:
        if name in entry["overrides"] and not run.overriding:
            continue
        shape = [run.sizes.get(dim, 2) if isinstance(dim, str) else dim or 2 for dim in dims]
        rng = np.random.default_rng([zlib.crc32(name.encode()), run.seed])
        arrays[name] = _array(rng, DTYPES[kind], shape, entry["ranges"].get(name))
        if run.planted and np.issubdtype(arrays[name].dtype, np.floating):
            flat = arrays[name].reshape(-1)
            special = np.array(PLANTED[: flat.size])
            with np.errstate(over="ignore"):
                flat[: special.size] = special.astype(flat.dtype)
    return arrays


def _array(rng, dtype, shape: list[int], bounds: list[int] | None) -> np.ndarray:
    if dtype is np.str_:
        return rng.choice(WORDS, shape)
    if dtype is np.bool_:
        return np.asarray(rng.integers(0, 2, shape), dtype=np.bool_)
    if np.issubdtype(dtype, np.integer):
        low, high = bounds or (0, 4)
        return np.asarray(rng.integers(low, high, shape), dtype=dtype)
    return np.asarray(rng.standard_normal(shape), dtype=dtype)
