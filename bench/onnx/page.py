"""The comparison as a Markdown page.

Owns tables and wording; takes the document that ``compare.py`` made and measures nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

MIB = 1024.0**2

GROUPS = {
    "light": "Light networks of the `onnx` package",
    "trained": "Networks that Shorthaul trains, exported with symbolic dimensions",
    "exported": "Networks of torchvision and transformers with random weights",
    "hard": "Small hard files",
    "big": "A large file",
}

EXPLANATION = """\
**Nodes** are counted in the graph, in the bodies of control flow and in functions, without
`Constant` nodes, which hold data. After a plus stand nodes that compute from constants alone: a
runtime runs them once, on loading, and a file may be far smaller with them than with their results.
**Verified** means that ONNX Runtime, with its optimizations off, gives the same outputs for the
original and for the written file: two settings of the symbolic dimensions with two seeds each, and
other values for initializers that are inputs too. Floats may differ by 10⁻⁴ of an output's largest
value (half precision 2·10⁻², double 10⁻¹⁰), everything else must be equal. **NaN** is one more run
with NaN, infinities, −0 and very large and small numbers planted in the inputs. **Kept** are names,
order, types and dimensions of inputs and outputs, operator sets, metadata and the doc string. What
ONNX Runtime cannot run is run by the `onnx` package's reference evaluator.
"""

MARKS = """\
**Bold**: the fewest nodes among the verified files of a tool and its rivals. ✗: the outputs differ,
or it does not run. ∞: only the run with NaN and infinities differs. ~: something of the interface
is not kept.
"""


def render(document: dict) -> str:
    """The whole page."""
    names = [tool["name"] for tool in document["tools"]]
    files = document["files"]
    parts = [
        "# ONNX optimizers side by side",
        _conditions(document),
        EXPLANATION,
        "## In all",
        _summary(names, files),
        "## Nodes",
        MARKS,
    ]
    for group, title in GROUPS.items():
        members = [file for file in files if file["group"] == group]
        if members:
            parts += [f"### {title}", _nodes_table(names, members)]
    parts += ["## File size", "As a factor of the original's, with its external data."]
    parts += [_factors_table(names, files, "MiB", _size_row)]
    if any("models" in file.get("timing", {}) for file in files):
        parts += ["## Time in ONNX Runtime", _timing_words()]
        parts += [_factors_table(["again", *names], files, "ms", _timing_row)]
        parts += [_slower(files)]
    parts += ["## The optimizer's own time and memory", "Seconds and peak MiB of its process."]
    parts += [_table(["file", *names], (_cost_row(file, names) for file in files))]
    parts += ["## What went wrong", _failures(names, files)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _conditions(document: dict) -> str:
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["```sh", document["command"], "```", ""]
    lines.append(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}.")
    lines.append(f"Python {machine['python']}, {versions}. The optimizers:")
    lines.append("")
    for tool in document["tools"]:
        lines.append(f"- {tool['name']} {tool['version']}: `{tool['command']}`")
    lines += [f"- left out: {sentence}" for sentence in document["missing"]]
    return "\n".join(lines)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" if i == 0 else "---:" for i in range(len(head)))]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def nodes(facts: dict) -> int:
    """Nodes that work on what is fed in."""
    return facts["nodes"] - facts["constants"] - facts["generated"]


def _count(facts: dict) -> str:
    """Nodes, and after a plus those that make constants."""
    made = facts["generated"]
    return f"{nodes(facts)} + {made}" if made else str(nodes(facts))


def _is_right(tool: dict) -> bool:
    """Whether the tool wrote a file with the same numbers."""
    return tool["outcome"] == "ok" and tool["verified"] is not False


def fewest(file: dict, name: str) -> int | None:
    """The fewest nodes that a tool or its rivals got to with the same numbers.

    Two targets of one program are no rivals: operators of one runtime only need fewer nodes.
    """
    program = name.split()[0]
    tools = file["tools"].items()
    rivals = [tool for other, tool in tools if other == name or other.split()[0] != program]
    return min((nodes(tool) for tool in rivals if _is_right(tool)), default=None)


def _summary(names: list[str], files: list[dict]) -> str:
    networks = [file for file in files if file["group"] not in ("light", "hard")]
    light = [file for file in files if file["group"] == "light"]
    rows = [
        ["files written", *_per_tool(names, files, lambda tool: tool["outcome"] == "ok")],
        ["verified", *_per_tool(names, files, lambda tool: tool.get("verified"))],
        ["– with NaN too", *_per_tool(names, files, _is_right_with_nan)],
        ["kept", *_per_tool(names, files, lambda t: t["outcome"] == "ok" and not t["changes"])],
        ["fewest nodes, verified", *(_count_fewest(name, files) for name in names)],
        ["nodes left", *(_mean(name, files, _node_factor) for name in names)],
        ["– with those on constants", *(_mean(name, files, _all_nodes_factor) for name in names)],
        ["file size", *(_mean(name, networks, _size_factor) for name in names)],
        ["– light networks", *(_mean(name, light, _size_factor) for name in names)],
        ["largest growth", *(_largest(name, files, _size_factor) for name in names)],
    ]
    if any("models" in file.get("timing", {}) for file in files):
        convolutional = [file for file in files if file["convolutional"]]
        rows += [
            ["time in ONNX Runtime", *(_mean(name, files, _time_factor) for name in names)],
            ["– convolutional", *(_mean(name, convolutional, _time_factor) for name in names)],
            ["– slowest", *(_largest(name, files, _time_factor) for name in names)],
        ]
    rows += [
        ["own time, all files", *(_total_seconds(name, files) for name in names)],
        ["largest peak memory", *(_largest_peak(name, files) for name in names)],
    ]
    head = [f"of {len(files)} files", *names]
    note = (
        "Nodes, sizes and times are geometric means of factors of the original's, over the files "
        "that the optimizer wrote and that were verified; file size is that of the exported "
        "networks."
    )
    return f"{_table(head, rows)}\n\n{note}"


def _is_right_with_nan(tool: dict) -> bool:
    return bool(tool.get("verified") and tool.get("planted_same"))


def _per_tool(names: list[str], files: list[dict], holds: Callable[[dict], object]) -> list[str]:
    return [str(sum(bool(holds(file["tools"][name])) for file in files)) for name in names]


def _count_fewest(name: str, files: list[dict]) -> str:
    tools = [(file["tools"][name], fewest(file, name)) for file in files]
    return str(sum(_is_right(tool) and nodes(tool) == least for tool, least in tools))


def _node_factor(file: dict, name: str) -> float | None:
    tool = file["tools"][name]
    return max(nodes(tool), 1) / max(nodes(file["original"]), 1) if _is_right(tool) else None


def _all_nodes_factor(file: dict, name: str) -> float | None:
    tool, original = file["tools"][name], file["original"]
    if not _is_right(tool):
        return None
    return max(tool["nodes"] - tool["constants"], 1) / (original["nodes"] - original["constants"])


def _size_factor(file: dict, name: str) -> float | None:
    tool = file["tools"][name]
    return tool["bytes"] / file["original"]["bytes"] if _is_right(tool) else None


def _time_factor(file: dict, name: str) -> float | None:
    timed = file.get("timing", {}).get("models", {}).get(name)
    known = file["tools"].get(name)
    if timed is None or (known is not None and not _is_right(known)):
        return None
    return timed["ratio"]


def _factors(name: str, files: list[dict], factor: Callable) -> list[tuple[float, str]]:
    found = [(factor(file, name), file["name"]) for file in files]
    return [(value, where) for value, where in found if value is not None]


def _mean(name: str, files: list[dict], factor: Callable) -> str:
    values = [value for value, _ in _factors(name, files, factor)]
    if not values:
        return "–"
    return f"{math.exp(statistics.fmean(math.log(value) for value in values)):.3f}"


def _largest(name: str, files: list[dict], factor: Callable) -> str:
    value, where = max(_factors(name, files, factor), default=(None, ""))
    return "–" if value is None else f"{_factor_text(value)} ({where})"


def _factor_text(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.0f}"


def _total_seconds(name: str, files: list[dict]) -> str:
    return f"{sum(file['tools'][name]['seconds'] for file in files):.0f} s"


def _largest_peak(name: str, files: list[dict]) -> str:
    peak = max(file["tools"][name]["peak_bytes"] for file in files)
    return f"{peak / MIB:,.0f} MiB"


def _nodes_table(names: list[str], files: list[dict]) -> str:
    rows = []
    for file in files:
        cells = [_nodes_cell(file["tools"][name], fewest(file, name)) for name in names]
        rows.append([file["name"], _count(file["original"]), *cells])
    return _table(["file", "original", *names], rows)


def _nodes_cell(tool: dict, least: int | None) -> str:
    if tool["outcome"] != "ok":
        return tool["outcome"]
    count = _count(tool)
    text = f"**{count}**" if _is_right(tool) and nodes(tool) == least else count
    if tool["verified"] is None:
        text += " ?"
    elif not tool["verified"]:
        text += " ✗"
    elif not tool["planted_same"]:
        text += " ∞"
    return text + (" ~" if tool["changes"] else "")


def _factors_table(names: list[str], files: list[dict], unit: str, row: Callable) -> str:
    rows = [cells for cells in (row(file, names) for file in files) if cells]
    return _table(["file", f"original, {unit}", *names], rows)


def _size_row(file: dict, names: list[str]) -> list[str]:
    factors = [_size_factor(file, name) for name in names]
    cells = ["–" if value is None else _factor_text(value) for value in factors]
    return [file["name"], f"{file['original']['bytes'] / MIB:.3f}", *cells]


def _timing_words() -> str:
    return (
        "With all of its optimizations on, on the CPU with 2 threads and the first setting of the "
        "dimensions: milliseconds of the original, then factors of it, medians over 15 rounds in "
        "one process in which all files take turns. *again* is the original a second time: what "
        "differs from 1 there is noise."
    )


def _slower(files: list[dict]) -> str:
    """Files that take more than 1.02 of the original's time, and those not decided."""
    lines = [
        "Where ours may be slower than 1.02 of the original, further rounds in new sessions follow "
        "until the 95 % interval of the median ratio to the mean of the original's two copies "
        "decides or time is up:",
        "",
    ]
    n_decided = 0
    for file in files:
        for name, timed in file.get("timing", {}).get("models", {}).items():
            if not name.startswith("shorthaul") or "verdict" not in timed:
                continue
            n_decided += timed["verdict"] == "not slower"
            if timed["verdict"] != "not slower":
                low, high = timed["interval"]
                words = f"{low:.3f} to {high:.3f} in {timed['n_rounds']} rounds"
                lines.append(f"- {timed['verdict']}: {file['name']}, {name}, {words}")
    return "\n".join([*lines, f"- not slower: {n_decided} others"])


