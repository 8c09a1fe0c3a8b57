"""Measured tables that a cost model reads: products, attention, memory-bound kernels.

Each item is checked before it is timed. Products: shapes of the networks that Shorthaul is built
for, in the layouts of forward, data gradient and weight gradient, with the epilogues that
cuBLASLt has through PyTorch, beside Shorthaul's kernel. Attention: PyTorch's back ends. Memory-
bound: groups over working sets up to 1 GiB, with the bytes that must move.

Before all this, every candidate for attention is timed, and every candidate for the products and
convolutions of the networks, of these shapes and of ResNet-50's windows: in place, in training
steps. The result is the table that programs are compiled with. It is written to the file of
`--table`, which `SHORTHAUL_CUDA_TABLE` then names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention as attention_rows
import step
import torch
import torch.nn.functional as F
from measuring import Bench, check, parse, without_tf32
from products import ProductTable
from results import Results
from shorthaul.models import without_dropout
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

#: (rows, outputs, inputs) of products: BERT-large at B=8 L=512, then ResNet-50's 1×1 convolutions
#: at B=64, then a square.
PRODUCTS = [
    (4096, 1024, 1024),
    (4096, 3072, 1024),
    (4096, 4096, 1024),
    (4096, 1024, 4096),
    (200704, 64, 64),
    (200704, 256, 64),
    (50176, 512, 128),
    (12544, 1024, 256),
    (3136, 2048, 512),
    (8192, 8192, 8192),
]
#: (batch, channels, image, filters, window, stride) of ResNet-50's convolutions with windows.
CONVOLUTIONS = [
    (64, 3, 224, 64, 7, 2),
    (64, 64, 56, 64, 3, 1),
    (64, 128, 56, 128, 3, 2),
    (64, 256, 56, 512, 1, 2),
    (64, 128, 28, 128, 3, 1),
    (64, 256, 14, 256, 3, 1),
    (64, 512, 7, 512, 3, 1),
]
#: (batch, heads, length, head size).
ATTENTION = [(8, 16, 512, 64), (96, 16, 128, 64), (2, 16, 2048, 64)]
DRY_ATTENTION = (1, 2, 8, 8)
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
MEGABYTES = (1, 16, 256, 1024)


class Product(nn.Module):
    """``[m, k] × [n, k]ᵀ`` with an epilogue."""

    def __init__(self, n: int, k: int, epilogue: str):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * k**-0.5)
        self.bias = nn.Parameter(torch.zeros(n)) if epilogue != "none" else None
        self.is_gelu = epilogue == "bias_gelu"

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y, approximate="tanh") if self.is_gelu else y


class Convolution(nn.Module):
    """``[n, c, h, w]`` by filters ``[k, c, r, r]``, alone or with bias and ReLU."""

    def __init__(self, c: int, k: int, window: int, stride: int, epilogue: str):
        super().__init__()
        biased = epilogue == "bias_relu"
        self.conv = nn.Conv2d(c, k, window, stride, window // 2, bias=biased)
        self.is_rectified = biased

    def forward(self, x):
        y = self.conv(x)
        return F.relu(y) if self.is_rectified else y


def product(bench: Bench, shape: tuple[int, int, int], epilogue: str, dtype) -> dict[str, Any]:
    """Forward of a product with an epilogue, and its two gradients as products of their own."""
    m, n, k = shape
    torch.manual_seed(0)
    model = Product(n, k, epilogue).to(bench.device)
    x = torch.randn(m, k, device=bench.device)
    with without_tf32():
        verdict = check(bench, model, (x,), dtype)
    if not verdict["ok"]:
        return verdict
    compiled = bench.module(model)

    def run(called):
        def call():
            with torch.no_grad(), bench.autocast(dtype):
                called(x)

        return call

    half, weight = x.to(dtype), model.weight.detach().to(dtype)
    grad = torch.randn(m, n, device=bench.device, dtype=dtype)
    calls: dict[str, Callable | str] = {
        "shorthaul": run(compiled),
        "eager": run(model),
        "library_nt": lambda: half @ weight.t(),
        "library_data_gradient": lambda: grad @ weight,
        "library_weight_gradient": lambda: grad.t() @ half,
    }
    if epilogue == "bias_gelu":
        bias = model.bias.detach().to(dtype)
        calls["library_fused"] = lambda: torch.ops.aten._addmm_activation(
            bias, half, weight.t(), use_gelu=True
        )
    return {**verdict, "flop": 2.0 * m * n * k, "times": bench.interleaved(calls)}


def attention(bench: Bench, shape: tuple[int, int, int, int], dtype) -> dict[str, Any]:
    """Forward and backward of attention by each of PyTorch's back ends."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape, device=bench.device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double()).detach()
    grad = torch.randn_like(q)
    calls: dict[str, Callable | str] = {}
    errors = {}
    for name in BACKENDS:
        backend = getattr(SDPBackend, name)

        def call(backend=backend):
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(q, k, v)
            torch.autograd.grad(output, (q, k, v), grad)
            return output

        try:
            errors[name] = (call().double() - exact).abs().max().item()
            calls[name.lower()] = call
        except RuntimeError as error:
            calls[name.lower()] = str(error).splitlines()[0]
    return {"errors": errors, "times": bench.interleaved(calls)}


