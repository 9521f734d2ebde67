"""A status as one sentence: who waits for how many blocks, and what there is for them.

A pure function of the status, so that the sentence names the numbers that are shown beside it. The
engine does not write it: the API process that answers does. What would help is not in it, but in
`vtoken.sentences.advice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import counted, span
from vtoken.sentences.parking import back_text, parked_text

if TYPE_CHECKING:
    from vtoken.wire import AdviceLevel, FirstWaiting, MemoryPressure, Status

MAX_LENGTH = 180
TWO_LINES = 150  # of 80 columns


def situation(status: Status, columns: int = TWO_LINES) -> str:
    """The sentence, of at most `MAX_LENGTH` characters.

    Where who needs how much, and what there is for them, does not fit in `columns`, it names the
    sums alone. Other clauses that do not fit are left out.

    Its head says what happens: OK, `Memory is free again` while parked tokens come back and shortly
    after, if there is room for all, GIVING, SHORT where what can be given is not enough, FULL where
    nobody can give, FRAGMENTED where compacting frees all that is missing, PAUSED, IDLE.
    """
    memory, cause, requests = status.pressure, status.fragmentation.cause, status.requests
    if status.scheduling != "running":
        return _suspended(status, columns)
    if status.reclamation.held_blocks == 0:
        first_step = f"{_wait(requests.waiting)} for a first step"
        return f"IDLE: {first_step if requests.waiting else 'the whole pool is free'}."
    parking = status.parking
    if cause == "ok" and not stopped(status) and (back := back_text(parking)):
        is_free = parking is not None and parking.waits_for != "memory"
        head = "Memory is free again: " if is_free else "OK: "
        return _joined(columns, head, back, *_in_use(status))
    if cause == "ok":
        return _joined(columns, "OK: ", *_in_use(status), parked_text(parking))
    if memory is None:
        return _joined(columns, f"{cause.upper()}: ", *(_lacks(status) or _in_use(status)))
    giving = "GIVING after SHORT" if was_short(status) else "GIVING"
    if memory.short_blocks == 0:
        until = f"SHORT until {status.fragmentation.held_s:.1f} s ago"
        head = giving if memory.recent_tokens else until
        return _joined(columns, f"{head}: ", *_in_use(status), _gave(memory), parked_text(parking))
    if memory.waits_for == "resume":
        state, _, by = stopped(status).partition(" ")
        head = f"{state.upper()} {by}: nobody gives; "
    elif memory.waits_for == "giving":
        head = f"{giving}: "
    elif cause == "fragmented":
        head = "FRAGMENTED: "
    else:
        head = "SHORT: " if memory.givable_blocks else "FULL: "
    needs, *rest = _needs(status, memory)
    if len(_joined(MAX_LENGTH, head, needs, *rest)) > columns:
        needs = _sums(status, memory)
    return _joined(columns, head, needs, *rest, _gave(memory), parked_text(parking))


def level(status: Status) -> AdviceLevel | None:
    """Whether memory is short or nearly so; None while it is neither.

    It is short while somebody waits for blocks that nobody gives in the next step, and 2 s longer;
    nearly so while requests give, 2 s longer, and while no further request would fit.
    """
    memory, relief = status.pressure, status.relief
    if status.reclamation.held_blocks == 0:
        return None
    if was_short(status):
        return "short"
    is_full = relief is not None and relief.more_requests == 0
    if status.fragmentation.cause != "ok" or (memory is not None and memory.near and is_full):
        return "near"
    return None


def was_short(status: Status) -> bool:
    """Whether somebody waits for blocks that nobody gives in the next step, or did 2 s ago."""
    return status.fragmentation.held_for in ("end", "resume", "patience")


def missing_blocks(status: Status) -> int:
    """How many blocks are short."""
    memory, first = status.pressure, status.requests.first
    if memory is not None:
        return memory.short_blocks
    return 0 if first is None else first.short_blocks


def stopped(status: Status) -> str:
    """Who stopped reclamation, and when: `paused by root 4 min ago`; "" while it is auto."""
    done = status.reclamation
    if done.state == "auto":
        return ""
    ago = "" if done.since_ts is None else f" {span(max(0.0, status.ts - done.since_ts))} ago"
    return f"{done.state} by {done.by}{ago}" if done.by else f"{done.state} since the start"


def waiting_text(status: Status) -> str:
    """`2 wait (oldest 17 s)`."""
    requests = status.requests
    oldest = "oldest " if requests.waiting > 1 else ""
    return f"{_wait(requests.waiting)} ({oldest}{seconds_text(requests.oldest_wait_s)})"


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `17 s`, `3 min`."""
    return f"{seconds:.1f} s" if seconds < 10 else span(seconds)


