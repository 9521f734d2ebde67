"""Results of the checks of docs/gpu.md: tables, and one claim per expectation stated there.

The input is the JSON that `vtoken_bench.checks` prints; no device is needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.variants import NATIVE
from vtoken_bench.output import Result, Table

SHAPE = "Llama-3.1-8B"  # heads and head size of every check
PAGE_LIMIT, COPY_SHARE, COPY_TOKENS = 1.10, 0.80, 4096
IN_ORDER, SCATTERED = "page 1, blocks in order", "page 1, scattered"
Cell = str | int | float | None


class Finished(msgspec.Struct):
    """The result of one check, its device and its end time."""

    check: str
    device: str
    finished: str
    seconds: float
    result: dict[str, Any]


Outcome = Finished | str  # a str: why there is no result


@dataclass(frozen=True, slots=True)
class Tests:
    """Result of `make test-gpu`; `failed`: names of tests with a failure or an error."""

    count: int
    skipped: int
    failed: tuple[str, ...]
    when: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one question of docs/gpu.md; `met`: None if nothing is expected or measured."""

    check: str
    question: str
    found: str
    expected: str
    met: bool | None
    claim: Claim | None = None

    def cells(self, when: str) -> list[Cell]:
        verdict = {True: "met", False: "missed", None: ""}[self.met]
        return [f"{self.check}: {self.question}", self.found, self.expected, verdict, when]


def read_tests(path: Path) -> Tests | None:
    """Read a JUnit file; None if it is missing or unreadable."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    cases = list(root.iter("testcase"))
    failed = tuple(
        f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    suite = next(root.iter("testsuite"), root)
    when = suite.get("timestamp", "")[:19].replace("T", " ")
    return Tests(len(cases), skipped, failed, when)


def versions(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Versions of the machine that ran the checks, for the setup line of the result."""
    found = [o.result["facts"] for o in outcomes.values() if isinstance(o, Finished)]
    names = ("torch", "cuda", "triton")
    return {name: str(facts[name]) for facts in found[:1] for name in names if facts.get(name)}


def fill(result: Result, outcomes: dict[str, Outcome], tests: Tests | None) -> None:
    """Add tables, claims and raw data to `result`."""
    overview = Table(
        "The checks",
        ["check", "found", "expected", "", "measured"],
        [],
        ["expected: see docs/gpu.md; met, missed: of the worst case, not of the median"],
    )
    overview.rows.append(_tests_row(tests))
    result.tables.append(overview)
    if tests is not None:
        overview.notes += [f"failed: {name}" for name in tests.failed]
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            overview.rows.append([name, f"failed: {outcome}", None, None, None])
            continue
        for answer in ANSWERS[name](outcome.result):
            overview.rows.append(answer.cells(outcome.finished))
            if answer.claim is not None:
                result.claims.append(answer.claim)
        for kernel, why in outcome.result.get("failed", {}).items():
            overview.rows.append([f"{name}, {kernel}", f"failed: {why}", None, None, None])
        result.tables.append(TABLES[name](outcome.result))
    result.raw = {
        name: found if isinstance(found, str) else msgspec.to_builtins(found)
        for name, found in outcomes.items()
    }


def _tests_row(tests: Tests | None) -> list[Cell]:
    if tests is None:
        return ["make test-gpu", "not run", "all pass", None, None]
    ran = tests.count - tests.skipped
    found = f"{ran - len(tests.failed)} of {ran} pass"
    if tests.skipped:
        found += f", {tests.skipped} skipped"
    verdict = "missed" if tests.failed else ("met" if ran else None)
    return ["make test-gpu", found, "all pass", verdict, tests.when]


# ---------------------------------------------------------------- answers


def _claim(row: str, what: str, values: Sequence[float], unit: str, goal: str) -> Claim:
    """A claim with the median and the range of `values`, one value per case."""
    middle = statistics.median(values)
    return Claim(
        row, what, SHAPE, middle, min(values), max(values), unit, len(values), "", goal=goal
    )


def _present(values: Iterable[float | None]) -> list[float]:
    """Leave out missing values: without a device there are no times."""
    return [value for value in values if value is not None]


def _ratios(values: Sequence[float]) -> str:
    if not values:
        return "not timed"
    return f"{statistics.median(values):.2f} [{min(values):.2f} .. {max(values):.2f}]"


