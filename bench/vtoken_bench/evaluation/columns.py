"""Columns of the evaluation's tables: a heading, and what a row has there.

A part's table is a choice of columns; a row is one variant under one load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from vtoken_bench.evaluation.answers import (
    answers_interval,
    kept,
    paired_answers,
    points_shown,
)
from vtoken_bench.evaluation.effects import (
    SHOWN,
    Effect,
    Figure,
    bounds,
    busy_speed,
    packing_share,
    spread,
)
from vtoken_bench.evaluation.points import Labels, Run, pick
from vtoken_bench.evaluation.variants import NATIVE
from vtoken_bench.output import Table


@dataclass(frozen=True, slots=True)
class Row:
    """`runs`: all of one load. `labels`: those of the row's runs among them.

    `against`: the labels of the runs that ratios and differences are to.
    """

    name: str
    runs: Sequence[Run]
    labels: Labels
    against: Labels = field(default_factory=lambda: {"variant": NATIVE})

    @property
    def own(self) -> list[Run]:
        return pick(self.runs, **self.labels)

    @property
    def is_reference(self) -> bool:
        return self.labels == self.against


@dataclass(frozen=True, slots=True)
class Column:
    """`compares`: the reference's row has no cell. `note`: what a reader has to know of it."""

    heading: str
    cell: Callable[[Row], str | None]
    compares: bool = False
    note: str = ""


def of_figure(heading: str, figure: Figure | str, note: str = "") -> Column:
    """The figure's median and range over the repeats."""
    return Column(heading, lambda row: spread([_figure(figure)(run) for run in row.own]), note=note)


def of_ratio(heading: str, figure: Figure | str, note: str = "") -> Column:
    """The figure over that of what the row is compared with, in the same repeat.

    `note`: one for all ratios of a table, in place of the column's own.
    """

    def cell(row: Row) -> str | None:
        found = Effect.of(row.runs, _figure(figure), row.labels, row.against)
        return None if found is None else str(found)

    return Column(heading, cell, compares=True, note=note or f"{heading}: {SHOWN}")


def of_percentiles(heading: str, path: str, unit: float, digits: int) -> Column:
    """Medians of the p50 and the p95 of `path`, in the unit."""

    def cell(row: Row) -> str:
        both = (median([run.figure(f"{path}.{p}") / unit for run in row.own]) for p in _PERCENTILES)
        return " | ".join(f"{value:.{digits}f}" for value in both)

    return Column(heading, cell)


def _figure(figure: Figure | str) -> Figure:
    return figure if callable(figure) else lambda run: run.figure(figure)


def _found(row: Row) -> str:
    shares = answers_interval(row.own)
    return f"{100 * shares.value:.0f}{bounds((100 * shares.low, 100 * shares.high), '.0f')}"


def _difference(row: Row) -> str | None:
    pairs = paired_answers(row.runs, row.labels, row.against)
    return points_shown(pairs.difference()) if pairs.samples else None


def _packing(row: Row) -> str | None:
    runs = row.own
    if runs[0].figures.get("pack_us") is None:  # stock vLLM
        return None
    return spread([100 * packing_share(run) for run in runs])


_PERCENTILES = ("p50", "p95")
SPEED = of_figure("tok/s", busy_speed, "tok/s: while every client had a request, median [range]")
GAIN = of_ratio("x native", busy_speed)
FOUND = Column("facts found [%]", _found, note="facts found: exact 95% interval")
DIFFERENCE = Column(
    "difference to native [points]",
    _difference,
    compares=True,
    note="difference: answers to the same prompts, Tango's 95% interval",
)
ANSWERS = (FOUND, DIFFERENCE)
LATENCIES = (
    of_percentiles("TTFT p50 | p95 [s]", "ttft_ms", 1e3, 1),
    of_percentiles("between tokens p50 | p95 [ms]", "itl_ms", 1.0, 0),
)
KEPT = of_figure(
    "kept [%]",
    lambda run: 100 * kept(run),
    "kept: live share of a request's tokens at its end, mean",
)
RUNNING = of_figure("at once, mean", "mean_running")
PREEMPTIONS = of_figure("preemptions", "preemptions")
PACKING = Column(
    "packing [% of the time]",
    _packing,
    note="packing: of holes for attention, a cost of the CPU's kernel",
)


def table(title: str, first: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """`first`: the heading of the rows' names."""
    return Table(
        title,
        [first, *[column.heading for column in columns]],
        [
            [
                row.name,
                *[
                    None if column.compares and row.is_reference else column.cell(row)
                    for column in columns
                ],
            ]
            for row in rows
        ],
        list(dict.fromkeys(column.note for column in columns if column.note)),
    )
