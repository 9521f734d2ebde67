"""Details of the setting under the cursor: summary, choices or bounds, why it has no effect.

For a policy: a table with what answers contained under each, and its probe's cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vtoken_console.changes.policies import facts_text, measured_text, probe_text
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, cut, merge, wrap

if TYPE_CHECKING:
    from vtoken.wire.reducer import StreamState
    from vtoken_console.changes.fields import Field

FACTS = 28  # columns
MAX_LINES = 4  # of a setting that is not a policy


def detail_lines(
    field: Field,
    value: Any,
    void: str,
    kept: float | None,
    model: StreamState,
    width: int,
    height: int,
) -> list[Line]:
    """At most `height` lines, the first a rule. `value`: the edited one; `void`: why it has no
    effect; `kept`: the share of a prompt that the edited floor keeps.
    """
    about: list[Span] = [(f" {field.summary}", palette.MUTED_STYLE)]
    if field.path[-1] != "name":
        about += _bounds(field, value)
        about += [(f" {void}", palette.WARN_STYLE)] if void else []
        return [_rule(field, "", width), *wrap(about, width, min(MAX_LINES, height - 1))]
    summary = wrap(about, width, 2)
    room = max(1, height - 3 - len(summary))  # rule, head and note
    chosen = field.choices.index(value) if value in field.choices else 0
    first = max(0, min(chosen - room // 2, len(field.choices) - room))
    shown = field.choices[first : first + room]
    place = f"{first + 1}–{first + len(shown)} of {len(field.choices)}"
    rows = _policies(field, shown, value, kept, model)
    rule = _rule(field, place if len(shown) < len(field.choices) else "", width)
    return [rule, *summary, *(merge(cut(row, width)) for row in rows)][:height]


def num_lines(field: Field) -> int:
    """Lines of the complete detail."""
    return len(field.choices) + 5 if field.path[-1] == "name" else MAX_LINES + 1


def _rule(field: Field, place: str, width: int) -> Line:
    title, border = field.name, palette.style(palette.BORDER)
    end = f" {place} " if place else ""
    rest = "─" * max(0, width - len(title) - len(end) - 2)
    left, right = (title, palette.MUTED_STYLE), (end, palette.FAINT_STYLE)
    return merge([("─", border), left, (rest, border), right, ("─", border)])


def _bounds(field: Field, value: Any) -> list[Span]:
    if not field.choices:
        return [(f" ({field.bound_text})", palette.TEXT_STYLE)] if field.bound_text else []
    spans: list[Span] = [(": ", palette.MUTED_STYLE)]
    for n, choice in enumerate(field.choices):
        style = palette.BOLD_STYLE if choice == value else palette.TEXT_STYLE
        spans += [(" | " if n else "", palette.FAINT_STYLE), (choice, style)]
    return spans


def _policies(
    field: Field, names: Sequence[str], value: Any, kept: float | None, model: StreamState
) -> list[list[Span]]:
    """A head, a row for each policy of `names`, and a note; what is in force is marked."""
    muted, text, faint = palette.MUTED_STYLE, palette.TEXT_STYLE, palette.FAINT_STYLE
    infos = {info.name: info for info in (model.hello.policies if model.hello else ())}
    width = max(len(name) for name in (*infos, *names)) + 2
    status = model.status
    price = status.prices.probe if status and status.prices else None
    running = infos.get(model.config.effective.policy.name) if model.config else None
    head = f"   {'policy':<{width}}{'facts found   asked later':<{FACTS}}probe of a request"
    rows: list[list[Span]] = [[(head, muted)]]
    for name in names:
        info, chosen, in_force = infos.get(name), name == value, name == field.effective
        facts = facts_text(info, kept) if info else ""
        cost = probe_text(info, running, price) if info else ""
        rows.append(
            [
                (f" {'›' if chosen else ' '} ", text),
                (units.fit(name, width), palette.CURSOR_STYLE if chosen else text),
                (f"{facts:<{FACTS}}", text if facts != "not measured" else faint),
                (cost, muted),
                ("  in force" if in_force else "", palette.GOOD_STYLE),
            ]
        )
    return [*rows, [(f" {measured_text(infos.values(), kept)}", faint)]]