def _timing_row(file: dict, names: list[str]) -> list[str]:
    models = file.get("timing", {}).get("models", {})
    if "original" not in models:
        return []
    factors = [_time_factor(file, name) for name in names]
    cells = ["–" if value is None else f"{value:.3f}" for value in factors]
    return [file["name"], f"{models['original']['ms']:.3f}", *cells]


def _cost_row(file: dict, names: list[str]) -> list[str]:
    tools = [file["tools"][name] for name in names]
    return [file["name"], *(f"{t['seconds']:.1f} / {t['peak_bytes'] / MIB:,.0f}" for t in tools)]


def _failures(names: list[str], files: list[dict]) -> str:
    lines = []
    for name in names:
        lines += ["", f"**{name}**", ""]
        for file in files:
            tool = file["tools"][name]
            lines += [f"- {file['name']}: {sentence}" for sentence in _sentences(tool)]
    return "\n".join(lines)


def _sentences(tool: dict) -> Iterable[str]:
    if tool["outcome"] != "ok":
        words = tool.get("messages", "").strip().splitlines()
        yield f"{tool['outcome']}: {_code(words[-1])}" if words else tool["outcome"]
        return
    if tool["invalid"]:
        yield f"not valid ONNX: {_code(tool['invalid'])}"
    for reason in tool.get("reasons", [])[:2]:
        yield _code(reason)
    if tool["changes"]:
        yield "; ".join(tool["changes"])


def _code(words: str) -> str:
    """A tool's own words on one line, so that nothing in them is taken for Markdown."""
    one_line = " ".join(words.replace("`", "'").split())
    return f"`{one_line[:200]}`"
