"""The gates of an automatic planning round (paper 3.3): one predicate per gate, text on demand.

Pure functions of counts, independent of tables and planners. Decisions and explanations use the
same predicates; only explanations format text.

Gates in evaluation order; the first closed gate defers the round:
  reclamation      mode = auto
  theta_f          F > theta_F
  watermark        free blocks, less those that the first waiting request lacks and those that
                   vLLM's own watermark withholds from it, <= low watermark
  pause            >= 1 step since the last round, `EMPTY_ROUND_BACKOFF_STEPS` after an empty one
  low_utilization  >= `MIN_LOW_UTILIZATION_BLOCKS` blocks are at most half live
theta_f, watermark and low_utilization are the paper's pressure gates. Under `round_rule: price` all
three are also open while a round is expected to save more time than it costs
(`vtoken.core.planning.worth`), and while blocks are short under `evict_when: pressure`, because
tokens were given for blocks. The gate `price` shows both times; it is closed only together with one
of the three. Where holes have no price, both rules are the same and the gate does not exist.
A manual round bypasses the gates, never the planner's safety rules. Two more reasons defer a round
and are known only after planning: `headroom`, and relocations still `in_flight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vtoken.base.quantities import time_text
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.worth import Worth
from vtoken.sentences import counted
from vtoken.wire import Gate

EMPTY_ROUND_BACKOFF_STEPS = 8
MIN_LOW_UTILIZATION_BLOCKS = 2


@dataclass(frozen=True)
class Pressure:
    """The input of the gates.

    `count_low_utilization` is called only when all other gates are open, `ask_worth` at most once
    and only under `round_rule: price`.
    """

    f: float
    free_blocks: int
    steps_since_round: int
    last_round_empty: bool
    count_low_utilization: Callable[[], int]
    wanted_blocks: int = 0  # lacked by the first waiting request, plus those withheld from it
    short_blocks: int = 0  # the shortage for which requests give tokens
    ask_worth: Callable[[], Worth | None] = lambda: None

    @cached_property
    def worth(self) -> Worth | None:
        """Of a round now; None where holes have no price."""
        return self.ask_worth()

    @property
    def pause_steps(self) -> int:
        return EMPTY_ROUND_BACKOFF_STEPS if self.last_round_empty else 1


@dataclass(frozen=True, slots=True)
class Condition:
    """One gate.

    `met`: the gate's predicate. `text(config, pressure, met)`: both numbers and their relation.
    `pressure`: one of the three gates that are also open while a round pays.
    """

    name: str
    met: Callable[[VTokenConfig, Pressure], bool]
    text: Callable[[VTokenConfig, Pressure, bool], str]
    pressure: bool = False

    def holds(self, config: VTokenConfig, pressure: Pressure) -> bool:
        """Whether the gate is open."""
        return self.met(config, pressure) or (
            self.pressure and (pressure.short_blocks > 0 or _pays(config, pressure))
        )

    def describe(self, config: VTokenConfig, pressure: Pressure) -> Gate:
        met = self.met(config, pressure)
        is_open = self.holds(config, pressure)
        detail = self.text(config, pressure, met)
        if is_open and not met:
            detail += ", but blocks are short" if pressure.short_blocks else ", but moving pays"
        return Gate(name=self.name, open=is_open, detail=detail)


def _pays(config: VTokenConfig, pressure: Pressure) -> bool:
    worth = pressure.worth if config.experiment.round_rule == "price" else None
    return worth is not None and worth.pays


def _distinct(a: float, b: float) -> tuple[str, str]:
    """Format both numbers with enough decimals to differ, at most four."""
    for decimals in (2, 3):
        pair = f"{a:.{decimals}f}", f"{b:.{decimals}f}"
        if pair[0] != pair[1]:
            return pair
    return f"{a:.4f}", f"{b:.4f}"


def _theta_text(config: VTokenConfig, pressure: Pressure, met: bool) -> str:
    f, theta = _distinct(pressure.f, config.theta_f)
    return f"F {f} {'>' if met else '<='} theta_F {theta}"


def _watermark_text(config: VTokenConfig, pressure: Pressure, met: bool) -> str:
    wanted = f" less {pressure.wanted_blocks:,} wanted" if pressure.wanted_blocks else ""
    relation = "<=" if met else ">"
    return (
        f"free {pressure.free_blocks:,}{wanted} {relation} "
        f"low watermark {config.low_watermark_blocks:,} blocks"
    )


def _pause_text(_: VTokenConfig, pressure: Pressure, met: bool) -> str:
    why = " after one that found nothing" if pressure.last_round_empty else ""
    relation = ">=" if met else "<"
    since = counted(pressure.steps_since_round, "step")
    return f"{since} since a round {relation} {pressure.pause_steps}{why}"


def _low_utilization_text(_: VTokenConfig, pressure: Pressure, met: bool) -> str:
    relation = ">=" if met else "<"
    found = counted(pressure.count_low_utilization(), "block")
    return f"{found} at most half live {relation} {MIN_LOW_UTILIZATION_BLOCKS}"


CONDITIONS = (
    Condition(
        "reclamation",
        lambda config, _: config.reclamation == "auto",
        lambda config, _, met: f"reclamation {config.reclamation}" + ("" if met else ", not auto"),
    ),
    Condition("theta_f", lambda config, p: p.f > config.theta_f, _theta_text, pressure=True),
    Condition(
        "watermark",
        lambda config, p: p.free_blocks - p.wanted_blocks <= config.low_watermark_blocks,
        _watermark_text,
        pressure=True,
    ),
    Condition("pause", lambda _, p: p.steps_since_round >= p.pause_steps, _pause_text),
    Condition(
        "low_utilization",
        lambda _, p: p.count_low_utilization() >= MIN_LOW_UTILIZATION_BLOCKS,
        _low_utilization_text,
        pressure=True,
    ),
)
DEFERRALS = (*(condition.name for condition in CONDITIONS), "headroom", "in_flight")


def first_closed(config: VTokenConfig, pressure: Pressure) -> str | None:
    """The name of the first gate that is closed; None when a round may be planned."""
    for condition in CONDITIONS:
        if not condition.holds(config, pressure):
            return condition.name
    return None


def describe_gates(config: VTokenConfig, pressure: Pressure) -> list[Gate]:
    """The state of every gate of `CONDITIONS`, and of `price` where it exists."""
    gates = [condition.describe(config, pressure) for condition in CONDITIONS]
    worth = pressure.worth if config.experiment.round_rule == "price" else None
    if worth is not None:
        under_pressure = all(c.met(config, pressure) for c in CONDITIONS if c.pressure)
        gates.append(_price_gate(worth, under_pressure))
    return gates


def _price_gate(worth: Worth, under_pressure: bool) -> Gate:
    relation = ">" if worth.pays else "<="
    saving, cost = time_text(worth.saving_us / 1e3), time_text(worth.cost_us / 1e3)
    detail = f"saves {saving} {relation} costs {cost}"
    if under_pressure and not worth.pays:
        detail += ", but under pressure"
    return Gate(name="price", open=worth.pays or under_pressure, detail=detail)


def headroom_gate(available: int, missing: int, *, gains: bool) -> Gate:
    """The gate of a round planned with `available` fresh blocks that lacks `missing` more.

    `gains`: the round frees blocks nevertheless.
    """
    if missing <= 0:
        detail = f"{counted(available, 'fresh block')} suffice{'s' * (available == 1)}"
    else:
        more = " for more" if gains else ""
        detail = f"{counted(available, 'fresh block')} < {available + missing:,} needed{more}"
    return Gate(name="headroom", open=gains or missing <= 0, detail=detail)