class ResidualNorm(nn.Module):
    """Bias, residual and LayerNorm: what stands between the products of an encoder layer."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, residual):
        return self.norm(x + self.bias + residual)


class Softmax(nn.Module):
    """Rows of scores."""

    def forward(self, x):
        return x.softmax(-1)


class Gelu(nn.Module):
    """Element by element."""

    def forward(self, x):
        return F.gelu(x)


#: Module, number of inputs, and how many elements forward and backward must move for each element
#: of an input: inputs, outputs and their gradients, each once.
MEMORY_BOUND = {
    "gelu": (lambda width: Gelu(), 1, 5),
    "softmax": (lambda width: Softmax(), 1, 5),
    "layer_norm": (nn.LayerNorm, 1, 5),
    "bias_residual_layer_norm": (ResidualNorm, 2, 8),
}


def memory_bound(bench: Bench, kind: str, n_bytes: int, width: int, dtype) -> dict[str, Any]:
    """Forward and backward of a group at one size of its input, against eager and compilers."""
    make, n_inputs, moves = MEMORY_BOUND[kind]
    rows = max(n_bytes // (width * dtype.itemsize), 1)
    torch.manual_seed(0)
    model = make(width).to(bench.device, dtype)
    inputs = tuple(
        torch.randn(rows, width, device=bench.device, dtype=dtype).requires_grad_()
        for _ in range(n_inputs)
    )
    verdict = check(bench, model, inputs, dtype, contextlib.nullcontext())
    if not verdict["ok"]:
        return verdict
    grad = torch.randn(rows, width, device=bench.device, dtype=dtype)

    def run(called):
        def call():
            leaves = (*inputs, *called.parameters())
            torch.autograd.grad(called(*inputs), leaves, grad)

        return call

    variants = bench.variants(model)
    calls = {name: v if isinstance(v, str) else run(v) for name, v in variants.items()}
    moved = float(moves * rows * width * dtype.itemsize)
    return {**verdict, "bytes": moved, "times": bench.interleaved(calls, graph=True)}


def products_of_models(bench: Bench, options, dtype, item) -> None:
    """Writes the table: products and convolutions of networks, those of shapes, attention."""
    table: ProductTable | None = None

    def made() -> ProductTable:
        nonlocal table
        if table is None:
            path = options.table or Path(options.out).with_name("products.json")
            table = ProductTable(bench, path, options.ranks or (1 if bench.is_dry else 8))
        return table

    def add(model: nn.Module, inputs: tuple) -> dict[str, Any]:
        torch.manual_seed(0)
        return made().measure(model.to(bench.device), inputs, dtype)

    def attended(shape: tuple[int, int, int, int], is_causal: bool) -> dict[str, Any]:
        return attention_rows.measure(bench, made(), shape, is_causal, dtype)

    def network(n: step.Network) -> dict[str, Any]:
        torch.manual_seed(0)
        model = without_dropout(n.example.make().train())
        inputs = tuple(x.to(bench.device) for x in n.example.inputs(n.batch))
        return add(model, inputs)

    def alone(shape: tuple[int, int, int], epilogue: str) -> dict[str, Any]:
        m, n, k = shape
        torch.manual_seed(0)
        x = torch.randn(m, k, device=bench.device, requires_grad=True)
        return add(Product(n, k, epilogue), (x,))

    def convolved(shape: tuple[int, ...], epilogue: str) -> dict[str, Any]:
        n, c, image, k, window, stride = shape
        torch.manual_seed(0)
        x = torch.randn(n, c, image, image, device=bench.device)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        return add(Convolution(c, k, window, stride, epilogue), (x,))

    for name, n in (step.DRY if bench.is_dry else step.NETWORKS).items():
        item(f"table of {name}", lambda n=n: network(n))
    for shape in [(16, 16, 16)] if bench.is_dry else PRODUCTS:
        for epilogue in ("none", "bias", "bias_gelu"):
            name = f"table of a product {'x'.join(map(str, shape))} {epilogue}"
            item(name, lambda s=shape, e=epilogue: alone(s, e))
    for shape in [(2, 8, 6, 8, 3, 1)] if bench.is_dry else CONVOLUTIONS:
        for epilogue in ("none", "bias_relu"):
            name = f"table of a convolution {'x'.join(map(str, shape))} {epilogue}"
            item(name, lambda s=shape, e=epilogue: convolved(s, e))
    for shape in [DRY_ATTENTION] if bench.is_dry else ATTENTION:
        for is_causal in (False, True):
            kind = "causal attention" if is_causal else "attention"
            name = f"table of {kind} {'x'.join(map(str, shape))}"
            item(name, lambda s=shape, c=is_causal: attended(s, c))


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    parser = parse(__doc__.splitlines()[0], "results/tables.json")
    parser.add_argument("--table", help="table of products (products.json beside the results)")
    parser.add_argument("--ranks", type=int, help="algorithms of each product (8; 1 in a dry run)")
    options = parser.parse_args(arguments)
    bench, dry = Bench(options.dry_run, options.rounds), options.dry_run
    results = Results(options.out, "tables", vars(options))
    half = torch.float32 if dry else torch.bfloat16

    def item(name, measure):
        if options.only in name:
            results.item(name, measure)

    products_of_models(bench, options, half, item)
    for shape in [(16, 16, 16)] if dry else PRODUCTS:
        for epilogue in ("none", "bias", "bias_gelu"):
            name = f"product {'x'.join(map(str, shape))} {epilogue}"
            item(name, lambda s=shape, e=epilogue: product(bench, s, e, half))
    for shape in [DRY_ATTENTION] if dry else ATTENTION:
        name = f"attention {'x'.join(map(str, shape))}"
        item(name, lambda s=shape: attention(bench, s, half))
    sizes = [(1 << 10, 32)] if dry else [(mb << 20, 1024) for mb in MEGABYTES]
    for kind in MEMORY_BOUND:
        for n_bytes, width in sizes:
            name = f"{kind} {n_bytes} bytes of rows of {width}"
            item(name, lambda k=kind, b=n_bytes, w=width: memory_bound(bench, k, b, w, half))
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
