"""Networks exported from PyTorch, with random weights and symbolic dimensions.

Owns the list of the networks that Shorthaul trains and of those of torchvision and transformers,
and how each is exported. Some go through PyTorch's new exporter and some through its older one,
which leaves shape arithmetic and decomposed operators in the file.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

# Settings of the symbolic dimensions: pictures by their number, texts also by their length.
PICTURES = [{"batch": 1}, {"batch": 3}]
TEXTS = [{"batch": 2, "sequence": 16}, {"batch": 1, "sequence": 33}]
VOCABULARY = 1000

# The names under which each way of exporting appears on the page.
EXPORTERS = {
    "dynamo": "torch.onnx.export",
    "dynamo-raw": "torch.onnx.export(optimize=False)",
    "script": "torch.onnx.export(dynamo=False)",
    "script-raw": "torch.onnx.export(dynamo=False, do_constant_folding=False, training=PRESERVE)",
}


def files(file: Callable) -> Iterator:
    """Every exported network; ``file`` is the class ``zoo.File``."""
    yield from _trained(file)
    yield from _torchvision(file)
    yield from _transformers(file)


def _trained(file: Callable) -> Iterator:
    examples = _shorthaul_examples()
    for name in ("digits_cnn", "digits_transformer", "mobilenet_v2", "resnet50"):
        example = examples[name]
        yield file(
            name,
            "trained",
            _exporting(example.make, example.inputs(2), ["images"], [{0: "batch"}], "dynamo", 20),
            sizes=PICTURES,
            convolutional=name != "digits_transformer",
            source=EXPORTERS["dynamo"],
        )
    for exporter in ("dynamo", "dynamo-raw"):
        yield file(
            f"bert_large_layer_{exporter}".replace("-", "_"),
            "trained",
            _exporting(
                examples["bert_large_layer"].make,
                (torch.randn(2, 16, 1024),),
                ["hidden"],
                [{0: "batch", 1: "sequence"}],
                exporter,
                18,
            ),
            sizes=TEXTS,
            source=EXPORTERS[exporter],
        )


def _shorthaul_examples() -> dict:
    """The networks of ``shorthaul.models``, read from its files: they need no built package."""
    root = Path(__file__).resolve().parents[2]
    folder = root / "torch-bridge" / "python" / "shorthaul" / "models"
    spec = importlib.util.spec_from_file_location(
        "shorthaul_models", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.EXAMPLES


def _torchvision(file: Callable) -> Iterator:
    exports = (
        ("resnet18", "script-raw", 17),
        ("squeezenet1_1", "script", 13),
        ("densenet121", "script-raw", 14),
        ("shufflenet_v2_x1_0", "script", 17),
        ("shufflenet_v2_x1_0", "dynamo", 20),
        ("mobilenet_v3_small", "script-raw", 17),
        ("efficientnet_b0", "script", 17),
        ("efficientnet_b0", "dynamo-raw", 20),
        ("regnet_y_400mf", "script-raw", 15),
        ("convnext_tiny", "script", 17),
        ("vit_b_16", "script", 16),
        ("swin_t", "script", 17),
        ("swin_t", "dynamo", 18),
    )
    for name, exporter, opset in exports:
        yield file(
            f"{name}_{exporter}".replace("-", "_"),
            "exported",
            _exporting(
                _vision(name),
                (torch.randn(2, 3, 224, 224),),
                ["images"],
                [{0: "batch"}],
                exporter,
                opset,
            ),
            sizes=PICTURES,
            convolutional=name not in ("vit_b_16", "swin_t"),
            source=f"torchvision, {EXPORTERS[exporter]}",
        )


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None)

    return make


def _transformers(file: Callable) -> Iterator:
    exports = (
        ("bert", "script", 14),
        ("distilbert", "script", 17),
        ("gpt2", "script", 17),
        ("gpt2", "dynamo", 20),
        ("llama", "dynamo", 23),
    )
    for name, exporter, opset in exports:
        yield file(
            f"{name}_{exporter}",
            "exported",
            _exporting(
                _language(name),
                (torch.randint(VOCABULARY, (2, 16)), torch.ones(2, 16, dtype=torch.int64)),
                ["tokens", "mask"],
                [{0: "batch", 1: "sequence"}] * 2,
                exporter,
                opset,
            ),
            sizes=TEXTS,
            ranges={"tokens": [0, VOCABULARY], "mask": [1, 2]},
            source=f"transformers, {EXPORTERS[exporter]}",
        )
    yield file(
        "bert_large",
        "big",
        _exporting(
            _language("bert", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
            (torch.randint(VOCABULARY, (2, 16)), torch.ones(2, 16, dtype=torch.int64)),
            ["tokens", "mask"],
            [{0: "batch", 1: "sequence"}] * 2,
            "script",
            17,
        ),
        sizes=TEXTS,
        ranges={"tokens": [0, VOCABULARY], "mask": [1, 2]},
        source=f"transformers, {EXPORTERS['script']}",
    )


class Language(nn.Module):
    """A model of transformers from tokens and mask, ``[batch, sequence]``, to hidden states."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]``."""
        return self.model(input_ids=tokens, attention_mask=mask).last_hidden_state


