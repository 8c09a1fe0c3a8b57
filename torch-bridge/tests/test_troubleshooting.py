"""The troubleshooting page has an entry for each message, and each message of it is in the code."""

import ast
import re

import pytest
import shorthaul
from documents import ROOT
from shorthaul.onnx import OnnxError

PAGE = (ROOT / "docs/src/troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "torch-bridge/python/shorthaul"

CLASSES = [OnnxError.__name__] + [
    name
    for name in shorthaul.__all__
    if isinstance(getattr(shorthaul, name), type)
    and issubclass(getattr(shorthaul, name), (Exception, Warning))
]

#: Errors whose messages a user sees as they are, those of the bench included.
RAISED = {*CLASSES, "BrokenResults", "MissingLibrary", "RuntimeError", "FileNotFoundError"}
RAISED |= {"IsADirectoryError", "PermissionError"}

#: Errors of Rust that a user of the package or of the program meets. What the others say is wrapped
#: in one of these, is an internal error, or is the reason in a report.
RUST = (
    *("autodiff/src/error.rs", "compiler/src/error.rs", "compiler/src/recipe.rs"),
    *("importer/src/onnx/error.rs", "kernels/src/toolchain.rs", "kernels/src/features.rs"),
    *("kernels/src/cache/mod.rs", "kernels/cuda/src/error.rs", "kernels/cuda/src/nvrtc.rs"),
    *("onnx/src/file/mod.rs", "onnx/src/file/write.rs", "onnx/src/optimize.rs"),
    *("onnx/src/ort.rs", "onnx/src/verify/mod.rs", "onnx/src/set_shape.rs"),
    *(f"onnx/src/edit/{name}.rs" for name in ("extract", "free", "halve", "raise")),
    *("onnx/src/edit/rename.rs", "onnx/src/edit/request.rs", "onnx/src/rewrite/inline_all.rs"),
    *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "cli/src").glob("*.rs"))),
)

#: Messages without an entry, with the reason.
WITHOUT_ENTRY = {
    "only for code that calls the crates, since the package and the program pass these": (
        *("the program takes … buffers", "… needs … bytes, none were given"),
        *("… must start at a multiple of … bytes", "a kernel cannot be timed alone"),
        *("the kernels were compiled for", "… is in memory of"),
        *(
            "… has loops or branches, which cannot be differentiated",
            "already holds backward nodes",
        ),
        *("functions of a file keep their versions", "the compilation was interrupted"),
        "which are not converted to half precision; inline them first",
    ),
    "names the option and what it takes": (
        *("name the ONNX file to optimize", "name the file to write", "gives … twice"),
        *("--time-limit is longer than", "cannot write the file to standard output"),
        *("standard output, which gets the summary", "with --measure, ONNX Runtime reads"),
        *(
            "the names of input … are given twice",
            "… would stand for … and for",
            "the name … is taken",
        ),
        *("version … of the operators is not known", "could stay in f32"),
        "this program was built without tract",
    ),
    "the first line of an error whose cause follows": (
        *("cannot compare", "cannot plan", "cannot lower", "cannot make a training graph of"),
        *("cannot print the result", "cannot time the files in ONNX Runtime"),
        *("the file has no graph", "cannot tell which input"),
    ),
    "tract's, in a program that one built with it": (
        *("tract cannot take", "cannot read tract's result"),
    ),
}


def entries():
    """The messages of the page: the code in the first cells of its rows, without class names."""
    for row in re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE):
        for long, short in re.findall(r"`` (.*?) ``|`([^`]*)`", row):
            if (long or short) not in CLASSES and not re.fullmatch(r"\w+Error", long or short):
                yield long or short


ENTRIES = list(entries())


def flat(text):
    """Text of sources without line ends, quotes and placeholders, so that messages can be found."""
    text = re.sub(r"\\\n\s*|\"\s*\n\s*f?\"|'\s*\n\s*f?'", "", text)
    return re.sub(r"[`'\"\\]", "", text)


def pieces(message):
    """What a message says between its placeholders."""
    return [piece for part in message.split("…") if (piece := flat(part).strip(" ;:,.()"))]


def is_telling(message):
    """Whether a message says something besides what is put into it."""
    return sum(map(len, pieces(message))) > 8


def has_entry(message, known):
    """Whether all that one of the known messages says is in this one, in order."""
    for entry in known:
        if re.search(".*?".join(map(re.escape, pieces(entry))), flat(message), re.DOTALL):
            return True
    return False


def literal(node):
    """A text in Python's source, with `…` for what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return "…"


def messages_of_python():
    """Messages of errors and warnings of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call, known = node.exc, ast.unparse(node.exc.func) in RAISED
            elif isinstance(node, ast.Call):
                call, known = node, ast.unparse(node.func) == "warnings.warn"
            else:
                continue
            message = literal(call.args[0]) if call.args else ""
            if known and is_telling(message):
                place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                yield pytest.param(message, id=f"{place}: {message[:50]}")


def messages_of_rust():
    """Messages of the enums in ``RUST``, and what the program adds."""
    text = r'\(\s*"((?:[^"\\]|\\.)*)"'
    kinds = r"#\[error|bail!|anyhow!|\.context|\.with_context\(\|\| format!"
    for name in RUST:
        source = (ROOT / name).read_text(encoding="utf-8")
        for found in re.finditer(f"(?:{kinds}){text}", source, re.DOTALL):
            message = re.sub(r"\{[^}]*\}", "…", re.sub(r"\\\n\s*", "", found[1]))
            if is_telling(message):
                line = source.count("\n", 0, found.start()) + 1
                yield pytest.param(message, id=f"{name}:{line}: {message[:50]}")


def test_there_are_entries():
    assert len(ENTRIES) > 80


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_on_the_page(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("message", [*messages_of_python(), *messages_of_rust()])
def test_every_message_has_an_entry(message):
    without = [known for group in WITHOUT_ENTRY.values() for known in group]
    assert has_entry(message, ENTRIES) or has_entry(message, without), message


@pytest.mark.parametrize("message", [p for p in messages_of_rust() if not p.id.startswith("cli/")])
def test_messages_that_the_package_shares_name_no_option_of_the_program(message):
    assert not re.search(r"(?<![\w-])--[a-z]", message)


@pytest.mark.parametrize("known", [m for group in WITHOUT_ENTRY.values() for m in group])
def test_messages_without_an_entry_exist(known):
    assert any(has_entry(p.values[0], [known]) for p in messages_of_rust())


def _sources():
    folders = ("torch-bridge/python", "torch-bridge/src", "kernels", "onnx", "importer", "cli")
    folders += ("compiler", "autodiff")
    for folder in folders:
        for kind in ("*.py", "*.rs"):
            yield from (p for p in (ROOT / folder).rglob(kind) if "target" not in p.parts)


def test_messages_of_the_page_exist():
    """Each piece of a message between placeholders is somewhere in the sources."""
    everything = "\n".join(flat(p.read_text(encoding="utf-8")) for p in _sources())
    missing = [
        piece
        for entry in ENTRIES
        for piece in pieces(entry)
        if len(piece) > 8 and piece not in everything
    ]
    assert not missing
