"""Rate limits: a token bucket for each client address and kind of call.

The limits stop a runaway script, not a busy operator. The bus bounds the engine's load.

1. Buckets of at most MAX_ADDRESSES addresses are kept, in LRU order. An evicted address starts
   again with a full bucket.
2. A refused call costs nothing.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vtoken_api.problems import refuse

MAX_ADDRESSES = 1024


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_second` in the long run, `burst` at once."""

    per_second: float
    burst: float


RATES: Mapping[str, Rate] = {
    "change": Rate(20, 100),  # everything but GET, HEAD, OPTIONS and dry runs
    "read": Rate(100, 400),
    "stream": Rate(10, 100),  # connections
}
DRY_RUN_COST = 4.0  # in reads: the engine plans a round
COSTS: Mapping[str, float] = {"blocks": 5, "recording": 20}  # expensive reads; others cost 1


class RateLimits:
    """Buckets of all addresses; a kind without a rate is unlimited."""

    def __init__(
        self,
        rates: Mapping[str, Rate] = RATES,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_addresses: int = MAX_ADDRESSES,
    ) -> None:
        self._rates = rates
        self._clock = clock
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def spend(self, address: str, kind: str, cost: float = 1.0) -> None:
        """Charge one call of `kind` to `address`; raises 429 with Retry-After."""
        rate = self._rates.get(kind)
        if rate is None:
            return
        now = self._clock()
        key = (address, kind)
        level, seen = self._buckets.pop(key, (rate.burst, now))
        level = min(rate.burst, level + max(0.0, now - seen) * rate.per_second)
        paid = level >= cost
        self._buckets[key] = (level - cost if paid else level, now)
        while len(self._buckets) > self._max_addresses * len(self._rates):
            self._buckets.popitem(last=False)
        if not paid:
            wait_s = (cost - level) / rate.per_second
            raise refuse(
                429,
                f"too many calls of this kind ({kind}) from {address}",
                bound=f"{rate.per_second:g} a second, {rate.burst:g} at once",
                headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
            )
