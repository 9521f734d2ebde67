"""The measured cost of holes, copies, plans and probes on this machine, in µs.

Independent of tables and gates. For each step, the worker reports how many tokens it packed for
attention, copied, parked and restored, how many requests it probed, and the time of each; the
relocator reports the planning time of a round. A price is the median of its newest `WINDOW`
samples, so a single slow step has little effect.

A price counts as measured from `MIN_SAMPLES` samples on. Before that, it is a prior:
- hole: 0, so the gates are the paper's. Where attention never packs (CUDA), no sample arrives and
  the price stays 0
- copy: the price of a hole. Both read and write a token's K and V once in every layer
- park: the price of a copy
- restore: the price of a park, over the same bus
- prefill: 0, so nothing counts as cheaper than computing again
- plan, probe: 0. On CUDA the host does not wait for a probe, and its price stays 0
"""

from __future__ import annotations

from collections import deque
from statistics import median

from vtoken.core.planning.worth import Estimate, Worth
from vtoken.wire import Price

WINDOW = 15
MIN_SAMPLES = 3
LEAST_CHUNK = 32  # tokens of prompts in a step whose time is a sample of their price


class Samples:
    """The newest samples of one price, in µs per piece."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=WINDOW)
        self._median: float | None = None  # of the newest; None: not asked for since
        self.count = 0  # since the start

    def add(self, us: float, pieces: int) -> None:
        """Add a sample: `pieces` took `us` together. Ignored if there are none."""
        if pieces <= 0:
            return
        self._newest.append(us / pieces)
        self._median = None
        self.count += 1

    @property
    def us(self) -> float | None:
        """The median; None with fewer than `MIN_SAMPLES` samples."""
        if self.count < MIN_SAMPLES:
            return None
        if self._median is None:
            self._median = median(self._newest)
        return self._median


class Prices:
    """The prices of one engine; with several ranks, those of the output rank."""

    def __init__(self) -> None:
        self.holes = Samples()
        self.copies = Samples()
        self.parks = Samples()
        self.restores = Samples()
        self.plans = Samples()
        self.probes = Samples()
        self.steps = Samples()  # without a prompt
        self.prefills = Samples()

    @property
    def hole_us(self) -> float:
        """Packing one token for one step."""
        return self.holes.us or 0.0

    @property
    def copy_us(self) -> float:
        """Moving one token."""
        return self.hole_us if self.copies.us is None else self.copies.us

    @property
    def park_us(self) -> float:
        """Copying one token to host memory."""
        return self.copy_us if self.parks.us is None else self.parks.us

    @property
    def restore_us(self) -> float:
        """Copying one token from host memory."""
        return self.park_us if self.restores.us is None else self.restores.us

    @property
    def plan_us(self) -> float:
        """Planning one request of a round."""
        return self.plans.us or 0.0

    @property
    def probe_us(self) -> float:
        """Probing the decode query of one request, on all layers of its signals."""
        return self.probes.us or 0.0

    @property
    def prefill_us(self) -> float:
        """Computing one token of a prompt; 0 before it was measured."""
        return self.prefills.us or 0.0

    def note_step(self, us: float, num_prompt_tokens: int) -> None:
        """A step took `us`, and computed so many tokens beside one of each of its requests.

        What a step without a prompt takes is not the prompt's.
        """
        if num_prompt_tokens == 0:
            self.steps.add(us, 1)
        elif num_prompt_tokens >= LEAST_CHUNK:
            self.prefills.add(max(0.0, us - (self.steps.us or 0.0)), num_prompt_tokens)

    def worth(self, estimate: Estimate) -> Worth:
        """The saving and cost of a round at these prices."""
        moving = estimate.moved_tokens * self.copy_us
        return Worth(
            saving_us=estimate.packed_tokens * self.hole_us,
            cost_us=moving + estimate.num_requests * self.plan_us,
        )

    def document(self) -> dict[str, Price]:
        """The prices by their names on the wire, and their sources."""
        of_requests = self.plans, self.probes
        return {
            name: Price(
                us=round(us, 4),
                per="request" if samples in of_requests else "token",
                source="prior" if samples.us is None else "measured",
                samples=samples.count,
            )
            for name, us, samples in (
                ("hole", self.hole_us, self.holes),
                ("copy", self.copy_us, self.copies),
                ("park", self.park_us, self.parks),
                ("restore", self.restore_us, self.restores),
                ("plan", self.plan_us, self.plans),
                ("probe", self.probe_us, self.probes),
            )
        }
