"""How low the floor may be when memory is short: the curve's load with memory for a quarter.

A third of the prompt is the curve's floor, half is that of `--vtoken-policy auto`.
"""

from __future__ import annotations

from vtoken_bench.evaluation.answers import BUDGET, CONFIGS, POLICY, PRESSURE, configured
from vtoken_bench.evaluation.curve import claims, points_at, table
from vtoken_bench.evaluation.points import Comparison, Experiment, Run, Setting
from vtoken_bench.output import Result

POOL = 0.25
HALF = {"budget_ratio": 0.5}
VARIANTS = {
    f"{PRESSURE}, floor a third": CONFIGS[PRESSURE],
    f"{PRESSURE}, floor half": CONFIGS[PRESSURE] | HALF,
    "vToken, fixed budget of half": BUDGET | HALF,
}


def comparisons(setting: Setting) -> list[Comparison]:
    native = points_at(setting, {"pool": POOL}, POOL)[0]
    evicting = [configured(native, name, config) for name, config in VARIANTS.items()]
    return [Comparison("floors", [native, *evicting], setting.repeats, fresh=True)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table and the claims."""
    title = f"{model}: memory for {POOL:.0%} of the demand, {POLICY}, by floor"
    result.tables.append(table(title, runs))
    result.claims += claims(model, runs, POOL)


EXPERIMENT = Experiment(
    "floors",
    "throughput and answers by the floor of requests, where memory is short",
    "not in the paper",
    comparisons,
    report,
    repeats=8,
)
