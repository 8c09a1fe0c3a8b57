"""Trains one small model in two processes, through DDP and FSDP2, and writes the losses as JSON.

``test_distributed.py`` starts it: ``python distributed_training.py RANK WORLD_SIZE STORE RESULT``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import traceback
import warnings
from pathlib import Path

import conftest  # noqa: F401  (finds Shorthaul where it is not installed)
import shorthaul
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loss_curves import N_STEPS, WRAPS, Tower, rows_and_labels
from shorthaul import _autograd
from shorthaul._call import recorded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard(model):
    """A sharded model: each block, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


DISTRIBUTE = {"ddp": DistributedDataParallel, "fsdp": shard}


def overlap() -> list[str]:
    """What happens in the backward pass of a compiled model in DDP, in order."""
    torch.manual_seed(0)
    model = shorthaul.module(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    model = DistributedDataParallel(model, bucket_cap_mb=1)
    events: list[str] = []

    def exchange(state, bucket):
        events.append("gradients are sent")
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))

    def backward(*arguments):
        events.append("kernels run")
        return run(*arguments)

    model.register_comm_hook(None, exchange)
    run, _autograd.backward = _autograd.backward, backward
    try:
        for _ in range(3):  # DDP arranges its buckets in the first step
            events.clear()
            model(torch.randn(4, 512)).sum().backward()
    finally:
        _autograd.backward = run
    return events


def cases():
    """Functions of a model, by what they do to it from the inside out."""
    for kind, distribute in DISTRIBUTE.items():
        yield kind, distribute
        for name, wrap in WRAPS.items():
            yield f"{name}, {kind}", lambda m, w=wrap, d=distribute: d(w(m))
            yield f"{kind}, {name}", lambda m, w=wrap, d=distribute: w(d(m))


def train(model) -> list[float]:
    """Losses over both processes, which have batches of their own.

    Gradients of two batches make a step; those of the first stay in their process.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    losses = []
    for _ in range(N_STEPS):
        total = torch.zeros(())
        for part in range(2):
            rows, labels = rows_and_labels(seed=2 * part + rank)
            with _synchronized(model, part == 1):
                loss = F.cross_entropy(model(rows), labels) / 2
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


@contextlib.contextmanager
def _synchronized(model, is_last: bool):
    """Whether the backward pass inside sends gradients to the other process."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield


def main(rank: int, world_size: int, store: str, result: Path) -> None:
    """Runs every case; an error of one does not stop the others."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model, found = Tower(), {}
    warnings.simplefilter("ignore")
    for name, distribute in cases():
        torch._dynamo.reset()
        try:
            with recorded() as calls:
                losses = train(distribute(copy.deepcopy(model)))
            found[name] = {"losses": losses, "n_calls": len(calls)}
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        found["overlap"] = overlap()
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
