"""Writes the cases that importer/tests/operators.rs runs: the ONNX standard's own node tests.

Run `python importer/tests/data/generate.py` with the PyPI packages `onnx` and `numpy`; it rewrites
`<family>.cases` beside itself, one file for each file of rules in importer/src/onnx/operators.

A file is a protobuf message `Cases { repeated Case case = 1 }` with
`Case { string name = 1; bytes model = 2; repeated bytes input = 3; repeated bytes output = 4 }`;
`input` and `output` are `TensorProto`s. The standard gives shapes, axes and the like as inputs;
those that the importer must know become initializers. Cases with element types that Shorthaul does
not have, and random ones, are left out. Operators unchanged since before version 13 are marked as
version 13.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

HERE = Path(__file__).parent
RULES = HERE.parent.parent / "src" / "onnx" / "operators"
MAX_CASE_BYTES = 12_000
MAX_FAMILY_BYTES = 70_000

# Inputs that must be known at import, by operator.
KNOWN = {
    "AffineGrid": [1],
    "BlackmanWindow": [0],
    "CenterCropPad": [1],
    "Col2Im": [1, 2],
    "Compress": [1],
    "ConstantOfShape": [0],
    "CumProd": [1],
    "CumSum": [1],
    "DFT": [1, 2],
    "Dropout": [1, 2],
    "Expand": [1],
    "HammingWindow": [0],
    "HannWindow": [0],
    "MaxUnpool": [2],
    "MelWeightMatrix": [0, 1, 2, 3, 4],
    "OneHot": [1],
    "Pad": [1, 2, 3],
    "Range": [0, 1, 2],
    "Reshape": [1],
    "Resize": [1, 2, 3],
    "STFT": [1, 3],
    "Slice": [1, 2, 3, 4],
    "Split": [1],
    "Squeeze": [1],
    "Tile": [1],
    "TopK": [1],
    "Trilu": [1],
    "Unsqueeze": [1],
}

OLDEST_OPSET = 13

# Element types, by their number in TensorProto.DataType.
ELEMENT_TYPES = {1, 2, 3, 5, 6, 7, 9, 10, 11, 16}

# Cases whose expected outputs are written with four digits.
ROUNDED = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad",
    "test_gridsample_bicubic",
    "test_roialign_aligned_false",
    "test_roialign_aligned_true",
}


def varint(n):
    """`n` as a protobuf varint."""
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number, data):
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def as_tensor(value, name):
    """`value` as a TensorProto without its name; None if it is no plain tensor."""
    if isinstance(value, onnx.TensorProto):
        return value
    if isinstance(value, (list, tuple, dict)) or value is None:
        return None
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "USc":
        return None
    return numpy_helper.from_array(array, name)


def known_positions(node):
    """Positions of a node's inputs that must be known at import."""
    if node.op_type.startswith("Reduce"):
        return [1]
    return KNOWN.get(node.op_type, [])


def has_known_types(model):
    """Whether all values and conversions have element types that Shorthaul has."""
    values = list(model.graph.input) + list(model.graph.output)
    types = {value.type.tensor_type.elem_type for value in values}
    for node in model.graph.node:
        types |= {a.i for a in node.attribute if a.name in ("to", "dtype")}
    return types <= ELEMENT_TYPES


def is_random(case):
    """Whether the expected outputs are those of NumPy's random numbers."""
    drops = case.name.startswith("test_training_dropout") and "zero_ratio" not in case.name
    return drops or case.name.startswith("test_bernoulli")


def encode(case):
    """A case as bytes; None if it holds more than tensors or is too large."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    if not has_known_types(model):
        return None
    for entry in model.opset_import:
        entry.version = max(entry.version, OLDEST_OPSET)
    inputs, outputs = case.data_sets[0]
    named = {i.name: as_tensor(v, i.name) for i, v in zip(model.graph.input, inputs, strict=True)}
    results = [as_tensor(v, o.name) for o, v in zip(model.graph.output, outputs, strict=True)]
    if None in named.values() or None in results:
        return None
    for node in model.graph.node:
        for position in known_positions(node):
            name = node.input[position] if position < len(node.input) else ""
            if name in named:
                model.graph.initializer.append(named.pop(name))
    kept = [i for i in model.graph.input if i.name in named]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    data = field(1, case.name.encode()) + field(2, model.SerializeToString())
    data += b"".join(field(3, named[i.name].SerializeToString()) for i in kept)
    data += b"".join(field(4, r.SerializeToString()) for r in results)
    return data if len(data) <= MAX_CASE_BYTES else None


def main():
    """Writes one file for each family of rules."""
    family_of = {}
    for path in sorted(RULES.glob("*.rs")):
        for name in re.findall(r'\(\s*"([A-Z]\w+)",', path.read_text()):
            family_of[name] = path.stem
    families = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    for case in sorted(cases, key=lambda case: case.name):
        if case.model is None or case.name.endswith("_expanded") or "_expanded_" in case.name:
            continue
        if is_random(case) or case.name in ROUNDED or case.name.endswith("_old"):
            continue
        operators = {node.op_type for node in case.model.graph.node}
        domains = {entry.domain for entry in case.model.opset_import}
        if len(operators) != 1 or not operators <= family_of.keys() or domains - {""}:
            continue
        data = encode(case)
        if data is not None:
            families.setdefault(family_of[operators.pop()], []).append(field(1, data))
    for family, encoded in families.items():
        # Small cases first where a family has too many bytes.
        kept, total = set(), 0
        for n in sorted(range(len(encoded)), key=lambda n: len(encoded[n])):
            total += len(encoded[n])
            if total <= MAX_FAMILY_BYTES:
                kept.add(n)
        path = HERE / f"{family}.cases"
        path.write_bytes(b"".join(encoded[n] for n in sorted(kept)))
        print(f"{path.name}: {len(kept)} of {len(encoded)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
