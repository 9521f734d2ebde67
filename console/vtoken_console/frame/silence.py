"""How long a server or an engine may be silent before the console says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtoken import wire

SILENT_S = 5.0


def is_link_silent(age_s: float) -> bool:
    """Whether the newest message is too old; servers send at least one a second."""
    return age_s > SILENT_S


def is_overdue(silent_s: float, hello: wire.Hello | None) -> bool:
    """Whether a step is overdue after `silent_s` seconds; a state is as old as two frames."""
    period_s = 1 / hello.fps if hello is not None and hello.fps > 0 else 0.0
    return silent_s > SILENT_S + 2 * period_s
