"""Rows of results, the tables made of them, and which tasks count.

A row is one setting on one task or kind of continuation: a plain dict, as in the JSON file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from vtoken_bench.output import Table
from vtoken_bench.quality.measures import mean

Row = dict[str, Any]
ABOVE_CHANCE = 0.2  # the full cache's interval must exceed chance by this much
FULL_CACHE = "full cache"
ALL_TASKS = "all tasks"
QUESTIONS = {
    "aware": "the question is in the prompt",
    "later": "the question comes after the eviction",
}
METRICS = {
    "kl": "KL [nats]",
    "first": "same first choice",
    "ppl": "perplexity",
    "equal": "equal tokens",
    "rouge": "ROUGE-L",
    "longer": "length ratio",
    "judged_ppl": "own text: perplexity",
    "agree": "own text: first choice",
    "repeats": "own text: repetition",
}
CONTINUATION_NOTES = [
    "on the full cache's text, forced: KL of the next-token distributions (the 50 "
    "likeliest tokens of both one by one, the rest as one bucket: never more than the true KL), "
    "share of equal first choices, perplexity; the first token is left out: nothing is evicted "
    "before it",
    "own text: greedy and free, its perplexity under the full cache, share of its tokens that are "
    "the full cache's first choice, share of 4-token runs that occurred before; a text that loops "
    "agrees with itself, so read these three together",
    "[95% confidence interval, bootstrap over the samples]",
]


def shown(found: dict[str, Any], *, percent: bool = False) -> str:
    """A mean as a cell of a table: `0.123 [0.101 .. 0.150]`, or in percent."""
    values = [found[name] * (100 if percent else 1) for name in ("value", "low", "high")]
    digits = 0 if percent else 2 if abs(values[0]) >= 1 else 3
    value, low, high = (f"{v:.{digits}f}" for v in values)
    return f"{value} [{low} .. {high}]"


# ---------------------------------------------------------------- tasks


def clears_chance(samples: Sequence[Row]) -> bool:
    """Whether the full cache is well above chance on a task; `samples`: its own."""
    if not samples:
        return False
    chance = mean([s["chance"] for s in samples]).value
    return mean([s["score"] for s in samples]).low >= chance + ABOVE_CHANCE


def task_rows(facts: Row, scores: dict[str, dict[int, float]]) -> list[Row]:
    """One row per task, and one of the means over tasks. `scores`: task -> number -> score."""
    rows = [
        facts | {"task": task, "score": asdict(mean(list(found.values())))}
        for task, found in scores.items()
        if found
    ]
    numbers = set.intersection(*map(set, scores.values())) if scores else set()
    if numbers:
        means = [sum(found[i] for found in scores.values()) / len(scores) for i in sorted(numbers)]
        rows.append(facts | {"task": ALL_TASKS, "score": asdict(mean(means))})
    return rows


def task_tables(rows: Sequence[Row], dropped: Sequence[Row]) -> list[Table]:
    """For each length and place of the question: policies against keep, then task by task.

    `dropped`: task, length and score of the full cache where it is not well above chance.
    """
    tables = []
    for length in _distinct(rows, "length"):
        for question in QUESTIONS:
            found = [r for r in rows if r["length"] == length and r["question"] == question]
            if not any(r["policy"] != FULL_CACHE for r in found):
                continue
            tasks = [task for task in _distinct(found, "task") if task != ALL_TASKS]
            tables.append(_by_keep(found, tasks, f"{length} tokens, {QUESTIONS[question]}"))
            if len(tasks) > 1:
                tables.append(_by_task(found, tasks, f"{length} tokens, {QUESTIONS[question]}"))
    if dropped:
        table = Table("Not compared: the full cache is not well above chance [%]", [], [])
        table.columns = ["task, tokens", FULL_CACHE]
        for row in dropped:
            score = shown(row["score"], percent=True)
            table.rows.append([f"{row['task']}, {row['length']}", score])
        tables.append(table)
    return tables


def _by_keep(rows: Sequence[Row], tasks: Sequence[str], title: str) -> Table:
    rows = [row for row in rows if row["task"] == ALL_TASKS]
    keeps = sorted({row["keep"] for row in rows if row["policy"] != FULL_CACHE}, reverse=True)
    table = Table(
        f"Gold strings found [%] by share of the prompt kept: {title}",
        ["policy", *(f"{keep:.3g}" for keep in keeps)],
        [],
        [
            f"{', '.join(tasks)}: {_counted(row['score'] for row in rows)} a task and setting; "
            "[95% confidence interval, bootstrap over the samples]"
        ],
    )
    cells = {(row["policy"], row["keep"]): row["score"] for row in rows}
    full = next((row["score"] for row in rows if row["policy"] == FULL_CACHE), None)

    def rank(policy: str) -> float:
        found = [cells[policy, keep]["value"] for keep in keeps if (policy, keep) in cells]
        return -float(sum(found))

    if full is not None:
        table.rows.append([FULL_CACHE, *[shown(full, percent=True)] * len(keeps)])
    for policy in sorted((p for p in _distinct(rows, "policy") if p != FULL_CACHE), key=rank):
        table.rows.append(
            [policy, *(_cell(cells.get((policy, keep)), percent=True) for keep in keeps)]
        )
    return table


def _by_task(rows: Sequence[Row], tasks: Sequence[str], title: str) -> Table:
    table = Table(f"The same, task by task: {title}", ["policy, kept", *tasks], [])
    cells = {(row["policy"], row["keep"], row["task"]): row["score"] for row in rows}
    for policy in _distinct(rows, "policy"):
        for keep in sorted({k for p, k, _ in cells if p == policy}, reverse=True):
            scores = [_cell(cells.get((policy, keep, task)), percent=True) for task in tasks]
            table.rows.append([_name(policy, keep), *scores])
    return table


# ---------------------------------------------------------------- continuations


def continuation_row(facts: Row, samples: Sequence[Row]) -> Row:
    """Means over continuations of one setting."""
    means = {name: mean([s[name] for s in samples]) for name in samples[0]}
    means["ppl"] = means["nll"].mapped(math.exp)
    means["judged_ppl"] = means["judged"].mapped(math.exp)
    return facts | {"figures": {name: asdict(means[name]) for name in METRICS}}


def full_row(facts: Row, samples: Sequence[Row]) -> Row:
    """The full cache's row from the same samples; its text is the forced one."""
    ppl = mean([s["full_nll"] for s in samples]).mapped(math.exp)
    repeats = mean([s["full_repeats"] for s in samples])
    metrics = {"ppl": ppl, "judged_ppl": ppl, "repeats": repeats}
    return facts | {"figures": {name: asdict(found) for name, found in metrics.items()}}


