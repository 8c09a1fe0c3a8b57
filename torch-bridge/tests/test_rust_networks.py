"""The networks that the room ``models`` builds in Rust are those of PyTorch.

A small network gets the weights of the PyTorch module by the names of its ``state_dict``. The
example ``rust_network`` interprets its graph in float64; results, new running statistics and all
gradients are PyTorch's in float64.
"""

import functools
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from documents import ROOT, built
from shorthaul.models import EXAMPLES, without_dropout
from shorthaul.models.sequences import LstmClassifier
from torch import nn

#: Rounding of float64 (1.1e-16), grown by sums of up to a few thousand terms and by the norms of
#: up to 50 layers (5e-13 was seen); relative to the largest element of a tensor.
TOLERANCE = 1e-11

#: Gradients that are 0 but for rounding, as of a bias in front of a norm, are compared with this
#: part of the largest gradient of the network.
CANCELLED = 1e-2


class DecoderLayer(nn.Module):
    """A pre-normalization decoder layer in which two heads of queries share keys and values."""

    def __init__(self, width: int = 16, n_heads: int = 4, n_key_heads: int = 2, inner: int = 24):
        super().__init__()
        self.head, keys = width // n_heads, n_key_heads * width // n_heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, width),
                "k_proj": nn.Linear(width, keys),
                "v_proj": nn.Linear(width, keys),
                "c_proj": nn.Linear(width, width),
            }
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)}
        )

    def forward(self, x):
        normal = self.ln_1(x)
        q, k, v = (
            self.attn[f"{part}_proj"](normal).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class EncoderLayer(nn.Module):
    """A layer of BERT as transformers has it, by the names of its parameters."""

    def __init__(self):
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        super().__init__()
        config = BertConfig(
            hidden_size=12,
            num_attention_heads=3,
            intermediate_size=20,
            attn_implementation="eager",
        )
        layer = BertLayer(config)
        self.attention, self.intermediate = layer.attention, layer.intermediate
        self.output = layer.output
        self.layer = [layer]

    def forward(self, x):
        result = self.layer[0](x)
        return result[0] if isinstance(result, tuple) else result


def resnet():
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1])


def mobilenet_v2():
    from torchvision.models import MobileNetV2

    return MobileNetV2()


def example(name):
    return EXAMPLES[name].small.make, lambda: EXAMPLES[name].small.inputs(
        EXAMPLES[name].small.batch
    )


def reals(*shape):
    return lambda: (torch.randn(shape),)


#: The PyTorch module and inputs of each network of ``models/src/small.rs``.
NETWORKS = {
    "resnet": (resnet, reals(2, 3, 48, 48)),
    "mobilenet_v2": (mobilenet_v2, reals(3, 3, 64, 64)),
    "encoder_layer": (EncoderLayer, reals(2, 5, 12)),
    "decoder_layer": (DecoderLayer, reals(2, 5, 16)),
    "lstm": (lambda: LstmClassifier(6, 8, 2), reals(3, 5, 6)),
    "wavenet": example("wavenet"),
    "dlrm": example("dlrm"),
    "mlp_mixer": example("mlp_mixer"),
    "yolo_block": example("yolo_block"),
    "unet_2d": example("unet_2d"),
    "unet_3d_ensemble": example("unet_3d_ensemble"),
}

#: What Rust calls the inputs, where it is not ``x``.
INPUT_NAMES = {"dlrm": ("numbers", "categories")}


@functools.cache
def program() -> Path:
    """The example ``rust_network``, built unless SHORTHAUL_RUST_NETWORK names it."""
    example = ["--package", "shorthaul-compiler", "--example", "rust_network"]
    return built("examples/rust_network", "SHORTHAUL_RUST_NETWORK", *example)


def stored(model):
    """Parameters and buffers that the Rust network has too: all but counters of batches."""
    state = model.state_dict().items()
    return {n: t.clone() for n, t in state if not n.endswith("num_batches_tracked")}


def by_pytorch(model, inputs, seeds):
    """Results, new buffers and gradients of a module, by the names that the example gives them."""
    results = model(*inputs.values())
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, seeds(results))
    found = {f"result.{n}": r for n, r in enumerate(results)}
    buffers = dict(model.named_buffers())
    found |= {f"update.{n}": buffers[n] for n in stored(model) if n in buffers}
    given = {**inputs, **dict(model.named_parameters())}
    found |= {f"gradient.{n}": t.grad for n, t in given.items() if t.grad is not None}
    return {name: t.detach().numpy() for name, t in found.items()}


def by_rust(name, given, folder):
    numpy.savez(folder / "given.npz", **given)
    subprocess.run([program(), name, folder / "given.npz", folder / "results.npz"], check=True)
    with numpy.load(folder / "results.npz") as results:
        return dict(results)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    gradients = [abs(e).max() for name, e in expected.items() if name.startswith("gradient.")]
    for name, e in expected.items():
        least = CANCELLED * max(gradients) if name.startswith("gradient.") else 0.0
        allowed = TOLERANCE * max(abs(e).max(), least)
        off = abs(found[name] - e).max()
        assert found[name].shape == e.shape and off <= allowed, f"{name}: {off} of {abs(e).max()}"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_rust_network_with_the_weights_of_pytorch_computes_the_same(name, tmp_path):
    make, make_inputs = NETWORKS[name]
    model = without_dropout(make()).double().train()
    for parameter in model.parameters():
        # Biases and the scales of norms start as 0 and 1, and would hide a wrong formula.
        parameter.data += 0.1 * torch.randn_like(parameter)
    inputs = dict(zip(INPUT_NAMES.get(name, ("x",)), make_inputs(), strict=True))
    for n, t in inputs.items():
        if t.is_floating_point():
            inputs[n] = t.double().requires_grad_()
    given = {**stored(model), **inputs}
    given = {n: t.detach().numpy().copy() for n, t in given.items()}

    def seeds(results):
        made = [torch.randn_like(r) for r in results]
        given.update({f"seed.{n}": s.numpy() for n, s in enumerate(made)})
        return made

    expected = by_pytorch(model, inputs, seeds)
    assert_same(by_rust(name, given, tmp_path), expected)


def test_every_rust_network_is_compared():
    text = (ROOT / "models/src/small.rs").read_text(encoding="utf-8")
    names = [line.split('"')[1] for line in text.splitlines() if line.startswith('    ("')]
    assert names == list(NETWORKS)
