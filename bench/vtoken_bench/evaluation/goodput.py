"""What eviction gains where memory is short, and what it costs where memory is ample.

Short: a pool that holds half of the clients' requests in full. Ample: short prompts in a pool that
holds everything, where vToken can only lose. Goodput counts the requests whose time to the end, a
token, is within what native vLLM gives its median request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    Spread,
    figures,
    pick,
    ratios,
    speed,
    spread,
    stock_of,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table

# A step of a small model on a CPU is bound by its weights for fewer requests than on a GPU: the
# trained model's takes 90 ms for 8 and 130 ms for 16.
CLIENTS, SLOW_CLIENTS = 16, 8
POLICY = "tova"
KEEPS = (0.5, 1 / 3)  # of prompt and output
SHORT, OPEN, AMPLE = "half the memory", "half the memory, arrivals", "ample memory"
RATES = (0.7, 1.0, 1.3)  # of what native serves in the closed loop
IDLE = "vToken, policy none"
GOALS = {NATIVE: 1.5, NAIVE: 1.3}
LOSS_GOAL = 3.0  # percent


def comparisons(setting: Setting) -> list[Comparison]:
    found = [_short(setting), _ample(setting)]
    return found[:1] if setting.quick else found


def _short(setting: Setting) -> Comparison:
    workload = replace(setting.chat(), name=SHORT)
    longest, mean = workload.longest(), workload.mean()
    clients = SLOW_CLIENTS if setting.slow else CLIENTS
    blocks = round(0.5 * clients * mean / setting.block_size)
    points: list[Point] = []
    for keep in KEEPS[:1] if setting.quick else KEEPS:
        evicting = Point(
            {"situation": SHORT, "keep": round(keep, 3)},
            setting.engine(stock=False, num_blocks=blocks, max_model_len=longest + 1),
            {},
            workload,
            2 * CLIENTS if not setting.slow else 3 * clients,
            keep,
            concurrency=clients,
        )
        names: tuple[str, ...] = (NATIVE, NAIVE, DEFAULTS)
        if points:
            names = (DEFAULTS,) if setting.slow else (NAIVE, DEFAULTS)
        points += variant_points(names, stock_of(evicting, keep=1.0), evicting, {"name": POLICY})
    return Comparison(SHORT, points, setting.repeats, fresh=True)


def _ample(setting: Setting) -> Comparison:
    clients = 8
    workload = Workload(AMPLE, (64, 64))
    blocks = 2 * clients * -(-128 // setting.block_size)
    idle = Point(
        {"situation": AMPLE, "keep": 1.0},
        setting.engine(stock=False, num_blocks=blocks, max_model_len=256),
        {},
        workload,
        clients * (2 if setting.slow else 8),
        None,
        concurrency=clients,
        sample_every=0,
    )
    stock = stock_of(idle)
    points = variant_points((NATIVE, DEFAULTS), stock, idle, {"name": POLICY})
    points.append(
        replace(
            idle,
            labels={**idle.labels, "variant": IDLE},
            config={"policy": {"name": "none"}},
        )
    )
    second = replace(stock.engine, copy=1)
    again = {**stock.labels, "variant": f"{NATIVE}, again"}
    points.append(replace(stock, labels=again, engine=second))
    return Comparison(AMPLE, points, setting.repeats, fresh=True)


def arrivals(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """The same memory and an open loop: Poisson arrivals at shares of what native served."""
    closed = pick(runs, situation=SHORT, variant=NATIVE)
    if setting.quick or setting.slow or not closed:
        return []
    served = spread([len(r.figures["requests"]) / r.figure("seconds") for r in closed]).median
    short = [p for p in _short(setting).points if p.labels["keep"] in (1.0, KEEPS[0])]
    points = [
        replace(
            point,
            labels={**point.labels, "situation": OPEN, "rate": share},
            concurrency=None,
            rate=float(f"{share * served:.2g}"),
            num_requests=2 * CLIENTS,
        )
        for share in RATES
        for point in short
    ]
    return [Comparison(OPEN, points, setting.repeats, fresh=True)]


def busy_speed(run: Run) -> float:
    """Output tokens a second while every client had a request, without the end of the run."""
    return run.figure("busy.tokens") / run.figure("busy.seconds")


def unpacked_speed(run: Run) -> float:
    """The same if packing holes for attention took no time: CPU alone packs.

    Packing is taken to be spread evenly over the run.
    """
    packing = float(run.figures.get("pack_us", 0)) / 1e6
    return busy_speed(run) / (1 - packing / run.figure("seconds"))


def within(run: Run, bound_s: float) -> float:
    """Requests a second that took at most `bound_s` for each of their tokens, waiting included."""
    good = sum((end - came) / count <= bound_s for came, _, end, count in run.figures["requests"])
    return int(good) / run.figure("seconds")


def native_median_s(run: Run) -> float:
    """Time to the end, a token, of the median request."""
    return spread([(end - came) / count for came, _, end, count in run.figures["requests"]]).median


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds a table a situation, the bars that open the page, and the claims with their goals."""
    reports = {SHORT: _report_short, OPEN: _report_open, AMPLE: _report_ample}
    for situation, add in reports.items():
        if found := pick(runs, situation=situation):
            add(result, model, found)


