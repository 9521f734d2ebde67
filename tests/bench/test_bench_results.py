"""Committed results: the page and its charts match their JSON files, and claims are compared."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import msgspec
import pytest

from vtoken_bench import client_report, main
from vtoken_bench.charts import Chart, Line, Panel, digest, draw, file_names, source_of
from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.command import PARTS
from vtoken_bench.evaluation.curve import MEMORY
from vtoken_bench.evaluation.points import Run, stamp
from vtoken_bench.log import Entry
from vtoken_bench.output import (
    KEPT,
    LOADS,
    WITH_LOADS,
    Result,
    Table,
    as_markdown,
    as_text,
    commit_of,
    new_result,
    publish,
    read,
    shown_charts,
)
from vtoken_bench.page import CONTENTS, PAGE, contents, page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / KEPT


def test_the_page_is_that_of_the_results() -> None:
    """`vtoken bench results` writes it."""
    found = page(contents(ROOT / CONTENTS), RESULTS)
    assert (ROOT / PAGE).read_text() == found
    assert len(found.split()) <= 9_000
    with pytest.raises(FileNotFoundError):
        page(contents(ROOT / CONTENTS), ROOT)


def test_every_file_is_shown_or_read() -> None:
    figures = (ROOT / "docs" / "figures.toml").read_text()
    shown = contents(ROOT / CONTENTS).files
    files = {path.stem for path in RESULTS.glob("*.json")}
    assert set(shown) <= files
    assert not [name for name in files - set(shown) if f'in = "{name}"' not in figures]


def test_every_chart_is_on_a_page_and_as_its_result_has_it() -> None:
    charts = {
        file: digest(chart)
        for path in RESULTS.glob("*.json")
        for file, chart in file_names(path.stem, read(path).charts).items()
    }
    assert charts == {file: source_of(RESULTS / file) for file in charts}
    assert charts.keys() == shown_charts(RESULTS) == {p.name for p in RESULTS.glob("*.svg")}


def some_result(bench: str = "planner", commit: str = "abc1234") -> Result:
    line = Line("a", [1, 64], [2.0, 3.0], [1.5, 2.5], [2.5, 3.5])
    result = Result(bench, f"make bench-{bench}", {"steps": 1}, [Table("T", ["a"], [["x"], [1.5]])])
    result.machine = {"cpu": "c", "python": "3", "versions": {}}
    result.started, result.commit = "2026-01-02 00:00:00 UTC", commit
    result.raw = ["all measurements"]
    result.charts = [
        Chart("Cost", [Panel("P", "x", "y", [line])]),
        Chart("Other", [Panel("P", "x", "y", [line])], part="other"),
    ]
    return result


def save(result: Result, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return path


def published(root: Path, *results: Result) -> tuple[Path, list[str]]:
    """The folder of the published results, and what was skipped; the README shows one chart."""
    (root / "README.md").write_text("![Cost](docs/results/planner.svg)")
    for result in results:
        save(result, root / ".bench" / f"{result.bench}.json")
    kept = root / KEPT
    return kept, publish([result.bench for result in results], root / ".bench", kept)


def test_a_run_is_copied_without_measurements_and_its_shown_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept, skipped = published(tmp_path, some_result())
    assert skipped == []
    assert sorted(path.name for path in kept.iterdir()) == ["planner.json", "planner.svg"]
    assert source_of(kept / "planner.svg") == digest(some_result().charts[0])
    assert read(tmp_path / ".bench" / "planner.json").raw == ["all measurements"]
    copy = read(kept / "planner.json")
    assert (copy.raw, [chart.caption for chart in copy.charts]) == (None, ["Cost"])
    older = some_result(commit="0000000")
    older.started = "2026-01-01 00:00:00 UTC"
    _, (line,) = published(tmp_path, older)
    assert "is older than" in line
    assert read(kept / "planner.json").commit == "abc1234"


def test_loads_of_the_newest_code_are_published_without_numbers_of_requests(tmp_path: Path) -> None:
    loads = [
        {
            "key": {"repeat": repeat, "code": code},
            "value": {"tokens": 9, "requests": [[0, 1]], "endpoint": "ipc:"},
        }
        for repeat, code in ((0, "older"), (0, "new"), (1, "new"))
    ]
    log = tmp_path / ".bench" / "evaluation" / "curve.jsonl"
    log.parent.mkdir(parents=True)
    log.write_bytes(msgspec.json.Encoder().encode_lines(loads))
    kept, _ = published(tmp_path, some_result("evaluation-curve"))
    copies = (kept / LOADS / "curve.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line) for line in copies] == [
        load | {"value": {"tokens": 9}} for load in loads[1:]
    ]


def test_a_table_is_readable_on_a_page_and_in_a_terminal() -> None:
    result = some_result()
    result.tables = [Table("T", ["a", "b"], [["1.0 | 2.0", 1234.5], ["y", None]], ["note"])]
    shown = as_markdown(result)
    assert "`make bench-planner` at abc1234, " in shown
    assert "| 1.0 \\| 2.0 | 1,234 |" in shown
    assert shown.endswith("- note")
    assert "1.0 | 2.0  1,234" in as_text(result)
    result.measured = {"demo": "2026-01-01 10:00 UTC at abc", "trained": "2026-01-02 at abd"}
    stamps = "measured demo 2026-01-01 10:00 UTC at abc; trained 2026-01-02 at abd; "
    assert as_markdown(result).startswith(f"`make bench-planner`, {stamps}")


REPORTS = {
    **{f"evaluation-{name}": part.report for name, part in PARTS.items() if name in WITH_LOADS},
    "client": partial(client_report.report, memory=MEMORY),
}


def test_every_published_load_is_reported() -> None:
    names = {path.stem for path in (RESULTS / LOADS).glob("*.jsonl")}
    assert names == {name.removeprefix("evaluation-") for name in REPORTS} == {*WITH_LOADS}


@pytest.mark.parametrize("name", REPORTS)
def test_published_loads_give_the_published_result(name: str) -> None:
    path = RESULTS / LOADS / f"{name.removeprefix('evaluation-')}.jsonl"
    published = read(RESULTS / f"{name}.json")
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
    assert msgspec.to_builtins(result.tables) == msgspec.to_builtins(published.tables)


# ---------------------------------------------------------------- charts


def test_a_chart_is_drawn_reproducibly_with_its_source(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [Line("a", [1, 64], [1.0, 2.0]), Line("bound", [1], [1.5], reference=True)]
    chart = Chart("Cost", [Panel("Lines", "requests", "µs", lines)] * 4)
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw(chart, path, source="0123")
    one, two = (path.read_text() for path in paths)
    assert one == two
    assert source_of(paths[0]) == "0123"
    assert all(f">{text}<" in one for text in ("a", "bound", "Lines", "requests", "Cost"))


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
    here = commit_of(ROOT / "vtoken", ROOT / "bench/vtoken_bench")
    # Whether the tree differs is tested above: beside the suite somebody may work in this one.
    assert new_result("planner", "", {}).commit.removesuffix("+") == here.removesuffix("+") != ""


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


def test_claims_in_one_result_only_are_listed_and_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_claims(tmp_path / "one.json", claim("both", 1.0), claim("old", 1.0))
    two = with_claims(tmp_path / "two.json", claim("both", 1.0), claim("new", 1.0))
    assert main(["compare", str(one), str(two)]) == 0
    ends = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert ends == ["reproduced", "only in new", "only in old"]


def test_what_cannot_be_compared_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_claims(tmp_path / "one.json", claim("a", 1.0))
    assert main(["compare", str(one), str(tmp_path / "gone.json")]) == 2
    assert "gone.json" in capsys.readouterr().err
    with_claims(tmp_path / "two.json", claim("a", 2.0))
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "duplicate claim Memory, a, demo" in capsys.readouterr().err