def _language(name: str, **overrides: int) -> Callable[[], nn.Module]:
    """A model of four small layers, unless ``overrides`` of its configuration say otherwise."""

    def make() -> nn.Module:
        import transformers

        plain = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
        if name == "distilbert":
            sizes = {"dim": 128, "n_layers": 4, "n_heads": 4, "hidden_dim": 512}
            config = transformers.DistilBertConfig(**plain, **sizes)
            return Language(transformers.DistilBertModel(config))
        if name == "gpt2":
            sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "use_cache": False}
            return Language(transformers.GPT2Model(transformers.GPT2Config(**plain, **sizes)))
        sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes.update(overrides)
        sizes["intermediate_size"] = 4 * sizes["hidden_size"]
        if name == "llama":
            config = transformers.LlamaConfig(**plain, **sizes, use_cache=False)
            return Language(transformers.LlamaModel(config))
        if overrides:
            plain["vocab_size"] = 30522
        config = transformers.BertConfig(**plain, **sizes)
        return Language(transformers.BertModel(config, add_pooling_layer=False))

    return make


def _exporting(
    make: Callable[[], nn.Module],
    inputs: tuple[torch.Tensor, ...],
    names: list[str],
    axes: list[dict[int, str]],
    exporter: str,
    opset: int,
) -> Callable[[Path], None]:
    """Writes the network that ``make`` gives, with weights of a fixed seed."""

    def export(path: Path) -> None:
        torch.manual_seed(0)
        model = make().eval()
        _spread_weights(model)
        if exporter.startswith("dynamo"):
            _export_dynamo(model, inputs, names, axes, path, opset, exporter == "dynamo")
        else:
            _export_script(model, inputs, names, axes, path, opset, exporter == "script")

    return export


@torch.no_grad()
def _spread_weights(model: nn.Module) -> None:
    """Gives every constant parameter and statistic values of its own.

    Normalization starts as the identity and biases as zero; folding them wrongly would not show.
    """
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.1)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)


def _export_dynamo(model, inputs, names, axes, path: Path, opset: int, optimize: bool) -> None:
    dimensions: dict[str, torch.export.Dim] = {}
    for axis_names in axes:
        for name in axis_names.values():
            dimensions.setdefault(name, torch.export.Dim(name, min=1, max=512))
    shapes = tuple({i: dimensions[name] for i, name in axis.items()} for axis in axes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            path,
            input_names=names,
            output_names=["output"],
            opset_version=opset,
            dynamic_shapes=shapes,
            optimize=optimize,
            external_data=False,
            verbose=False,
        )


def _export_script(model, inputs, names, axes, path: Path, opset: int, fold: bool) -> None:
    dynamic = dict(zip(names, axes, strict=True)) | {"output": {0: "batch"}}
    training = torch.onnx.TrainingMode.EVAL if fold else torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            str(path),
            input_names=names,
            output_names=["output"],
            opset_version=opset,
            dynamic_axes=dynamic,
            dynamo=False,
            do_constant_folding=fold,
            training=training,
        )
