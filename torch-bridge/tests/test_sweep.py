"""Tests of the sweep: it passes networks that are right, and its rule sees results that are not."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweep import run
from sweep.compare import Difference, judge

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("model_type", ["gpt2", "vit"])
def test_a_tiny_network_is_the_same(model_type, tmp_path):
    # Networks run in forks, and this process may have threads.
    ended = tmp_path / "ended.jsonl"
    command = [sys.executable, "-m", "sweep", "transformers", f"{model_type}/*", "--steps", "1"]
    subprocess.run([*command, "--json", ended, "--limit", "300"], cwd=FOLDER, check=True)
    (line,) = ended.read_text().splitlines()
    outcome = run.Outcome(**json.loads(line))
    assert outcome.kind == run.SAME, outcome
    assert not any(sentence.startswith("PyTorch runs") for sentence in outcome.outside)
    assert outcome.n_judged > 20 and outcome.steps_done == 1


def test_a_network_that_is_not_made_in_time_is_not_made():
    network = run.Network("endless", lambda: _wait_for_ever())
    assert run.run_in_child(network, limit=1).kind == run.NOT_MADE


def _wait_for_ever():
    while True:
        pass


_EXACT = torch.linspace(-1, 1, 100, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (lambda t: t, False),
        (lambda t: t * (1 + 1e-7), False),
        (lambda t: t * (1 + 1e-5), True),
        (lambda t: t.where(t < 1, torch.nan), True),
        (lambda t: t.half(), True),
        (lambda t: t[1:], True),
        (lambda t: None, True),
    ],
)
def test_the_rule_sees_what_is_more_than_rounding(change, is_seen):
    eager = {"output": _EXACT.float()}
    found = {"output": change(_EXACT.float())}
    verdict = judge(found, eager, {"output": _EXACT}, again=lambda: [eager])
    assert bool(verdict.differences) == is_seen


def test_a_tensor_that_eager_misses_is_not_judged():
    eager = {"output": _EXACT.float() + 0.1}
    found = {"output": _EXACT.float() - 1}
    verdict = judge(found, eager, {"output": _EXACT}, again=list)
    assert (verdict.differences, verdict.n_unstable) == ([], 1)


class _Wrong(torch.nn.Linear):
    """Its result is wrong by a part in a thousand, or only with the weights that it has now."""

    def __init__(self, right, only_now):
        super().__init__(3, 3)
        self.load_state_dict(right.state_dict())
        self.wrong = right.weight.detach().clone() if only_now else None

    def forward(self, input):
        wrong = self.wrong is None or torch.equal(self.weight, self.wrong)
        return super().forward(input) * (1.001 if wrong else 1)


@pytest.mark.parametrize("only_now", [True, False])
def test_a_difference_counts_that_other_weights_have_too(only_now):
    original = torch.nn.Linear(3, 3)
    models = (_Wrong(original, only_now), *(copy.deepcopy(original) for _ in range(2)))
    models[2].double()
    step = run.Step("training", {"input": torch.randn(2, 3)})
    differences = [Difference("output ", 0.001, 0.0), Difference("gradient of bias", 0.001, 0.0)]
    left = run.with_other_weights(models, original, step, differences)
    assert left == ([] if only_now else differences)
    assert all(torch.equal(one.weight.float(), original.weight) for one in models)
