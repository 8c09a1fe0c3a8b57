"""Mistakes, each with the error that a type checker finds in its line. It is never run."""

import shorthaul
import shorthaul.onnx
import torch
from torch import nn

plain = nn.Sequential(nn.Linear(4, 4))
model = shorthaul.module(plain)
optimizer = shorthaul.optim.SGD(model.parameters())
x = torch.randn(2, 4)


def say_two(first: str, second: str) -> None:
    """Takes a line too many."""


shorthaul.modul(plain)  # error: attr-defined
shorthaul.module(x)  # error: call-overload
shorthaul.module(plain, fallback="ignore")  # error: call-overload
shorthaul.module(plain, max_program=2)  # error: call-overload
shorthaul.module(nn.Linear)(4, "4")  # error: arg-type
print(model.in_feature + 1)  # error: operator
shorthaul.profile(model, x, rounds="20")  # error: arg-type
print(shorthaul.report(model, x).date)  # error: attr-defined
shorthaul.recipe(model, x).without("fuse")  # error: arg-type
shorthaul.tune(model, x, progress=say_two)  # error: arg-type
print(shorthaul.bisect(model, x).decision.place)  # error: union-attr
shorthaul.machine(again=1)  # error: arg-type
shorthaul.cache.clear("all")  # error: call-arg
shorthaul.optim.AdamW(4)  # error: arg-type
shorthaul.optim.AdamW(model.parameters(), amsgrad=True)  # error: call-arg
optimizer.step(x)  # error: call-overload
shorthaul.onnx.grad("model.onnx")  # error: call-arg
shorthaul.onnx.optimize("model.onnx", target="ort")  # error: arg-type
number: str = shorthaul.cache.info().n_bytes  # error: assignment