def _report_short(result: Result, model: str, runs: list[Run]) -> None:
    bounds = {run.repeat: native_median_s(run) for run in pick(runs, variant=NATIVE)}

    def good(run: Run) -> float:
        return within(run, bounds[run.repeat])

    table = Table(
        f"{model}: memory for half of what the clients ask for, {POLICY}",
        [
            "variant, share kept",
            "tok/s",
            "x native",
            "x naive-evict",
            "x naive-evict, packing taken out",
            "x native, packing taken out",
            "goodput [req/s]",
            "x native",
            "TTFT p50 | p95 [s]",
            "between tokens p50 | p95 [ms]",
            "to the end p50 | p95 [s]",
            "preemptions",
        ],
        [],
        [
            "tok/s: while every client had a request; ratios of the same repeat",
            "goodput: requests whose time to the end, a token, is within that of native's median "
            "request",
            "packing taken out: the time that naive-evict and vToken spend on packing holes for "
            "attention, a cost of the CPU's kernel alone, is subtracted from both",
            "[..]: range over the repeats",
        ],
    )
    values: list[Spread] = []
    names: list[str] = []
    for keep, variant in dict.fromkeys(
        (float(r.labels["keep"]), str(r.labels["variant"])) for r in runs
    ):
        chosen = pick(runs, keep=keep, variant=variant)
        one: Labels = {"keep": keep, "variant": variant}
        native: Labels = {"variant": NATIVE}
        naive: Labels = {"keep": keep, "variant": NAIVE}
        gain = ratios(runs, busy_speed, one, native)
        over_naive = ratios(runs, busy_speed, one, naive)
        unpacked = ratios(runs, unpacked_speed, one, naive)
        unpacked_gain = ratios(runs, unpacked_speed, one, native)
        better = ratios(runs, good, one, native)
        first, whole, between = (
            [figures(chosen, f"{what}_ms.{p}").median for p in ("p50", "p95")]
            for what in ("ttft", "e2e", "itl")
        )
        evicts = variant != NATIVE
        table.rows.append(
            [
                f"{variant}, {keep:.2g}" if evicts else variant,
                str(spread([busy_speed(r) for r in chosen])),
                None if not evicts else str(gain),
                None if variant in (NATIVE, NAIVE) or over_naive is None else str(over_naive),
                None if variant in (NATIVE, NAIVE) or unpacked is None else str(unpacked),
                None if not evicts else str(unpacked_gain),
                str(spread([good(r) for r in chosen])),
                None if not evicts else str(better),
                f"{first[0] / 1e3:.1f} | {first[1] / 1e3:.1f}",
                f"{between[0]:.0f} | {between[1]:.0f}",
                f"{whole[0] / 1e3:.1f} | {whole[1] / 1e3:.1f}",
                str(figures(chosen, "preemptions")),
            ]
        )
        names.append(f"{variant}, {keep:.2g}" if evicts else variant)
        values.append(spread([busy_speed(r) for r in chosen]))
        if variant == DEFAULTS:
            _short_claims(result, model, keep, gain, unpacked, better)
    result.tables.append(table)
    panel = Panel(
        f"{model}: memory for half",
        "",
        "output tokens a second",
        bars=[
            Bars(
                "output tokens a second",
                [s.median for s in values],
                [s.low for s in values],
                [s.high for s in values],
            )
        ],
        groups=names,
    )
    result.charts.append(Chart(f"Throughput with memory for half, {model}", [panel], part=model))


