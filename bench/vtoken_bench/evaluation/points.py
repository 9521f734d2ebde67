"""What is measured, as data: points, each one load on one engine in one configuration.

A comparison is a handful of points that run interleaved: whatever slows the machine down for a
while slows all of them down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vtoken_bench.output import Result

Labels = Mapping[str, str | int | float]


class Workload(Protocol):
    """Where the requests of a load come from; it is a dataclass, and part of a point's key."""

    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""

    def requests(self, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
        """For a load's `requests`; a seed gives the same ones again."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine process. `copy`: one more process of the same. `others`: vLLM's arguments beside
    those of every load.
    """

    model: str
    stock: bool
    block_size: int
    num_blocks: int
    max_model_len: int
    copy: int = 0
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """`concurrency`: closed loop; `rate` requests a second: open loop. `max_running`: most
    requests that vLLM runs at once; None: as many as it admits.
    """

    labels: Labels
    engine: EngineSpec
    config: dict[str, Any]
    workload: Workload
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    max_running: int | None = None

    def key(self, repeat: int) -> dict[str, Any]:
        """Everything that the figures depend on, beside the code and the machine."""
        return asdict(self) | {"repeat": repeat}

    def stock(self, **labels: str | int | float) -> Point:
        """The same load on stock vLLM, which evicts nothing. `labels`: those that differ."""
        engine = replace(self.engine, stock=True)
        return replace(self, engine=engine, config={}, labels={**self.labels, **labels})

    def configured(self, variant: str, config: dict[str, Any]) -> Point:
        """The same load on vToken in this configuration."""
        labels, engine = {**self.labels, "variant": variant}, replace(self.engine, stock=False)
        return replace(self, labels=labels, engine=engine, config=config)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Points that are compared by their speeds. Every load has an engine process of its own: a
    process makes its first load about a tenth slower than the next ones, and where it has its
    weights makes all of them faster or slower by as much; either would pass for an effect. On a CPU
    the loads of a repeat take turns of a second, so that they share what else goes on on the
    machine.

    Repeats are numbered from `first` up to `repeats`, without it.
    """

    name: str
    points: Sequence[Point]
    repeats: int
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
class Part:
    """One part of the evaluation: its points on one model, and what is made of their runs.

    `report` adds tables, charts and claims for one model to the result. `then`: what is measured
    next, given the runs so far; it is asked again until it names nothing new. `trained`: it needs
    a trained model, random weights tell nothing. `varies`: it has an arm for each of a setting's
    `also`.
    """

    name: str
    comparisons: Callable[[Setting], list[Comparison]]
    report: Callable[[Result, str, list[Run]], None]
    then: Callable[[Setting, list[Run]], list[Comparison]] | None = None
    trained: bool = False
    varies: bool = False


@dataclass(frozen=True)
class Setting:
    """The model that is measured, and how much of it there is time for.

    `block_size`: what stock vLLM takes. `quick`: to see that it works. `also`: fields of the
    configuration, each for one more arm of a part that `varies`.
    """

    model: str
    block_size: int
    quick: bool
    repeats: int
    also: tuple[tuple[str, Any], ...] = ()

    def point(
        self, labels: Labels, workload: Workload, num_requests: int, num_blocks: int, **load: Any
    ) -> Point:
        """The load on stock vLLM in a pool of `num_blocks`."""
        longest, others = workload.longest() + 1, getattr(workload, "engine_args", {})
        engine = EngineSpec(self.model, True, self.block_size, num_blocks, longest, others=others)
        return Point(labels, engine, {}, workload, num_requests, **load)


def pick(runs: Sequence[Run], **labels: str | int | float) -> list[Run]:
    return [r for r in runs if all(r.labels.get(k) == v for k, v in labels.items())]


def variants_of(runs: Sequence[Run]) -> list[str]:
    """The variants of the runs, each once, in their order."""
    return list(dict.fromkeys(str(run.labels["variant"]) for run in runs))


def stamp(runs: Sequence[Run]) -> str:
    """When the runs were measured and at which commits, as "A to B at C"."""
    times = sorted(run.at for run in runs)
    commits = ", ".join(dict.fromkeys(run.commit for run in runs if run.commit))
    first, last = times[0], times[-1]
    return (first if first == last else f"{first} to {last}") + (
        f" at {commits}" if commits else ""
    )
