"""How low the floor may be when memory is short: the curve's load with memory for a quarter.

A third of the prompt is the curve's floor, half is that of `--vtoken-policy auto`.
"""

from __future__ import annotations

from vtoken_bench.evaluation.answers import BUDGET, CONFIGS, POLICY, PRESSURE
from vtoken_bench.evaluation.curve import by_pool, claims, points_at
from vtoken_bench.evaluation.points import Comparison, Part, Run, Setting
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
    evicting = [native.configured(name, config) for name, config in VARIANTS.items()]
    return [Comparison("floors", [native, *evicting], setting.repeats)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table and the claims."""
    title = f"{model}: memory for {POOL:.0%} of the demand, {POLICY}, by floor"
    result.tables.append(by_pool(title, runs))
    result.claims += claims(model, runs, POOL)


PART = Part("floors", comparisons, report, trained=True)
