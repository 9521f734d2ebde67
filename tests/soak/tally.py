"""The counts of a soak, and their sum over phases."""

from __future__ import annotations

import msgspec


class Tally(msgspec.Struct):
    """Sums over one phase or all; `failures`: what went wrong, one sentence each."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    evictions: int = 0
    relocations: int = 0
    verified: int = 0  # relocations whose contents were hashed before and after
    verify_us: int = 0  # time in that
    recycled: int = 0
    parked: int = 0  # tokens copied to host memory
    restored: int = 0  # tokens that came back from it
    swapped: int = 0  # preempted requests that waited in host memory
    dropped: int = 0  # tokens whose copy was given up while they were parked
    preemptions: int = 0
    compactions: int = 0
    switches: int = 0
    refused: int = 0  # patches that the engine refused because of a bound, as expected
    checks: int = 0
    violations: int = 0
    statements: int = 0  # moments whose documents were compared with each other
    contradictions: int = 0
    compared: int = 0  # requests compared with the oracle
    compared_tokens: int = 0
    wrong_tokens: int = 0
    largest_gap: float = 0.0  # of a sampled token's logit to the best one
    seconds: float = 0.0
    failures: list[str] = []

    @property
    def ok(self) -> bool:
        wrong = self.violations or self.contradictions or self.wrong_tokens
        return not (self.failed or wrong or self.failures)


def total(tallies: list[Tally]) -> Tally:
    """The sum of all; the largest of the gaps."""
    out = Tally()
    for tally in tallies:
        for name in Tally.__struct_fields__:
            mine, more = getattr(out, name), getattr(tally, name)
            setattr(out, name, max(mine, more) if name == "largest_gap" else mine + more)
    return out
