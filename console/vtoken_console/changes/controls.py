"""The one-key actions: pause, resume, compact, restore, undo, and dry runs.

Each makes its calls and returns a sentence. If the server refuses, it raises ProblemError and
nothing was changed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from vtoken.base.request_ids import short_id
from vtoken.sentences import counted, operation_text, since_text, value_text
from vtoken_console.style import palette
from vtoken_console.style.units import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.client import AsyncClient
    from vtoken_console.changes.watch import ChangeWatch
    from vtoken_console.style.palette import Paragraph

POLL_S = 0.1
POLLS = 100


def applied_text(result: wire.PatchResult) -> str:
    """The outcome of an applied change: revision, when it is in force, changes, notes."""
    changes = change_text(result.changes) or "nothing differed"
    return f"{since_text(result)}: {'; '.join([changes, *result.notes])}"


def effective_text(result: wire.PatchResult) -> str:
    """The effective values of the changed fields."""
    import msgspec  # here, to keep the first frame fast

    effective = msgspec.to_builtins(result.effective)
    values = ", ".join(f"{name} {value_text(effective[name])}" for name in result.changes)
    if result.outcome == "accepted":
        return f"Effective until then: revision {result.effective_revision}, {values}."
    return f"Effective: {values}."


def pause_question(status: wire.Status, host: str) -> tuple[str, list[Paragraph]]:
    """What `toggle_pause` does, as a verb and a question."""
    running = status.requests.running
    if status.reclamation.state == "auto":
        verb, effect = "Pause", "Nobody gives tokens until it is resumed: others wait, or vLLM"
        effect += " preempts them. It can be resumed at any time."
    else:
        verb, effect = "Resume", "Requests give tokens again, and parked tokens come back."
    runs = "runs" if running == 1 else "run"
    question = f"{verb} reclamation on {host}? {counted(running, 'request')} {runs}."
    return verb, [(question, palette.BOLD_STYLE), (effect, palette.TEXT_STYLE)]


async def toggle_pause(rest: AsyncClient, state: str, watch: ChangeWatch) -> str:
    """Pauses reclamation, or resumes it if it is paused or off."""
    result = await rest.patch_config({"reclamation": "paused" if state == "auto" else "auto"})
    watch.add_own(result, time.monotonic())
    verb = "paused" if state == "auto" else "resumed"
    return f"Reclamation {verb}: {applied_text(result)}"


async def restore_question(rest: AsyncClient, request_id: str, host: str) -> list[Paragraph]:
    """What `restore` would do, as a question; raises ProblemError if it is refused."""
    found = await rest.restore(request_id, validate_only=True)
    back, parked = found.restorable_tokens, counted(found.parked_tokens, "parked token")
    question = f"Bring back {back:,} of {parked} of {short_id(found.request_id)} on {host}?"
    effect = f"They take {counted(found.blocks, 'free block')}; memory may get short again sooner."
    return [
        (question, palette.BOLD_STYLE),
        (effect, palette.TEXT_STYLE),
        *((note, palette.WARN_STYLE) for note in found.notes),
    ]


async def restore(rest: AsyncClient, request_id: str) -> str:
    """Brings parked tokens of a request back."""
    found = await rest.restore(request_id)
    back = f"{found.restorable_tokens:,} of {counted(found.parked_tokens, 'parked token')}"
    return "; ".join([f"Restored {short_id(found.request_id)}: {back} come back", *found.notes])


async def undo(rest: AsyncClient, watch: ChangeWatch) -> str:
    """Restores the configuration before the newest revision; ends its trial."""
    result = await rest.undo()
    watch.add_own(result, time.monotonic())
    return f"Undone: {applied_text(result)}"


async def undo_dry(rest: AsyncClient) -> str:
    """Returns what undo would do."""
    result = await rest.undo(validate_only=True)
    details = "; ".join([change_text(result.changes) or "nothing differs", *result.notes])
    return f"Undo would revert revision {result.revision}: {details}."


async def confirm(rest: AsyncClient, watch: ChangeWatch) -> str:
    """Keeps the change that is on trial."""
    result = await rest.confirm()
    watch.num_changes += 1
    return "; ".join([f"Kept: revision {result.revision} stays", *result.notes]) + "."


async def compact(
    rest: AsyncClient, *, request_id: str | None = None, dry_run: bool = False
) -> str:
    """Runs one compaction round and waits for its outcome, up to POLLS * POLL_S seconds."""
    operation = await rest.compact(request_id=request_id, dry_run=dry_run)
    for _ in range(POLLS):
        if operation.state not in ("pending", "running"):
            break
        await asyncio.sleep(POLL_S)
        operation = await rest.operation(operation.id)
    return operation_text(operation)
