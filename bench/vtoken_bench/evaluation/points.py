"""What is measured, as data: points, each one load on one engine in one configuration.

A comparison is a handful of points that run interleaved: whatever slows the machine down for a
while slows all of them down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student_t

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.variants import NATIVE, VARIANTS
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result
from vtoken_bench.quality.settings import PAPER_PARAMS

Labels = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine process. `dtype`, `threads` a forward: None is the target's. `copy`: one more
    process of the same.
    """

    model: str
    stock: bool
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_caching: bool = False
    copy_sync: bool = False
    dtype: str | None = None
    threads: int | None = None
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """`keep`: the share of prompt and output that is every request's budget; None: the budget is
    that of `config`.

    `concurrency`: closed loop; `rate` requests a second: open loop. `max_running`: most
    requests that vLLM runs at once; None: as many as it admits.
    """

    labels: Labels
    engine: EngineSpec
    config: dict[str, Any]
    workload: Workload | FactChats
    num_requests: int
    keep: float | None
    concurrency: int | None = None
    rate: float | None = None
    max_running: int | None = None
    shared: tuple[int, int] | None = None  # (degree, tokens) of common beginnings
    sample_every: int = 8
    stop_on_overflow: bool = False
    keep_tokens: bool = False
    own_bytes: bool = False
    questions: bool = False  # about the text, in the chat template; answers end by themselves
    continues: bool = False  # outputs continue the text and end by themselves; `reference_ids` too

    def key(self, repeat: int) -> dict[str, Any]:
        """Everything that the figures depend on, beside the code and the machine."""
        return asdict(self) | {"repeat": repeat}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`fresh`: of speeds. Every load has an engine process of its own: a process makes its first
    load about a tenth slower than the next ones, and where it has its weights makes all of them
    faster or slower by as much; either would pass for an effect. On a CPU the loads of a repeat
    take turns of a second, so that they share what else goes on on the machine.

    Repeats are numbered from `first` up to `repeats`, without it.
    """

    name: str
    points: Sequence[Point]
    repeats: int = 3
    fresh: bool = False
    first: int = 0


@dataclass(frozen=True)
class Run:
    """What one point gave in one repeat; `seconds`: what measuring it took, `at`: when, `commit`:
    of which code.
    """

    labels: Labels
    repeat: int
    figures: dict[str, Any]
    seconds: float = 0.0
    at: str = ""
    commit: str = ""

    def figure(self, path: str) -> float:
        """`itl_ms.p95` and the like; KeyError where it was not measured."""
        found: Any = self.figures
        for part in path.split("."):
            found = found[part]
        return float(found)


@dataclass(frozen=True)
class Experiment:
    """One part of the evaluation: its points on one model, and what is made of their runs.

    `report` adds tables, charts and claims for one model to the result. `then`: what is measured
    next, given the runs so far; it is asked again until it names nothing new. `repeats`: by
    default; an interval of a speed takes eight.
    """

    name: str
    summary: str
    paper: str  # which part of section 5
    comparisons: Callable[[Setting], list[Comparison]]
    report: Callable[[Result, str, list[Run]], None]
    then: Callable[[Setting, list[Run]], list[Comparison]] | None = None
    repeats: int = 3


@dataclass(frozen=True)
class Setting:
    """The model that is measured, and how much of it there is time for.

    `block_size`: what stock vLLM takes. `slow`: a trained model on a CPU, some 400 prompt tokens
    and 100 output tokens a second. `quick`: to see that it works.
    """

    model: str
    block_size: int
    slow: bool
    quick: bool
    repeats: int
    on_gpu: bool = False

    def engine(self, *, stock: bool, num_blocks: int, max_model_len: int) -> EngineSpec:
        return EngineSpec(self.model, stock, self.block_size, num_blocks, max_model_len)

    def workloads(self) -> list[Workload]:
        """Chat and long context, or what of them there is time for."""
        both = [self.chat(), self.long_context()]
        return both[:1] if self.quick or self.slow else both

    def chat(self) -> Workload:
        """ShareGPT's lengths; on a CPU prompts are cut down more than outputs.

        There a prompt token costs a sixth of an output token (8 requests, the trained model), on a
        GPU a twentieth or less: so the two keep the shares that they have on a GPU.
        """
        if self.on_gpu:
            return Workload("chat", "chat", longest_tokens=8192)
        return Workload("chat", "chat", 1 / 8, 1 / 2, 1024)

    def long_context(self) -> Workload:
        """LongBench's lengths."""
        if self.on_gpu:
            return Workload("long context", "long-context", longest_tokens=16_384)
        return Workload("long context", "long-context", 1 / 12, 1.0, 2048)


def stock_of(point: Point, **labels: str | int | float) -> Point:
    """The same load on stock vLLM, which evicts nothing. `labels`: those that differ."""
    engine = replace(point.engine, stock=True)
    return replace(point, engine=engine, config={}, keep=None, labels={**point.labels, **labels})


