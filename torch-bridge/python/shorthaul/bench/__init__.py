"""``python -m shorthaul.bench NAME...``: training steps beside PyTorch's, in one run.

Owns the order of things: which settings are measured, what is printed and written. The
measurement is in ``timing``, first steps and memory in ``alone``, processes for single networks in
``separate``, variants in ``variants``, their environment in
``environment``, the comparison with float64 in ``accuracy``, the machine's
limits in ``limits``, predictions in ``predicted``, recipes in ``recipes``, files in ``results``,
the page in ``page``. Also installed as the command ``shorthaul-bench``.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

import shorthaul

from ..models import EXAMPLES
from ..models.libraries import MissingLibrary
from . import environment, files, limits, page, predicted, recipes, results, separate, stored
from .accuracy import check, gradient_errors, print_check
from .alone import Processes, first_step, serve
from .kernels import print_profile
from .options import Setting, network, parse
from .timing import is_out_of_memory, measure
from .variants import inputs_of, model_of, precision


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench; from a command line, in the environment of ``environment``.

    The exit code is 1 if Shorthaul fails, ``--check`` finds a difference or a file of results
    cannot be used, 2 for options that cannot be followed, 130 if Ctrl-C stopped
    the run: what was measured by then is written. If a peer fails, a network does not fit into
    memory, its library is not installed or there is nothing to compare with, it prints the reason
    and continues with the rest. With ``--separate``, a network whose process the system kills
    counts as a failure of Shorthaul.
    """
    warnings.simplefilter("ignore", shorthaul.RecompileWarning)
    options = parse(arguments)
    if options.list:
        _print_networks()
        return 0
    if options.serve:
        serve()
        return 0
    if options.alone:
        print(json.dumps(first_step(options.settings[0], options.alone)))
        return 0
    try:
        old = _old_results(options.compare)
        for path in filter(None, (options.json, options.html)):
            files.check_writable(path)
    except (stored.BrokenResults, OSError) as error:
        print(f"shorthaul-bench: error: {error}", file=sys.stderr)
        return 2
    if options.page_from:
        return _page_from(options.page_from, options.html)
    if arguments is None and not options.plain_environment:
        environment.start_again()
    found: list[dict] = []
    ok = old is not None or not options.compare
    try:
        with Processes() as processes:
            for setting in options.settings:
                measured, is_good = _outcome(setting, options, processes)
                found += measured
                ok &= is_good
                if options.json and measured and files.is_replaceable(options.json):
                    ok &= _is_written(options.json, found)
    except KeyboardInterrupt:
        print(f"\nstopped: {len(found)} of {len(options.settings)} results are kept", flush=True)
        if found:
            _finish(options, found, old)
        return 130
    ok &= _finish(options, found, old)
    return 0 if ok else 1


def _old_results(path: Path | None) -> stored.Stored | None:
    """The results to compare with. Prints why, and returns ``None``, if the file holds none."""
    try:
        return stored.read(path) if path else None
    except stored.ForeignFile as error:
        print(f"shorthaul-bench: {error}; nothing is compared with it", file=sys.stderr)
        return None


def _page_from(paths: list[Path], html: Path) -> int:
    """Draws the results of files. Names those that it cannot read, and leaves them out."""
    shown: list[stored.Stored] = []
    for path in paths:
        try:
            shown.append(stored.read(path))
        except (stored.BrokenResults, OSError) as error:
            print(f"shorthaul-bench: {error}; it is left out", file=sys.stderr)
    if not shown:
        print("shorthaul-bench: error: there are no results to draw", file=sys.stderr)
        return 2
    for sentence in [sentence for file in shown for sentence in file.odd]:
        print(sentence)
    text = page.page(stored.together(shown), [file.machine for file in shown])
    return 0 if _is_written(html, text) and len(shown) == len(paths) else 1


def _finish(options: argparse.Namespace, found: list[dict], old: stored.Stored | None) -> bool:
    """Prints and writes what concerns all measurements; returns whether it could be written."""
    ok = True
    measured = [result for result in found if "variants" in result]
    results.print_mean(measured)
    recipes.print_mean(found)
    if options.predicted:
        found = found + predicted.together(found)
    if options.json:
        ok &= _is_written(options.json, found)
    if options.html:
        ok &= _is_written(options.html, page.page(measured, [results.machine()]))
    if old:
        measured_in = environment.sentence(old.machine.get("environment"))
        print(f"\nsince {options.compare}, measured {measured_in}:")
        for sentence in [*old.odd, *stored.changes(old.results, measured)]:
            print(f"  {sentence}")
    return ok


def _is_written(path: Path, content: list[dict] | str) -> bool:
    """Writes results or a page. If that fails, as on a full disk, prints why and goes on."""
    try:
        files.write(path, content if isinstance(content, str) else results.text(content))
    except OSError as error:
        print(f"\n{path} cannot be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _outcome(
    setting: Setting, options: argparse.Namespace, processes: Processes
) -> tuple[list[dict], bool]:
    """The results of one setting, and whether Shorthaul did well; a skipped one has none."""
    if options.separate:
        return separate.run(setting, options, processes)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        network(setting.name)
        result, is_good = _run(setting, options, processes)
    except MissingLibrary as error:
        print(f"\n{setting}: skipped, {error}")
        return [], True
    except ModuleNotFoundError as error:
        missing = (error.name or str(error)).partition(".")[0]
        print(f"\n{setting}: skipped, it needs the package {missing}: pip install {missing}")
        return [], True
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, shorthaul.ShorthaulError) or not is_out_of_memory(error):
            raise
        print(f"\n{setting}: skipped, it does not fit into memory")
        return [], True
    finally:
        torch.set_num_threads(n_threads)
    return [] if result is None else [result], is_good


def _run(setting: Setting, options, processes: Processes) -> tuple[dict | None, bool]:
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
        processes=None if options.no_first_step else processes,
        with_counts=options.limits and setting.mode != "step",
        seconds=options.seconds,
    )
    counted = measured.pop("counted", None)
    if options.errors:
        good = [v for v, entry in measured["variants"].items() if "error" not in entry]
        for variant, found in gradient_errors(setting, good).items():
            measured["variants"][variant]["gradient_error"] = found
    results.print_result(measured, str(setting))
    own = measured["variants"]["shorthaul"]
    if options.limits and counted is not None:
        machine = limits.limits(setting.threads)
        found = limits.used(counted, own["median_ms"], machine)
        print(limits.sentence(found, machine))
        measured |= {"limits": machine, "used": found}
    return measured, "error" not in measured["variants"]["shorthaul"]


def _print_networks() -> None:
    for example in EXAMPLES.values():
        print(f"{example.name:<20}{example.n_parameters:>14,} parameters, batch {example.batch}")
