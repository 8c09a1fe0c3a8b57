"""Operators that the documentation calls differentiated have gradients compared with PyTorch's."""

import re
from pathlib import Path

import test_onnx_grad_composite_operators
import test_onnx_grad_more_operators
import test_onnx_grad_operators

PAGE = Path(__file__).parents[2] / "docs" / "src" / "onnx-coverage.md"

#: Operators whose gradients are compared in files of their own.
ELSEWHERE = {"LSTM", "GRU", "RNN", "Loop", "Scan", "If"}

#: Its results are random.
WITHOUT_A_REFERENCE = {"Bernoulli"}


def differentiated():
    """Operators of which the page counts cases in the column that says so."""
    rows = (line.strip("|").split("|") for line in PAGE.read_text().splitlines() if "|" in line)
    rows = [[cell.strip() for cell in row] for row in rows]
    column = next(row.index("differentiated") for row in rows if "differentiated" in row)
    counted = (row for row in rows if len(row) > column and re.match(r"\d+/\d+$", row[column]))
    return {row[0] for row in counted} - {"several operators"}


def compared():
    found = {row.values[0] for row in test_onnx_grad_operators.CASES}
    for module in (test_onnx_grad_more_operators, test_onnx_grad_composite_operators):
        for row in module.CASES:
            found |= {"".join(name) for name in re.findall(r"= ([\w.]+) *(?:<|\()", row.values[0])}
    return found


def test_every_differentiated_operator_is_compared():
    wanted = differentiated()
    assert len(wanted) > 100
    assert wanted - compared() == ELSEWHERE & wanted | WITHOUT_A_REFERENCE
