"""Rate limits: a token bucket for each payer and kind of call.

1. Calls: the payer is the client's address. The limits stop a runaway script, not a busy operator.
   A refused call costs nothing.
2. The engine's thread: reads and dry runs are answered between two steps, so what they cost delays
   every request. The payers are all callers with control together, and all others together. A call
   is charged what the engine measured, once it is answered (`EngineTime`). While a payer is in
   debt, its calls are refused. So a payer takes at most the rate of each kind in the long run, and
   at once the burst and the calls in flight.

Buckets of at most MAX_PAYERS payers are kept, in LRU order. An evicted payer starts again with a
full bucket.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from vtoken_api.problems import refuse

MAX_PAYERS = 1024
MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_second` in the long run, `burst` at once."""

    per_second: float
    burst: float


READ_TIME, DRY_RUN_TIME = "reads", "dry runs"
CONTROLLERS, READERS = "callers with control", "callers without control"
RATES: Mapping[str, Rate] = {
    "change": Rate(20, 100),  # everything but GET, HEAD, OPTIONS and dry runs
    "read": Rate(100, 400),
    "stream": Rate(10, 100),  # connections
    READ_TIME: Rate(0.05, 2.0),  # seconds of the engine's thread; most reads take 1 ms or less
    DRY_RUN_TIME: Rate(0.05, 1.0),
}
DRY_RUN_COST = 4.0  # in reads
COSTS: Mapping[str, float] = {"blocks": 5, "recording": 20}  # expensive reads; others cost 1


class RateLimits:
    """Buckets of all addresses; a kind without a rate is unlimited."""

    def __init__(
        self,
        rates: Mapping[str, Rate] = RATES,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_payers: int = MAX_PAYERS,
    ) -> None:
        self._rates = rates
        self._clock = clock
        self._max_payers = max_payers
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def spend(self, address: str, kind: str, cost: float = 1.0) -> None:
        """Charge one call of `kind` to `address`; raises 429 with Retry-After."""
        level = self._level(address, kind)
        if level < cost:
            self._refuse(kind, cost - level, f"too many calls of this kind ({kind}) from {address}")
        self.charge(address, kind, cost)

    def require_no_debt(self, payer: str, kind: str) -> None:
        """Raises 429 with Retry-After until what `charge` took beyond the burst is paid back."""
        level = self._level(payer, kind)
        if level < 0:
            self._refuse(
                kind,
                -level,
                f"{kind} of {payer} have used their share of the engine's thread",
                of=" s of the engine's thread",
            )

    def charge(self, payer: str, kind: str, cost: float) -> None:
        """Charge `cost`, which may be more than is left."""
        level = self._level(payer, kind)
        if level < math.inf:
            self._buckets[payer, kind] = (level - cost, self._clock())

    def _level(self, payer: str, kind: str) -> float:
        """What `payer` can spend now, refilled; negative: its debt."""
        rate = self._rates.get(kind)
        if rate is None:
            return math.inf
        now = self._clock()
        level, seen = self._buckets.pop((payer, kind), (rate.burst, now))
        level = min(rate.burst, level + max(0.0, now - seen) * rate.per_second)
        self._buckets[payer, kind] = (level, now)
        while len(self._buckets) > self._max_payers * len(self._rates):
            self._buckets.popitem(last=False)
        return level

    def _refuse(self, kind: str, missing: float, detail: str, of: str = "") -> NoReturn:
        rate = self._rates[kind]
        raise refuse(
            429,
            detail,
            bound=f"{rate.per_second:g}{of} a second, {rate.burst:g}{of} at once",
            headers={"Retry-After": str(max(1, math.ceil(missing / rate.per_second)))},
        )


@dataclass(frozen=True, slots=True)
class EngineTime:
    """The bill for the engine's time of one call: `payer` has `kind` to spend."""

    limits: RateLimits
    payer: str
    kind: str

    def require_no_debt(self) -> None:
        """Raises 429 while the payer owes time."""
        self.limits.require_no_debt(self.payer, self.kind)

    def charge(self, seconds: float) -> None:
        """Charge `seconds` of the engine's thread."""
        self.limits.charge(self.payer, self.kind, seconds)
