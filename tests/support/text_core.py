"""A core whose one request has evicted tokens, for tests of the text of requests."""

from __future__ import annotations

from tests.support.core.live import LiveEngine, make_quiet
from vtoken.core.config.request_rules import request_rules


def make_evicting(
    prompt_tokens: int = 201, budget_tokens: int = 128, park_bytes: int = 0
) -> LiveEngine:
    """Request "a" after one eviction by a random policy, beside a shadow of another policy.

    Its tokens 0 to 2 are protected. By default it has 203 tokens, 73 of them dead.
    """
    core = make_quiet()
    core.configure(
        policy={"name": "random", "params": {"sinks": 3}},
        shadow={"name": "streaming_llm", "params": {"sinks": 3}},
        budget_tokens=budget_tokens,
        park_bytes=park_bytes,
        evict_when="always",
        interval_tokens=16,
        recycle=False,
        reclamation="paused",
    )
    core.runtime.announce("a", request_rules({"vtoken_protect": [0, 3]}))
    core.admit("a", prompt_tokens)
    core.steps(3)
    return core
