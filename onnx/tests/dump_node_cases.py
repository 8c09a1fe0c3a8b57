"""Writes the onnx package's node test cases to files: NAME/{model.onnx,input_N.pb,output_N.pb}.

Cases whose inputs or outputs are not tensors (sequences, optional values) are left out.
"""

import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
