"""The quality canary's tally: generated tokens compared with the full cache, over recent checks.

Independent of how requests are sampled and checked. A check is one finished request whose prompt
and output were read once more without eviction. For a generated token t, with p its probability
under the full cache and q the one that it was sampled from (both before temperature):

    agrees  p(t) >= p(u) for every token u; counted for greedy requests only
    lost    log q(t) - log p(t), in nats

Means are sum / tokens over the newest `WINDOW` checks, so long outputs weigh more than short ones.
Requests are independent, tokens of one request are not: the standard error of a mean r is that of a
ratio over k requests, with x_i the sum and n_i the tokens of request i,

    sqrt(k / (k - 1) * sum((x_i - r * n_i)^2)) / sum(n_i)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from vtoken.base.arrays import Floats
from vtoken.wire import CanaryFigures, CanaryGroup, CanaryStatus

WINDOW = 256  # the most checks in a mean

F = TypeVar("F", bound=CanaryFigures)


@dataclass(frozen=True, slots=True)
class Check:
    """One checked request, summed over its `num_tokens` generated tokens.

    None: `num_agreed` unless it sampled greedily, `lost` if its own log-probabilities are unknown,
    `logprob` if the engine reports none.
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
    """The check of n generated tokens; raises ValueError if a number is not finite.

    `own` [n]: log-probabilities at sampling, None: unknown. `full` [n]: log-probabilities under the
    full cache; `first` [n]: those of the full cache's most likely token. `are_logprobs` is False if
    `full` and `first` are logits, which only allow comparing them.
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
        self._documents: dict[int | None, CanaryStatus] = {}  # by revision, None: all; a cache
        self.request_id: str | None = None  # of the check that runs now
        self.used = False  # whether any request was sampled since the start

    def add(self, check: Check, *, evicted: bool) -> None:
        (self._evicting if evicted else self._control).append(check)
        self._checked += 1
        self._documents.clear()

    def drop(self, num_checks: int = 1) -> None:
        """Count sampled requests that are not checked for lack of memory or time."""
        self._dropped += num_checks
        self._documents.clear()

    def fail(self) -> None:
        """Count a check without a result."""
        self._failed += 1
        self._documents.clear()

    def skip(self, reason: str) -> None:
        """Count a sampled request that cannot be checked."""
        self._skipped[reason] += 1
        self._documents.clear()

    def document(self, revision: int | None = None) -> CanaryStatus:
        """The current document, cached; do not write to it.

        With a `revision`: of requests that ran entirely under it.
        """
        if revision not in self._documents:
            evicting, control = (
                [check for check in checks if revision in (None, check.revision)]
                for checks in (self._evicting, self._control)
            )
            self._documents[revision] = _summarize(
                CanaryStatus,
                evicting,
                window=WINDOW,
                control=_summarize(CanaryFigures, control),
                groups=_groups(evicting),
                checked=self._checked,
                dropped=self._dropped,
                failed=self._failed,
                skipped=dict(sorted(self._skipped.items())),
            )
        return self._documents[revision]


def _groups(checks: Iterable[Check]) -> list[CanaryGroup]:
    found: dict[tuple[int, str], list[Check]] = {}
    for check in checks:
        found.setdefault((-check.revision, check.policy), []).append(check)
    return [
        _summarize(CanaryGroup, members, policy=policy, revision=-newest_first)
        for (newest_first, policy), members in sorted(found.items())
    ]


def _summarize(kind: type[F], checks: Collection[Check], **more: Any) -> F:
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
    """Sum / tokens of the known samples, and its standard error; see the module docstring."""
    known = [(x, n) for x, n in samples if x is not None]
    if not known:
        return None, None
    tokens = sum(n for _, n in known)
    mean = math.fsum(x for x, _ in known) / tokens
    if len(known) < 2:
        return mean, None
    squares = math.fsum((x - mean * n) ** 2 for x, n in known)
    return mean, math.sqrt(len(known) / (len(known) - 1) * squares) / tokens
