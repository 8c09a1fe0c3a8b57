"""Training with batches of many sizes: how much the sizes cost.

Run it as ``python bench/lengths.py``. A small BERT-like encoder is trained on made-up sentences in
batches of 8. Each batch is padded to its longest sentence, so about 30 lengths come in random
order. With ``--task images``, a ResNet-18 is trained on batches of 16 images of five sizes, as in
mixed-size training (arXiv 1908.08986). Every variant trains on the same batches in a process of its
own, with an empty cache of compiled kernels; the times of all steps count, compilation included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import shorthaul
import torch
from torch import nn
from torchvision.models import resnet

#: ``static`` makes a program of its own for each length: what sharing them costs in speed.
VARIANTS = ("eager", "wait", "background", "static")


def batches(n_steps: int, batch: int, shortest: int, longest: int, vocabulary: int):
    """Tokens ``[batch, length]`` and the class of each sentence, one pair for each step."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_steps):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        tokens = torch.randint(vocabulary, (batch, length), generator=generator)
        yield tokens, torch.randint(2, (batch,), generator=generator)


def images(n_steps: int):
    """Images ``[16, 3, size, size]`` and their classes, one pair for each step."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_steps):
        size = 16 * int(torch.randint(4, 9, (), generator=generator))
        x = torch.randn(16, 3, size, size, generator=generator)
        yield x, torch.randint(2, (16,), generator=generator)


def classifier(width: int, layers: int, heads: int, longest: int, vocabulary: int):
    """An encoder with a mean over positions and two classes."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(longest, width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
                for _ in range(layers)
            )
            self.head = nn.Linear(width, 2)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    return Classifier()


def train(variant: str, options: argparse.Namespace) -> dict:
    """Seconds of all steps, and of each epoch."""
    torch.set_num_threads(options.threads)
    sizes = (options.longest, options.vocabulary)
    if options.task == "images":
        torch.manual_seed(0)
        blocks = [max(1, options.layers // 2)] * 4
        own = resnet.ResNet(resnet.BasicBlock, blocks, num_classes=2)
    else:
        own = classifier(options.width, options.layers, options.heads, *sizes)
    model = own
    if variant == "static":
        model = shorthaul.module(own, dynamic=False, max_programs=1000)
    elif variant != "eager":
        model = shorthaul.module(own, warmup=variant, max_programs=1000)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, foreach=True)
    epochs, losses, lengths = [], [], set()
    for _ in range(options.epochs):
        if options.task == "images":
            data = images(options.steps)
        else:
            data = batches(options.steps, 8, options.shortest, *sizes)
        began = time.perf_counter()
        for x, classes in data:
            lengths.add(x.shape[-1])
            loss = torch.nn.functional.cross_entropy(model(x), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epochs.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"epochs": epochs, "lengths": len(lengths), "loss": losses[-1], "peak_mib": peak}


def main() -> None:
    """Trains each variant in its own process and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("text", "images"), default="text")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120, help="steps in an epoch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=45)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--only", choices=VARIANTS, help="train this variant in this process")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(train(options.only, options)))
        return
    for variant in options.variants.split(","):
        with tempfile.TemporaryDirectory() as cache:
            run = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--only", variant],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env={**os.environ, "SHORTHAUL_CACHE_DIR": cache},
            )
        result = json.loads(run.stdout.splitlines()[-1])
        seconds = ", ".join(f"{second:.1f}" for second in result["epochs"])
        print(
            f"{variant:>10}: {result['lengths']} sizes, {sum(result['epochs']):6.1f} s in all; "
            f"epochs {seconds} s; peak memory {result['peak_mib']} MiB; "
            f"last loss {result['loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
