"""One filter for requests and blocks: `req:a91f policy:h2o state:shared`, or plain text.

Terms are combined with AND, comma-separated values of a term with OR. Plain text matches a
request's id or policy. A block belongs to its newest holder. A filter that cannot be parsed names
the error in `problem` and hides nothing. numpy is imported when a mask is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken.base.request_ids import short_id
from vtoken_console.style.words import BLOCK_STATES, REQUEST_STATES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vtoken.wire import RequestRow
    from vtoken.wire.reducer import StreamState

KEYS = ("req", "policy", "state")
EXAMPLE = "part of an id, or req:a91f policy:h2o state:shared,tail"


@dataclass(frozen=True, slots=True)
class Filter:
    """`terms`: (key or "" for plain text, alternatives in lower case)."""

    text: str = ""
    terms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    problem: str = ""

    def __bool__(self) -> bool:
        return bool(self.terms) and not self.problem

    @property
    def selects_requests(self) -> bool:
        """Whether any term is about requests, not only about blocks."""
        return any(
            key != "state" or any(v in REQUEST_STATES for v in values) for key, values in self.terms
        )

    @property
    def block_states(self) -> tuple[tuple[str, ...], ...]:
        """The terms about block states."""
        states = (values for key, values in self.terms if key == "state")
        found = (tuple(v for v in values if v in BLOCK_STATES) for values in states)
        return tuple(values for values in found if values)

    def matches(self, row: RequestRow) -> bool:
        """Whether a request matches the terms about requests."""
        if self.problem:
            return True
        name, policy = f"{row.id} {short_id(row.id)}".lower(), row.policy.lower()
        for key, values in self.terms:
            if key == "req":
                found = any(v in name for v in values)
            elif key == "policy":
                found = any(v in policy for v in values)
            elif key == "state":
                wanted = [v for v in values if v in REQUEST_STATES]
                found = not wanted or row.state in wanted
            else:
                found = any(v in name or v in policy for v in values)
            if not found:
                return False
        return True

    def rows(self, model: StreamState) -> list[RequestRow]:
        """The matching requests. With terms about blocks, only those that hold a matching block."""
        rows = [row for row in model.requests.values() if self.matches(row)]
        if self and self.block_states and len(model.owner):
            import numpy as np

            blocks = block_mask(self, model)
            holders = set(np.unique(model.owner[blocks]).tolist()) - {0}  # 0: no owner
            rows = [row for row in rows if row.number in holders]
        return rows


NO_FILTER = Filter()


def parse(text: str) -> Filter:
    """Parses a filter; unknown keys and states are named in `problem`."""
    terms: list[tuple[str, tuple[str, ...]]] = []
    for word in text.split():
        key, colon, rest = word.lower().partition(":")
        if not colon:
            terms.append(("", (key,)))
            continue
        if key not in KEYS:
            known = ", ".join(f"{k}:" for k in KEYS)
            return Filter(text, problem=f"{key}: unknown; known: {known}")
        values = tuple(v for v in rest.split(",") if v)
        if key == "state":
            states = (*BLOCK_STATES, *REQUEST_STATES)
            expanded = []
            for value in values:
                found = [s for s in states if s == value] or [
                    s for s in states if s.startswith(value)
                ]
                if not found:
                    return Filter(
                        text, problem=f"state:{value} is unknown; known: {', '.join(states)}"
                    )
                expanded += found
            values = tuple(expanded)
        if values:
            terms.append((key, values))
    return Filter(text.strip(), tuple(terms))


def block_mask(wanted: Filter, model: StreamState) -> Any:
    """Whether each block matches: bool [N]. Terms about unreported owners are ignored."""
    import numpy as np

    from vtoken_console.style.cells import STATES

    mask = np.ones(model.num_blocks, bool)
    for values in wanted.block_states:
        term = np.zeros(model.num_blocks, bool)
        for state in values:
            term |= STATES[state](model.live, model.flags, model.block_size)
        mask &= term
    if wanted.selects_requests and len(model.owner):
        mask &= _owned_by((r for r in model.requests.values() if wanted.matches(r)), model)
    return mask


def _owned_by(rows: Iterable[RequestRow], model: StreamState) -> Any:
    import numpy as np

    chosen = np.zeros(1 << 16, bool)
    chosen[[row.number for row in rows if row.number]] = True
    return chosen[model.owner]


def shortfall(wanted: Filter, model: StreamState) -> str:
    """The part of the filter that this server's data cannot answer, or an empty string."""
    if wanted and wanted.selects_requests and not len(model.owner):
        return "blocks unfiltered: this server does not report owners"
    return ""
