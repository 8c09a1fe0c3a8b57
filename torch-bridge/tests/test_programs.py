"""Runs the small programs (``programs``) beside eager; a test for each theme sees its outcomes.

A program may be refused, in Shorthaul's own words; it may not differ, crash or hang.
"""

import collections

import pytest
from programs.registry import THEMES, programs
from programs.run import CRASHED, DIFFERS, HUNG, run_in_fresh_interpreter


@pytest.fixture(scope="session")
def outcomes():
    """The outcome of each program, by theme."""
    by_theme = collections.defaultdict(list)
    for outcome in run_in_fresh_interpreter(programs(), "module"):
        by_theme[outcome.program.split(".")[0]].append(outcome)
    return by_theme


@pytest.mark.parametrize("theme", THEMES)
def test_programs_are_like_eager(outcomes, theme):
    wrong = [one for one in outcomes[theme] if one.kind in (DIFFERS, CRASHED, HUNG)]
    assert not wrong, "\n".join(f"{o.kind} {o.program}: {'; '.join(o.reasons[:3])}" for o in wrong)
    assert len(outcomes[theme]) == len(programs(theme)) >= 10


def test_there_are_enough_programs():
    assert len(programs()) >= 400
