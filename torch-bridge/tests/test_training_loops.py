"""Training loops as people write them, twenty steps each, to eager's loss curve."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loss_curves import (
    N_STEPS,
    WRAPS,
    Block,
    Tower,
    assert_same_curve,
    compare_training,
    rows_and_labels,
)
from shorthaul._call import recorded
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

wraps = pytest.mark.parametrize("wrap", ["module", "compile"])


def train(model, *, n_parts=1, clip=None, after_step=None):
    """Losses of a plain loop, with gradients of ``n_parts`` batches added for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(N_STEPS):
        total = 0.0
        for part in range(n_parts):
            rows, labels = rows_and_labels(seed=part)
            loss = F.cross_entropy(model(rows), labels) / n_parts
            loss.backward()
            total += loss.item()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        losses.append(total)
    return losses


@wraps
def test_accumulation_clipping_and_a_moving_average(wrap):
    """The average of the weights is eager's too, and an averaged compiled model runs."""
    averages = []

    def with_average(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averages.append(average)
        return train(model, n_parts=3, clip=0.5, after_step=average.update_parameters)

    compare_training(Tower(), with_average, wrap)
    eager, ours = averages
    rows, _ = rows_and_labels()
    for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours(rows), eager(rows), rtol=1e-3, atol=1e-4)


class Checkpointed(Tower):
    """Keeps only what enters a block, and computes the block again."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@wraps
@pytest.mark.filterwarnings("ignore::shorthaul.FallbackWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_the_model(wrap, use_reentrant):
    compare_training(Checkpointed(use_reentrant), train, wrap)


@wraps
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_around_compiled_blocks(wrap, use_reentrant):
    class Outside(nn.Module):
        """The loop is eager's; each block is compiled."""

        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
            self.blocks = nn.Sequential(Block(16), Block(16), Block(16))

        def forward(self, x):
            x = self.stem(x)
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=use_reentrant)
            return self.head(x)

    model = Outside()
    torch._dynamo.reset()
    eager = train(copy.deepcopy(model))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = WRAPS[wrap](block)
    with recorded() as calls:
        found = train(model)
    assert_same_curve(found, eager)
    # The first of two segments is one block, which runs twice; the last is not checkpointed.
    assert len(calls) >= (2 + 1 + 1) * N_STEPS, "a block ran through PyTorch, or was not run again"
