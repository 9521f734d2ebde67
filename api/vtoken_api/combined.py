"""The answers of several engines to one call, as one that keeps theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import structs

from vtoken import wire

T = TypeVar("T")
Sums = TypeVar("Sums", wire.OperationPlan, wire.OperationResult, wire.WhatIf)


def together(answers: Sequence[T]) -> T:
    """One answer for all; that of a single engine is returned as it is."""
    parts: Any = answers
    combined: Any = parts[0]
    if len(parts) > 1 and isinstance(combined, wire.PatchResult):
        combined = _changes(parts)
    elif len(parts) > 1 and isinstance(combined, wire.Operation):
        combined = _compactions(parts)
    answer: T = combined
    return answer


def _changes(results: Sequence[wire.PatchResult]) -> wire.PatchResult:
    first = next((result for result in results if result.changes), results[0])
    found = [result.what_if for result in results if result.what_if is not None]
    waits = any(result.outcome == "accepted" for result in results)
    return structs.replace(
        first,
        engine=None,
        revision=max(result.revision for result in results),
        outcome="accepted" if waits else first.outcome,
        what_if=_added(found) if found else None,
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        engines=list(results),
    )


def _compactions(parts: Sequence[wire.Operation]) -> wire.Operation:
    order = ("failed", "cancelled", "running", "pending", "done")
    plans = [part.plan for part in parts if part.plan is not None]
    results = [part.result for part in parts if part.result is not None]
    return structs.replace(
        parts[0],
        id="+".join(part.id for part in parts),
        state=min((part.state for part in parts), key=order.index),
        engine=None,
        plan=_added(plans) if plans else None,
        result=_added(results) if results else None,
        error="; ".join(f"engine {p.engine}: {p.error}" for p in parts if p.error) or None,
        engines=list(parts),
    )


def _added(parts: Sequence[Sums]) -> Sums:
    """Counts added up; a duration is the longest."""
    total = structs.replace(parts[0])
    for part in parts[1:]:
        for name, value in structs.asdict(part).items():
            mine = getattr(total, name)
            if mine is None:
                setattr(total, name, value)
            elif name == "duration_ms":
                setattr(total, name, max(mine, value))
            elif isinstance(value, int):
                setattr(total, name, mine + value)
            elif isinstance(value, wire.WhatIf):
                setattr(total, name, _added([mine, value]))
    return total
