"""Accumulators against the definitions of signals, over random prompts, steps and evictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import plain_signals
from vtoken.policies.signals import (
    WARM_QUERIES,
    Accumulator,
    AnchoredKeyKind,
    Change,
    KeyKind,
    SeenKeys,
    Signal,
    by_id,
    pooled,
    redundancy,
)
from vtoken.policies.signals.kind import BUILT_IN

SIGNALS = [
    Signal("attention_sum"),
    Signal("attention_sum", pool="max", pool_radius=2),
    Signal("attention_last"),
    Signal("attention_last", pool_radius=1),
    Signal("attention_window", 1),
    Signal("attention_window", 5),
    Signal("attention_window", 5, pool_radius=3),
    Signal("attention_max", 1),
    Signal("attention_max", 7),
    Signal("attention_max", 7, pool="max", pool_radius=3),
    Signal("attention_hits", 3),
    Signal("attention_hits", 11),
    Signal("attention_hits", 64),
]


class Shadow:
    """All rows so far, each a dictionary token -> attention.

    What queries gave a token before it was dead counts in a sum over all queries alone.
    """

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.rows: list[dict[int, float]] = []

    def value(self, token: int) -> float:
        """The signal of a token that was live at the newest query."""
        radius, live = self.signal.pool_radius, sorted(self.rows[-1])
        own = max(self.signal.window_queries, 1)  # newest tokens, which share nothing
        before = live[: max(0, len(live) - own)]
        if not radius or token not in before:
            return self.alone(token)
        place = before.index(token)
        around = [self.alone(t) for t in before[max(0, place - radius) : place + radius + 1]]
        return max(around) if self.signal.pool == "max" else sum(around) / (2 * radius + 1)

    def alone(self, token: int) -> float:
        rows = self.rows[-self.signal.window_queries :]
        got = [row.get(token, 0.0) for row in rows]
        if self.signal.kind != "attention_sum":
            was_dead = [token not in row and token < max(row) for row in rows]
            got = [0.0 if any(was_dead[i:]) else given for i, given in enumerate(got)]
        return plain_signals.of_queries(self.signal.kind, got, [len(row) for row in rows])


class Request:
    """Live tokens and their attention, in multiples of 1/64.

    A value ties with 1/n only if 1/n is a multiple too, which floats represent exactly.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.live: list[int] = []
        self.dead: list[int] = []
        self.num_tokens = 0

    def append(self, count: int) -> list[dict[int, float]]:
        rows = []
        for _ in range(count):
            self.live.append(self.num_tokens)
            self.num_tokens += 1
            rows.append({t: int(self.rng.integers(0, 9)) / 64 for t in self.live})
        return rows

    def evict(self, count: int) -> None:
        """All but the newest token may die."""
        count = min(count, len(self.live) - 1)
        died = set(self.rng.choice(self.live[:-1], count, replace=False).tolist())
        self.live = [t for t in self.live if t not in died]
        self.dead += died

    def restore(self, count: int) -> None:
        back = set(self.rng.permutation(self.dead)[:count].tolist())
        self.live = sorted([*self.live, *back])
        self.dead = [t for t in self.dead if t not in back]

    def feed(self, accumulator: Accumulator, shadow: Shadow, rows: list[dict[int, float]]) -> None:
        shadow.rows += rows
        full = np.array([[row.get(t, 0.0) for t in self.live] for row in rows], dtype=np.float32)
        given = full[-accumulator.signal.num_rows(len(rows)) :]
        if accumulator.signal.sums_rows:
            given = given.sum(axis=0, keepdims=True)
        accumulator.add(np.array(self.live), given, len(rows))


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
@given(
    seed=st.integers(0, 2**32),
    events=st.lists(
        st.tuples(st.sampled_from(["probed", "unprobed", "evict", "restore"]), st.integers(1, 20)),
        max_size=40,
    ),
)
@settings(max_examples=30)
def test_accumulator_equals_the_definition(
    signal: Signal, seed: int, events: list[tuple[str, int]]
) -> None:
    request, accumulator, shadow = Request(seed), Accumulator(signal), Shadow(signal)
    request.feed(accumulator, shadow, request.append(40))
    for what, size in events:
        if what == "evict":
            request.evict(size)
        elif what == "restore":
            request.restore(size)
        else:
            rows = request.append(size if size > 16 else 1)
            if what == "probed":
                request.feed(accumulator, shadow, rows)
    found = accumulator.scores()
    assert found is not None
    assert found.dtype == np.float32
    scores = by_id(accumulator.ids, found, accumulator.num_tokens)
    known = [t for t in request.live if t in shadow.rows[-1]]
    expected = [shadow.value(t) for t in known]
    np.testing.assert_allclose(scores[known], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_a_late_start_is_reported_after_enough_queries(signal: Signal) -> None:
    """32 queries, or the window if it is shorter; the newest query alone is one."""
    needed = 1 if signal.kind == "attention_last" else WARM_QUERIES
    if signal.window_queries:
        needed = min(needed, signal.window_queries)
    request, accumulator, shadow = Request(0), Accumulator(signal), Shadow(signal)
    request.append(50)
    assert accumulator.scores() is None
    for query in range(1, needed + 1):
        request.feed(accumulator, shadow, request.append(1))
        assert (accumulator.scores() is not None) == (query == needed)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_a_short_prompt_that_was_probed_completely_is_reported_at_once(signal: Signal) -> None:
    request, accumulator, shadow = Request(0), Accumulator(signal), Shadow(signal)
    request.feed(accumulator, shadow, request.append(2))
    request.feed(accumulator, shadow, request.append(1))
    assert accumulator.scores() is not None


def test_one_missed_query_in_a_short_history_delays_the_report() -> None:
    request = Request(0)
    accumulator, shadow = Accumulator(Signal("attention_sum")), Shadow(Signal("attention_sum"))
    request.feed(accumulator, shadow, request.append(3))
    request.append(1)
    request.feed(accumulator, shadow, request.append(1))
    assert accumulator.scores() is None


@pytest.mark.parametrize(
    ("signal", "bytes_a_token"),
    [(Signal("attention_window", 64), 256), (Signal("attention_hits", 400), 400)],
    ids=str,
)
def test_memory_follows_the_live_tokens_not_the_length(signal: Signal, bytes_a_token: int) -> None:
    accumulator: Any = Accumulator(signal)
    ids = np.arange(8000)
    accumulator.add(ids, np.zeros((1, 8000), np.float32), 1)
    assert accumulator.data.nbytes <= 1.3 * 8000 * bytes_a_token
    accumulator.add(ids[-500:] + 1, np.zeros((1, 500), np.float32), 1)
    assert accumulator.data.nbytes <= 2 * 500 * bytes_a_token


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_a_token_that_comes_back_has_its_sum_again_and_starts_at_zero_in_a_window(
    signal: Signal,
) -> None:
    accumulator = Accumulator(signal)
    accumulator.add(np.arange(9), np.ones((1, 9), np.float32), 9)
    accumulator.add(np.array([0, 1, 3, 9]), np.zeros((1, 4), np.float32), 1)
    accumulator.add(np.array([0, 1, 2, 3, 5, 10]), np.zeros((1, 6), np.float32), 1)
    alone = accumulator.data[:, :6].sum(axis=0).tolist()
    live_on = 1.0 if signal.kind != "attention_last" else 0.0
    if signal.window_queries == 1:
        live_on = 0.0
    back = 1.0 if signal.kind == "attention_sum" else 0.0
    assert alone == [live_on, live_on, back, live_on, back, 0.0]


def test_control_columns_that_are_only_looked_up_are_another_tokens(monkeypatch: Any) -> None:
    """Without a merge a token that comes back has the column of the next one that stayed."""

    def look_up(self: Accumulator, ids: Any) -> Change | None:
        known = ids[: np.searchsorted(ids, self.num_tokens)]
        columns = np.searchsorted(self.ids, known)
        return Change(columns, known[:0], known[:0], known[:0], known[:0])

    monkeypatch.setattr(Accumulator, "_change_to", look_up)
    for signal in (Signal("attention_sum"), Signal("attention_window", 5)):
        with pytest.raises(AssertionError):
            test_a_token_that_comes_back_has_its_sum_again_and_starts_at_zero_in_a_window(signal)


def test_every_kind_of_attention_is_compared_with_plain_python() -> None:
    of_keys = {name for name, kind in BUILT_IN.items() if isinstance(kind, KeyKind)}
    assert {signal.kind for signal in SIGNALS} == BUILT_IN.keys() - of_keys


@pytest.mark.parametrize("name", [n for n, kind in BUILT_IN.items() if isinstance(kind, KeyKind)])
def test_numbers_of_keys_are_those_of_plain_python(name: str) -> None:
    keys = np.random.default_rng(0).normal(size=(3, 20, 8)).astype(np.float32)
    expected = [plain_signals.of_keys(name, head) for head in keys]
    np.testing.assert_allclose(BUILT_IN[name].numbers(keys), expected, rtol=1e-5, atol=1e-6)


def test_an_anchor_can_be_made_of_other_keys_than_those_compared_with_it() -> None:
    keys = np.random.default_rng(1).normal(size=(3, 20, 8)).astype(np.float32) + 0.5
    seen, kind = keys[:, :13], BUILT_IN["key_difference"]
    assert isinstance(kind, AnchoredKeyKind)
    found = kind.against(keys, kind.summands(seen).sum(axis=1))
    expected = [plain_signals.of_keys(kind.name, *heads) for heads in zip(keys, seen, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("readings", "new"),
    [
        ([([0, 1, 2], 3), ([0, 1, 2, 3], 4)], [3, 1]),
        ([([0, 1, 2], 3), ([0, 2, 3, 4], 5)], [3, 2]),
        ([([0, 1, 2], 3), ([0, 5], 7)], [3, 1]),
        ([([0, 1, 2], 3), ([0, 1], 3), ([4], 5)], [3, 0, 1]),
    ],
    ids=["one came", "one died", "some came and died", "none came"],
)
def test_a_reading_adds_the_tokens_that_came_since(readings: Any, new: list[int]) -> None:
    seen = SeenKeys()
    assert [seen.advance(np.array(ids), num_tokens) for ids, num_tokens in readings] == new


def test_only_a_signal_of_a_kind_with_an_anchor_names_one() -> None:
    assert "anchor of all tokens seen" in str(Signal("key_difference", anchor="seen"))
    assert "anchor" not in str(Signal("key_difference"))
    for kind, anchor in (("key_norm", "seen"), ("attention_last", "seen"), ("key_difference", "x")):
        with pytest.raises(ValueError, match="anchor"):
            Signal(kind, anchor=anchor)  # type: ignore[arg-type]


# ---------------------------------------------------------------- neighbours


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("mean", [2.0, 3.0, 3.0, 1.0, 50.0, 60.0]), ("max", [6.0, 6.0, 6.0, 3.0, 50.0, 60.0])],
)
def test_neighbours_are_pooled_except_in_the_window(pool: Any, expected: list[float]) -> None:
    """A missing neighbour counts 0 in a mean and does not count in a maximum."""
    signal = Signal("attention_window", 2, pool=pool, pool_radius=1)
    values = np.array([0.0, 6.0, 3.0, 0.0, 50.0, 60.0], dtype=np.float32)
    assert pooled(signal, values).tolist() == expected


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("num_live", [1, 2, 3, 4])
def test_pooling_takes_fewer_tokens_than_neighbours(pool: Any, num_live: int) -> None:
    values = np.full(num_live, -2.0, dtype=np.float32)
    found = pooled(Signal("key_norm", pool=pool, pool_radius=32), values)
    assert len(found) == num_live
    assert found[-1] == -2.0
    if pool == "max":
        assert found.tolist() == values.tolist()


