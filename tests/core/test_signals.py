"""Signal keepers against their definitions, over random prompts, decode steps and evictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.policies.signals import WARM_QUERIES, Keeper, Signal, make_keeper

LAYERS = (0, 3)
SIGNALS = [
    Signal("attention_sum"),
    Signal("attention_last"),
    Signal("attention_window", 1),
    Signal("attention_window", 5),
    Signal("attention_hits", 3),
    Signal("attention_hits", 11),
    Signal("attention_hits", 64),
]


class Shadow:
    """Every row there ever was, as a dictionary token -> attention."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.rows: list[dict[int, float]] = []

    def value(self, token: int) -> float:
        kind, window = self.signal.kind, self.signal.window_queries
        got = [row.get(token, 0.0) for row in self.rows]
        if kind == "attention_sum":
            return sum(got)
        if kind == "attention_last":
            return got[-1]
        if kind == "attention_window":
            return sum(got[-window:]) / len(got[-window:])
        return sum(row.get(token, 0.0) / len(LAYERS) >= 1 / len(row) for row in self.rows[-window:])


class Request:
    """Live tokens, and the attention that their queries give: multiples of 1/64, never a tie with
    1/n but where 1/n is one too, which floats hold exactly."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.live: list[int] = []
        self.num_tokens = 0

    def append(self, count: int) -> list[dict[int, float]]:
        rows = []
        for _ in range(count):
            self.live.append(self.num_tokens)
            self.num_tokens += 1
            rows.append({t: int(self.rng.integers(0, 9)) / 32 for t in self.live})
        return rows

    def feed(self, keeper: Keeper, shadow: Shadow, rows: list[dict[int, float]]) -> None:
        shadow.rows += rows
        full = np.array([[row.get(t, 0.0) for t in self.live] for row in rows], dtype=np.float32)
        given = full[-keeper.signal.num_rows(len(rows)) :]
        if keeper.signal.kind == "attention_sum":
            given = given.sum(axis=0, keepdims=True)
        keeper.add(np.array(self.live), given, len(rows))


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
@given(
    seed=st.integers(0, 2**32),
    events=st.lists(
        st.tuples(st.sampled_from(["probed", "unprobed", "evict"]), st.integers(1, 20)),
        max_size=40,
    ),
)
@settings(max_examples=30)
def test_keeper_equals_the_definition(
    signal: Signal, seed: int, events: list[tuple[str, int]]
) -> None:
    request, keeper, shadow = Request(seed), make_keeper(signal, LAYERS), Shadow(signal)
    request.feed(keeper, shadow, request.append(40))
    for what, size in events:
        if what == "evict":
            size = min(size, len(request.live) - 1)
            dead = set(request.rng.choice(request.live[:-1], size, replace=False).tolist())
            request.live = [t for t in request.live if t not in dead]
        else:
            rows = request.append(size if size > 16 else 1)
            if what == "probed":
                request.feed(keeper, shadow, rows)
    scores = keeper.scores()
    assert scores is not None
    assert scores.dtype == np.float32
    assert len(scores) == keeper.num_tokens
    known = [t for t in request.live if t < len(scores)]
    expected = [shadow.value(t) for t in known]
    np.testing.assert_allclose(scores[known], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_a_late_start_is_told_once_it_rests_on_enough_queries(signal: Signal) -> None:
    """32 queries, or the window where it is shorter; the last query alone is enough for its own."""
    needed = 1 if signal.kind == "attention_last" else WARM_QUERIES
    if signal.window_queries:
        needed = min(needed, signal.window_queries)
    request, keeper, shadow = Request(0), make_keeper(signal, LAYERS), Shadow(signal)
    request.append(50)
    assert keeper.scores() is None
    for query in range(1, needed + 1):
        request.feed(keeper, shadow, request.append(1))
        assert (keeper.scores() is not None) == (query == needed)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_a_short_prompt_that_was_seen_whole_is_told_at_once(signal: Signal) -> None:
    request, keeper, shadow = Request(0), make_keeper(signal, LAYERS), Shadow(signal)
    request.feed(keeper, shadow, request.append(2))
    request.feed(keeper, shadow, request.append(1))
    assert keeper.scores() is not None


def test_one_query_missed_in_a_short_history_makes_it_wait() -> None:
    request = Request(0)
    keeper, shadow = make_keeper(Signal("attention_sum"), LAYERS), Shadow(Signal("attention_sum"))
    request.feed(keeper, shadow, request.append(3))
    request.append(1)
    request.feed(keeper, shadow, request.append(1))
    assert keeper.scores() is None


@pytest.mark.parametrize(
    ("signal", "bytes_a_token"),
    [(Signal("attention_window", 64), 256), (Signal("attention_hits", 400), 50)],
    ids=str,
)
def test_memory_follows_the_live_tokens_not_the_length(signal: Signal, bytes_a_token: int) -> None:
    keeper: Any = make_keeper(signal, LAYERS)
    ids = np.arange(8000)
    keeper.add(ids, np.zeros((1, 8000), np.float32), 1)
    assert keeper._data.nbytes <= 1.3 * 8000 * bytes_a_token
    keeper.add(ids[-500:] + 1, np.zeros((1, 500), np.float32), 1)
    assert keeper._data.nbytes <= 2 * 500 * bytes_a_token


@pytest.mark.parametrize(
    ("kind", "window"), [("attention_sum", 4), ("attention_hits", 0), ("key_norm", 1)]
)
def test_a_window_belongs_to_the_kinds_that_have_one(kind: Any, window: int) -> None:
    with pytest.raises(ValueError, match=kind):
        Signal(kind, window)
