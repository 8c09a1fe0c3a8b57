"""The bench's networks: parameter counts of the full ones, the numbers of the small ones."""

import pytest
import torch
from against_eager import assert_close, compiles_recurrent_layers
from shorthaul.bench.accuracy import _results, smoothed
from shorthaul.models import EXAMPLES, without_dropout
from torch import nn

#: Networks whose full configuration must be in the bench.
WANTED = {
    "resnet50",
    "wide_resnet50_2",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "densenet121",
    "resnext50_32x4d",
    "wavenet",
    "dlrm",
    "bert_large_layer",
    "bert_large",
    "mlp_mixer",
    "gpt2",
    "llama_135m",
    "vit_b_16",
    "yolo_block",
    "unet_2d",
    "unet_3d_ensemble",
    "lstm",
    "vgg11_bn",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "googlenet",
    "swin_t",
}

NETWORKS = [name for name, example in EXAMPLES.items() if example.small]

#: Networks that run on one thread too: long sums over positions, rows, groups and features.
ON_ONE_THREAD = ["resnet50", "googlenet", "resnext50_32x4d", "vgg11_bn", "mobilenet_v2", "gpt2"]


def test_the_list_is_complete():
    assert set(EXAMPLES) >= WANTED and set(NETWORKS) >= WANTED


@pytest.mark.parametrize("name", EXAMPLES)
def test_parameters_are_counted(name, monkeypatch):
    # What initialization writes does not change the count, and takes seconds for large networks.
    for initialize in ("normal_", "uniform_", "kaiming_normal_", "trunc_normal_"):
        monkeypatch.setattr(nn.init, initialize, lambda tensor, *_, **__: tensor)
    model = EXAMPLES[name].make()
    assert sum(p.numel() for p in model.parameters()) == EXAMPLES[name].n_parameters


@pytest.mark.filterwarnings("error::shorthaul.FallbackWarning")
@pytest.mark.parametrize(
    ("name", "n_threads"),
    [pytest.param(n, 2, marks=compiles_recurrent_layers if n == "lstm" else ()) for n in NETWORKS]
    + [(n, 1) for n in ON_ONE_THREAD],
)
def test_small_networks_compute_what_float64_does(name, n_threads):
    """Like ``assert_network_matches``, with the network's own inputs and loss.

    Outputs, gradients and buffers are each held together by the root mean square of their errors,
    relative to float64: at most twice eager's.
    """
    torch.set_num_threads(n_threads)
    example = EXAMPLES[name].small
    model = without_dropout(smoothed(example.make().train()))
    inputs = example.inputs(example.batch)
    ours, eager, exact = (
        _results(example, variant, model, inputs) for variant in ("shorthaul", "eager", "float64")
    )
    assert ours.keys() == eager.keys() == exact.keys()
    for kind in ("output", "gradient", "buffer"):
        names = [n for n in exact if n.startswith(kind) and exact[n] is not None]
        floating = [n for n in names if exact[n].is_floating_point()]
        for n in set(names) - set(floating):
            assert_close(n, ours[n], eager[n], exact[n])
        norms = {n: exact[n].norm().item() for n in floating}
        largest = max(norms.values(), default=0.0)
        errors = {"ours": 0.0, "eager": 0.0}
        for n in floating:
            for who, run in (("ours", ours), ("eager", eager)):
                error = (run[n].double() - exact[n]).norm().item()
                # A bias before BatchNorm has a gradient of nothing but rounding.
                if norms[n] <= 1e-10 * largest:
                    assert error <= 1e-4 * largest, n
                else:
                    errors[who] += (error / norms[n]) ** 2 / len(floating)
        assert errors["ours"] ** 0.5 <= 2 * errors["eager"] ** 0.5 + 1e-6, (kind, errors)
    assert all((p is None) == (exact[n] is None) for n, p in ours.items())
    assert all(torch.isfinite(t).all() for t in ours.values() if t is not None)
