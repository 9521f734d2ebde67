"""The ids of requests, taken apart, and the short id that people see.

A server makes the id of an answer from X: the client's `X-Request-Id` or `request_id`, else 16 hex
digits. vLLM makes the engine's id of that one, which ends in 8 random hex digits:

| request | id of its answer | id in the engine |
|---|---|---|
| a chat, or tokens | chatcmpl-X, generate-tokens-X | chatcmpl-X-RANDOM, generate-tokens-X-RANDOM |
| prompt I of a completion | cmpl-X | cmpl-X-I-RANDOM |
| step I of a response | X; without the client's, resp_ and 16 digits | X_I-RANDOM |
| chat I of a batch | chatcmpl-X | chatcmpl-X_I-RANDOM |
| sample K, if there are several | that of its request | K_ and that of its request |

A request's names are these two ids and X. Chats of a batch have the last two only if X is random:
otherwise X_I may be another client's X.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

NUM_SHORT = 8  # characters of a short id
_RANDOM = r"-(?P<random>[0-9a-f]{8})"
# 16 hex digits, or a UUID, which has 32.
_DIGITS = re.compile(
    r"(?<![0-9a-z])(?:[0-9a-f]{16}|[0-9a-f]{8}(-?)(?:[0-9a-f]{4}\1){3}[0-9a-f]{12})(?![0-9a-z])",
    re.IGNORECASE,
)
_FORMS = [
    re.compile(form + _RANDOM, re.DOTALL)
    for form in (
        r"(?P<sample>\d+_)?(?P<answer>chatcmpl-(?P<own>[0-9a-f]{16}))(?P<part>_\d+)",
        r"(?P<sample>\d+_)?(?P<answer>(?:chatcmpl|generate-tokens)-(?P<own>.+))(?P<part>)",
        r"(?P<sample>\d+_)?(?P<answer>cmpl-(?P<own>.+))(?P<part>-\d+)",
        r"(?P<sample>)(?P<answer>(?P<own>.+?))(?P<part>_\d+)?",
    )
]


def short_id(request_id: str) -> str:
    """The engine's id as people see it: at most `NUM_SHORT` characters, which name it.

    The client's own id if it is as short, its first digits if they are random, and else the
    engine's random digits; with K_ of a sample. An id of another form is whole.
    """
    parts = parts_of(request_id)
    return request_id if parts is None else parts.short


class Parts(NamedTuple):
    """An engine's id, taken apart. `starts`: where a name may begin; `randoms`: random digits."""

    names: tuple[str, str]  # that of its answer and the client's
    short: str
    starts: set[int]
    randoms: list[tuple[int, int]]


@lru_cache(maxsize=4096)  # a name that begins like all ids makes an engine read all of them
def parts_of(request_id: str) -> Parts | None:
    form = next(filter(None, (form.fullmatch(request_id) for form in _FORMS)), None)
    if form is None:
        return None
    # Digits without a letter may be a number that its client counted up.
    digits = [d.span() for d in _DIGITS.finditer(request_id) if not d[0].isdecimal()]
    return Parts(
        names=(form["answer"], form["own"]),
        short=_short(form),
        starts={0, form.start("answer"), form.start("own")},
        randoms=[form.span("random"), *digits],
    )


def _short(form: re.Match[str]) -> str:
    own, part = form["own"], form["part"]
    if form["sample"] or (part or "0").strip("-_") != "0":  # others have this answer too
        return (form["sample"] or "") + form["random"]
    if len(own) <= NUM_SHORT:
        return own
    digits = own.removeprefix("resp_").replace("-", "")
    if _DIGITS.fullmatch(digits) is None or digits.isdecimal():
        return form["random"]
    # vLLM's own, or a UUID of version 4: others begin with the time.
    return digits[:NUM_SHORT] if len(digits) == 16 or digits[12] == "4" else form["random"]
