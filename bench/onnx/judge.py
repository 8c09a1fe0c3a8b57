"""Whether an optimized model gives the same numbers and keeps its interface.

Owns the comparison of saved outputs and of interfaces. Loads no model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

# The largest error that rounding in another order explains, relative to the output's largest value:
# deep networks of random weights gather some hundred roundings of their type. Integers, truth
# values and strings must be equal.
TOLERANCES = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-10}


def compare_outputs(reference: Path, candidate: Path, errors: dict[str, str]) -> dict:
    """``same`` in all runs, ``planted_same`` with NaN and infinity, the worst error, and reasons.

    Compares what ``run_model.py`` saved; ``errors`` are the candidate's runs that failed.
    """
    worst, reasons, planted_reasons = 0.0, [], []
    with np.load(reference) as expected, np.load(candidate) as found:
        for key in expected.files:
            run, name = key.split("/", 1)
            into = planted_reasons if run == "planted" else reasons
            if run in errors:
                into.append(f"{run}: {errors[run]}")
                continue
            if key not in found.files:
                into.append(f"{run}: no output `{name}`")
                continue
            error, reason = _compare(expected[key], found[key])
            if run != "planted":
                worst = max(worst, error)
            if reason:
                into.append(f"{run}, `{name}`: {reason}")
    return {
        "same": not reasons,
        "planted_same": not planted_reasons,
        "worst": worst,
        "reasons": list(dict.fromkeys(reasons + planted_reasons)),
    }


def _compare(expected: np.ndarray, found: np.ndarray) -> tuple[float, str | None]:
    """The relative error of an output, and what is wrong with it."""
    if expected.dtype.kind != found.dtype.kind or (
        expected.dtype.kind != "U" and expected.dtype != found.dtype
    ):
        return 0.0, f"type {found.dtype} for {expected.dtype}"
    if expected.shape != found.shape:
        return 0.0, f"shape {list(found.shape)} for {list(expected.shape)}"
    if expected.dtype.kind != "f":
        n_other = int((expected != found).sum())
        return 0.0, f"{n_other} of {expected.size} values differ" if n_other else None
    for what, test in (("NaN", np.isnan), ("+infinity", np.isposinf), ("-infinity", np.isneginf)):
        n_other = int((test(expected) != test(found)).sum())
        if n_other:
            return np.inf, f"{what} in {n_other} other places of {expected.size}"
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0, None
    a, b = expected[finite].astype(np.float64), found[finite].astype(np.float64)
    largest = np.abs(a).max()
    error = float(np.abs(a - b).max() / (largest or 1.0))
    tolerance = TOLERANCES[expected.dtype.name]
    return error, f"error {error:.1e} of the largest value" if error > tolerance else None


def compare_interfaces(original: dict, optimized: dict) -> list[str]:
    """What the optimized file changed in the original's interface, one phrase each."""
    changes = []
    for side in ("inputs", "outputs"):
        before, after = _visible(original, side), _visible(optimized, side)
        if [value[0] for value in before] != [value[0] for value in after]:
            changes.append(f"{side} renamed, moved or dropped")
        by_name = {value[0]: value for value in after}
        pairs = [(value, by_name[value[0]]) for value in before if value[0] in by_name]
        if any(a[1] != b[1] for a, b in pairs):
            changes.append(f"types of {side}")
        for phrase in sorted({_dims_change(a[2], b[2]) for a, b in pairs} - {""}):
            changes.append(f"{phrase} in {side}")
    for domain, version in original["opsets"].items():
        if optimized["opsets"].get(domain) != version:
            known = domain or "ai.onnx"
            changes.append(f"opset {known} {version} to {optimized['opsets'].get(domain)}")
    if any(optimized["metadata"].get(key) != value for key, value in original["metadata"].items()):
        changes.append("metadata lost")
    if original["doc"] != optimized["doc"]:
        changes.append("doc string lost")
    return changes


def _visible(interface: dict, side: str) -> list:
    """The inputs or outputs that a caller sees.

    Before version 4 a file had to list every initializer as an input, and none could be replaced.
    """
    if side == "outputs" or interface["ir_version"] >= 4:
        return interface[side]
    return [value for value in interface[side] if value[0] not in interface["initialized"]]


def _dims_change(before: list | None, after: list | None) -> str:
    if before is None or before == after:
        return ""
    if after is None or len(before) != len(after):
        return "shape lost"
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and a != b]
    if any(isinstance(a, str) and isinstance(b, int) for a, b in pairs):
        return "symbolic dimension fixed"
    return "name of a dimension changed" if pairs else ""
