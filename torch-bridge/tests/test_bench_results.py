"""Files of the bench: written after each network, read with care, compared, drawn as a page."""

import json
import os

import pytest
from bench_results import measured
from shorthaul import bench
from shorthaul.bench import files, stored, timing


@pytest.fixture
def quick(monkeypatch):
    """Lets ``bench.main`` measure nothing but give fixed times; calls of each name can be set."""
    instead = {}

    def measure(setting, *_, **__):
        if setting.name in instead:
            instead[setting.name]()
        return measured(setting.name, batch=setting.batch, threads=setting.threads)

    monkeypatch.setattr(bench, "measure", measure)
    return instead


def _interrupted():
    raise KeyboardInterrupt


def test_results_are_written_after_each_network(quick, tmp_path):
    path, seen = tmp_path / "new.json", []
    quick["lstm"] = lambda: seen.append(json.loads(path.read_text())["results"])
    assert bench.main(["digits_cnn", "lstm", "--json", str(path)]) == 0
    assert [r["name"] for r in seen[0]] == ["digits_cnn"]
    assert [r["name"] for r in json.loads(path.read_text())["results"]] == ["digits_cnn", "lstm"]
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_keeps_what_was_measured(quick, tmp_path, capsys):
    old, path, drawn = (tmp_path / name for name in ("old.json", "new.json", "new.html"))
    assert bench.main(["digits_cnn", "--json", str(old)]) == 0
    quick["lstm"] = _interrupted
    asked = ["digits_cnn", "lstm", "wavenet", "--json", str(path), "--html", str(drawn)]
    assert bench.main([*asked, "--compare", str(old)]) == 130
    assert [r["name"] for r in json.loads(path.read_text())["results"]] == ["digits_cnn"]
    assert "digits_cnn" in drawn.read_text()
    said = capsys.readouterr().out
    assert "stopped: 1 of 3 results are kept" in said and "no change beyond noise" in said


def test_ctrl_c_before_the_first_result_leaves_the_old_file(quick, tmp_path):
    path = tmp_path / "new.json"
    path.write_text("what was there")
    quick["lstm"] = _interrupted
    assert bench.main(["lstm", "--json", str(path)]) == 130
    assert path.read_text() == "what was there"


def test_a_file_that_cannot_be_written_in_the_end_is_said(quick, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    path = tmp_path / "new.json"
    path.write_text("what was there")
    assert bench.main(["digits_cnn", "lstm", "--json", str(path)]) == 1
    said = capsys.readouterr()
    assert f"{path} cannot be written: No space left on device" in said.err
    assert path.read_text() == "what was there" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    files.write(link, "text")
    assert link.is_symlink() and target.read_text() == "text"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, "text")
    assert os.read(reader, 99) == b"text" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_path_that_cannot_be_written_is_said_before_measuring(option, quick, tmp_path, capsys):
    quick["lstm"] = lambda: pytest.fail("this must not be measured")
    for path, said in ((tmp_path / "none" / "new", "there is no folder"), (tmp_path, "a folder")):
        assert bench.main(["lstm", option, str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"shorthaul-bench: error: {path}") and said in error


FOREIGN = ["", "[1, 2]", "{", "[" * 100_000, '{"results": 3}', '{"results": null}', "null", "\\xff"]


@pytest.mark.parametrize("text", [*FOREIGN, '{"results": []}', '{"results": [{"a": 1}, 3]}'])
def test_a_file_without_results_is_said_and_the_rest_goes_on(text, quick, tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_bytes(text.encode() if text != "\\xff" else b"\xff")
    assert bench.main(["lstm", "--compare", str(path)]) == 1
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    kind = "measurements" if text.startswith('{"results": [') else "results"
    assert line == (
        f"shorthaul-bench: {path} holds no {kind} of the bench; nothing is compared with it"
    )
    assert "lstm" in told.out and "since" not in told.out


def test_a_missing_results_file_is_said(tmp_path, capsys):
    path = tmp_path / "none.json"
    assert bench.main(["lstm", "--compare", str(path)]) == 2
    assert f"{path} cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"variants": []}, "its `variants`"),
        ({"variants": 3}, "its `variants`"),
        ({"variants": None}, "its `variants`"),
        ({"variants": {"eager": {"times_ms": [1.0]}}}, "its `variants`"),
        ({"variants": {"shorthaul": None}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": [1.0, 0.0]}}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": [1.0, float("nan")]}}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": [10**400, 1.0]}}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": ["1", "2"]}}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": 3.0}}}, "the times of shorthaul"),
        ({"variants": {"shorthaul": {"times_ms": [1.0]}, "eager": 3}}, "the times of eager"),
        (
            {"variants": {"shorthaul": {"times_ms": [1.0, 2.0]}, "eager": {"times_ms": [1.0]}}},
            "its variants have different numbers of rounds",
        ),
        ({"batch": [8]}, "its `batch`"),
        ({"threads": {"n": 2}}, "its `threads`"),
        ({"dtype": ["f32"]}, "its `dtype`"),
        ({"name": 7}, "its `name`"),
    ],
)
def test_an_odd_measurement_is_said_and_the_rest_is_compared(odd, said, quick, tmp_path, capsys):
    assert bench.main(["digits_cnn", "--json", str(tmp_path / "old.json")]) == 0
    old = json.loads((tmp_path / "old.json").read_text())
    old["results"].insert(0, measured("lstm") | odd)
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert bench.main(["digits_cnn", "lstm", "--compare", str(tmp_path / "old.json")]) == 0
    _, changes = capsys.readouterr().out.split("\nsince ")
    first, second, third = changes.splitlines()[1:]
    assert f"left out of {tmp_path / 'old.json'}, {said}" in first
    assert second.startswith("  digits_cnn, batch 64: no change beyond noise")
    assert third.endswith("not in the old file")


def test_changes_beyond_noise_are_told_from_noise():
    old = [measured()]
    fast = measured(own=(7.0, 7.1, 6.9, 7.2))
    # The whole machine is slower: nothing changed.
    slow_machine = measured(own=(20.0, 20.2, 19.8, 20.4), eager=(40.0,) * 4)
    slow = measured(own=(14.0, 14.2, 13.8, 14.4))
    assert stored.changes(old, [fast])[0].startswith("net, batch 8: faster, 0.502 of eager's")
    assert "no change beyond noise" in stored.changes(old, [slow_machine])[0]
    assert ": slower, " in stored.changes(old, [slow])[0]
    assert "not in the old file" in stored.changes(old, [measured(batch=4)])[0]
    failed = measured(variants={"shorthaul": {"error": "no kernels"}})
    assert "the new results have no rounds" in stored.changes(old, [failed])[0]
    short = measured(own=(1.0,), eager=(1.0,))
    assert "the old results have 1 round" in stored.changes([short], [fast])[0]


def test_a_change_in_milliseconds_where_eager_is_missing():
    alone = measured(own=(7.0, 7.1, 6.9, 7.2), variants={"shorthaul": timing.summary([7.0, 7.1])})
    (said,) = stored.changes([measured()], [alone])
    assert said == "net, batch 8: faster, 10.1 ms → 7.05 ms"
