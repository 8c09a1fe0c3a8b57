"""Runs the small programs (``programs``) beside eager; a test for each theme sees its outcomes.

A program may be refused, in Shorthaul's own words; it may not differ, crash or hang.
"""

import collections

import pytest
from documents import ROOT
from programs.ran import NOT_COMPILED
from programs.registry import THEMES, programs
from programs.run import CRASHED, DIFFERS, HUNG, run_in_fresh_interpreter
from shorthaul._pytorch_version import VERSION

#: Programs that differ, with the reason. None of them computes other numbers than eager.
KNOWN = {
    "aliasing.output_saved_for_backward_written_by_caller": "eager raises; kernels do not need the "
    "overwritten result, and give the right gradient",
    "parameters.uninitialized_weight_is_copied": "the class keeps the lazy layer's name",
    "state.cached_function": "Dynamo calls the body of a cached function once more",
}
if VERSION < (2, 8):
    KNOWN["special_values.signs_of_zeros"] = (
        "eager gives 0.0 for elu(-0.0), and newer versions -0.0"
    )
if (2, 10) <= VERSION < (2, 12):
    for name in ("multihead_attention_with_masks", "multihead_attention_in_inference"):
        KNOWN[f"sequences.{name}"] = (
            "PyTorch's tracer takes other operators; their result has other strides"
        )


@pytest.fixture(scope="session")
def outcomes():
    """The outcome of each program, by theme."""
    by_theme = collections.defaultdict(list)
    for outcome in run_in_fresh_interpreter(programs(), "module"):
        by_theme[outcome.program.split(".")[0]].append(outcome)
    return by_theme


@pytest.mark.parametrize("theme", THEMES)
def test_programs_are_like_eager(outcomes, theme):
    found = [one for one in outcomes[theme] if one.kind in (DIFFERS, CRASHED, HUNG)]
    wrong = [one for one in found if one.kind != DIFFERS or one.program not in KNOWN]
    assert not wrong, "\n".join(f"{o.kind} {o.program}: {'; '.join(o.reasons[:3])}" for o in wrong)
    assert len(outcomes[theme]) == len(programs(theme)) >= 10


def test_most_programs_are_compiled(outcomes):
    """A capture that leaves everything to PyTorch would be like eager too."""
    ended = [one for theme in THEMES for one in outcomes[theme] if one.ran]
    left = [one.program for one in ended if one.ran == NOT_COMPILED]
    # Before PyTorch 2.14 its tracer breaks graphs at more places.
    most = 160 if VERSION >= (2, 14) else len(ended) // 4
    assert len(left) <= most, left


def test_the_guide_counts_the_programs():
    guide = (ROOT / "docs" / "src" / "limits.md").read_text(encoding="utf-8")
    assert f"- {len(programs()):,} small test programs run beside eager PyTorch" in guide
