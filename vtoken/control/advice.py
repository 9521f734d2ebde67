"""One line in plain words: what limits admission now, and what would help.

Pure: counts and gates in, a sentence of at most `MAX_LENGTH` characters out. Every number in it is
one that the planner or the gates decide by.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from vtoken.config.values import VTokenConfig
from vtoken.planning.gates import Pressure
from vtoken.wire import Cause, Gate, SchedulingState

MAX_LENGTH = 180


@dataclass(frozen=True, slots=True)
class Situation:
    """What the sentence is made of; see `vtoken.control.diagnosis` for the cause and the offer.

    `lacking_blocks`: what the request that waits first lacks; vLLM keeps `withheld_blocks` from it.
    `gains`: one round would free something; `freed_blocks`, `moved_bytes`: so much at least.
    `missing_blocks`: fresh blocks that it lacks for more, of `available_blocks`.
    `held_shared_blocks`, `copy_freed_blocks`: shared blocks with holes that stay where they are,
    and what `better_sharing` would free of them.
    `planned_s`: age of the plan that all of these are from, if another one may say otherwise.
    """

    cause: Cause
    config: VTokenConfig
    pressure: Pressure
    gates: list[Gate]
    num_requests: int
    may_evict: bool
    num_waiting: int
    lacking_blocks: int
    withheld_blocks: int
    used_blocks: int
    used_slots: int
    live_tokens: int
    gains: bool
    freed_blocks: int
    moved_bytes: int
    missing_blocks: int
    available_blocks: int
    held_shared_blocks: int
    copy_freed_blocks: int
    better_sharing: str
    planned_s: float | None

    @property
    def closed(self) -> Gate | None:
        """The gate that holds an automatic round back."""
        return next((gate for gate in self.gates if not gate.open), None)


def sentence(now: Situation) -> str:
    if now.num_requests == 0:
        if now.num_waiting:
            return f"Idle: waiting for their first step: {now.num_waiting:,} requests."
        return "Idle: no request is running; the whole pool is free."
    if now.cause == "fragmented":
        return f"Fragmented: {_queue(now)}{_gain(now)}; {_remedy(now)}."
    if now.cause == "full":
        return f"Full: {_queue(now)}{_full(now)}."
    free = now.pressure.free_blocks
    if now.gains:
        held = f"; held back: {now.closed.detail}" if now.closed else ""
        return f"OK: {_blocks(free)} free; {_gain(now)}{held}."
    waiting = ""
    if now.num_waiting and free > now.config.low_watermark_blocks:
        waiting = f"; waiting, not for blocks: {now.num_waiting:,}"
    return f"OK: {_blocks(free)} free; {_holes(now)}{waiting}."


def paused_sentence(state: SchedulingState, num_running: int, num_waiting: int) -> str:
    """What is said of an engine that was told to schedule nothing, or nobody new."""
    waiting = f"{num_waiting:,} wait{'s' if num_waiting == 1 else ''}"
    if state == "paused":
        stands = "request stands" if num_running == 1 else "requests stand"
        told = f"vLLM schedules nothing until it is resumed; {num_running:,} {stands} still"
    else:
        told = f"vLLM starts no further request until it is resumed; {num_running:,} running"
    return f"Paused: {told}, {waiting}."


def _queue(now: Situation) -> str:
    if not now.lacking_blocks:
        return ""
    waiting = "1 waits" if now.num_waiting == 1 else f"{now.num_waiting:,} wait"
    withheld = f" ({now.withheld_blocks:,} withheld by --watermark)" if now.withheld_blocks else ""
    return f"{waiting}, the first lacks {_blocks(now.lacking_blocks)}{withheld}; "


def _blocks(n: int) -> str:
    return "1 block" if n == 1 else f"{n:,} blocks"


def _holes(now: Situation) -> str:
    empty = now.used_slots - now.live_tokens
    return f"{empty:,} of {now.used_slots:,} held slots carry no live token"


def _gain(now: Situation) -> str:
    if not now.freed_blocks:
        return "compacting is likely to free blocks"
    moved = "" if now.lacking_blocks else f" ({now.moved_bytes / 1e6:,.1f} MB moved)"
    return f"compacting now would free {_blocks(now.freed_blocks)}{moved}"


def _remedy(now: Situation) -> str:
    """Why compaction does not happen by itself, and what makes it happen."""
    config, pressure = now.config, now.pressure
    if now.closed is None:
        return "a round is due"
    if now.closed.name == "reclamation":
        if config.reclamation == "paused":
            return "reclamation is paused: resume it"
        return "reclamation is off: set it to auto"
    if now.closed.name == "theta_f":
        return f"lower theta_F from {config.theta_f:.2f} to below {_below(pressure.f)}, which is F"
    if now.closed.name == "watermark":
        free = pressure.free_blocks - pressure.wanted_blocks
        return f"raise the low watermark from {config.low_watermark_blocks:,} to {free:,} or more"
    if now.closed.name == "pause":
        steps = pressure.pause_steps - pressure.steps_since_round
        return f"the next round follows in {steps} step{'s' if steps != 1 else ''}"
    return "too few blocks are half empty for a round: compact by hand"


def _below(f: float) -> str:
    """A number that is not above `f`, with two decimals, or four where two say nothing."""
    if f >= 0.01:
        return f"{floor(f * 100) / 100:.2f}"
    return f"{floor(f * 10_000) / 10_000:.4f}"


def _full(now: Situation) -> str:
    """Why compaction frees nothing, and what does."""
    config = now.config
    if now.planned_s is not None:
        holes = "" if now.lacking_blocks else f"{_holes(now)}; "
        planned = f"compacting was last planned {now.planned_s:.1f} s ago"
        return f"{holes}{planned}: a dry run says what it frees now"
    needed = now.available_blocks + now.missing_blocks
    if now.missing_blocks and now.pressure.free_blocks >= needed:
        return (
            f"moving tokens takes {needed:,} fresh blocks, headroom is {config.headroom_blocks:,}: "
            f"raise headroom_blocks to {needed:,}"
        )
    if now.missing_blocks:
        return (
            f"moving tokens takes {needed:,} fresh blocks, {now.available_blocks:,} are there: "
            "smaller budget or fewer requests"
        )
    if now.copy_freed_blocks:
        return (
            f"{now.held_shared_blocks:,} shared blocks with holes stay: "
            f"prefix_sharing={now.better_sharing} would free {now.copy_freed_blocks:,}"
        )
    if not now.may_evict:
        return "every token is kept: choose a policy that evicts, or fewer requests"
    if now.lacking_blocks:
        return "compacting frees nothing: smaller budget or fewer requests"
    return f"{_holes(now)}; compacting frees nothing: smaller budget or fewer requests"
