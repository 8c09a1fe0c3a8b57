"""Writes the onnx package's node test cases to files: NAME/{model.onnx,input_N.pb,output_N.pb}.

``dump_node_cases.py FOLDER`` writes the node cases; with ``--models`` those that the package holds
as files: small models, and operators and networks converted from PyTorch. Cases whose inputs or
outputs are not tensors (sequences, optional values) are left out. A few cases have outputs that are
written by hand with four decimals: instead of these, the files hold what ONNX Runtime computes.
"""

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

#: Cases whose outputs are written by hand with four decimals.
FOUR_DECIMALS = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad",
    "test_gridsample_bicubic",
    "test_roialign_aligned_false",
    "test_roialign_aligned_true",
}
#: A unit of the fourth decimal: not every number was rounded to the nearest.
FOURTH_DECIMAL = 1e-4


def computed(case, inputs, outputs):
    """What ONNX Runtime computes, which must be what is written by hand, up to the last decimal."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    # Later versions of these operators have more types only, and ONNX Runtime lacks some of them.
    model.opset_import[0].version = 20
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [port.name for port in case.model.graph.input]
    found = session.run(None, dict(zip(names, inputs, strict=True)))
    for ours, written in zip(found, outputs, strict=True):
        np.testing.assert_allclose(ours, written, rtol=0, atol=FOURTH_DECIMAL, err_msg=case.name)
    return found


def tensors(values, infos):
    """The values as messages, or None if one is no tensor."""
    protos = []
    for value, info in zip(values, infos, strict=True):
        if not info.type.HasField("tensor_type"):
            return None
        is_proto = isinstance(value, onnx.TensorProto)
        proto = value if is_proto else numpy_helper.from_array(np.asarray(value))
        protos.append(proto)
    return protos


def main(folder: Path) -> None:
    # Importing this builds the cases, which warns about overflows they are made of.
    warnings.simplefilter("ignore")
    from onnx.backend.test.case.node import collect_testcases

    shutil.rmtree(folder, ignore_errors=True)
    n_written = 0
    for case in collect_testcases(None):
        if not case.data_sets:
            continue
        inputs, outputs = case.data_sets[0]
        if case.name in FOUR_DECIMALS:
            outputs = computed(case, inputs, outputs)
        graph = case.model.graph
        kinds = {"input": tensors(inputs, graph.input), "output": tensors(outputs, graph.output)}
        if any(protos is None for protos in kinds.values()):
            continue
        at = folder / case.name
        at.mkdir(parents=True)
        (at / "model.onnx").write_bytes(case.model.SerializeToString())
        for kind, protos in kinds.items():
            for n, proto in enumerate(protos):
                (at / f"{kind}_{n}.pb").write_bytes(proto.SerializeToString())
        n_written += 1
    print(f"{n_written} cases in {folder}")


def copy_models(folder: Path) -> None:
    """Copies the cases that the package holds as files."""
    shutil.rmtree(folder, ignore_errors=True)
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    n_written = 0
    for kind in ("simple", "pytorch-converted", "pytorch-operator"):
        for case in sorted((data / kind).glob("test_*")):
            sets = case / "test_data_set_0"
            graph = onnx.load(case / "model.onnx").graph
            ports = (*graph.input, *graph.output)
            if not sets.is_dir() or not all(p.type.HasField("tensor_type") for p in ports):
                continue
            at = folder / case.name
            at.mkdir(parents=True)
            shutil.copy(case / "model.onnx", at)
            for file in sets.glob("*.pb"):
                shutil.copy(file, at)
            n_written += 1
    print(f"{n_written} cases in {folder}")


if __name__ == "__main__":
    write = copy_models if "--models" in sys.argv[2:] else main
    write(Path(sys.argv[1]))
