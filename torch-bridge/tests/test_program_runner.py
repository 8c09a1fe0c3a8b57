"""Tests that the small programs and their runner see a difference where there is one.

Each wrap of ``programs.perturb`` is wrong in one way. Programs are run under it in which that way
shows, and every program must show at least one of the ways.
"""

import pytest
import torch
from programs import facts
from programs.compare import Refused, differences
from programs.perturb import PERTURBED
from programs.registry import Program, programs
from programs.run import CRASHED, DIFFERS, HUNG, REFUSED, SAME, run_here, run_in_children
from shorthaul import OutOfRange, ShorthaulError
from shorthaul._pytorch_version import VERSION


def _program(run, **kwargs):
    return Program("test", run.__name__, run, **kwargs)


def _named(full_name):
    (found,) = [p for p in programs(full_name.split(".")[0]) if p.full_name == full_name]
    return found


@pytest.mark.parametrize(
    ("wrap", "full_name"),
    [
        ("shifted", "layers.layer_norm"),
        ("shifted", "integers.bits"),
        ("detached", "hooks.hook_on_input"),
        ("detached", "gradients.gradient_penalty"),
        ("copied", "aliasing.view_of_input"),
        ("copied", "mutation.input_written_and_returned"),
        ("stale", "state.global_number_changes"),
        ("stale", "parameters.tied_pair_changes"),
        ("stale", "aliasing.same_tensor_twice_then_two"),
        ("twice", "attributes.counter_in_forward"),
        ("twice", "mutation.input_written"),
        ("twice", "randomness.python_random_number"),
        ("silent", "integers.division_by_zero"),
        ("silent", "control.value_error_keeps_its_type"),
        ("apart", "mutation.input_written_and_not_returned"),
        ("apart", "aliasing.input_written_before_backward"),
        ("unshared", "aliasing.parameter_written_before_backward"),
        ("hookless", "module_hooks.forward_hook_of_whole_model_added"),
    ],
)
def test_a_wrong_wrap_is_seen(wrap, full_name):
    assert run_here(_named(full_name), wrap).kind == DIFFERS


# Eager itself must raise in it, or give what a compiler may give instead.
BLIND = {"mutation.intermediate_saved_for_backward_written"}


def test_every_program_sees_some_wrong_wrap():
    blind = {
        one.full_name
        for one in programs()
        if not one.alone
        and one.since <= VERSION
        and all(run_here(one, wrap).kind == SAME for wrap in PERTURBED)
    }
    assert blind == BLIND


def test_every_program_is_the_same_as_itself():
    wrong = [run_here(one, "eager") for one in programs() if not one.alone and one.since <= VERSION]
    assert [outcome for outcome in wrong if outcome.kind != SAME] == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.double(), "dtype"),
        (lambda t: t.t().contiguous().t(), "strides"),
        (lambda t: t.detach(), "requires_grad"),
        (lambda t: t[:1], "shape"),
        (lambda t: t + 1e-3, "became"),
        (lambda t: t.detach().requires_grad_(), "has_history"),
        (lambda t: t.as_subclass(torch.nn.Buffer), "kind"),
    ],
)
def test_each_fact_of_a_tensor_counts(change, what):
    tensor = torch.ones(2, 3, requires_grad=True) * 2
    lines = differences(facts.observe(tensor), facts.observe(change(tensor)))
    assert any(what in line for line in lines)
    assert not differences(facts.observe(tensor), facts.observe(tensor * (1 + 1e-6)))


def test_a_missing_gradient_is_not_a_zero_gradient():
    a = facts.observe([None])
    assert differences(a, facts.observe([torch.zeros(2)])) and not differences(a, a)


def test_errors_compare_by_kind():
    def error(raised):
        return facts.raises(lambda: (_ for _ in ()).throw(raised), message=True)

    index = error(IndexError("a"))
    assert not differences(error(IndexError("a")), index)
    assert differences(error(IndexError("b")), index)
    assert differences(error(ValueError("a")), index)
    assert differences(facts.observe(1.0), index)
    own = facts.raises(lambda: (_ for _ in ()).throw(OutOfRange("a")))
    assert not differences(facts.raises(lambda: [][0]), own)
    with pytest.raises(Refused):
        differences(facts.observe(1.0), error(ShorthaulError("cannot")))


def test_a_crash_or_a_hang_costs_one_program():
    def crash(wrap):
        if wrap.__name__ != "eager":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGSEGV)
        return 1

    def hang(wrap):
        while wrap.__name__ != "eager":
            pass
        return 1

    def refuse(wrap):
        if wrap.__name__ != "eager":
            raise ShorthaulError("cannot")
        return 1

    def behave(wrap):
        return 1

    made = [_program(run) for run in (crash, hang, refuse, behave)]
    expected = {"crash": CRASHED, "hang": HUNG, "refuse": REFUSED, "behave": SAME}
    for at_most in (1, 4):
        ended = run_in_children(made, "shifted", 1, 1, at_most)
        assert {one.program.removeprefix("test."): one.kind for one in ended} == expected
