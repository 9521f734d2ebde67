"""The errors of vToken.

VTokenError
├── RefusedError            bad input: names field, value and bound; nothing changed
│   ├── UnknownRequestError
│   └── StaleRevisionError
├── InvariantViolation      protected KV data would have been lost or misread (I1 to I4)
├── MirrorMismatchError     worker and scheduler disagree about a request
├── SelfTestError           the data path computes wrong results on this machine
├── UnsupportedError        a model, flag or vLLM version that vToken does not support
└── MalformedError          bytes that are not the expected document, see `vtoken.base.documents`
"""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 300  # characters of a value that an error shows
MAX_DETAIL = 1_000


def shown(value: Any, most: int = MAX_SHOWN) -> Any:
    """`value`; of one whose text is longer than `most` characters, both ends of the text."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


class VTokenError(Exception):
    """Base of all errors that vToken raises on purpose."""


class RefusedError(VTokenError):
    """Invalid input, refused entirely; nothing changed.

    `status` is the matching HTTP status; `field`, `value` and `bound` identify the invalid part. Of
    long input only the ends are kept.
    """

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        value: Any = None,
        bound: str | None = None,
        status: int = 422,
        title: str = "Refused",
    ) -> None:
        self.detail = shown(detail, MAX_DETAIL)
        super().__init__(self.detail)
        self.field = shown(field)
        self.value = shown(value)
        self.bound = bound
        self.status = status
        self.title = title


def refused(field: str, value: Any, why: str, bound: str) -> RefusedError:
    """The error for `field = value`, and `why` it cannot be."""
    return RefusedError(f"{field} = {value!r} {why}", field=field, value=value, bound=bound)


class UnknownRequestError(RefusedError):
    """No running request has this id; `ended`: it has finished.

    `num_kept`: how many finished requests the call could have found. `similar`: the ids that begin
    with this one, as text.
    """

    def __init__(
        self, request_id: str, *, ended: bool = False, num_kept: int = 0, similar: str = ""
    ) -> None:
        why, bound = f"no running request has the id {request_id!r}", "the id of a running request"
        if ended:
            why = f"the request {request_id!r} has finished, its tokens are gone"
        if num_kept:
            why += f", and none of the newest {num_kept:,} that finished"
            bound += f", or of one of the newest {num_kept:,} that finished"
        if similar:
            why += f"; ids that begin with it: {similar}"
        super().__init__(
            why,
            field="request_id",
            value=request_id,
            bound=f"{bound}, see GET /vtoken/v1/requests",
            status=404,
            title="Unknown request",
        )


class StaleRevisionError(RefusedError):
    """`If-Match` names a revision that is not current."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(
            f"the configuration is at revision {current}, the call was made for {expected}",
            field="If-Match",
            value=expected,
            bound=f"{current}",
            status=412,
            title="Stale revision",
        )


class InvariantViolation(VTokenError):  # noqa: N818  (the paper's term)
    """An invariant is broken; the message contains the equation and both numbers."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class MirrorMismatchError(VTokenError):
    """The worker's mirror of a token table differs from the scheduler's table."""


class SelfTestError(VTokenError):
    """The start-up self-test found wrong results in attention, packing or copies."""


class UnsupportedError(VTokenError):
    """vToken does not support this model or these flags; the message lists every reason."""