def _pages(result: dict[str, Any]) -> list[Answer]:
    answers = []
    for kernel in dict.fromkeys(row["kernel"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kernel"] == kernel]
        ratios = _present(row["ratio_to_block_size"][way] for row in rows for way in WAYS)
        question, goal = f"time at page size 1 against 16, {kernel}", f"at most {PAGE_LIMIT:.2f}"
        claim = _claim("GPU check 1", question, ratios, "x", goal) if ratios else None
        met = max(ratios) <= PAGE_LIMIT if ratios else None
        answers.append(Answer("1", question, _ratios(ratios), goal, met, claim))
    equal_bits = {
        "equal bits wherever the tokens lie": "equal_bits_scattered",
        "equal bits of a graph's replay and no graph": "equal_bits_replayed_",
    }
    for what, key in equal_bits.items():
        for kernel in dict.fromkeys(row["kernel"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["kernel"] == kernel]
            equal = [row[name] for row in rows for name in row if name.startswith(key)]
            if not equal:  # measured before this was
                continue
            question, goal = f"{what}, {kernel}", "in every case"
            found = f"{sum(equal)} of {len(equal)} cases"
            share = 100 * sum(equal) / len(equal)
            claim = Claim(
                "GPU check 2", question, SHAPE, share, share, share, "%", len(equal), goal=goal
            )
            answers.append(Answer("2", question, found, goal, all(equal), claim))
    return answers


def _copies(result: dict[str, Any]) -> list[Answer]:
    rows = [row for row in result["rows"] if row["tokens"] >= COPY_TOKENS]
    shares = [100 * share for share in _present(row["triton"]["share"] for row in rows)]
    question = f"relocation over {result['layers']} layers, share of a large device copy"
    goal = f"at least {COPY_SHARE:.0%} from {COPY_TOKENS:,} tokens on"
    exact = all(row["triton_exact"] for row in result["rows"])
    found = "not timed" if not shares else f"{min(shares):.0f} .. {max(shares):.0f}%"
    met = exact and min(shares) >= 100 * COPY_SHARE if shares else None
    claim = _claim("GPU check 3", question, shares, "%", goal) if shares else None
    if not exact:
        found, met = f"{found}, rows differ", False
    return [Answer("3", question, found, goal, met, claim)]


def _overlap(result: dict[str, Any]) -> list[Answer]:
    rows = {row["variant"]: row for row in result["rows"]}
    none, own, waits = (rows[name] for name in ("no copies", "own stream", "host waits"))
    syncs, base = own["host_synchronisations_in_4_steps"], none["host_synchronisations_in_4_steps"]
    question = "host synchronisations in 4 steps, copies on their own stream"
    if syncs is None:
        return [Answer("4", question, "not counted", "as many as without copies", None)]
    claim = _claim("GPU check 4", f"{question}, beyond none", [float(syncs - base)], "", "0")
    step = "step time, copies on their own stream against none"
    ratio, waiting = own["step_us"] / none["step_us"], waits["step_us"] / none["step_us"]
    return [
        Answer("4", question, f"{syncs}", f"{base}, as without copies", syncs == base, claim),
        Answer(
            "4",
            step,
            f"{ratio:.2f}; where the host waits {waiting:.2f}",
            "near 1",
            None,
            _claim("GPU check 4", step, [ratio], "x", "near 1"),
        ),
    ]


def _probe(result: dict[str, Any]) -> list[Answer]:
    answers = []
    for kernel in _probed_against(result):
        ratios = _present(row.get(f"ratio, {kernel}") for row in result["rows"])
        question = f"time of the score probe against attention, {kernel}"
        claim = _claim("GPU check 5", question, ratios, "x", "") if ratios else None
        answers.append(Answer("5", question, _ratios(ratios), "", None, claim))
    return answers


def _serving(result: dict[str, Any]) -> list[Answer]:
    rows = result["rows"]
    native = {row["repeat"]: row["seconds"] for row in rows if row["variant"] == NATIVE}
    answers = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != NATIVE):
        mine = [row for row in rows if row["variant"] == variant and row["repeat"] in native]
        gains = [native[row["repeat"]] / row["seconds"] for row in mine]
        question = f"throughput of native in the same pool, {variant}"
        claim = _claim("GPU check 6", question, gains, "x", "")
        answers.append(Answer("6", question, _ratios(gains), "", None, claim))
    return answers


def _probed_against(result: dict[str, Any]) -> list[str]:
    found = [key for row in result["rows"] for key in row if key.startswith("ratio, ")]
    return [key.removeprefix("ratio, ") for key in dict.fromkeys(found)]


# ---------------------------------------------------------------- tables


WAYS = (IN_ORDER, SCATTERED)


def _pages_table(result: dict[str, Any]) -> Table:
    table = Table(
        "Checks 1 and 2: decode attention at page size 1",
        [
            "kernel, batch, context",
            "µs, page 16",
            "ratio, blocks in order",
            "ratio, scattered",
            "of the copy's GB/s",
            "equal bits, scattered",
            "largest error",
        ],
        [],
        ["ratio: to page size 16; share of the bandwidth: page size 1, scattered"],
    )
    for row in result["rows"]:
        base = next(us for way, us in row["us"].items() if way not in WAYS)
        table.rows.append(
            [
                f"{row['kernel']}, {row['batch']}, {row['context']}",
                base,
                *(row["ratio_to_block_size"][way] for way in WAYS),
                _percent(row["share_of_ceiling"][SCATTERED]),
                "yes" if row["equal_bits_scattered"] else "no",
                f"{row['max_error']:.1e}",
            ]
        )
    return table


def _copies_table(result: dict[str, Any]) -> Table:
    ways = ("triton", "torch")
    table = Table(
        f"Check 3: relocation over {result['layers']} layers",
        ["tokens", *(f"{what}, {way}" for way in ways for what in ("µs", "share")), "exact"],
        [],
        ["share: of the bandwidth of one large copy on the device"],
    )
    for row in result["rows"]:
        cells: list[Cell] = [f"{row['tokens']:,}"]
        for way in ways:
            cells += [row[way]["us"], _percent(row[way]["share"])]
        exact = all(row[f"{way}_exact"] for way in ways)
        table.rows.append([*cells, "yes" if exact else "no"])
    return table


def _overlap_table(result: dict[str, Any]) -> Table:
    table = Table(
        f"Check 4: copies of {result['tokens']:,} tokens beside the forward",
        ["variant", "µs a step", "µs of the host", "host synchronisations in 4 steps"],
        [],
    )
    keys = ("variant", "step_us", "host_us", "host_synchronisations_in_4_steps")
    table.rows += [[row[key] for key in keys] for row in result["rows"]]
    return table


def _probe_table(result: dict[str, Any]) -> Table:
    kernels = _probed_against(result)
    table = Table(
        "Check 5: the score probe of one layer",
        ["batch, context", "µs, probe", *(f"ratio, {name}" for name in kernels), "largest error"],
        [],
        ["ratio: to the attention kernel over the same live tokens"],
    )
    for row in result["rows"]:
        ratios = [row.get(f"ratio, {name}") for name in kernels]
        name = f"{row['batch']}, {row['context']}"
        table.rows.append([name, row["probe_us"], *ratios, f"{row['max_error']:.1e}"])
    return table


def _serving_table(result: dict[str, Any]) -> Table:
    load = result["load"]
    table = Table(
        f"Check 6: {load['requests']} requests of {load['prompt_tokens']:,} + {load['new_tokens']} "
        f"tokens, {load['clients']} at a time, {result['blocks']:,} blocks",
        [
            "variant, repeat",
            "seconds",
            "between tokens p50, p95 [ms]",
            "to the first token p50, p95 [s]",
            "at once, mean",
            "blocks a request",
            "preemptions",
            "moved tokens",
            "GPU [ms a step]",
            "vToken's code on the host, scheduler and worker [ms a step]",
            "decode steps in full graphs",
        ],
        [],
        [
            f"{SHAPE}'s shape with random weights, bfloat16, CUDA graphs; the pool holds "
            f"{load['pool']:.0%} of what the clients' requests need at their end"
        ],
    )
    for row in sorted(result["rows"], key=lambda row: row["repeat"]):
        between, first = row["itl_ms"], row["ttft_ms"]
        memory, gpu = row.get("memory", {}), row.get("gpu_seconds")
        decodes = row.get("graphs", {}).get("decode")
        table.rows.append(
            [
                f"{row['variant']}, {row['repeat'] + 1}",
                row["seconds"],
                f"{between['p50']:.1f}, {between['p95']:.1f}",
                f"{first['p50'] / 1e3:.2f}, {first['p95'] / 1e3:.2f}",
                row["mean_running"],
                memory.get("blocks_per_request"),
                row["preemptions"],
                row.get("moved_tokens"),
                None if gpu is None else 1e3 * gpu / row["steps"],
                ", ".join(f"{1e3 * s / row['steps']:.2f}" for s in row["hook_seconds"].values()),
                _percent(decodes["FULL"] / sum(decodes.values()) if decodes else None),
            ]
        )
    return table


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


ANSWERS = {
    "pages": _pages,
    "copies": _copies,
    "overlap": _overlap,
    "probe": _probe,
    "serving": _serving,
}
TABLES = {
    "pages": _pages_table,
    "copies": _copies_table,
    "overlap": _overlap_table,
    "probe": _probe_table,
    "serving": _serving_table,
}
