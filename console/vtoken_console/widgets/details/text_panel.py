"""The text of one request: dead tokens struck through, parked ones dim, live ones shaded by score.

With a shadow policy, a second column shows what the shadow would have evicted at the newest
eviction. The cursor is on a token; on the last token it follows the end.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.style import Style
from textual import events

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.flow import Flow, printable
from vtoken_console.style.themes import score_shades
from vtoken_console.widgets.cursor import CursorWidget
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.lines import EMPTY, Line, Span, cells_of, cut, merge

if TYPE_CHECKING:
    from vtoken import wire

MIN_COLUMN = 28  # columns of a text below which the second one is hidden
BETWEEN = " │ "
PROTECTED = ("{", "}")
NO_TEXT = "□"  # a prompt token that was given as an embedding
State = Literal["live", "parked", "dead"]
Marks = Mapping[State, tuple[str, str]]  # before and after a run of tokens in this state
STATES: tuple[State, ...] = ("live", "parked", "dead")  # the worst last
STYLES: dict[State, Style] = {
    "dead": palette.style(palette.FAINT, strike=True),
    "parked": palette.style(palette.PARKED),
}
DIFFERENT_DEAD_STYLE = palette.style(palette.WARN, strike=True)
DIFFERENT_LIVE_STYLE = palette.style(palette.GOOD, bold=True)


class Side:
    """One of the two texts: the states of its tokens, and its lines."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.laid_out = Flow(0)
        self._key: tuple[int, Marks | None] | None = None  # of `laid_out`

    def flow(
        self,
        tokens: Sequence[wire.TextToken],
        width: int,
        *,
        marks: Marks | None,
    ) -> Flow:
        """The lines of `tokens` for `width` columns. `marks`: put around runs of dead and of parked
        ones, and braces around protected ones, for terminals without colour and strike-through.
        """
        key = (width, marks)
        if marks or key != self._key or len(self.laid_out) > len(tokens):
            self.laid_out, self._key = Flow(width), key
        for n in range(len(self.laid_out), len(tokens)):
            text = tokens[n].text
            shown = NO_TEXT if text is None else printable(text)
            self.laid_out.add(self._marked(tokens, n, shown, marks) if marks else shown)
        return self.laid_out

    def _marked(self, tokens: Sequence[wire.TextToken], n: int, text: str, marks: Marks) -> str:
        def mark(n: int) -> tuple[str, str]:
            return marks.get(self.states[n]) or (PROTECTED if tokens[n].protected else ("", ""))

        opens, closes = mark(n)
        opens = "" if n > 0 and mark(n - 1) == mark(n) else opens
        closes = "" if n < len(tokens) - 1 and mark(n + 1) == mark(n) else closes
        bare = text.lstrip(" ")
        return f"{text[: len(text) - len(bare)]}{opens}{bare}{closes}"


