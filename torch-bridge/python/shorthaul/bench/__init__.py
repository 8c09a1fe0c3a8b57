"""``python -m shorthaul.bench NAME...``: training steps beside PyTorch's, in one run.

Owns the order of things: which settings are measured, what is printed and written. The
measurement is in ``timing``, first steps and memory in ``alone``, processes for single networks in
``separate``, variants in ``variants``, the comparison with float64 in ``accuracy``, the machine's
limits in ``limits``, predictions in ``predicted``, recipes in ``recipes``, files in ``results``,
the page in ``page``. Also installed as the command ``shorthaul-bench``.
"""

from __future__ import annotations

import json
import warnings

import torch

import shorthaul

from ..models import EXAMPLES
from ..models.libraries import MissingLibrary
from . import limits, page, predicted, recipes, results, separate
from .accuracy import check, print_check
from .alone import first_step
from .kernels import print_profile
from .options import Setting, network, parse
from .timing import measure
from .variants import inputs_of, model_of, precision


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench; the exit code is 1 if Shorthaul fails or ``--check`` finds a difference.

    If a peer fails, a network does not fit into memory, or an old file cannot be read, it prints
    the reason and continues with the rest.
    """
    warnings.simplefilter("ignore", shorthaul.RecompileWarning)
    options = parse(arguments)
    if options.list:
        _print_networks()
        return 0
    if options.alone:
        print(json.dumps(first_step(options.settings[0], options.alone)))
        return 0
    n_threads, found, ok = torch.get_num_threads(), [], True
    for setting in options.settings:
        if options.separate:
            results_of_one, is_good = separate.run(setting, options)
            found += results_of_one
            ok &= is_good
            continue
        torch.set_num_threads(setting.threads)
        try:
            network(setting.name)
        except MissingLibrary as error:
            print(f"\n{setting}: skipped, {error}")
            continue
        try:
            result, is_good = _run(setting, options)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, shorthaul.ShorthaulError) or not _is_out_of_memory(error):
                raise
            print(f"\n{setting}: skipped, it does not fit into memory")
            continue
        finally:
            torch.set_num_threads(n_threads)
        ok &= is_good
        if result is not None:
            found.append(result)
    measured = [result for result in found if "variants" in result]
    results.print_mean(measured)
    recipes.print_mean(found)
    if options.predicted:
        found += predicted.together(found)
    if options.compare:
        _compare(options.compare, measured)
    if options.json:
        results.write(options.json, found)
    if options.html:
        page.write(options.html, measured)
    return 0 if ok else 1


def _run(setting: Setting, options) -> tuple[dict | None, bool]:
    """One setting: its result, if it has one, and whether Shorthaul did well."""
    if options.profile:
        with precision(setting.dtype):
            print_profile(setting, options.rounds, options.warmup)
        return None, True
    if options.predicted:
        with precision(setting.dtype):
            return predicted.compare(setting, options.rounds, options.warmup), True
    if options.tune is not None:
        return recipes.make(setting, options.recipes, options.tune), True
    if options.recipes is not None:
        try:
            return recipes.compare(setting, options.recipes, options.rounds), True
        except FileNotFoundError as error:
            print(f"\n{setting}: skipped, {error}")
            return None, False
    if options.report:
        with precision(setting.dtype):
            print(shorthaul.report(model_of(setting), *inputs_of(setting)))
        return None, True
    if options.check:
        checked = check(
            setting.example,
            setting.batch,
            dtype=setting.dtype,
            smooth=options.smooth,
            seed=options.seed,
        )
        print_check(checked)
        return checked, not checked["beyond"]
    measured = measure(
        setting,
        options.variants,
        rounds=options.rounds,
        warmup=options.warmup,
        with_first_step=not options.no_first_step,
    )
    results.print_result(measured, str(setting))
    own = measured["variants"]["shorthaul"]
    if options.limits and setting.mode != "step" and "error" not in own:
        machine = limits.limits(setting.threads)
        found = limits.used(setting, own["median_ms"], machine)
        print(limits.sentence(found, machine))
        measured |= {"limits": machine, "used": found}
    return measured, "error" not in measured["variants"]["shorthaul"]


def _is_out_of_memory(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in said


def _compare(path, measured: list[dict]) -> None:
    try:
        old = results.read(path)
    except results.BrokenResults as error:
        print(f"\n{error}; nothing is compared")
        return
    print(f"\nsince {path}:")
    for sentence in results.changes(old, measured):
        print(f"  {sentence}")


def _print_networks() -> None:
    for example in EXAMPLES.values():
        print(f"{example.name:<20}{example.n_parameters:>14,} parameters, batch {example.batch}")
