"""The page of the bench: from results just measured, and from files of several runs."""

import json
import re
import shutil
import subprocess
from importlib import metadata

import pytest
from bench_results import measured
from shorthaul import bench
from shorthaul.bench import limits, page, results, roofline, stored, versions
from shorthaul.bench.options import parse

LIMITS = {"copy_gb_s": 10.0, "product_gflop_s": 100.0}
USED = {"bytes_least": 1e8, "of_copy": 0.5, "of_product": 0.5}


def limited(name, n_bytes, operations, **more):
    """A measurement of 10 ms with its use of the machine."""
    used = USED | {"bytes_moved": n_bytes, "operations": operations}
    return (
        measured(name, own=(10.0, 10.0, 10.0), eager=(20.0,) * 3, used=used, limits=LIMITS) | more
    )


def test_a_page_escapes_what_it_shows():
    record = {"torch": "<b>", "c_compiler": "cc 12", "logical_cpus": 2, "command": "<i>"}
    record["environment"] = {"variables": {"OMP_A": "<u>"}}
    text = page.page([limited("<script>", 1e8, 1e8)], [record])
    assert not re.search("<script>|<b>|<i>|<u>", text)
    assert "C compiler: cc 12, number of processors: 2" in text
    for escaped in ("&lt;script&gt;", "torch &lt;b&gt;", "&lt;i&gt;", "OMP_A=&lt;u&gt;"):
        assert escaped in text


def test_the_mean_is_that_of_the_best_peers():
    """The best peer has the smallest median time, which need not give the smallest ratio."""
    ratios = {
        name: {"median": ratio, "low": ratio, "high": ratio}
        for name, ratio in (("eager", 2.0), ("compile", 1.5))
    }
    text = page.page([measured() | {"ratios": ratios, "best_peer": "eager"}], [{}])
    assert "Shorthaul is 2.00 times as fast as the fastest peer" in text
    alone = measured() | {"ratios": {}, "best_peer": None}
    assert "fastest peer" not in page.page([alone], [{}])


def test_shares_of_the_limits_are_readable():
    used = {"bytes_moved": 1.21e9, "of_copy": 0.114, "operations": 1.2e12, "of_product": 0.88}
    machine = {"copy_gb_s": 34.58, "product_gflop_s": 1234.0}
    assert limits.sentence(used, machine) == (
        "moves 1.21 GB (11 % of the copy bandwidth, 34.6 GB/s); computes 1,200 GFLOP (88 % of a "
        "large matrix product's 1,234 GFLOP/s)"
    )
    assert "1,234 GFLOP/s, 9,876 in bf16)" in limits.sentence(
        used, machine | {"pair_gflop_s": 9876.0}
    )


def test_points_are_operations_per_byte_and_second():
    # 1e9 operations in 10 ms are 100 GFLOP/s.
    assert roofline.point(limited("net", 1e8, 1e9)) == pytest.approx((10.0, 100.0))
    assert roofline.point(measured()) is None
    assert roofline.roof(1.0, LIMITS) == 10.0 and roofline.roof(1000.0, LIMITS) == 100.0
    faster = {"limits": {"copy_gb_s": 12.0, "product_gflop_s": 90.0}}
    found = roofline.best_limits([limited("a", 1, 1), limited("b", 1, 1) | faster])
    assert found == {"copy_gb_s": 12.0, "product_gflop_s": 100.0}


def test_the_roof_is_drawn_on_logarithmic_axes():
    # At 1, 10 and 100 operations per byte: 10 GFLOP/s on the roof's slope, 100 at its bend, 10.
    nets = [("slope", 1e8, 1e8), ("bend", 1e8, 1e9), ("flat", 1e6, 1e8)]
    drawn = roofline.draw([limited(*net) for net in nets], lambda result: result["name"])
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    (slope, bend, flat) = [(float(x), float(y)) for x, y in circles]
    assert bend[0] - slope[0] == pytest.approx(flat[0] - bend[0], abs=0.2)
    assert slope[1] == flat[1] > bend[1]
    (line,) = re.findall(r'class="roof" d="M([^"]+)"', drawn)
    corners = [tuple(map(float, corner.split())) for corner in line.split("L")]
    assert corners == [slope, bend, (flat[0], bend[1])]
    assert "flat: 100 operations per byte, 10 GFLOP/s, 10 % of the roof" in drawn
    assert roofline.draw([measured()], str) == ""


def test_names_hide_no_points_and_no_other_names():
    nets = [("first", 1e8, 1e8), ("second", 1.001e8, 1e8), ("far", 1e6, 1e8)]
    drawn = roofline.draw([limited(*net) for net in nets], lambda result: result["name"])
    shown = re.findall(r"<text[^>]*>(first|second|far)</text>", drawn)
    # The second name finds no room to the right of the first point, but to the left.
    assert sorted(shown) == ["far", "first", "second"]
    crowd = [limited(f"net_{i}", 1e8 * (1 + i / 1000), 1e9) for i in range(9)]
    drawn = roofline.draw(crowd, lambda result: result["name"])
    assert drawn.count("<circle") == 9 and 1 <= len(re.findall(r">net_\d</text>", drawn)) < 9


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([3.0, 40.0], [2, 5, 10, 20, 50]), ([1.0], [1, 2]), ([0.3, 0.3], [0.2, 0.5]), ([7], [5, 10])],
)
def test_ticks_stand_around_the_values(values, ticks):
    assert roofline._ticks(values) == pytest.approx(ticks)


