"""The load generator on real engines: loops, latencies and turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from vtoken_bench.engines import Engine, ask_in_turns
from vtoken_bench.evaluation.prose import Prose, set_arrivals
from vtoken_bench.evaluation.variants import NAIVE, VARIANTS, configuration
from vtoken_bench.target import Target, model_folder

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_SIZE = 24, 32
LOAD, REQUESTS = Prose(96, 64), 4  # five blocks each in full, three packed at half
HALF = LOAD.longest() // 2
# Filling holes needs next to no headroom.
EAGER = {"theta_f": 0.0, "low_watermark_blocks": BLOCKS, "headroom_blocks": 2, "batch_size": BLOCKS}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    target = Target(threads=1)
    args = target.engine_args(
        model_folder("demo"), block_size=BLOCK_SIZE, max_model_len=256, num_blocks=BLOCKS
    )
    cached = args | {"enable_prefix_caching": True}
    found = {
        "stock": Engine("stock", None, cached, threads=1),
        "vtoken": Engine("vtoken", {"policy": {"name": "none"}}, args, threads=1),
    }
    yield found
    for engine in found.values():
        engine.close()


def load(engine: Engine, **more: Any) -> dict[str, Any]:
    return engine.ask(question(**more))


def question(**more: Any) -> dict[str, Any]:
    requests = LOAD.requests(model_folder("demo"), REQUESTS, 0)
    if (rate := more.pop("rate", None)) is not None:
        set_arrivals(requests, rate, 0)
    return {"requests": requests, "keep_tokens": True, **more}


def test_stock_and_an_idle_plugin_give_the_same_tokens(
    engines: dict[str, Engine],
) -> None:
    stock, idle = (load(engines[name], concurrency=2) for name in ("stock", "vtoken"))
    assert stock["output_ids"] == idle["output_ids"]
    assert stock["most_running"] == 2
    assert stock["mean_running"] == pytest.approx(2)


def test_engines_in_turns_answer_as_alone_and_count_no_waiting(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtoken_bench.engines.TURN_S", 0.05)
    asked = question(concurrency=2)
    alone = engines["stock"].ask(asked)
    started = time.perf_counter()
    together = ask_in_turns([(engine, asked) for engine in engines.values()])
    taken = time.perf_counter() - started
    assert [found["output_ids"] for found in together] == [alone["output_ids"]] * 2
    assert all(found["seconds"] > 4 * 0.05 for found in together)  # several turns each
    assert sum(found["seconds"] for found in together) < taken


def test_latencies_count_from_arrival_on_the_engines_clock(engines: dict[str, Engine]) -> None:
    found = load(engines["stock"], concurrency=1)
    ends = [end for _, _, end, _ in found["requests"]]
    arrivals = [came for came, *_ in found["requests"]]
    assert arrivals == [0, *ends[:-1]]  # closed loop: the next request arrives when one ends
    assert ends[-1] == pytest.approx(found["seconds"], abs=1e-4)
    assert all(came < first < end for came, first, end, _ in found["requests"])
    assert [count for *_, count in found["requests"]] == [64] * 4
    together = load(engines["stock"], concurrency=4)
    assert together["steps"] < found["steps"] / 3


def test_a_turn_takes_the_place_of_the_one_before_it(engines: dict[str, Engine]) -> None:
    """And finds that one's prompt in the prefix cache."""
    first, other = (request["prompt"] for request in LOAD.requests(model_folder("demo"), 2, 0))
    requests = [
        {"prompt": first, "num_new": 8, "turn": 1},
        {"prompt": other, "num_new": 9, "turn": 1},
        {"prompt": first + other[:40], "num_new": 10, "turn": 2, "after": 0},
    ]
    found = engines["stock"].ask({"requests": requests, "concurrency": 1})
    arrivals, firsts, ends, counts = zip(*found["requests"], strict=True)
    assert counts == (8, 10, 9)
    assert arrivals == (0, *ends[:-1])
    assert found["hit_tokens"] == len(first)
    assert found["prompt_tokens"] == 3 * len(first) + 40
    ttft_ms = found["turn_ttft_ms"]
    assert [*ttft_ms] == ["1", "2"]
    assert ttft_ms["2"]["p95"] == pytest.approx(1e3 * (firsts[1] - arrivals[1]), abs=0.1)


def test_an_open_loop_waits_for_arrivals_without_spending_time(engines: dict[str, Engine]) -> None:
    found = load(engines["stock"], rate=0.001)
    arrivals = [came for came, *_ in found["requests"]]
    assert arrivals[-1] > 100  # seconds of the load's clock
    assert found["seconds"] > arrivals[-1]
    assert found["most_running"] == 1
    waits = [first - came for came, first, *_ in found["requests"]]
    assert max(waits) < arrivals[0]  # of many minutes: no request waited for another


def test_no_more_requests_run_at_once_than_a_load_allows(engines: dict[str, Engine]) -> None:
    limited = load(engines["stock"], max_running=3)
    assert limited["most_running"] == 3
    assert 1 < limited["mean_running"] <= 3
    free = load(engines["stock"])  # the limit is of one load
    assert free["most_running"] == 4
    assert free["output_ids"] == limited["output_ids"]


def test_variants_change_on_one_engine_and_decide_alike(engines: dict[str, Engine]) -> None:
    policy = {"policy": {"name": "h2o"}, "interval_tokens": 8, "budget_tokens": HALF}
    naive, eager, again = (
        load(engines["vtoken"], concurrency=2, config=configuration(patch | policy, BLOCKS))
        for patch in (VARIANTS[NAIVE], EAGER, VARIANTS[NAIVE])
    )
    assert naive["output_ids"] == eager["output_ids"] == again["output_ids"]
    assert naive["tokens_hash"] == again["tokens_hash"]
    assert naive["evicted_tokens"] == eager["evicted_tokens"] > 0
    assert eager["recycled_slots"] > naive["recycled_slots"] == 0
    assert eager["packed_tokens"] < naive["packed_tokens"]
