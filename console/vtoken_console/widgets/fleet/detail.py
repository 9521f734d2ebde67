"""More about the row under the cursor of the fleet page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vtoken.sentences import change_text, policy_text
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge, width_of, wrap

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.frame.fleet import FleetRow


class FleetDetail(LinesWidget):
    """The row under the cursor: what it is, and why it does not answer, how it differs, or what
    its planner says.
    """

    def __init__(self, row: Callable[[], FleetRow | None], *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._row = row

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        row = self._row()
        if row is None:
            return []
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        status = row.status
        spans: list[Span] = [(f" {row.name}", palette.BOLD_STYLE), (f"  {row.server.url}", muted)]
        for fact in _facts(status) if status is not None else ():
            more: list[Span] = [("  ", muted), (fact, text)]
            if width_of(spans) + width_of(more) > width:
                break
            spans += more
        return [merge(cut(spans, width)), *wrap(_why(row), width, height - 1)]


def _facts(status: wire.Status) -> list[str]:
    versions = f"vToken {status.vtoken_version}, vLLM {status.vllm_version}"
    return [status.model.rsplit("/", 1)[-1], policy_text(status), versions, f"step {status.step:,}"]


def _why(row: FleetRow) -> list[Span]:
    status = row.status
    if not row.answers:
        since = f" for {units.duration(row.since_s)}: " if row.since_s else ": "
        return [(f" {row.condition}{since}", palette.BAD_STYLE), (row.problem, palette.TEXT_STYLE)]
    if row.drift:
        found = change_text(row.drift, "where the others have")
        return [(f" ≠ {found}", palette.WARN_STYLE)]
    if status is None:
        return [(" connecting …", palette.MUTED_STYLE)]
    return [(f" {status.fragmentation.sentence}", palette.TEXT_STYLE)]
