"""Writes `exported.cases`: small networks as PyTorch exports them, with sizes left dynamic.

Run `python importer/tests/data/export.py` with the PyPI packages `torch`, `onnx` and `onnxscript`.
Each network is exported by both of PyTorch's exporters; a case is a model with inputs of one size
and PyTorch's own outputs. The format is that of generate.py.
"""

import io
import tempfile
import warnings
from pathlib import Path

import onnx
import torch
from generate import HERE, field
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F


class Convolutional(nn.Module):
    """Convolutions, normalization that training keeps apart, pooling, a linear head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        """Log-probabilities of 5 classes for images [batch, 3, 16, 16]."""
        x = torch.relu(self.norm(self.stem(x)))
        x = F.hardswish(self.instance(self.depthwise(x)))
        x = F.max_pool2d(self.up(x), 2)
        x = F.avg_pool2d(x, 3, padding=1, count_include_pad=False)
        return torch.log_softmax(self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), -1)


class Transformer(nn.Module):
    """One pre-norm layer over learned embeddings and positions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 16, 8))
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, ids):
        """Pooled [batch, 8] and token [batch, seq, 8] states for ids [batch, seq]."""
        batch, seq = ids.shape
        x = self.embedding(ids) + self.positions[:, :seq]
        qkv = self.qkv(self.norm(x)).view(batch, seq, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, 8))
        x = x + self.mlp(self.norm(x))
        return x.mean(1), x


def exported(net, example, sizes, dynamo):
    """The model as ONNX, stripped of texts for people."""
    if dynamo:
        shape = {d: torch.export.Dim(name, min=2, max=16) for d, name in sizes.items()}
        options = {"dynamic_shapes": (shape,), "external_data": False}
    else:
        options = {"dynamic_axes": {"x": sizes}, "opset_version": 17}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            net, (example,), path, dynamo=dynamo, input_names=["x"], verbose=False, **options
        )
        model = onnx.load(path)
    del model.metadata_props[:]
    del model.graph.value_info[:]
    for part in [model.graph, *model.graph.node, *model.graph.input, *model.graph.output]:
        del part.metadata_props[:]
        part.ClearField("doc_string")
    return model.SerializeToString()


def as_bytes(tensor):
    """A torch tensor as a serialized TensorProto."""
    return numpy_helper.from_array(tensor.detach().numpy()).SerializeToString()


def case(name, model, net, x):
    """A case as bytes."""
    outputs = net(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    data = field(1, name.encode()) + field(2, model) + field(3, as_bytes(x))
    return field(1, data + b"".join(field(4, as_bytes(y)) for y in outputs))


def main():
    """Writes the cases."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    networks = [
        ("convolutional", Convolutional(), {0: "batch"}, lambda n: torch.randn(n, 3, 16, 16)),
        (
            "transformer",
            Transformer(),
            {0: "batch", 1: "seq"},
            lambda n: torch.randint(0, 11, (n, 2 * n + 1)),
        ),
    ]
    out = io.BytesIO()
    for name, net, sizes, data in networks:
        net.eval()
        for dynamo in [False, True]:
            model = exported(net, data(2), sizes, dynamo)
            for n in [2, 3]:
                exporter = "dynamo" if dynamo else "torchscript"
                out.write(case(f"{name}_{exporter}_{n}", model, net, data(n)))
    (HERE / "exported.cases").write_bytes(out.getvalue())
    print(f"exported.cases: {len(out.getvalue())} bytes")


if __name__ == "__main__":
    main()
