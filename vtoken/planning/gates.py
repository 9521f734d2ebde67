"""When an automatic planning round runs (paper 3.3): one predicate a gate, its words on demand.

Pure: counts in, an answer out. Knows neither tables nor planners. Who decides and who explains ask
the same predicates; only who explains pays for words.

Gates, in the order in which they are asked; the first closed one is what holds a round back:
  reclamation      mode = auto
  theta_f          F > theta_F
  watermark        free blocks, less what the request that waits first lacks and what vLLM's own
                   watermark keeps from it, <= low watermark
  pause            >= 1 step since the last round, `EMPTY_ROUND_BACKOFF_STEPS` when it found nothing
  low_utilization  >= `MIN_LOW_UTILIZATION_BLOCKS` blocks are at most half live
theta_f, watermark and low_utilization are the paper's: there is pressure. Under `round_rule: price`
all three are also open, whatever their numbers, while a round is expected to save more time than it
costs (`vtoken.planning.worth`). `price` says both; it is closed only beside one of the three. Where
holes have no price, the two rules are the same, and there is no such gate.
A manual round passes them, never the safety rules of the planner. Two more things hold a round
back, and are known only once it is planned: `headroom`, and relocations still `in_flight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vtoken.config.values import VTokenConfig
from vtoken.planning.worth import Worth
from vtoken.wire import Gate

EMPTY_ROUND_BACKOFF_STEPS = 8
MIN_LOW_UTILIZATION_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the gates look at. `count_low_utilization` is called only when all others are open.

    `worth` of a round now, None where holes have no price, is asked under `round_rule: price` only.
    """

    f: float
    free_blocks: int
    steps_since_round: int
    last_round_empty: bool
    count_low_utilization: Callable[[], int]
    wanted_blocks: int = 0  # what the request that waits first lacks, and what is kept from it
    worth: Callable[[], Worth | None] = lambda: None

    @property
    def pause_steps(self) -> int:
        return EMPTY_ROUND_BACKOFF_STEPS if self.last_round_empty else 1


@dataclass(frozen=True, slots=True)
class Condition:
    """`met` is what the gate asks for; `pressure`: it is one of the three that a round which pays
    need not pass. `told(config, pressure, met)`: both numbers, with the relation between them.
    """

    name: str
    met: Callable[[VTokenConfig, Pressure], bool]
    told: Callable[[VTokenConfig, Pressure, bool], str]
    pressure: bool = False

    def holds(self, config: VTokenConfig, pressure: Pressure) -> bool:
        """Whether the gate is open."""
        return self.met(config, pressure) or (self.pressure and _pays(config, pressure))

    def describe(self, config: VTokenConfig, pressure: Pressure) -> Gate:
        met = self.met(config, pressure)
        is_open = met or (self.pressure and _pays(config, pressure))
        detail = self.told(config, pressure, met)
        return Gate(
            name=self.name,
            open=is_open,
            detail=detail if met or not is_open else f"{detail}, but moving pays",
        )


def _pays(config: VTokenConfig, pressure: Pressure) -> bool:
    worth = pressure.worth() if config.round_rule == "price" else None
    return worth is not None and worth.pays


def _two(a: float, b: float) -> tuple[str, str]:
    """Both numbers with as many decimals as it takes to tell them apart, four at most."""
    for decimals in (2, 3):
        pair = f"{a:.{decimals}f}", f"{b:.{decimals}f}"
        if pair[0] != pair[1]:
            return pair
    return f"{a:.4f}", f"{b:.4f}"


def _tell_theta(config: VTokenConfig, pressure: Pressure, met: bool) -> str:
    f, theta = _two(pressure.f, config.theta_f)
    return f"F {f} {'>' if met else '<='} theta_F {theta}"


def _tell_watermark(config: VTokenConfig, pressure: Pressure, met: bool) -> str:
    wanted = f" less {pressure.wanted_blocks:,} wanted" if pressure.wanted_blocks else ""
    relation = "<=" if met else ">"
    return (
        f"free {pressure.free_blocks:,}{wanted} {relation} "
        f"low watermark {config.low_watermark_blocks:,} blocks"
    )


def _tell_pause(_: VTokenConfig, pressure: Pressure, met: bool) -> str:
    why = " after one that found nothing" if pressure.last_round_empty else ""
    relation = ">=" if met else "<"
    return (
        f"{pressure.steps_since_round:,} steps since a round {relation} {pressure.pause_steps}{why}"
    )


def _tell_low_utilization(_: VTokenConfig, pressure: Pressure, met: bool) -> str:
    relation = ">=" if met else "<"
    found = pressure.count_low_utilization()
    return f"{found:,} blocks at most half live {relation} {MIN_LOW_UTILIZATION_BLOCKS}"


CONDITIONS = (
    Condition(
        "reclamation",
        lambda config, _: config.reclamation == "auto",
        lambda config, _, met: f"reclamation {config.reclamation}" + ("" if met else ", not auto"),
    ),
    Condition("theta_f", lambda config, p: p.f > config.theta_f, _tell_theta, pressure=True),
    Condition(
        "watermark",
        lambda config, p: p.free_blocks - p.wanted_blocks <= config.low_watermark_blocks,
        _tell_watermark,
        pressure=True,
    ),
    Condition("pause", lambda _, p: p.steps_since_round >= p.pause_steps, _tell_pause),
    Condition(
        "low_utilization",
        lambda _, p: p.count_low_utilization() >= MIN_LOW_UTILIZATION_BLOCKS,
        _tell_low_utilization,
        pressure=True,
    ),
)
DEFERRALS = (*(condition.name for condition in CONDITIONS), "headroom", "in_flight")


def first_closed(config: VTokenConfig, pressure: Pressure) -> int | None:
    """Index in `CONDITIONS` of the first gate that is closed; None when a round may be planned."""
    for index, condition in enumerate(CONDITIONS):
        if not condition.holds(config, pressure):
            return index
    return None


def describe_gates(config: VTokenConfig, pressure: Pressure) -> list[Gate]:
    """Every gate of `CONDITIONS` as it stands, and `price` where there is one."""
    gates = [condition.describe(config, pressure) for condition in CONDITIONS]
    worth = pressure.worth() if config.round_rule == "price" else None
    if worth is not None:
        under_pressure = all(c.met(config, pressure) for c in CONDITIONS if c.pressure)
        gates.append(_price_gate(worth, under_pressure))
    return gates


def _price_gate(worth: Worth, under_pressure: bool) -> Gate:
    relation = ">" if worth.pays else "<="
    detail = f"saves {worth.saving_us:,.0f} µs {relation} costs {worth.cost_us:,.0f} µs"
    if under_pressure and not worth.pays:
        detail += ", but under pressure"
    return Gate(name="price", open=worth.pays or under_pressure, detail=detail)


def headroom_gate(available: int, missing: int, *, gains: bool) -> Gate:
    """Of a round that was planned with `available` fresh blocks, lacks `missing`, and frees some
    (`gains`) or none for that reason."""
    if missing <= 0:
        detail = f"{available:,} fresh blocks suffice"
    else:
        more = " for more" if gains else ""
        detail = f"{available:,} fresh blocks < {available + missing:,} needed{more}"
    return Gate(name="headroom", open=gains or missing <= 0, detail=detail)