def variant_points(
    names: Sequence[str], stock: Point, evicting: Point, policy: dict[str, Any]
) -> list[Point]:
    """`stock` for native, `evicting` for the others, with the policy as its paper has it."""
    if policy.get("name") in PAPER_PARAMS:
        policy = {"params": PAPER_PARAMS[policy["name"]]} | policy
    found = []
    for name in names:
        if name == NATIVE:
            found.append(replace(stock, labels={**stock.labels, "variant": name}))
            continue
        config = VARIANTS[name] | {"policy": policy} | evicting.config
        labels = {**evicting.labels, "variant": name}
        found.append(replace(evicting, labels=labels, config=config))
    return found


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats: its median, least and most.

    `values`: those of single repeats, in their order, where they are known.
    """

    median: float
    low: float
    high: float
    count: int = field(default=1)
    values: tuple[float, ...] = ()

    def interval(self) -> tuple[float, float] | None:
        """95% Student t interval of the mean; None for less than three repeats."""
        if len(self.values) < 3:
            return None
        quantile = float(student_t.ppf(0.975, len(self.values) - 1))
        half = quantile * stdev(self.values) / len(self.values) ** 0.5
        middle = fmean(self.values)
        return middle - half, middle + half

    def __str__(self) -> str:
        if self.low == self.high:
            return _number(self.median)
        return f"{_number(self.median)} [{_number(self.low)} .. {_number(self.high)}]"

    def change(self) -> Spread:
        """Of ratios: how much more or less than 1, in percent."""
        return spread([100 * (ratio - 1) for ratio in self.values])

    def claim(
        self, row: str, what: str, model: str, unit: str, paper: str, goal: str = ""
    ) -> Claim:
        """The claim, with its values and, from three on, the interval that decides a goal."""
        middle = self.median, self.low, self.high
        varies = self.low != self.high
        return Claim(
            row,
            what,
            model,
            *middle,
            unit,
            self.count,
            paper,
            goal,
            self.interval() if varies else None,
            list(self.values) if varies else [],
        )


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(median, ordered[0], ordered[-1], len(ordered), tuple(values))


def figures(runs: Sequence[Run], path: str, **labels: str | int | float) -> Spread:
    """One figure of the runs with these labels; ValueError when there is none."""
    found = [run.figure(path) for run in pick(runs, **labels)]
    if not found:
        raise ValueError(f"no run is {labels}")
    return spread(found)


def variants_of(runs: Sequence[Run]) -> list[str]:
    """The variants of the runs, each once, in their order."""
    return list(dict.fromkeys(str(run.labels["variant"]) for run in runs))


def pick(runs: Sequence[Run], **labels: str | int | float) -> list[Run]:
    return [r for r in runs if all(r.labels.get(k) == v for k, v in labels.items())]


def ratios(
    runs: Sequence[Run],
    figure: Callable[[Run], float],
    one: Labels,
    other: Labels,
) -> Spread | None:
    """The spread of `paired`; None where it is empty."""
    found = paired(runs, figure, one, other)
    return spread(found) if found else None


def paired(
    runs: Sequence[Run],
    figure: Callable[[Run], float],
    one: Labels,
    other: Labels,
) -> list[float]:
    """`figure` of one over other's, repeat by repeat: both ran side by side in each."""
    firsts = {run.repeat: figure(run) for run in pick(runs, **one)}
    seconds = {run.repeat: figure(run) for run in pick(runs, **other)}
    both = sorted(firsts.keys() & seconds.keys())
    return [firsts[n] / seconds[n] for n in both if seconds[n]]


def same_tokens(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether both gave the same tokens in every repeat: then their decisions were the same."""
    return all(
        run.figures["tokens_hash"] == other.figures["tokens_hash"]
        for run in runs
        for other in others
        if run.repeat == other.repeat
    )


def stamp(runs: Sequence[Run]) -> str:
    """When the runs were measured and at which commits, as "A to B at C"."""
    times = sorted(run.at for run in runs)
    commits = ", ".join(dict.fromkeys(run.commit for run in runs if run.commit))
    first, last = times[0], times[-1]
    return (first if first == last else f"{first} to {last}") + (
        f" at {commits}" if commits else ""
    )


def speed(run: Run) -> float:
    """Output tokens a second."""
    return run.figure("tokens") / run.figure("seconds")


def busy_speed(run: Run) -> float:
    """The same while every client had a request, without the end of the run."""
    return run.figure("busy.tokens") / run.figure("busy.seconds")


def packing_share(run: Run) -> float:
    """Share of the time in which holes were packed for attention: CPU alone packs."""
    return float(run.figures.get("pack_us", 0)) / (1e6 * run.figure("seconds"))


# How tables show an `unpacked` speed, for their notes.
UNPACKED = "packing of holes for attention, a cost of the CPU's kernel, is taken out of both"


def unpacked(speed_of: Callable[[Run], float]) -> Callable[[Run], float]:
    """The speed if packing took no time. It is taken to be spread evenly over the run."""
    return lambda run: speed_of(run) / (1 - packing_share(run))


def cpu_seconds(run: Run) -> float:
    """CPU time of the engine's steps."""
    return run.figure("cpu_seconds")


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