# ---------------------------------------------------------------- parts


def _suspended(status: Status, columns: int) -> str:
    """The engine is paused, or paused for new requests."""
    running, waiting = status.requests.running, _wait(status.requests.waiting)
    if status.scheduling == "paused":
        requests = "request is" if running == 1 else "requests are"
        effect, whom = "vLLM schedules nothing", f"{running:,} {requests} suspended"
    else:
        effect, whom = "vLLM starts no new request", f"{running:,} running"
    return _joined(columns, "PAUSED: ", f"{effect} until it is resumed", f"{whom}, {waiting}")


def _wait(n: int) -> str:
    return "1 waits" if n == 1 else f"{n:,} wait"


def _in_use(status: Status) -> list[str]:
    """How full the pool is, and that nobody waits for blocks."""
    blocks, waiting = status.blocks, status.requests.waiting
    clauses = [f"{1 - blocks.free / max(1, blocks.total):.0%} of the pool in use"]
    if waiting == 0:
        clauses.append("nobody waits")
    else:
        why = "the first has its blocks free" if status.requests.first else "not for want of blocks"
        clauses.append(f"{_wait(waiting)}, {why}")
    if status.pressure is not None and (by := stopped(status)):
        clauses.insert(0, f"{by}, nobody gives")  # others may be left out
    return clauses


def _lacks(status: Status) -> list[str]:
    """What the first waiting request lacks where nobody gives; [] if none lacks blocks."""
    first = status.requests.first
    if first is None or not first.short_blocks:
        return []
    return [f"{_first(status, first)}: {first.short_blocks:,} missing"]


def _first(status: Status, first: FirstWaiting) -> str:
    """Who waits, and how many blocks the first needs."""
    needs = "needs" if status.requests.waiting == 1 else "first needs"
    text = f"{waiting_text(status)}, {needs} {counted(first.needed_blocks, 'block')} now"
    if first.withheld_blocks:
        text += f" ({first.withheld_blocks:,} withheld by --watermark)"
    if first.reread_tokens:
        text += f" to read {counted(first.reread_tokens, 'token')} again"
    return text


def _needs(status: Status, memory: MemoryPressure) -> list[str]:
    """Who needs how many blocks, and what there is for them.

    Where all that can be given is not enough, the terms are what running requests take until their
    ends. Else they are those of the next steps, and what is missing of them.
    """
    first, free = status.requests.first, status.blocks.free
    can_give = f"{memory.givable_blocks:,} can be given"
    waits = memory.waits_for
    if first is not None and _is_lasting(status, memory):
        needs = f"{_first(status, first)} + {memory.future_blocks:,} for running ones"
        return [needs, f"{free:,} free, {can_give}"]
    if first is None:
        needs = f"running ones need {counted(memory.growth_blocks, 'block')}"
    else:
        needs = _first(status, first)
        needs += f" + {memory.growth_blocks:,} for running ones" if memory.growth_blocks else ""
    reserve = f" + {memory.headroom_blocks:,} reserve" if memory.headroom_blocks else ""
    if waits == "patience" and first is not None:
        can_give += f" in {seconds_text(first.patience_s)}"
    missing = f"{needs}{reserve}, {free:,} free: {memory.short_blocks:,} missing"
    return [missing] if waits == "resume" else [missing, can_give]


def _is_lasting(status: Status, memory: MemoryPressure) -> bool:
    """Whether all that can be given is not enough until the ends of running requests."""
    lasting = memory.asked_blocks + memory.future_blocks
    return memory.waits_for == "end" and lasting > status.blocks.free + memory.givable_blocks


def _sums(status: Status, memory: MemoryPressure) -> str:
    """`_needs` without its terms."""
    first, missing = status.requests.first, f"{counted(memory.short_blocks, 'block')} missing"
    if first is None:
        return f"running ones: {missing}"
    if _is_lasting(status, memory):
        return f"{waiting_text(status)}, need {first.needed_blocks + memory.future_blocks:,} in all"
    return f"{waiting_text(status)}, {missing}"


def _gave(memory: MemoryPressure) -> str:
    """Who gave lately; "" if nobody did."""
    if not memory.recent_tokens:
        return ""
    gave = f"{memory.recent_givers:,} gave {counted(memory.recent_tokens, 'token')}"
    return f"{gave} in {memory.window_s:g} s"


def _joined(columns: int, head: str, first: str, *others: str) -> str:
    """One sentence of `head`, the `first` clause and as many of the others as fit."""
    text = head + first
    for clause in others:
        if clause and len(text) + len(clause) + 3 <= columns:
            text += f"; {clause}"
    return f"{text}."
