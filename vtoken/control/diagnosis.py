"""Why admission is limited, and what to do about it, from the planner itself.

Reads the runtime and changes nothing. `Outlook` says how many blocks are short.
- Fragmented: blocks are short, and compacting frees them.
- Full: blocks are short, and compacting does not free them.
- OK: no block is short.

Where requests give tokens under pressure, a cause becomes worse at once and better only when the
worse one has been gone for `HOLD_S`: giving ends a shortage within a step, and the next one follows
in the next. With a fixed budget the paper's words hold, too, while no block is short: the pool is
fragmented if its free blocks, less what a waiting request lacks, are at the low watermark and
compacting would free some; it is full if compacting would free none and no more blocks are free
than one round may take.

The cause is cheap to tell, and always that of this moment. What takes the planner is a `Finding`:
gates, the round that compacting would run now, and advice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import get_args

from msgspec import structs

from vtoken.control.outlook import Outlook
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import Pressure, describe_gates, headroom_gate
from vtoken.core.runtime.relocation.round_planner import Preview
from vtoken.core.runtime.runtime import Runtime
from vtoken.sentences import counted
from vtoken.wire import Cause, Gate, MemoryPressure

HOLD_S = 2.0
CAUSES: tuple[Cause, ...] = get_args(Cause)  # the worse, the later


@dataclass(frozen=True, slots=True)
class Finding:
    """What the planner finds in one state of the runtime.

    `freed_blocks`, `moved_tokens`: of a manual compaction, one round within B and the headroom.
    `on_rounds`: what starts a round that frees blocks; without one, what would help.
    `on_giving`: what would let requests give more.
    """

    gates: list[Gate]
    freed_blocks: int
    moved_tokens: int
    on_rounds: str
    on_giving: str


class Diagnosis:
    """Diagnoses the memory of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._cause: Cause = "ok"
        self._seen = 0.0  # monotonic seconds at which `_cause` held last

    def find(self, outlook: Outlook) -> Finding:
        """Ask the planner. `outlook`: that of the configuration in force, now."""
        runtime, config = self._runtime, self._runtime.config
        pressure = runtime.relocator.pressure(ahead=1)
        gates = describe_gates(config, pressure)
        preview = runtime.round_planner.preview(config)
        freed = preview.round.num_freed_blocks
        lacking = preview.round.missing_blocks
        gates.append(headroom_gate(preview.available_blocks, lacking, gains=freed > 0))
        return Finding(
            gates=gates,
            freed_blocks=freed,
            moved_tokens=preview.round.num_moved_tokens,
            on_rounds=_to_start(config, pressure, gates) if freed else _to_free(runtime, preview),
            on_giving=outlook.advice(),
        )

    def cause(
        self, outlook: Outlook, freed_blocks: int, memory: MemoryPressure | None
    ) -> tuple[Cause, float]:
        """What limits admission, and how many seconds ago that was last true.

        `freed_blocks`: by compacting now. `memory`: the pressure now.
        """
        runtime, config = self._runtime, self._runtime.config
        free, short = runtime.store.num_free_blocks(), outlook.standing.blocks
        cause: Cause = "ok"
        if short:
            cause = "fragmented" if freed_blocks >= short else "full"
        elif memory is None and freed_blocks:
            low = free - runtime.current.wanted_blocks <= config.low_watermark_blocks
            cause = "fragmented" if low else "ok"
        elif memory is None and free <= config.headroom_blocks:
            cause = "full"
        return (cause, 0.0) if memory is None else self._held(cause)

    def _held(self, cause: Cause) -> tuple[Cause, float]:
        """The worst cause of the last `HOLD_S`, and how many seconds ago it held last."""
        runtime, now = self._runtime, time.monotonic()
        seen, gave_s = now, runtime.losses.given.since_s()
        if cause == "ok" and gave_s < HOLD_S:
            cause, seen = "full", now - gave_s  # it was short until others gave
        worse = CAUSES.index(cause) - CAUSES.index(self._cause)
        if worse == 0:
            self._seen = max(self._seen, seen)
        elif worse > 0 or now - self._seen >= HOLD_S or len(runtime.tables) == 0:
            self._cause, self._seen = cause, seen
        return self._cause, now - self._seen


# ---------------------------------------------------------------- advice: clauses of a sentence


def _to_start(config: VTokenConfig, pressure: Pressure, gates: Sequence[Gate]) -> str:
    """What starts a round that would free blocks, by the first closed gate."""
    closed = next((gate.name for gate in gates if not gate.open), None)
    if closed is None:
        return "a round is due"
    if closed == "reclamation":
        if config.reclamation == "paused":
            return "reclamation is paused: resume it"
        return "reclamation is off: set it to auto"
    if closed == "theta_f":
        return f"lower theta_F from {config.theta_f:.2f} to below {_below(pressure.f)}, which is F"
    if closed == "watermark":
        free = pressure.free_blocks - pressure.wanted_blocks
        return f"raise the low watermark from {config.low_watermark_blocks:,} to {free:,} or more"
    if closed == "pause":
        steps = counted(pressure.pause_steps - pressure.steps_since_round, "step")
        return f"the next round follows in {steps}"
    return "too few blocks are half empty for a round: compact by hand"


def _below(f: float) -> str:
    """`f` rounded down to two decimals, or to four where two would show 0."""
    if f >= 0.01:
        return f"{floor(f * 100) / 100:.2f}"
    return f"{floor(f * 10_000) / 10_000:.4f}"


def _to_free(runtime: Runtime, preview: Preview) -> str:
    """Why a round frees nothing, as in `preview`, and what would free blocks."""
    config, found = runtime.config, preview.round
    needed = preview.available_blocks + found.missing_blocks
    if found.missing_blocks and runtime.store.num_free_blocks() >= needed:
        return (
            f"moving tokens takes {needed:,} fresh blocks, headroom is {config.headroom_blocks:,}: "
            f"raise headroom_blocks to {needed:,}"
        )
    if found.missing_blocks:
        return (
            f"moving tokens takes {needed:,} fresh blocks, {preview.available_blocks:,} are "
            "free: smaller budget or fewer requests"
        )
    if found.shared_skipped_blocks and config.prefix_sharing != "copy":
        copying = structs.replace(config, prefix_sharing="copy")
        after = runtime.round_planner.preview_after(copying, {})
        if freed := after.emptied_blocks + after.round.num_freed_blocks:
            better = "copy" if after.round.num_moved_tokens else "index"  # all of them are dead
            return (
                f"{found.shared_skipped_blocks:,} shared blocks with holes stay: "
                f"prefix_sharing={better} would free {freed:,}"
            )
    if not runtime.requests.may_evict:
        return "every token is kept: choose a policy that evicts, or fewer requests"
    return "compacting frees nothing: smaller budget or fewer requests"
