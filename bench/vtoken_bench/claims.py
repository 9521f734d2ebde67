"""Claims of results beside the paper's numbers: all, and the few that a reader needs first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Order of the claims: rows that the paper lacks, then the paper's rows in its order.
ROWS = (
    "Causes",
    "Loss",
    "Curve",
    "Pressure",
    "Real client",
    "Speculation",
    "Hybrid",
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
TRAINED, DEMO = "trained", "demo"
# The trained model's folder, by which benchmarks of one model name it.
ALSO_TRAINED = "SmolLM2-135M-Instruct-float32"
# Row, what, model; one that was not measured yet is left out.
HEADLINES = (
    ("Causes", "throughput of native", TRAINED),
    ("Causes", "throughput of native, tuned", TRAINED),
    ("Curve", "100% of the demand: throughput of native, vToken, pressure", TRAINED),
    ("Curve", "70% of the demand: throughput of native, vToken, pressure", TRAINED),
    ("Curve", "45% of the demand: throughput of native, vToken, pressure", TRAINED),
    ("Curve", "25% of the demand: throughput of native, vToken, pressure", TRAINED),
    ("Curve", "25% of the demand: throughput of native, vToken, pressure, floor half", TRAINED),
    ("Curve", "100% of the demand: throughput of native, vToken, fixed budget", TRAINED),
    ("Curve", "45% of the demand: throughput of native, vToken, fixed budget", TRAINED),
    ("Curve", "25% of the demand: throughput of native, vToken, fixed budget", TRAINED),
    (
        "Curve",
        "45% of the demand: throughput of naive-evict, packing taken out, vToken, fixed budget",
        TRAINED,
    ),
    ("Curve", "45% of the demand: throughput of native, vToken, fixed budget", DEMO),
    ("Loss", "ample memory, short prompts: throughput lost, vToken", TRAINED),
    ("Loss", "ample memory, short prompts: throughput lost, vToken", DEMO),
    ("Pressure", "Saturated: tokens a second of pressure, of native", TRAINED),
    ("Pressure", "Saturated: tokens a second of pressure, of a fixed budget", TRAINED),
    *[
        ("Real client", f"45% of the demand: {what} of native, {variant}", TRAINED)
        for what in ("output tokens a second", "time to first token p95")
        for variant in ("vToken, pressure", "vToken, fixed budget")
    ],
    ("Real client", "45% of the demand: output tokens a second of native, naive-evict", TRAINED),
    (
        "Real client",
        "45% of the demand: time between tokens p95 of native, vToken, pressure",
        TRAINED,
    ),
    ("Fig. 2", "F under naive-evict, chat, all policies", TRAINED),
    ("Fig. 6a", "utilisation over naive-evict, chat, vToken, paper, mean", TRAINED),
    ("Fig. 6a", "utilisation over naive-evict, chat, vToken, mean", TRAINED),
    ("Fig. 6b", "blocks against naive-evict, chat, vToken, paper", TRAINED),
    ("Fig. 6b", "blocks against naive-evict, chat, vToken", TRAINED),
    ("Fig. 7", "chat, tova: throughput under the bound of naive-evict, vToken", TRAINED),
    ("Fig. 8", "largest concurrency, 5.3 footprints, native", TRAINED),
    ("Fig. 8", "largest concurrency, 5.3 footprints, vToken, paper", TRAINED),
    ("Fig. 8", "largest concurrency, 5.3 footprints, vToken", TRAINED),
    ("5.5", "plugin idle, 8 requests: step p50 against stock vLLM", DEMO),
    ("5.5", "plugin idle, 8 requests: step p50 against stock vLLM", TRAINED),
    ("Table 1", "blocks vs naive, sharing 4, vToken, paper", DEMO),
    (
        "Table 2",
        "difference of scores, mean, float32, vToken, paper, against naive-evict",
        TRAINED,
    ),
    ("Table 2", "differences at most 0.01, float32, vToken, paper, against naive-evict", TRAINED),
)


@dataclass
class Claim:
    """One number that the evaluation claims, with its range over the repeats.

    `row`: figure, table or section of the paper, as in docs/results.md. `paper`: its value there.
    `interval`: 95% confidence interval, which decides a goal; without one a goal has no verdict.
    `values`: those of the repeats, in their order, unless all are equal.
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
    values: list[float] = field(default_factory=list)

    def verdict(self) -> str:
        """met, missed or undecided: where the interval is; "" without goal or interval."""
        if not self.goal or self.interval is None:
            return ""
        relation, bound = self.goal.split()
        low, high = self.interval
        sign = {">=": 1, "<=": -1}[relation]
        right = [sign * (end - float(bound)) >= 0 for end in (low, high)]
        return "met" if all(right) else "undecided" if any(right) else "missed"


def headlines_table(claims: Sequence[tuple[Claim, str]]) -> str:
    """A Markdown table of `HEADLINES`, in their order."""
    found = {(claim.row, claim.what, _model(claim)): claim for claim, _ in claims}
    first = [claim for key in HEADLINES if (claim := found.get(key)) is not None]
    return "\n".join(
        [
            "| paper | what | model | paper says | ours [range over runs] | 95% interval | goal |",
            "|---|---|---|---:|---:|---:|---:|",
            *[f"| {' | '.join([*_cells(claim), *_ends(claim)])} |" for claim in first],
        ]
    )


def claims_table(claims: Sequence[tuple[Claim, str]]) -> str:
    """A Markdown table of all claims, each with its command, in the paper's order."""
    lines = [
        "| paper | what | model | paper says | ours [range over the runs] | runs | 95% interval "
        "| goal | command |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for claim, command in sorted(claims, key=lambda pair: _order(pair[0].row)):
        cells = [*_cells(claim), str(claim.repeats), *_ends(claim), f"`{command}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _model(claim: Claim) -> str:
    return TRAINED if claim.model == ALSO_TRAINED else claim.model


def _cells(claim: Claim) -> list[str]:
    """Row, what, model, the paper's number and ours."""
    spread = f"{claim.value:.3g} {claim.unit}".rstrip()
    if claim.low != claim.high:
        spread += f" [{claim.low:.3g} .. {claim.high:.3g}]"
    return [claim.row, claim.what, _model(claim), claim.paper, spread]


def _ends(claim: Claim) -> list[str]:
    """The interval, and the goal with its verdict."""
    interval, goal = "", claim.goal
    if claim.interval is not None:
        interval = f"{claim.interval[0]:.3g} .. {claim.interval[1]:.3g}"
    if verdict := claim.verdict():
        goal += f": {verdict}"
    return [interval, goal]


def _order(row: str) -> int:
    return ROWS.index(row) if row in ROWS else len(ROWS)
