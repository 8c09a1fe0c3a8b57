"""The table of ``package_files.py``, as Markdown.

Owns its columns and sentences; every number comes from the rows.
"""

from __future__ import annotations

from same_outputs import LIKE_THEIRS, THE_SAME

#: Characters of a reason that are shown.
SHOWN = 230


def summary(rows: list[dict]) -> str:
    """One sentence with all counts."""
    runs = [row for row in rows if not row["runtime"]]
    made = [row for row in runs if not row["optimize"]]
    same = [row for row in made if row["same"] == THE_SAME]
    near = [row for row in made if row["same"] == LIKE_THEIRS]
    whole = [row for row in made if not row["dropped"]]
    fewer = [row for row in made if not _more_than_runtime(row)]
    counts = {kind: sum(not row[kind] for row in rows) for kind in ("report", "grad")}
    return (
        f"{len(rows)} files; ONNX Runtime runs {len(runs)}; of these {len(made)} are optimized and "
        f"verified. On random inputs, ONNX Runtime gives the same outputs up to rounding for "
        f"{len(same)}, and for {len(near)} others outputs within what its own optimizations "
        f"change. Of all, "
        f"{len(whole)} keep every rewrite; {len(fewer)} have no more nodes than after ONNX "
        f"Runtime's own basic optimizations. "
        f"`report` works on {counts['report']}, `grad` on {counts['grad']}"
    )


def _more_than_runtime(row: dict) -> bool:
    theirs = row["runtime_operators"]
    return theirs is not None and row["operators"][1] > theirs


def table(rows: list[dict], empty: list[str]) -> str:
    """The page."""
    lines = [
        "# ONNX files in packages of the Python package index",
        "",
        summary(rows) + ".",
        "",
        "Made by `python bench/onnx/package_files.py --shorthaul target/release/shorthaul`. The",
        "numbers of nodes are those before and after `optimize`, and after ONNX Runtime's own",
        "basic optimizations of the original. Dropped are rewrites that made a difference. Held",
        "against rounding are outputs whose difference is larger than elsewhere, and within what",
        "other roundings of the original itself change. The difference is the largest over the",
        "largest element, in ONNX Runtime without optimizations. Where it is more than rounding",
        "and at most 4 times what ONNX Runtime's own optimizations change, the second table says",
        "so.",
        "",
        "| package | file | MB | nodes | in ONNX Runtime | dropped | held against rounding |"
        " difference | seconds | report | grad |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        nodes = " → ".join(str(n) for n in row.get("operators", [])) or "–"
        difference = row["difference"]
        cells = [
            row["package"],
            row["file"],
            f"{row['bytes'] / 1e6:.1f}",
            nodes,
            str(row["runtime_operators"] or "–"),
            _number(row, "dropped"),
            _number(row, "unsettled"),
            "–" if difference is None else f"{difference:.1e}",
            str(row["seconds"]),
            "no" if row["report"] else "yes",
            "no" if row["grad"] else "yes",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += _reasons(rows)
    if empty:
        lines += ["", "Packages without a file: " + ", ".join(empty) + "."]
    return "\n".join(lines) + "\n"


def _number(row: dict, kind: str) -> str:
    return "–" if row["optimize"] else str(len(row[kind]))


def _reasons(rows: list[dict]) -> list[str]:
    lines = ["", "## What stands in the way", ""]
    lines += ["| file | step | what it says |", "|---|---|---|"]
    titles = {
        "runtime": "ONNX Runtime",
        "check": "check",
        "info": "info",
        "optimize": "optimize",
        "same": "outputs in ONNX Runtime",
        "diff": "diff",
        "report": "report",
        "grad": "grad",
    }
    for row in rows:
        name = f"{row['package'].split()[0]}/{row['file']}"
        for kind, title in titles.items():
            said = row.get(kind, "")
            if said and not (kind == "same" and said == THE_SAME):
                lines.append(f"| {name} | {title} | {_shown(said)} |")
        lines += [f"| {name} | dropped | {_shown(said)} |" for said in row.get("dropped", [])]
        lines += [f"| {name} | left out | {_shown(said)} |" for said in row.get("left_out", [])]
    return lines


def _shown(said: str) -> str:
    text = " ".join(said.split()).replace("|", "\\|").removeprefix("error: ")
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