# ---------------------------------------------------------------- redundancy


def keys_with_copies(places: list[int]) -> npt.NDArray[np.float32]:
    """Ten dissimilar keys [10, 16], except those at `places`, which are nearly equal."""
    keys = np.eye(10, 16, dtype=np.float32)
    keys[places] = keys[places[0]]
    keys[places, 12 + np.arange(len(places))] = 0.05  # what each has of its own
    return keys


def test_of_three_similar_keys_the_oldest_is_the_most_redundant() -> None:
    found = redundancy(keys_with_copies([2, 5, 7]))
    assert np.argsort(-found)[:2].tolist() == [2, 5]
    assert found[2] > found[5] > found[7] == found[0]
    assert found.sum() == pytest.approx(1)


def test_of_two_similar_keys_neither_is_redundant() -> None:
    """As in the published code: of the two, each is the newest similar key of the other."""
    assert np.ptp(redundancy(keys_with_copies([2, 7]))) == 0


def test_redundancy_lowers_a_signal_by_its_share() -> None:
    signal = Signal("attention_window", 8, mix_lambda=0.25)
    attention, repeated = np.array([0.8, 0.2]), np.array([0.4, 0.6])
    np.testing.assert_allclose(signal.mixed(attention, repeated), [-0.1, -0.4])


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("kind", "window"), [("attention_sum", 4), ("attention_hits", 0), ("key_norm", 1)]
)
def test_a_window_is_refused_for_kinds_without_one(kind: Any, window: int) -> None:
    with pytest.raises(ValueError, match=kind):
        Signal(kind, window)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"over_heads": "median"}, "over_heads = 'median' is neither mean nor max"),
        ({"over_layers": "sum"}, "over_layers = 'sum'"),
        ({"pool": ""}, "pool = ''"),
        ({"pool_radius": -1}, "pool_radius = -1"),
        ({"kind": "attention"}, "kind 'attention' is not one of attention_hits"),
        ({"kind": "attention_sum", "over_heads": "max"}, "the mean over heads and layers"),
        ({"kind": "attention_sum", "over_layers": "max"}, "the mean over heads and layers"),
        ({"mix_lambda": 1.5}, r"mix_lambda = 1.5 is not in 0 .. 1"),
        ({"kind": "key_norm", "mix_lambda": 0.5}, "key_norm is a signal of keys"),
    ],
)
def test_an_aggregate_that_does_not_exist_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Signal(**{"kind": "attention_last", **wrong})


def test_a_signal_as_text() -> None:
    assert str(Signal("attention_last")) == "attention_last"
    one = Signal("attention_max", 8, "max", "mean", "max", 3, (21,), (0, 4))
    parts = "layer 21; heads 0, 4; max over heads; max over 3 neighbours a side"
    assert str(one) == f"attention_max(8) ({parts})"
    mixed = Signal("attention_window", 8, layers=(21,), mix_lambda=0.1)
    assert str(mixed) == "attention_window(8) (layer 21; less redundancy, lambda 0.1)"


@pytest.mark.parametrize(
    ("signal", "parts"),
    [
        (Signal("attention_last", layers=(1, 2)), 1),
        (Signal("attention_last", over_heads="max", over_layers="max", layers=(1, 2)), 1),
        (Signal("attention_last", over_heads="max", layers=(1, 2)), 2),
        (Signal("key_norm", over_layers="max", layers=(1, 2, 5)), 3),
        (Signal("key_norm", over_layers="max", layers=(5,)), 1),
    ],
)
def test_layers_are_kept_separately_if_their_order_matters(signal: Signal, parts: int) -> None:
    assert signal.parts == parts
