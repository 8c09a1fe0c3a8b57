"""Writes the seeds of the fuzz targets: models and texts that this repository's own tests use.

Run `python tests/fuzz/seeds.py`; it needs no package. Models are the files of the program's and the
importer's tests, and those inside of `importer/tests/data/*.cases` (`generate.py` beside these says
how they are stored). Each target gets its own copies, in `tests/fuzz/corpus/TARGET`, which it adds
to. Seeds of more than 8 KiB are left out: mutations of short ones find more.
"""

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODELS = ("cli/tests/data/*.onnx", "importer/tests/data/bad_files/*.onnx")
TARGETS = {"models": ("onnx_reader", "importer", "checker"), "texts": ("graph_text",)}
MOST_BYTES = 8 << 10


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes):
    """Number and bytes of each field of a message; all of these have a length."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        length, at = varint(data, at)
        yield key >> 3, data[at : at + length]
        at += length


def models():
    """Every model of the tests."""
    for pattern in MODELS:
        for path in sorted(ROOT.glob(pattern)):
            yield path.read_bytes()
    for path in sorted((ROOT / "importer/tests/data").glob("*.cases")):
        for _, case in fields(path.read_bytes()):
            yield dict(fields(case))[2]


def main() -> None:
    """Writes each seed under the hash of its content."""
    texts = [path.read_bytes() for path in sorted((ROOT / "graph/tests/texts").iterdir())]
    for kind, seeds in {"models": list(models()), "texts": texts}.items():
        kept = [seed for seed in seeds if len(seed) <= MOST_BYTES]
        for target in TARGETS[kind]:
            folder = HERE / "corpus" / target
            folder.mkdir(parents=True, exist_ok=True)
            for seed in kept:
                (folder / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
            print(f"{target}: {len(set(kept))} seeds")


if __name__ == "__main__":
    main()
