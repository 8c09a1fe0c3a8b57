"""Runs the small programs (``programs``) beside eager, one test for each theme.

Programs that start threads or processes run in a process of their own, the others in this one. A
program may be refused, in Shorthaul's own words; it may not differ, crash or hang.
"""

import pytest
from programs.registry import THEMES, programs
from programs.run import CRASHED, DIFFERS, HUNG, run_here, run_in_fresh_interpreter


@pytest.mark.parametrize("theme", THEMES)
def test_programs_are_like_eager(theme):
    made = programs(theme)
    ended = run_in_fresh_interpreter([one for one in made if one.alone], "module")
    ended += [run_here(one, "module") for one in made if not one.alone]
    wrong = [outcome for outcome in ended if outcome.kind in (DIFFERS, CRASHED, HUNG)]
    assert not wrong, "\n".join(
        f"{outcome.kind} {outcome.program}: {'; '.join(outcome.reasons[:3])}" for outcome in wrong
    )
    assert len(made) >= 10
