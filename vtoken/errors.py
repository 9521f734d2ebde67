"""The errors of vToken.

VTokenError
├── RefusedError            bad input: names field, value and bound; nothing was changed
│   ├── UnknownRequestError
│   └── StaleRevisionError
├── InvariantViolation      protected KV data would have been lost or misread (I1 to I4)
├── MirrorMismatchError     worker and scheduler disagree about a request
├── SelfTestError           the data path gives wrong numbers on this machine
├── UnsupportedError        a model, a flag or a vLLM that vToken cannot serve
└── ProfileError            a calibration profile that cannot be used
"""

from __future__ import annotations

from typing import Any


class VTokenError(Exception):
    """Base of all errors that vToken raises on purpose."""


class RefusedError(VTokenError):
    """Input that was refused as a whole; nothing was changed.

    `status` is the HTTP status that fits; `field`, `value` and `bound` name the culprit.
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
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.value = value
        self.bound = bound
        self.status = status
        self.title = title


class UnknownRequestError(RefusedError):
    """No running request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"no running request has the id {request_id!r}",
            field="request_id",
            value=request_id,
            bound="the id of a running request, see GET /vtoken/v1/requests",
            status=404,
            title="Unknown request",
        )


class StaleRevisionError(RefusedError):
    """`If-Match` named a revision that is no longer current."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(
            f"the configuration is at revision {current}, the call was made for {expected}",
            field="If-Match",
            value=expected,
            bound=f"{current}",
            status=412,
            title="Stale revision",
        )


class InvariantViolation(VTokenError):  # noqa: N818  (the paper's word)
    """An invariant does not hold; the message carries the equation and both numbers."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class MirrorMismatchError(VTokenError):
    """The worker's mirror of a token table differs from the scheduler's table."""


class SelfTestError(VTokenError):
    """The start-up self-test found attention, packing or copies that do not do what they must."""


class UnsupportedError(VTokenError):
    """vToken cannot serve this model or these flags; the message lists every reason."""


class ProfileError(VTokenError):
    """A calibration profile that cannot be used; the message says why and what to do."""
