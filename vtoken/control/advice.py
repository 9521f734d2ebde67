"""One sentence: what limits admission now, and what would help.

Pure functions: counts and gates in, at most `MAX_LENGTH` characters out. The sentence uses only
numbers on which the planner or the gates decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from vtoken.control.cached_preview import CachedPreview, Gain
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import Pressure
from vtoken.sentences import counted, kinds_text
from vtoken.wire import CacheGroup, Cause, Gate, MemoryPressure, SchedulingState

MAX_LENGTH = 180


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of `sentence`; `vtoken.control.diagnosis` computes it.

    `lacking_blocks`: blocks that the first waiting request lacks; vLLM withholds `withheld_blocks`
    from it. `gain`: what one round now would free, by moving `moved_bytes`. `preview`: the round
    behind these numbers; `planned_s`: its age, None while a new plan would equal it.
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
    used_slots: int
    live_tokens: int
    gain: Gain
    moved_bytes: int
    preview: CachedPreview
    planned_s: float | None
    memory: MemoryPressure | None = None  # of requests that give under pressure
    waits_for_end: bool = False  # all that can be given is not enough for the first waiting request
    groups: Sequence[CacheGroup] = ()

    @property
    def closed_gate(self) -> Gate | None:
        """The first closed gate; None when all are open."""
        return next((gate for gate in self.gates if not gate.open), None)


def sentence(situation: Situation) -> str:
    if situation.num_requests == 0:
        if situation.num_waiting:
            requests = "request waits" if situation.num_waiting == 1 else "requests wait"
            return f"Idle: {situation.num_waiting:,} {requests} for a first step."
        return "Idle: no request is running; the whole pool is free."
    if situation.cause == "fragmented":
        return f"Fragmented: {_queue(situation)}{_gain(situation)}; {_remedy(situation)}."
    if situation.cause == "full":
        return f"Full: {_queue(situation)}{_full(situation)}."
    free = situation.pressure.free_blocks
    if situation.gain.likely:
        held = f"; held back: {situation.closed_gate.detail}" if situation.closed_gate else ""
        return f"OK: {counted(free, 'block')} free; {_gain(situation)}{held}{_spared(situation)}."
    waiting = ""
    if situation.num_waiting and free > situation.config.low_watermark_blocks:
        waiting = f"; {_wait(situation.num_waiting)}, not for blocks"
    return f"OK: {counted(free, 'block')} free; {_holes(situation)}{waiting}{_spared(situation)}."


def paused_sentence(state: SchedulingState, num_running: int, num_waiting: int) -> str:
    """The sentence of an engine that is paused, or paused for new requests."""
    if state == "paused":
        requests = "request is" if num_running == 1 else "requests are"
        effect = f"vLLM schedules nothing until it is resumed; {num_running:,} {requests} suspended"
    else:
        effect = f"vLLM starts no new request until it is resumed; {num_running:,} running"
    return f"Paused: {effect}, {_wait(num_waiting)}."


def _wait(n: int) -> str:
    return "1 waits" if n == 1 else f"{n:,} wait"


def _queue(situation: Situation) -> str:
    if not situation.lacking_blocks:
        return ""
    withheld = (
        f" ({situation.withheld_blocks:,} withheld by --watermark)"
        if situation.withheld_blocks
        else ""
    )
    lacking = counted(situation.lacking_blocks, "block")
    return f"{_wait(situation.num_waiting)}, the first lacks {lacking}{withheld}; "


def _holes(situation: Situation) -> str:
    empty = situation.used_slots - situation.live_tokens
    return f"{empty:,} of {situation.used_slots:,} held slots carry no live token"


def _gain(situation: Situation) -> str:
    if not situation.gain.freed_blocks:
        return "compacting is likely to free blocks"
    moved = "" if situation.lacking_blocks else f" ({situation.moved_bytes / 1e6:,.1f} MB moved)"
    return f"compacting now would free {counted(situation.gain.freed_blocks, 'block')}{moved}"


def _remedy(situation: Situation) -> str:
    """Why compaction does not start automatically, and what makes it start."""
    config, pressure = situation.config, situation.pressure
    if situation.closed_gate is None:
        return "a round is due"
    if situation.closed_gate.name == "reclamation":
        if config.reclamation == "paused":
            return "reclamation is paused: resume it"
        return "reclamation is off: set it to auto"
    if situation.closed_gate.name == "theta_f":
        return f"lower theta_F from {config.theta_f:.2f} to below {_below(pressure.f)}, which is F"
    if situation.closed_gate.name == "watermark":
        free = pressure.free_blocks - pressure.wanted_blocks
        return f"raise the low watermark from {config.low_watermark_blocks:,} to {free:,} or more"
    if situation.closed_gate.name == "pause":
        steps = pressure.pause_steps - pressure.steps_since_round
        return f"the next round follows in {steps} step{'s' if steps != 1 else ''}"
    return "too few blocks are half empty for a round: compact by hand"


def _below(f: float) -> str:
    """`f` rounded down to two decimals, or to four where two would show 0."""
    if f >= 0.01:
        return f"{floor(f * 100) / 100:.2f}"
    return f"{floor(f * 10_000) / 10_000:.4f}"


def _spared(situation: Situation) -> str:
    """How many tokens live that a fixed budget would have evicted."""
    memory = situation.memory
    if memory is None or not memory.spared_tokens:
        return ""
    return f"; {counted(memory.spared_tokens, 'token')} live beyond the budgets"


def _given(memory: MemoryPressure, *, waits_for_end: bool) -> str:
    """Who gave tokens, and who still can."""
    gave = ""
    if memory.recent_tokens:
        gave = (
            f"{counted(memory.recent_givers, 'request')} gave "
            f"{counted(memory.recent_tokens, 'token')} in the last {memory.window_s:g} s; "
        )
    if not memory.givers:
        return f"{gave}every request is at its floor: smaller budget or fewer requests"
    more = "more" if gave else "tokens"
    enough = ", which is not enough: it waits until one ends" if waits_for_end else ""
    return f"{gave}{memory.givers:,} can give {memory.givable_tokens:,} {more}{enough}"


def _full(situation: Situation) -> str:
    """Why compaction frees nothing, and what would free blocks."""
    config, preview = situation.config, situation.preview
    others = [group for group in situation.groups if not group.managed]
    held, total = (sum(group.blocks for group in of) for of in (others, situation.groups))
    if 2 * held > total:
        return (
            f"{kinds_text(others)} hold {held:,} of {total:,} used blocks, which evicting does not "
            "free: fewer requests"
        )
    if situation.memory is not None and situation.planned_s is None:
        return _given(situation.memory, waits_for_end=situation.waits_for_end)
    if situation.planned_s is not None:
        holes = "" if situation.lacking_blocks else f"{_holes(situation)}; "
        planned = f"compacting was last planned {situation.planned_s:.1f} s ago"
        return f"{holes}{planned}: a dry run shows what it frees now"
    needed = preview.available_blocks + preview.missing_blocks
    if preview.missing_blocks and situation.pressure.free_blocks >= needed:
        return (
            f"moving tokens takes {needed:,} fresh blocks, headroom is {config.headroom_blocks:,}: "
            f"raise headroom_blocks to {needed:,}"
        )
    if preview.missing_blocks:
        return (
            f"moving tokens takes {needed:,} fresh blocks, {preview.available_blocks:,} are "
            "free: smaller budget or fewer requests"
        )
    if preview.copy_freed_blocks:
        return (
            f"{preview.held_shared_blocks:,} shared blocks with holes stay: "
            f"prefix_sharing={preview.better_sharing} would free {preview.copy_freed_blocks:,}"
        )
    if not situation.may_evict:
        return "every token is kept: choose a policy that evicts, or fewer requests"
    if situation.lacking_blocks:
        return "compacting frees nothing: smaller budget or fewer requests"
    return f"{_holes(situation)}; compacting frees nothing: smaller budget or fewer requests"
