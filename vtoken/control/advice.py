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
from vtoken.core.runtime.shortage import Shortage
from vtoken.sentences import counted, data_size, kinds_text
from vtoken.wire import CacheGroup, Cause, Gate, MemoryPressure, SchedulingState

MAX_LENGTH = 180


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of `sentence`; `vtoken.control.diagnosis` computes it.

    `short`: the shortage now; vLLM withholds `withheld_blocks` from the first waiting request,
    which computes `reread_tokens` again if it was preempted. `gain`: what one round now would
    free, by moving `moved_bytes`. `preview`: the round behind these numbers; `planned_s`: its age,
    None while a new plan would equal it.
    """

    cause: Cause
    config: VTokenConfig
    pressure: Pressure
    gates: list[Gate]
    num_requests: int
    may_evict: bool
    num_waiting: int
    short: Shortage
    withheld_blocks: int
    total_blocks: int
    used_slots: int
    live_tokens: int
    gain: Gain
    moved_bytes: int
    preview: CachedPreview
    planned_s: float | None
    memory: MemoryPressure | None = None  # of requests that give under pressure
    short_until_s: float = 0.0  # how long ago blocks were short, if they are not now
    oldest_wait_s: float = 0.0
    patience_s: float = 0.0  # how long the first waiting request waits before others give
    reread_tokens: int = 0
    remedy: str = ""  # what a lower floor would let requests give
    paused: str = ""  # who stopped reclamation, and when
    sessions: str = ""  # what sessions hold and do not give
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
    if situation.cause != "ok" and situation.memory is not None:
        return _under_pressure(situation, situation.memory)
    if situation.cause == "fragmented":
        return f"Fragmented: {_queue(situation)}{_gain(situation)}; {_remedy(situation)}."
    if situation.cause == "full":
        return f"Full: {_queue(situation)}{_full(situation)}."
    blocks = counted(situation.pressure.free_blocks, "block")
    free = f"{blocks} free of {situation.total_blocks:,}"
    paused = ""
    if situation.memory and situation.paused:
        paused = f"; reclamation {_nobody_gives(situation)}"
    if situation.gain.likely:
        held = f"; held back: {situation.closed_gate.detail}" if situation.closed_gate else ""
        return f"OK: {free}; {_gain(situation)}{held}{_spared(situation)}{paused}."
    waiting = ""
    if situation.num_waiting:
        why = "the first has its blocks free" if situation.short.asked_blocks else "not for blocks"
        waiting = f"; {_wait(situation.num_waiting)}, {why}"
    return f"OK: {free}; {_holes(situation)}{waiting}{_spared(situation)}{paused}."


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
    if not situation.short.blocks:
        return ""
    withheld = (
        f" ({situation.withheld_blocks:,} withheld by --watermark)"
        if situation.withheld_blocks
        else ""
    )
    lacking = counted(situation.short.blocks, "block")
    again = ""
    if situation.reread_tokens:
        again = f" to read {counted(situation.reread_tokens, 'token')} again"
    return f"{_wait(situation.num_waiting)}, the first lacks {lacking}{again}{withheld}; "


def _under_pressure(situation: Situation, memory: MemoryPressure) -> str:
    """What is short where requests give: for whom, what is free, what can be given, what ends it.

    The numbers are the terms of `MemoryPressure.short_blocks`. The last clauses are left out if
    the sentence is too long.
    """
    short, free = situation.short, f"{situation.short.free_blocks:,} free"
    gave = (
        f"{memory.recent_givers:,} gave {counted(memory.recent_tokens, 'token')} in "
        f"{memory.window_s:g} s"
        if memory.recent_tokens
        else ""
    )
    head = "Giving" if memory.waits_for == "giving" else situation.cause.capitalize()
    can_give = f"{counted(memory.givable_blocks, 'block')} can be given"
    paused = f"reclamation {_nobody_gives(situation)}" if situation.paused else ""
    if paused:
        can_give = ""
    elif not memory.givable_blocks:
        can_give = situation.sessions or "every request is at its floor"
    elif memory.waits_for == "end":
        can_give += ", not enough until one ends"
    if not short.blocks:
        since = f"{head} until {situation.short_until_s:.1f} s ago: {free}"
        return _joined(since, paused or can_give, gave)
    if situation.paused:
        head = f"Reclamation {_nobody_gives(situation)}"
    needs = _needs(situation, short, until_end=memory.waits_for == "end")
    clauses = [f"{free}, {short.blocks:,} short", can_give, _ending(situation, memory), gave]
    return _joined(f"{head}: {needs}", *clauses)


def _needs(situation: Situation, short: Shortage, *, until_end: bool) -> str:
    """Who needs how many blocks; `until_end`: until the running requests have ended."""
    kept = f", {short.headroom_blocks:,} headroom" if short.headroom_blocks else ""
    if not short.asked_blocks:
        return f"running requests take {counted(short.growth_blocks, 'block')} next{kept}"
    waiting = f"{_wait(situation.num_waiting)} ({situation.oldest_wait_s:,.0f} s)"
    first = f"{counted(short.asked_blocks, 'block')} for the first"
    if situation.reread_tokens:
        first += f" to read {counted(situation.reread_tokens, 'token')} again"
    if situation.withheld_blocks:
        first += f" ({situation.withheld_blocks:,} withheld by --watermark)"
    others = f"{short.growth_blocks:,} for running ones{kept}"
    if until_end:
        others = f"{short.future_blocks:,} that running ones still take"
    return f"{waiting}, {first}, {others}"


def _nobody_gives(situation: Situation) -> str:
    return f"{situation.paused}, nobody gives"


def _ending(situation: Situation, memory: MemoryPressure) -> str:
    """What ends the shortage."""
    if situation.gain.freed_blocks:
        compacting = f"compacting now would free {situation.gain.freed_blocks:,}"
        if situation.cause == "fragmented":
            return f"{compacting}; {_remedy(situation)}"
        if situation.paused:
            return compacting
    if memory.waits_for == "patience":
        return f"others give in {situation.patience_s:.1f} s"
    if memory.waits_for == "end":
        until = "end a session" if situation.sessions else ""
        return _other_groups(situation) or situation.remedy or until
    return situation.remedy


def _joined(head: str, *clauses: str) -> str:
    """One sentence of `head` and as many of the `clauses` as fit."""
    text = head
    for clause in clauses:
        if clause and len(text) + len(clause) + 3 <= MAX_LENGTH:
            text += f"; {clause}"
    return f"{text}."


def _holes(situation: Situation) -> str:
    empty = situation.used_slots - situation.live_tokens
    return f"{empty:,} of {situation.used_slots:,} held slots carry no live token"


def _gain(situation: Situation) -> str:
    if not situation.gain.freed_blocks:
        return "compacting is likely to free blocks"
    moved = "" if situation.short.blocks else f" ({data_size(situation.moved_bytes)} moved)"
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
    """How many tokens live because memory is not short."""
    memory = situation.memory
    if memory is None or not memory.spared_tokens:
        return ""
    return f"; {counted(memory.spared_tokens, 'token')} live above the floors"


def _other_groups(situation: Situation) -> str:
    """Which groups fill the pool, if evicting does not free most of it."""
    others = [group for group in situation.groups if not group.managed]
    held, total = (sum(group.blocks for group in of) for of in (others, situation.groups))
    if 2 * held <= total:
        return ""
    return (
        f"{kinds_text(others)} hold {held:,} of {total:,} used blocks, which evicting does not "
        "free: fewer requests"
    )


def _full(situation: Situation) -> str:
    """Why compaction frees nothing, and what would free blocks."""
    config, preview = situation.config, situation.preview
    if others := _other_groups(situation):
        return others
    if situation.gain.freed_blocks:
        return f"compacting now would free {situation.gain.freed_blocks:,} of them"
    if situation.sessions:
        return situation.sessions
    if situation.planned_s is not None:
        holes = "" if situation.short.blocks else f"{_holes(situation)}; "
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
    if situation.short.blocks:
        return "compacting frees nothing: smaller budget or fewer requests"
    return f"{_holes(situation)}; compacting frees nothing: smaller budget or fewer requests"
