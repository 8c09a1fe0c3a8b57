"""Writes `dynamic.json`: documents that the Python package captures with symbolic sizes.

Run `python importer/tests/data/dynamic.py` with the packages `torch` and `shorthaul`. Each case is
a document with its inputs and PyTorch's outputs, for sizes other than those it was captured with.
"""

import json
from itertools import compress
from pathlib import Path

import torch
import torch.nn.functional as F
from shorthaul._capture import capture
from shorthaul._region import _supported
from torch import nn
from torch.export import Dim


class Language(nn.Module):
    """A causal attention block and its loss; batch and length are open."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 7)

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.embed(tokens)
        split = self.qkv(self.norm(x)).view(batch, length, 3, 2, 2)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, 4)
        rows = self.out(x)[:, :-1].reshape(-1, 7)
        loss = F.cross_entropy(rows, tokens[:, 1:].reshape(-1))
        return loss, x.mean(1), torch.cat([x, x[:, :1]], 1).flatten(1), x * length


class Images(nn.Module):
    """Convolution, BatchNorm in training, pooling; batch and height are open."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)), y.sum((2, 3)), y / x.shape[0]


def tensor(value):
    """A tensor as the test reads it."""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": value.detach().flatten().tolist(),
    }


def case(model, example, sizes, others):
    """A document and runs with ``others``."""
    captured = capture(model, (example,), supported=_supported(), dynamic_shapes=(sizes,))
    assert len(captured.document["symbols"]) == 2 and not captured.constants
    # What only the caller checks (computed class labels) is no result.
    results = [spec.kind != "check" for spec in captured.outputs]
    captured.outputs = list(compress(captured.outputs, results))
    captured.document["outputs"] = list(compress(captured.document["outputs"], results))
    runs = []
    for other in others:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        inputs = [
            other if spec.kind == "user" else state[spec.target].detach().clone()
            for spec in captured.inputs
        ]
        results = model(other)
        given = iter(results)
        state = dict(model.named_buffers())
        outputs = [
            next(given) if spec.kind == "user" else state[spec.target].clone()
            for spec in captured.outputs
        ]
        runs.append(
            {"inputs": [tensor(x) for x in inputs], "outputs": [tensor(x) for x in outputs]}
        )
    return {"document": captured.document, "runs": runs}


def main():
    """Writes the file."""
    torch.manual_seed(0)
    tokens = {0: Dim("batch", min=2), 1: Dim("length", min=3)}
    images = {0: Dim("batch", min=2), 2: 2 * Dim("half", min=2)}
    language, convolutional = Language(), Images()
    cases = {
        "language": case(
            language,
            torch.randint(7, (3, 5)),
            tokens,
            [torch.randint(7, (2, 4)), torch.randint(7, (4, 3))],
        ),
        "images": case(
            convolutional,
            torch.randn(2, 2, 6, 4),
            images,
            [torch.randn(3, 2, 4, 4), torch.randn(2, 2, 8, 4)],
        ),
    }
    path = Path(__file__).parent / "dynamic.json"
    path.write_text(json.dumps(cases, separators=(",", ":")) + "\n")


main()