class TextPanel(CursorWidget):
    """Shows the text of `show_text`, or the message of `show_problem`."""

    WIDE = True

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.cursor = 0
        self.follows = True  # the cursor stays on the last token
        self._problem: tuple[str, ...] = ()
        self._tokens: Sequence[wire.TextToken] = ()
        self._shadow: wire.TextShadow | None = None
        self._ranks: Sequence[float] = ()
        self._scores: Sequence[float] = ()
        self._num_prompt = 0
        self._policy = ""
        self._sides = Side(), Side()  # the policy in force, the shadow policy
        self._top = 0
        self._rows = 1

    # ------------------------------------------------------------ what is shown

    def show_text(
        self,
        tokens: Sequence[wire.TextToken],
        shadow: wire.TextShadow | None,
        *,
        num_prompt: int,
        policy: str,
        scores: Sequence[float],
        ranks: Sequence[float],
    ) -> None:
        """Shows `tokens` [T] with their newest `scores` and `ranks` 0..1 (NaN: none; may be shorter
        than T).
        """
        self._tokens, self._shadow, self._num_prompt = tokens, shadow, num_prompt
        self._policy, self._scores, self._ranks, self._problem = policy, scores, ranks, ()
        actual, shadowed = self._sides
        actual.states = _states(tokens, [token.live for token in tokens])
        shadowed.states = _states(
            tokens, [t.live if t.shadow_live is None else t.shadow_live for t in tokens]
        )
        if self.follows:
            self.cursor = len(tokens) - 1
        self.cursor = max(0, min(self.cursor, len(tokens) - 1))
        self.redraw()

    def show_problem(self, *lines: str) -> None:
        """Shows why there is no text, and the remedy."""
        self._problem = lines
        self.redraw()

    def go(self, token: int) -> None:
        """Moves the cursor without a TokenMoved message."""
        self.cursor = max(0, min(token, len(self._tokens) - 1))
        self.redraw()

    def follow_from(self, token: int) -> None:
        """Follows the end if the cursor was moved to the last token."""
        self.follows = token >= len(self._tokens) - 1

    # ------------------------------------------------------------ drawing

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        self.set_titles("text", "")
        if self._problem:
            return [EMPTY, *(_paragraphs(self._problem, width))]
        if not self._tokens or height < 3:
            return [EMPTY, ((" no text yet …", palette.MUTED_STYLE),)]
        shadow = self._shadow
        column = (width - len(BETWEEN)) // 2
        beside = shadow is not None and column >= MIN_COLUMN
        flows = [
            side.flow(
                self._tokens,
                column if beside else width,
                marks=None if view.ramp.colors else _marks(view),
            )
            for side in self._sides[: 1 + beside]
        ]
        head = self._head(shadow, column) if shadow is not None and beside else None
        room = self._rows = height - 1 - (head is not None)
        at = flows[0].line_of[self.cursor]
        total = len(flows[0].lines)
        self._top = max(0, min(max(min(self._top, at), at - room + 1), total - room))
        lines = [] if head is None else [head]
        for y in range(room):
            line = self._line(view, flows[0], 0, self._top + y)
            if beside:
                other = flows[1].line_of[self.cursor] - at + self._top + y
                blank = " " * (column - cells_of(line))
                line += ((blank, palette.TEXT_STYLE), (BETWEEN, palette.FAINT_STYLE))
                line += self._line(view, flows[1], 1, other)
            lines.append(merge(line))
        where = f"lines {self._top + 1:,}–{min(total, self._top + room):,} of {total:,}"
        title = f"text · {len(self._tokens):,} tokens"
        if shadow is not None:
            title += f" · {shadow.agreed:,} of {shadow.evicted:,} victims the same"
        self.set_titles(title, where + " · follows" * self.follows)
        return [*lines, self._foot(view, width)]

    def _head(self, shadow: wire.TextShadow, column: int) -> Line:
        right = f"shadow {shadow.policy.name}, at step {shadow.step:,}"
        spans = cut([(self._policy, palette.BOLD_STYLE)], column)
        blank = " " * (column - cells_of(spans))
        spans += [(blank, palette.TEXT_STYLE), (BETWEEN, palette.FAINT_STYLE)]
        return merge([*spans, *cut([(right, palette.BOLD_STYLE)], column)])

    def _line(self, view: View, flow: Flow, side: int, number: int) -> Line:
        if not 0 <= number < len(flow.lines):
            return EMPTY
        shades = score_shades(view.theme)
        return merge(
            [(text, self._token_style(token, side, shades)) for token, text in flow.lines[number]]
        )

    def _token_style(self, n: int, side: int, shades: Sequence[str]) -> Style:
        if n == self.cursor:
            return palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
        state = self._sides[side].states[n]
        lives = [one.states[n] == "live" for one in self._sides]
        if self._shadow is not None and lives[0] != lives[1]:
            return DIFFERENT_LIVE_STYLE if lives[side] else DIFFERENT_DEAD_STYLE
        if state != "live":
            return STYLES[state]
        rank = self._ranks[n] if n < len(self._ranks) else float("nan")
        scored = shades and rank == rank  # NaN: no score
        shade = shades[round(rank * (len(shades) - 1))] if scored else None
        return palette.style(palette.TEXT, shade, underline=self._tokens[n].protected)

    def _foot(self, view: View, width: int) -> Line:
        n, muted, text = self.cursor, palette.MUTED_STYLE, palette.TEXT_STYLE
        token = self._tokens[n]
        score = self._scores[n] if n < len(self._scores) else float("nan")
        words = ["prompt" if n < self._num_prompt else "output", _state(token, live=token.live)]
        words += ["protected"] * token.protected
        words += [f"score {score:.3g}"] if score == score else []
        if self._shadow is not None and token.shadow_live is not None:
            words.append("the shadow keeps it" if token.shadow_live else "the shadow evicts it")
        if token.text is None:
            words.append("an embedding: no text")
        spans: list[Span] = [(f" token {n:,}  ", muted), (", ".join(words), text), ("   ", muted)]
        if view.ramp.colors:
            for state in self._gone:
                spans += [(state, STYLES[state]), ("  ", muted)]
            spans += [("protected", palette.style(palette.TEXT, underline=True)), ("  ", muted)]
            if shades := score_shades(view.theme):
                spans += [(" ", palette.style(palette.TEXT, shade)) for shade in shades]
                spans.append((" score", muted))
            if self._shadow is not None:
                spans += [("  ", muted), ("dead", DIFFERENT_DEAD_STYLE), (" or ", muted)]
                spans += [("live", DIFFERENT_LIVE_STYLE), (" in one only", muted)]
        else:
            marks = _marks(view)
            marked = "  ".join(state.join(marks[state]) for state in self._gone)
            spans.append((f"{marked}  {{protected}}", muted))
        return merge(cut(spans, width))

    @property
    def _gone(self) -> list[State]:
        """The states of tokens that attention does not read, for the last line."""
        return ["dead", "parked"] if "parked" in self._sides[0].states else ["dead"]

    # ------------------------------------------------------------ moving

    def _post_moved(self, token: int) -> None:
        if self._tokens:
            self.post_message(TokenMoved(max(0, min(token, len(self._tokens) - 1))))

    @property
    def _flow(self) -> Flow:
        """The lines under the policy in force."""
        return self._sides[0].laid_out

    def action_move(self, dx: int, dy: int) -> None:
        if dx:
            self._move_token(dx)
        else:
            self._move_line(dy)

    def _move_token(self, by: int) -> None:
        """Moves to the next token, skipping tokens that only begin a character."""
        at = self.cursor + by
        while 0 < at < len(self._tokens) - 1 and not self._tokens[at].text:
            at += by
        self._post_moved(at)

    def _move_line(self, by: int) -> None:
        if not self._tokens:
            return
        flow = self._flow
        line, column = flow.line_of[self.cursor], flow.column_of(self.cursor)
        line = max(0, min(line + by, len(flow.lines) - 1))
        while 0 < line < len(flow.lines) - 1 and not flow.lines[line]:
            line += 1 if by > 0 else -1
        token = flow.token_at(line, column)
        if token is not None:
            self._post_moved(token)

    def action_page(self, by: int) -> None:
        self._move_line(by * self._rows)

    def action_jump(self, to: int) -> None:
        self._post_moved(0 if to == 0 else len(self._tokens) - 1)

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is None or not self._tokens:
            return
        head = self.content_size.height - 1 - self._rows
        token = self._flow.token_at(self._top + place.y - head, place.x)
        if token is not None and place.y >= head:
            self._post_moved(token)


def _marks(view: View) -> Marks:
    """Around runs that attention does not read: brackets that texts seldom have."""
    if view.ascii_only:
        return {"dead": ("[-", "-]"), "parked": ("[~", "~]")}
    return {"dead": ("⟦", "⟧"), "parked": ("⟨", "⟩")}


def _state(token: wire.TextToken, *, live: bool) -> State:
    return "live" if live else "parked" if token.parked else "dead"


def _states(tokens: Sequence[wire.TextToken], live: Sequence[bool]) -> list[State]:
    """The state of each piece: of a character of several tokens that of the worst."""
    states: list[State] = []
    worst: State = "live"
    for token, is_live in zip(tokens, live, strict=True):
        worst = max(worst, _state(token, live=is_live), key=STATES.index)
        states.append(worst)
        worst = worst if token.text == "" else "live"
    return states


def _paragraphs(texts: Sequence[str], width: int) -> list[Line]:
    styles = [palette.WARN_STYLE] + [palette.TEXT_STYLE] * (len(texts) - 1)
    return [
        ((f" {line}", style),)
        for text, style in zip(texts, styles, strict=True)
        for line in [*textwrap.wrap(text, max(20, width - 2)), ""]
    ]
