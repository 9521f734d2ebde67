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
gates, the round that compacting would run now, and what would relieve the memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

from vtoken.control.outlook import Outlook
from vtoken.control.relief import relief, to_free, to_start
from vtoken.core.planning.gates import describe_gates, headroom_gate
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import Cause, Gate, Relief, Remedy, WaitsFor

HOLD_S = 2.0
CAUSES: tuple[Cause, ...] = get_args(Cause)  # the worse, the later
ENDS: tuple[WaitsFor, ...] = get_args(WaitsFor)  # what ends a shortage: the worse, the later

S = TypeVar("S", bound=str)


class Held(Generic[S]):
    """The worst of the states that were true within `HOLD_S`. `states`: the worse, the later."""

    def __init__(self, states: Sequence[S]) -> None:
        self._states = states
        self._worst = states[0]
        self._seen = 0.0  # monotonic seconds at which it was true last

    def see(self, state: S, ago_s: float, *, forget: bool = False) -> tuple[S, float]:
        """Note a state that was true `ago_s` seconds ago; the worst one, and how many seconds ago
        that was true. `forget`: those before count no more.
        """
        now = time.monotonic()
        worse = self._states.index(state) - self._states.index(self._worst)
        if worse == 0:
            self._seen = max(self._seen, now - ago_s)
        elif worse > 0 or now - self._seen >= HOLD_S or forget:
            self._worst, self._seen = state, now - ago_s
        return self._worst, now - self._seen


@dataclass(frozen=True, slots=True)
class Finding:
    """What the planner finds in one state of the runtime.

    `freed_blocks`, `moved_tokens`: of a manual compaction, one round within B and the headroom.
    `relief`: what would relieve the memory; None while it is ample.
    """

    gates: list[Gate]
    freed_blocks: int
    moved_tokens: int
    relief: Relief | None


class Diagnosis:
    """Diagnoses the memory of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._causes = Held(CAUSES)
        self._ends = Held(ENDS)

    def find(self, outlook: Outlook, block_bytes: int) -> Finding:
        """Ask the planner. `outlook`: that of the configuration in force, now; `block_bytes`: of a
        block on one rank, 0 if not known.
        """
        runtime, config = self._runtime, self._runtime.config
        pressure = runtime.relocator.pressure(ahead=1)
        gates = describe_gates(config, pressure)
        preview = runtime.round_planner.preview(config)
        freed = preview.round.num_freed_blocks
        lacking = preview.round.missing_blocks
        gates.append(headroom_gate(preview.available_blocks, lacking, gains=freed > 0))
        compactions: list[Remedy] = []
        is_ample = not outlook.is_tight and self._of_now(outlook, freed) == "ok"
        if freed and not is_ample and not outlook.gives:
            compactions = to_start(config, pressure, gates, freed)
        elif not freed and not is_ample:
            compactions = to_free(outlook, preview)
        return Finding(
            gates=gates,
            freed_blocks=freed,
            moved_tokens=preview.round.num_moved_tokens,
            relief=None if is_ample else relief(outlook, compactions, block_bytes),
        )

    def cause(self, outlook: Outlook, freed_blocks: int) -> tuple[Cause, float, WaitsFor]:
        """What limits admission, how many seconds ago that was last true, and the worst that a
        shortage has waited for.

        `freed_blocks`: by compacting now.
        """
        cause, ago_s = self._of_now(outlook, freed_blocks), 0.0
        if not outlook.gives:
            return cause, ago_s, outlook.waits_for
        gave_s, forget = self._runtime.losses.given.since_s(), len(self._runtime.tables) == 0
        if cause == "ok" and gave_s < HOLD_S:
            cause, ago_s = "full", gave_s  # it was short until others gave
        held_for, _ = self._ends.see(outlook.waits_for, 0.0, forget=forget)
        return *self._causes.see(cause, ago_s, forget=forget), held_for

    def _of_now(self, outlook: Outlook, freed_blocks: int) -> Cause:
        runtime, config = self._runtime, self._runtime.config
        free, short = runtime.store.num_free_blocks(), outlook.standing.blocks
        if short:
            return "fragmented" if freed_blocks >= short else "full"
        if outlook.gives:
            return "ok"
        if freed_blocks:
            low = free - runtime.current.wanted_blocks <= config.low_watermark_blocks
            return "fragmented" if low else "ok"
        return "full" if free <= config.headroom_blocks else "ok"
