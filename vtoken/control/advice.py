"""What would help: what starts a round, and what would let one free blocks.

Each advice is a clause of a sentence, from the numbers by which the planner decides. `Outlook` has
the advice on what requests give.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from msgspec import structs

from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import Pressure
from vtoken.core.runtime.relocation.round_planner import Preview
from vtoken.core.runtime.runtime import Runtime
from vtoken.sentences import counted
from vtoken.wire import Gate


def to_start(config: VTokenConfig, pressure: Pressure, gates: Sequence[Gate]) -> str:
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


def to_free(runtime: Runtime, preview: Preview) -> str:
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