def _short_claims(
    result: Result,
    model: str,
    keep: float,
    gain: Spread | None,
    unpacked: Spread | None,
    better: Spread | None,
) -> None:
    what = f"half the memory, {POLICY} at {keep:.2g}: "
    for found, text, goal in (
        (gain, "throughput of native", f">= {GOALS[NATIVE]}"),
        (unpacked, "throughput of naive-evict, packing taken out", f">= {GOALS[NAIVE]}"),
        (better, "goodput of native", f">= {GOALS[NATIVE]}"),
    ):
        if found is not None:
            result.claims.append(found.claim("Goodput", what + text, model, "x", "", goal))


def _report_open(result: Result, model: str, runs: list[Run]) -> None:
    table = Table(
        f"{model}: the same memory, requests arrive at random: TTFT p50 | p95 [s], to the end p95 "
        "[s]",
        ["variant", *[f"{share:.0%} of native's rate" for share in RATES]],
        [],
        ["the rate is a share of what native served in the closed loop"],
    )
    for variant in dict.fromkeys(str(run.labels["variant"]) for run in runs):
        cells: list[str | int | float | None] = [variant]
        for share in RATES:
            chosen = pick(runs, variant=variant, rate=share)
            first = [figures(chosen, f"ttft_ms.{p}").median / 1e3 for p in ("p50", "p95")]
            whole = figures(chosen, "e2e_ms.p95").median / 1e3
            cells.append(f"{first[0]:.1f} | {first[1]:.1f}, {whole:.1f}")
        table.rows.append(cells)
    result.tables.append(table)


def _report_ample(result: Result, model: str, runs: list[Run]) -> None:
    table = Table(
        f"{model}: ample memory, 64 + 64 tokens, 8 clients",
        ["variant", "tok/s", "x native", "CPU time x native", "between tokens p50 [ms]"],
        [],
        ["ratios of the same repeat; native, again: a second process of it"],
    )
    timings: dict[str, Callable[[Run], float]] = {
        "speed": speed,
        "cpu": lambda run: run.figure("cpu_seconds"),
    }
    for variant in dict.fromkeys(str(run.labels["variant"]) for run in runs):
        chosen = pick(runs, variant=variant)
        found = {
            name: ratios(runs, timing, {"variant": variant}, {"variant": NATIVE})
            for name, timing in timings.items()
        }
        table.rows.append(
            [
                variant,
                str(spread([speed(run) for run in chosen])),
                None if variant == NATIVE else str(found["speed"]),
                None if variant == NATIVE else str(found["cpu"]),
                str(figures(chosen, "itl_ms.p50")),
            ]
        )
        ratio = found["speed"]
        if variant != NATIVE and ratio is not None:
            loss = spread([100 * (1 - value) for value in ratio.values])
            result.claims.append(
                loss.claim(
                    "Loss",
                    f"ample memory, short prompts: throughput lost, {variant}",
                    model,
                    "%",
                    "1.0 (indirection alone)",
                    f"<= {LOSS_GOAL:.0f}",
                )
            )
    result.tables.append(table)


EXPERIMENT = Experiment(
    "goodput",
    "throughput with memory for half of the requests, loss with ample memory",
    "the claim of section 5.3, with native beside",
    comparisons,
    report,
    arrivals,
    repeats=8,
)
