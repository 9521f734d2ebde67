"""The quality canary's tally: how generated tokens look to the full cache, over the newest checks.

Knows neither how a request is sampled nor how it is checked. A check is one finished request whose
prompt and output were read once more without eviction. For a generated token t, with p its
probability under the full cache and q the one that it was sampled from (both before temperature):

    agrees  p(t) >= p(u) for every token u; counted for greedy requests only
    lost    log q(t) - log p(t), in nats

Means are sum / tokens over the newest `WINDOW` checks, so a long output counts for more than a
short one. Requests are independent, tokens of one request are not: the standard error of a mean r
is that of a ratio over k requests, with x_i the sum and n_i the tokens of request i,

    sqrt(k / (k - 1) * sum((x_i - r * n_i)^2)) / sum(n_i)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from vtoken.arrays import Floats
from vtoken.wire import CanaryFigures, CanaryGroup, CanaryStatus

WINDOW = 256  # checks that a figure rests on at most

F = TypeVar("F", bound=CanaryFigures)


@dataclass(frozen=True, slots=True)
class Check:
    """One checked request, summed over its `num_tokens` generated tokens.

    `num_agreed` is None unless it sampled greedily, `lost` where its own log-probabilities are not
    known, `logprob` where the engine reports none.
    """

    policy: str
    revision: int
    num_tokens: int
    num_agreed: int | None
    lost: float | None
    logprob: float | None


def make_check(
    policy: str,
    revision: int,
    *,
    greedy: bool,
    own: Floats | None,
    full: Floats,
    first: Floats,
    are_logprobs: bool = True,
) -> Check:
    """The check of n generated tokens; raises ValueError where a number is not finite.

    `own` [n]: log-probabilities that they were sampled with, None: unknown. `full` [n]: theirs
    under the full cache; `first` [n]: those of the token that the full cache ranks first.
    `are_logprobs`: False where `full` and `first` are logits, which only say who is first.
    """
    for name, values in (("own", own), ("full", full), ("first", first)):
        if values is not None and not np.isfinite(values).all():
            raise ValueError(f"a log-probability is not finite ({name})")
    known = are_logprobs and own is not None
    return Check(
        policy,
        revision,
        len(full),
        int(np.count_nonzero(full >= first)) if greedy else None,
        float((own - full).sum()) if known and own is not None else None,
        float(full.sum()) if are_logprobs else None,
    )


class CanaryTally:
    """Checks of requests that evicted, and of a control group that evicted nothing."""

    def __init__(self) -> None:
        self._evicting: deque[Check] = deque(maxlen=WINDOW)
        self._control: deque[Check] = deque(maxlen=WINDOW)
        self._checked = self._dropped = self._failed = 0
        self._skipped: Counter[str] = Counter()
        self._document: CanaryStatus | None = None  # None: to be made again
        self.request_id: str | None = None  # of the request that runs a check now
        self.used = False  # a request was sampled since the engine started

    def add(self, check: Check, *, evicted: bool) -> None:
        (self._evicting if evicted else self._control).append(check)
        self._checked += 1
        self._document = None

    def drop(self, num_checks: int = 1) -> None:
        """Sampled requests that are not checked, for lack of room or time."""
        self._dropped += num_checks
        self._document = None

    def fail(self) -> None:
        """A check ended without a result."""
        self._failed += 1
        self._document = None

    def skip(self, reason: str) -> None:
        """A sampled request cannot be checked."""
        self._skipped[reason] += 1
        self._document = None

    def of_revision(self, revision: int) -> CanaryFigures:
        """Requests that evicted and ran under `revision` from their first step to their last."""
        return _figures(CanaryFigures, [c for c in self._evicting if c.revision == revision])

    def document(self) -> CanaryStatus:
        """Not to be written: the same until something changes."""
        if self._document is None:
            self._document = _figures(
                CanaryStatus,
                self._evicting,
                window=WINDOW,
                control=_figures(CanaryFigures, self._control),
                groups=self._groups(),
                checked=self._checked,
                dropped=self._dropped,
                failed=self._failed,
                skipped=dict(sorted(self._skipped.items())),
            )
        return self._document

    def _groups(self) -> list[CanaryGroup]:
        found: dict[tuple[int, str], list[Check]] = {}
        for check in self._evicting:
            found.setdefault((-check.revision, check.policy), []).append(check)
        return [
            _figures(CanaryGroup, checks, policy=policy, revision=-newest_first)
            for (newest_first, policy), checks in sorted(found.items())
        ]


def _figures(kind: type[F], checks: Collection[Check], **more: Any) -> F:
    agreement, agreement_se = _ratio((check.num_agreed, check.num_tokens) for check in checks)
    lost, lost_se = _ratio((check.lost, check.num_tokens) for check in checks)
    return kind(
        count=len(checks),
        tokens=sum(check.num_tokens for check in checks),
        greedy_count=sum(check.num_agreed is not None for check in checks),
        agreement=agreement,
        agreement_se=agreement_se,
        logprob_lost=lost,
        logprob_lost_se=lost_se,
        logprob=_ratio((check.logprob, check.num_tokens) for check in checks)[0],
        **more,
    )


def _ratio(samples: Iterable[tuple[float | None, int]]) -> tuple[float | None, float | None]:
    """Sum over tokens of the samples that are known, and its standard error; see the module."""
    known = [(x, n) for x, n in samples if x is not None]
    if not known:
        return None, None
    tokens = sum(n for _, n in known)
    mean = math.fsum(x for x, _ in known) / tokens
    if len(known) < 2:
        return mean, None
    squares = math.fsum((x - mean * n) ** 2 for x, n in known)
    return mean, math.sqrt(len(known) / (len(known) - 1) * squares) / tokens
