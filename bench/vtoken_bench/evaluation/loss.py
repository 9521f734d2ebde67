"""What eviction costs where memory is ample: short prompts in a pool that holds everything.

vToken can only lose there. A second process of native vLLM shows the noise between processes.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.effects import cpu_seconds, over_native, speed
from vtoken_bench.evaluation.points import Comparison, Part, Run, Setting, variants_of
from vtoken_bench.evaluation.prose import Prose
from vtoken_bench.evaluation.variants import DEFAULTS, NATIVE
from vtoken_bench.grounds.settings import PAPER_PARAMS
from vtoken_bench.output import Result

CLIENTS, REQUESTS, QUICK_REQUESTS = 8, 64, 16
POLICY = {"name": "tova", "params": PAPER_PARAMS["tova"]}  # probes every query
IDLE, AGAIN = "vToken, policy none", "native, again"
GOAL = "<= 3"  # percent
COLUMNS = (
    columns.of_figure("tok/s", speed, "tok/s: median [range]"),
    columns.of_ratio("x native", speed),
    columns.of_ratio("CPU time x native", cpu_seconds),
    columns.of_figure("between tokens p50 [ms]", "itl_ms.p50"),
)


def comparisons(setting: Setting) -> list[Comparison]:
    blocks = 2 * CLIENTS * -(-128 // setting.block_size)
    requests = QUICK_REQUESTS if setting.quick else REQUESTS
    native = setting.point(
        {"variant": NATIVE}, Prose(64, 64), requests, blocks, concurrency=CLIENTS
    )
    again = native.stock(variant=AGAIN)
    points = [
        native,
        native.configured(DEFAULTS, {"policy": POLICY}),
        native.configured(IDLE, {"policy": {"name": "none"}}),
        replace(again, engine=replace(again.engine, copy=1)),
    ]
    return [Comparison("ample memory", points, setting.repeats)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table and the claims."""
    rows = [columns.Row(name, runs, {"variant": name}) for name in variants_of(runs)]
    title = f"{model}: ample memory, 64 + 64 tokens, {CLIENTS} clients"
    result.tables.append(columns.table(title, "variant", rows, COLUMNS))
    result.claims += [_lost(runs, model, name) for name in variants_of(runs) if name != NATIVE]


def _lost(runs: list[Run], model: str, variant: str) -> Claim:
    """Percent of native's tokens a second."""
    return Claim.of(
        "Loss",
        f"ample memory, short prompts: throughput lost, {variant}",
        model,
        [100 * (1 - ratio) for ratio in over_native(runs, speed, variant).values],
        "%",
        goal="" if variant == AGAIN else GOAL,  # that is noise, not vToken's
    )


PART = Part("loss", comparisons, report)
