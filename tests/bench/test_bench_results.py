"""Committed results: pages and charts match their JSON files, and claims are compared."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from vtoken_bench import client_report, main
from vtoken_bench.charts import Bars, Chart, Line, Panel, digest, draw, file_names, source_of
from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.command import EXPERIMENTS
from vtoken_bench.evaluation.curve import MEMORY
from vtoken_bench.evaluation.points import Run, stamp
from vtoken_bench.log import Entry
from vtoken_bench.output import (
    CLAIMS,
    KEPT,
    LOADS,
    PAGES,
    SECTION,
    WITH_LOADS,
    Result,
    Table,
    commit_of,
    fill_in,
    new_result,
    publish,
    read,
)

ROOT = Path(__file__).parents[2]
PUBLISHED_LOADS = ROOT / "docs" / KEPT / LOADS

PAGE = (
    "# Results\n\n<!-- bench:planner -->\nold\n<!-- /bench -->\n"
    "\n<!-- bench:none -->\n<!-- /bench -->\n"
)


def stale(root: Path) -> list[str]:
    """Sections, claims and charts below `root` that differ from their JSON, sections without."""
    found, sections, shown = [], set(), set()
    for page in PAGES:
        text = (root / page).read_text()
        sections |= {match[2] for match in SECTION.finditer(text)}
        found += [
            f"{page}, claims"
            for match in CLAIMS.finditer(text)
            if fill_in(match[0], root / page.parent / KEPT)[0] != match[0]
        ]
        for match in SECTION.finditer(text):
            now, filled, _ = fill_in(match[0], root / page.parent / KEPT)
            shown |= set(filled)
            if now != match[0]:
                found.append(f"{page}, {match[2]}")
    kept = root / PAGES[0].parent / KEPT
    drawn = {path.name for path in kept.glob("*.svg")}
    for path in sorted(kept.glob("*.json")):
        if path.stem not in shown:
            found.append(f"{path.name} has no section")
        for file, chart in file_names(path.stem, read(path).charts).items():
            if file not in drawn or source_of(kept / file) != digest(chart):
                found.append(file)
            drawn.discard(file)
    found += [f"{file} belongs to no chart" for file in sorted(drawn)]
    return found + sorted(sections - shown)


def test_pages_and_charts_are_those_of_the_json_files() -> None:
    """`vtoken bench results` updates them."""
    assert stale(ROOT) == []


def some_result(bench: str = "planner", commit: str = "abc1234") -> Result:
    line = Line("a", [1, 64], [2.0, 3.0], [1.5, 2.5], [2.5, 3.5])
    result = Result(bench, f"make bench-{bench}", {"steps": 1}, [Table("T", ["a"], [["x"], [1.5]])])
    result.machine = {"cpu": "c", "python": "3", "versions": {}}
    result.started, result.commit = "2026-01-02 00:00:00 UTC", commit
    result.raw = ["all measurements"]
    result.charts = [
        Chart("Cost", [Panel("P", "x", "y", lines=[line], x_scale="log")]),
        Chart("Other", [Panel("P", "x", "y", lines=[line])], part="other"),
    ]
    return result


def save(result: Result, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return path


def published(root: Path) -> Path:
    """Make a checkout with one published result; return the folder of its JSON."""
    pytest.importorskip("matplotlib")
    (root / "docs").mkdir()
    for page in PAGES:
        (root / page).write_text("# Page\n")
    page = root / PAGES[0]
    page.write_text(PAGE)
    save(some_result(), root / ".bench" / "planner.json")
    assert main(["results", "--folder", str(root / ".bench"), "--file", str(page)]) == 0
    return root / "docs" / KEPT


def test_results_copies_the_json_draws_its_charts_and_shows_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = published(tmp_path)
    assert "none: no " in capsys.readouterr().err
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["planner-other.svg", "planner.json", "planner.svg"]
    text = (tmp_path / PAGES[0]).read_text()
    assert "![Cost](results/planner.svg)\n\n![Other](results/planner-other.svg)\n\n**T**" in text
    assert stale(tmp_path) == ["none"]
    assert read(tmp_path / ".bench" / "planner.json").raw == ["all measurements"]
    assert read(kept / "planner.json").raw is None


def test_loads_of_the_newest_code_are_published_without_numbers_of_requests(tmp_path: Path) -> None:
    loads = [
        {
            "key": {"repeat": repeat, "code": code},
            "value": {"tokens": 9, "requests": [[0, 1]], "endpoint": "ipc:"},
        }
        for repeat, code in ((0, "older"), (0, "new"), (1, "new"))
    ]
    runs, page = tmp_path / ".bench", tmp_path / "docs" / "results.md"
    save(some_result("evaluation-curve"), runs / "evaluation-curve.json")
    log = runs / "evaluation" / "curve.jsonl"
    log.parent.mkdir()
    log.write_bytes(msgspec.json.Encoder().encode_lines(loads))
    page.parent.mkdir()
    page.write_text("<!-- bench:evaluation-curve -->\n<!-- /bench -->\n")
    publish([page], runs)
    copies = (page.parent / KEPT / LOADS / "curve.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line) for line in copies] == [
        load | {"value": {"tokens": 9}} for load in loads[1:]
    ]


REPORTS = {
    "evaluation-causes": EXPERIMENTS["causes"].report,
    "evaluation-curve": EXPERIMENTS["curve"].report,
    "evaluation-floors": EXPERIMENTS["floors"].report,
    "evaluation-loss": EXPERIMENTS["loss"].report,
    "evaluation-pressure": EXPERIMENTS["pressure"].report,
    "client": partial(client_report.report, memory=MEMORY),
}


def test_every_published_load_is_reported() -> None:
    names = {path.stem for path in PUBLISHED_LOADS.glob("*.jsonl")}
    assert names == {name.removeprefix("evaluation-") for name in REPORTS} == {*WITH_LOADS}


@pytest.mark.parametrize("name", REPORTS)
def test_published_loads_give_the_published_result(name: str) -> None:
    path = PUBLISHED_LOADS / f"{name.removeprefix('evaluation-')}.jsonl"
    published = read(PUBLISHED_LOADS.parent / f"{name}.json")
    loads = [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
    result = Result(published.bench, published.command, {}, [])
    of_model: dict[str, list[Run]] = {}
    for load in loads:
        key = load.key
        run = Run(key["labels"], key["repeat"], load.value, load.seconds, load.at, load.commit)
        of_model.setdefault(key["engine"]["model"], []).append(run)
    # By place: the client names its model by the folder.
    for (model, when), runs in zip(published.measured.items(), of_model.values(), strict=True):
        REPORTS[name](result, model, runs)
        assert when == stamp(runs)
    assert result.claims == published.claims
    assert result.sentences == published.sentences
    assert msgspec.to_builtins(result.tables) == msgspec.to_builtins(published.tables)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"1.5", b"1.6", ["docs/results.md, planner", "planner.svg", "planner-other.svg"]),
        (b"3.5", b"3.6", ["planner.svg", "planner-other.svg"]),
        (b"abc1234", b"abc1235", ["docs/results.md, planner"]),
    ],
)
def test_a_number_changed_in_the_json_makes_page_or_chart_stale(
    tmp_path: Path, old: bytes, new: bytes, expected: list[str]
) -> None:
    path = published(tmp_path) / "planner.json"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    assert stale(tmp_path) == [*expected, "none"]


def test_files_that_no_page_shows_are_named(tmp_path: Path) -> None:
    kept = published(tmp_path)
    save(Result("memory", "", {}, []), kept / "memory.json")
    shutil.copyfile(kept / "planner.svg", kept / "gone.svg")
    assert stale(tmp_path) == [
        "memory.json has no section", "gone.svg belongs to no chart", "none"
    ]  # fmt: skip


def test_a_newer_result_in_the_repository_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = published(tmp_path)
    old = some_result(commit="0000000")
    old.started = "2026-01-01 00:00:00 UTC"
    save(old, tmp_path / ".bench" / "planner.json")
    arguments = ["--folder", str(tmp_path / ".bench"), "--file", str(tmp_path / PAGES[0])]
    assert main(["results", *arguments]) == 0
    assert "is older than" in capsys.readouterr().err
    assert read(kept / "planner.json").commit == "abc1234"


# ---------------------------------------------------------------- charts


def test_a_chart_is_drawn_reproducibly_with_its_source(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars = [
        Bars("a", [1.0, None], [0.5, None], [1.5, None]),
        Bars("b", [2.0, 3.0], [1.0, 2.0], [2.5, 3.5]),
    ]
    lines = [Line("b", [1, 64], [1.0, 2.0]), Line("bound", [1], [1.5], reference=True)]
    panels = [
        Panel("Bars", "model", "ms", bars=bars, groups=["one", "two"]),
        Panel("Lines", "requests", "µs", lines=lines, x_scale="log", y_scale="log"),
    ]
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw(Chart("Cost", panels * 2), path, source="0123")
    one, two = (path.read_text() for path in paths)
    assert one == two
    assert source_of(paths[0]) == "0123"
    assert all(f">{text}<" in one for text in ("a", "b", "bound", "Bars", "64", "two", "Cost"))
    # A name has one colour in bars and lines: here the second bars and the line of a panel each.
    assert one.count("#ff7f0e") >= 3


def test_a_chart_has_the_same_digest_after_its_file() -> None:
    chart = some_result().charts[0]
    again = msgspec.json.decode(msgspec.json.encode(chart), type=Chart)
    assert digest(again) == digest(chart)
    again.panels[0].lines[0].y[0] += 1e-9
    assert digest(again) != digest(chart)


def test_two_charts_do_not_share_a_file() -> None:
    with pytest.raises(ValueError, match="2 charts, but only 1 different parts"):
        file_names("planner", [Chart("A", []), Chart("B", [])])


# ---------------------------------------------------------------- the commit


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_the_packages_and_marks_uncommitted_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("")
    assert commit_of(package) == ""
    git(tmp_path, "init")
    assert commit_of(package) == ""  # in a checkout that does not track it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "beside.py").write_text("")
    (package / "untracked.py").write_text("")
    assert commit_of(package) == commit
    source.write_text("1\n")
    assert commit_of(package) == f"{commit}+"
    git(tmp_path, "add", "package/__init__.py")
    assert commit_of(package) == f"{commit}+"


def test_a_change_of_any_package_marks_the_commit(tmp_path: Path) -> None:
    measured, benchmarks = tmp_path / "measured", tmp_path / "benchmarks"
    for package in (measured, benchmarks):
        package.mkdir()
        (package / "__init__.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = commit_of(measured, benchmarks)
    (benchmarks / "__init__.py").write_text("1\n")
    assert commit_of(measured, benchmarks) == f"{commit}+"
    assert commit_of(measured) == commit


def test_a_new_result_records_its_commit() -> None:
    assert new_result("planner", "", {}).commit == commit_of(
        ROOT / "vtoken", ROOT / "bench/vtoken_bench"
    )


# ---------------------------------------------------------------- claims


def claim(what: str, value: float, spread: float = 1.0, unit: str = "%") -> Claim:
    return Claim("Memory", what, "demo", value, value - spread, value + spread, unit, 5)


def with_claims(path: Path, *claims: Claim) -> Path:
    result = some_result()
    result.claims = list(claims)
    return save(result, path)


@pytest.mark.parametrize(
    ("new", "verdict", "code"),
    [
        (claim("fewer blocks", 31.5), "reproduced", 0),
        (claim("fewer blocks", 32.1), "differs", 1),
        (claim("fewer blocks", 27.9), "differs", 1),
        (claim("fewer blocks", 30.0, unit="blocks"), "differs", 1),
        (claim("fewer requests", 30.0), "only in old", 2),
    ],
)
def test_a_claim_is_reproduced_when_the_ranges_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new: Claim, verdict: str, code: int
) -> None:
    old = with_claims(tmp_path / "old" / "memory.json", claim("fewer blocks", 30.0))
    file = with_claims(tmp_path / "new" / "memory.json", new)
    assert main(["compare", str(old.parent), str(file)]) == code
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "Memory: fewer blocks" in line]
    assert "30 [29 .. 31] %" in line
    assert line.endswith(verdict)


def test_a_page_has_the_claims_of_a_page_after_it(tmp_path: Path) -> None:
    first, second = tmp_path / "docs" / "first.md", tmp_path / "docs" / "second.md"
    first.parent.mkdir()
    first.write_text("<!-- claims all -->\n<!-- /claims -->\n")
    second.write_text("<!-- bench:memory -->\n<!-- /bench -->\n")
    with_claims(tmp_path / "runs" / "memory.json", claim("fewer blocks", 30.0))
    publish([first, second], tmp_path / "runs")
    assert "fewer blocks" in first.read_text()


def test_claims_in_one_result_only_are_listed_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_claims(tmp_path / "one.json", claim("both", 1.0), claim("old", 1.0))
    two = with_claims(tmp_path / "two.json", claim("both", 1.0), claim("new", 1.0))
    assert main(["compare", str(one), str(two)]) == 0
    ends = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert ends == ["reproduced", "only in new", "only in old"]


def test_how_many_claims_would_be_reproduced_by_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three claims in percent, b is within reach of both others, so its chance is 1, a's and c's
    a half each; one in blocks has no other to stand beside.
    """
    values = {"a": 1.0, "b": 3.0, "c": 5.0}
    claims = [claim(what, value) for what, value in values.items()]
    claims.append(claim("d", 1.0, unit="blocks"))
    old, new = (with_claims(tmp_path / f"{name}.json", *claims) for name in ("old", "new"))
    assert main(["compare", str(old), str(new)]) == 0
    assert "4 of 4 claims are reproduced; 2.0 would be" in capsys.readouterr().out


def test_what_cannot_be_compared_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_claims(tmp_path / "one.json", claim("a", 1.0))
    assert main(["compare", str(one), str(tmp_path / "gone.json")]) == 2
    assert "gone.json" in capsys.readouterr().err
    with_claims(tmp_path / "two.json", claim("a", 2.0))
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "duplicate claim Memory, a, demo" in capsys.readouterr().err