def test_limits_are_a_block_of_their_own_by_number_of_threads():
    one = {"threads": 1, "limits": {"copy_gb_s": 5.0, "product_gflop_s": 50.0}}
    again = {"limits": {"copy_gb_s": 8.0, "product_gflop_s": 80.0}}
    of = [limited("a", 1e8, 1e8), limited("b", 1e8, 1e8) | again, limited("a", 1e8, 1e8) | one]
    text = page.page(of, [{}])
    rows = re.findall(r"<tr><td>(?:copy|large).*?</tr>", text)
    cells = [re.findall("<td>(.*?)</td>", row)[1:] for row in rows]
    assert cells == [
        ["1", "5.0", "5.0"],
        ["2", "8.0", "10.0"],
        ["1", "50.0", "50.0"],
        ["2", "80.0", "100.0"],
    ]
    assert "<h3>1 thread</h3>" in text and "<h3>2 threads</h3>" in text
    assert "Limits" not in page.page([measured()], [{}])


def _file(path, *found, **machine):
    path.write_text(json.dumps({"machine": machine, "results": found}))
    return str(path)


def test_a_page_from_files_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("nothing is measured"))
    slow, fast = measured("net", own=(30.0, 30.0, 30.0)), measured("net", own=(7.0, 7.0, 7.0))
    odd = measured("odd_one") | {"variants": []}
    first = _file(tmp_path / "a.json", slow, odd, measured("other"), torch="first_version")
    second = _file(tmp_path / "b.json", fast, torch="second_version")
    drawn = tmp_path / "page.html"
    assert bench.main(["--page-from", first, second, "--html", str(drawn)]) == 0
    text = drawn.read_text()
    assert "7.00 ms" in text or "7 ms" in text
    assert "30 ms" not in text and "other, 8, f32" in text and "odd_one" not in text
    assert "first_version" in text and "second_version" in text
    assert f"odd_one, batch 8: left out of {first}" in capsys.readouterr().out


def test_a_page_from_files_needs_a_path_and_no_networks(tmp_path, capsys):
    drawn = ["--page-from", "a.json", "--html", "b"]
    for asked in (drawn[:2], ["lstm", *drawn], [*drawn, "--json", "c"], [*drawn, "--compare", "c"]):
        with pytest.raises(SystemExit):
            parse(asked)
        assert "--page-from" in capsys.readouterr().err


def test_a_file_without_results_is_left_out_of_a_page(tmp_path, capsys):
    missing, foreign = str(tmp_path / "none.json"), tmp_path / "foreign.json"
    foreign.write_text("[]")
    drawn = tmp_path / "page.html"
    good = _file(tmp_path / "good.json", measured("net"))
    assert bench.main(["--page-from", missing, good, str(foreign), "--html", str(drawn)]) == 1
    said = capsys.readouterr().err
    assert f"{missing} cannot be read" in said and f"{foreign}" in said
    assert said.count("it is left out") == 2
    assert "net, 8, f32" in drawn.read_text()
    drawn.unlink()
    assert bench.main(["--page-from", missing, "--html", str(drawn)]) == 2
    assert "there are no results to draw" in capsys.readouterr().err
    assert not drawn.exists()


def test_numbers_of_a_file_follow_from_its_times(tmp_path):
    odd = limited("net", 1e8, 1e9)
    odd["variants"]["eager"] |= {"median_ms": "fast", "iqr_ms": None, "peak_bytes": []}
    odd |= {"ratios": 3, "best_peer": ["eager"], "used": {"operations": "many"}}
    (found,) = stored.read(tmp_path / _file(tmp_path / "a.json", odd)).results
    assert found["variants"]["eager"]["median_ms"] == 20.0
    assert found["ratios"]["eager"]["median"] == 2.0 and found["best_peer"] == "eager"
    assert "peak_bytes" not in found["variants"]["eager"]
    assert "used" not in found and "limits" not in found
    assert "net, 8, f32" in page.page([found], [{"environment": 3, "torch": ["x"]}])
    (sound,) = stored.read(tmp_path / _file(tmp_path / "b.json", limited("net", 1, 2))).results
    assert sound["used"]["operations"] == 2 and sound["limits"] == LIMITS


def test_versions_of_peers_and_compiler_are_recorded(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'compiler 7.1'\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("SHORTHAUL_CC", f"'{compiler}' -O3")
    found = versions.versions()
    assert found["c_compiler"] == "compiler 7.1"
    for package in ("jax", "onnxruntime"):
        assert found[package] == metadata.version(package)
    monkeypatch.setenv("SHORTHAUL_CC", str(tmp_path / "none"))
    monkeypatch.setattr(versions, "_PACKAGES", ("no-such-package",))
    assert "c_compiler" not in versions.versions() and "no-such-package" not in versions.versions()
    assert results.machine().items() >= {"torch": found["torch"]}.items()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_that_of_a_tracked_file(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "file.py"
    file.write_text("1\n")
    git("init", "-q")
    # As of a package that is installed in a folder of another project.
    assert versions._commit(file) is None
    git("add", "file.py")
    git("commit", "-qm", "one")
    assert versions._commit(file) == git("rev-parse", "--short=12", "HEAD")
    file.write_text("2\n")
    assert versions._commit(file) == git("rev-parse", "--short=12", "HEAD") + " with changes"
