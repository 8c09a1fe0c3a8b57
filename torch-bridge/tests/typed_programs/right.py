"""What users write, without a mistake: a strict type checker finds nothing. It is never run."""

from pathlib import Path
from typing import assert_type

import shorthaul
import shorthaul.onnx
import shorthaul.products
import torch
from torch import nn


class Network(nn.Module):
    """A model with an attribute of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return torch.relu(self.inner(x))


@shorthaul.module
class Decorated(nn.Module):
    """A class that compiles its instances."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


@shorthaul.module(fallback="error", warmup="background")
class DecoratedWithOptions(nn.Module):
    """The same with options."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


plain = Network(4)
x = torch.randn(2, 4)

model = shorthaul.module(plain)
assert_type(model, Network)
assert_type(model.width, int)
assert_type(shorthaul.module(nn.Sequential(nn.Linear(4, 4))), nn.Sequential)
assert_type(shorthaul.module(nn.Linear)(4, 4), nn.Linear)
assert_type(Decorated(2), Decorated)
assert_type(Decorated(2).depth, int)
assert_type(DecoratedWithOptions(2).depth, int)
shorthaul.module(
    plain,
    fallback="eager",
    max_programs=4,
    backend="cuda-emulated",
    fullgraph=True,
    dynamic=False,
    warmup="wait",
    recipe=Path("recipe.txt"),
    memory_budget=0.5,
    planned_threads=2,
)
torch.compile(plain, backend="shorthaul")

report = shorthaul.report(model, x, memory_budgets=[0.5])
assert_type(report, shorthaul.Report)
print(report.data["kernels"])
profile = shorthaul.profile(model, x, rounds=3, loss=lambda y: y.sum())
assert_type(profile, shorthaul.Profile)
profile.trace(Path("trace.json"))

recipe = shorthaul.recipe(model, x)
assert_type(recipe, shorthaul.Recipe)
assert_type(recipe.decisions, list[shorthaul.Decision])
assert_type(recipe.without(recipe.decisions[0]), shorthaul.Recipe)
recipe.save("recipe.txt")
assert_type(shorthaul.Recipe.load("recipe.txt"), shorthaul.Recipe)
assert_type(shorthaul.search(model, x, plans=2, recipe=recipe), shorthaul.Searched)
tuned = shorthaul.tune(model, x, seconds=1.0, progress=print)
assert_type(tuned, shorthaul.Tuned)
assert_type(tuned.ratio, float | None)
bisection = shorthaul.bisect(model, x)
assert_type(bisection, shorthaul.Bisection)
assert_type(bisection.decision, shorthaul.Decision | None)

assert_type(shorthaul.machine(again=True), shorthaul.Machine)
assert_type(shorthaul.machine().l2, shorthaul.Level)
assert_type(shorthaul.machine().l2.bytes, int)
assert_type(shorthaul.cache.info(), shorthaul.cache.CacheInfo)
assert_type(shorthaul.cache.clear(), int)
assert_type(shorthaul.cuda.info(), shorthaul.cuda.Info)
assert_type(shorthaul.cuda.available(), bool)
with shorthaul.products.every("own", 0, 0):
    assert_type(shorthaul.products.launched(lambda: model(x)), float)

optimizer = shorthaul.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)


def loss() -> torch.Tensor:
    """A step's loss."""
    optimizer.zero_grad()
    found = model(x).sum()
    assert isinstance(found, torch.Tensor)
    torch.autograd.backward(found)
    return found


assert_type(optimizer.step(loss), torch.Tensor)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
torch.optim.lr_scheduler.StepLR(optimizer, 10)
shorthaul.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
shorthaul.optim.Adam([{"params": model.parameters(), "lr": 0.1}])

assert_type(shorthaul.onnx.grad("model.onnx", loss="mse", optimizer="adam"), bytes | None)
optimized = shorthaul.onnx.optimize(b"", sizes={"n": 4}, target="ort-cpu", oracle="ort")
assert_type(optimized, shorthaul.onnx.Optimized)
assert_type(optimized.model, bytes | None)

try:
    model(x)
except shorthaul.Unsupported as missing:
    assert_type(missing.operators, list[tuple[str, list[str]]])
except shorthaul.ShorthaulError as error:
    print(error)