def continuation_tables(rows: Sequence[Row]) -> list[Table]:
    """One table per kind and length, by falling share kept, then by rising KL."""
    tables = []
    for kind in _distinct(rows, "what"):
        for length in _distinct(rows, "length"):
            found = [r for r in rows if r["what"] == kind and r["length"] == length]
            if not found:
                continue
            new = found[0]["new"]
            table = Table(
                f"Continuation of {kind}: {length} tokens, {new} of them generated",
                ["policy, kept", *METRICS.values()],
                [],
                [_counted(row["figures"]["repeats"] for row in found)],
            )

            def rank(row: Row) -> tuple[float, float]:
                return -row["keep"], row["figures"].get("kl", {"value": 0.0})["value"]

            for row in sorted(found, key=rank):
                cells = [_cell(row["figures"].get(name)) for name in METRICS]
                table.rows.append([_name(row["policy"], row["keep"]), *cells])
            tables.append(table)
    if tables:
        tables[-1].notes += CONTINUATION_NOTES
    return tables


# ---------------------------------------------------------------- the same tokens


def exact_table(found: dict[str, dict[str, list[int]]], title: str) -> Table:
    """`found`: policy -> variant -> token ids; all are compared with the first variant."""
    variants = list(next(iter(found.values())))
    table = Table(title, ["policy", *variants[1:]], [], [f"against {variants[0]}, token for token"])
    for policy, runs in found.items():
        expected = runs[variants[0]]
        table.rows.append([policy, *(_agreement(runs[v], expected) for v in variants[1:])])
    return table


def _agreement(ids: Sequence[int], expected: Sequence[int]) -> str:
    if ids == expected:
        return f"equal, {len(ids)} tokens"
    pairs = enumerate(zip(ids, expected, strict=False))
    return f"differs at token {next((i for i, (a, b) in pairs if a != b), len(expected))}"


# ----------------------------------------------------------------


def _distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Values of a field, in the order of their first row."""
    return list(dict.fromkeys(row[name] for row in rows))


def _counted(means: Iterable[dict[str, Any]]) -> str:
    counts = sorted({found["samples"] for found in means})
    return f"{' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} samples"


def _name(policy: str, keep: float) -> str:
    return policy if policy == FULL_CACHE else f"{policy}, {keep:.3g}"


def _cell(found: dict[str, Any] | None, *, percent: bool = False) -> str | None:
    return None if found is None else shown(found, percent=percent)
