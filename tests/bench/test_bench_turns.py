"""The part `turns` without an engine: its chats, its arms, and what is made of its runs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vtoken.core.config.values import AUTO_PATCH, VTokenConfig, default_config, merge_patch
from vtoken_bench import main
from vtoken_bench.evaluation import turns
from vtoken_bench.evaluation.chats import prompt_maker
from vtoken_bench.evaluation.conversations import SOURCES, TURNS, Conversations, age
from vtoken_bench.evaluation.points import Run, Setting
from vtoken_bench.evaluation.variants import NATIVE, configuration
from vtoken_bench.grounds.facts import FACTS
from vtoken_bench.grounds.prompts import PromptMaker
from vtoken_bench.output import new_result
from vtoken_bench.target import model_folder

GROUND = Conversations(1500, 28, around_tokens=650)  # the demo model has a token a byte
ALSO = (("evict_after_wait_ms", 2000), ("evict_after_wait_ms", 500))
SETTING = Setting("trained", 32, quick=False, repeats=3, also=ALSO)
PATIENT, LESS = (f"{turns.AUTO}, {name} {value}" for name, value in ALSO)
ARMS = [NATIVE, turns.AUTO, turns.NO_PARKING, PATIENT, LESS, turns.AMPLE]


@pytest.fixture
def maker(trained_model: Path) -> PromptMaker:
    return prompt_maker(trained_model, turns.GROUND.text_tokens, 0)


@pytest.mark.parametrize("number", range(4))
def test_each_prompt_of_a_chat_goes_on_from_the_one_before_it(
    number: int, maker: PromptMaker
) -> None:
    """All of its tokens, then the statement of its fact in place of an answer."""
    chat = maker.chat(number, SOURCES[number])
    for fact, before, after in zip(chat.facts, chat.prompts, chat.prompts[1:], strict=False):
        assert after[: len(before)] == before
        assert maker.text(after)[len(maker.text(before)) :].startswith(fact.statement)


@pytest.mark.parametrize("number", range(4))
def test_a_turn_asks_last_for_a_fact_that_only_its_source_states(
    number: int, maker: PromptMaker
) -> None:
    chat = maker.chat(number, SOURCES[number])
    texts = [maker.text(ids) for ids in chat.prompts]
    ends = [0, *map(len, texts)]
    for turn, fact in enumerate(chat.facts):
        source = turn - age(TURNS * number + turn)
        assert ends[source] < texts[turn].index(fact.statement) < ends[source + 1]
        assert texts[turn].count(fact.statement) == texts[turn].count(fact.question) == 1
        assert texts[turn].index(fact.question) > ends[turn]
    assert {fact.kind for fact in chat.facts} == FACTS.keys()


def test_a_base_models_answer_is_begun_and_goes_on_in_the_next_prompt() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("demo"))
    tokenizer.chat_template = None
    maker = PromptMaker(tokenizer, seed=0, num_tokens=GROUND.text_tokens)
    chat = maker.chat(0, SOURCES[0])
    for fact, before, after in zip(chat.facts, chat.prompts, chat.prompts[1:], strict=False):
        assert maker.text(before).endswith(fact.prefix)
        assert after[: len(before)] == before


def test_ages_and_kinds_are_spread_over_the_chats() -> None:
    maker = prompt_maker(model_folder("demo"), GROUND.text_tokens, 0)
    chats = [maker.chat(number, SOURCES[number % 4]) for number in range(turns.CHATS)]
    kinds = [fact.kind for chat in chats for fact in chat.facts]
    asked = Counter((age(number), kind) for number, kind in enumerate(kinds))
    assert asked == {(n, kind): (5, 5, 3, 3)[n] for n in range(TURNS) for kind in FACTS}


def test_a_turn_takes_the_place_of_the_one_before_it() -> None:
    folder = model_folder("demo")
    requests = GROUND.requests(folder, 8, 0)
    assert [request["turn"] for request in requests] == [1, 2, 3, 4] * 2
    assert [request.get("after") for request in requests] == [None, 0, 1, 2, None, 4, 5, 6]
    assert all(len(before["prompt"]) < len(r["prompt"]) for before, r in pairwise(requests[:4]))
    assert requests == GROUND.requests(folder, 8, 0)
    assert requests != GROUND.requests(folder, 8, 1)


def test_a_fact_is_looked_for_in_the_answer_to_its_question() -> None:
    folder = model_folder("demo")
    maker = prompt_maker(folder, GROUND.text_tokens, 0)
    facts = [fact for number in range(2) for fact in maker.chat(number, SOURCES[number]).facts]
    outputs = [maker.ids(fact.statement) for fact in facts]
    assert GROUND.found(folder, 0, outputs) == [True] * 8
    assert GROUND.found(folder, 0, [*outputs[1:], outputs[0]]) == [False] * 8


def test_a_chat_that_is_longer_than_it_says_is_refused() -> None:
    short = Conversations(1500, 28, around_tokens=50)
    with pytest.raises(ValueError, match="raise around_tokens"):
        short.requests(model_folder("demo"), 4, 0)


def test_auto_has_the_shipped_values_and_half_of_the_memory() -> None:
    (comparison,) = turns.comparisons(SETTING)
    points = {str(point.labels["variant"]): point for point in comparison.points}
    assert [*points] == ARMS
    blocks = {name: point.engine.num_blocks for name, point in points.items()}
    assert blocks == dict.fromkeys(ARMS, blocks[NATIVE]) | {turns.AMPLE: 4 * blocks[NATIVE]}
    assert [name for name in ARMS if points[name].engine.stock] == [NATIVE, turns.AMPLE]
    for name in (turns.AUTO, turns.NO_PARKING, PATIENT, LESS):
        patch = configuration(points[name].config, blocks[name], block_bytes=10)
        defaults = default_config(blocks[name])
        made = merge_patch(defaults, patch, num_blocks=blocks[name], num_layers=4)
        shipped = merge_patch(defaults, AUTO_PATCH, num_blocks=blocks[name], num_layers=4)
        pool = 0 if name == turns.NO_PARKING else 2 * 10 * blocks[name]
        wait = {PATIENT: 2000, LESS: 500}.get(name, VTokenConfig().evict_after_wait_ms)
        expected = {"park_bytes": pool, "evict_after_wait_ms": wait}
        assert made == merge_patch(shipped, expected, num_blocks=blocks[name], num_layers=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "turns", "--also", "patience=2000"], "is not FIELD=VALUE"),
        (["--parts", "turns", "--also", "evict_after_wait_ms"], "is not FIELD=VALUE"),
        (["--parts", "turns", "curve", "--also", "evict_after_wait_ms=2000"], "curve has no arms"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["evaluation", "--quick", *arguments])
    except SystemExit as exited:
        code = exited.code
    assert code
    assert message in capsys.readouterr().err


def measured(variant: str, repeat: int) -> dict[str, Any]:
    """Native finds what was stated in the turn that asks; the others find all."""
    ages = [age(number) for number in range(8)]
    percentiles = {"p50": 1000.0 + repeat, "p95": 2000.0 + repeat}
    figures = {
        "found": [variant != NATIVE or turns_ago == 0 for turns_ago in ages],
        "tokens": 200,
        "seconds": (2.0 if variant == NATIVE else 1.5) + repeat / 100,
        "prompt_tokens": 1000,
        "hit_tokens": 600 if variant == turns.AMPLE else 200 + repeat,
        "computed_tokens": 1200,
        "mean_running": 3.0,
        "preemptions": 1,
        "ttft_ms": percentiles,
        "turn_ttft_ms": {str(turn): percentiles for turn in range(1, TURNS + 1)},
    }
    if variant not in (NATIVE, turns.AMPLE):
        given = ("evicted", "given", "outlived", "parked", "restored", "thrashed", "dropped")
        figures |= {f"{name}_tokens": 1700 for name in given}
        figures |= {"kept_share_sum": 6.0, "park_peak_bytes": 2**20}
    return figures


def test_it_reports_facts_by_age_and_what_gave_way() -> None:
    runs = [
        Run(point.labels, repeat, measured(str(point.labels["variant"]), repeat))
        for comparison in turns.comparisons(SETTING)
        for point in comparison.points
        for repeat in range(comparison.repeats)
    ]
    result = new_result("evaluation-turns", "make bench-evaluation", {})
    turns.report(result, "trained", runs)
    speeds, first, ages, given, _ = [
        {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
        for table in result.tables
    ]
    assert [*speeds] == [*first] == ARMS
    assert [*given] == ARMS[1:5]
    assert speeds[turns.AMPLE]["prefix hits [%]"] == "60.0"
    assert first[NATIVE]["turn 4"] == "1.0 | 2.0"
    assert given[turns.AUTO]["evicted a token"] == "8.50"
    assert [*ages] == [f"{n}, {name}" for n in range(TURNS) for name in ARMS]
    found = [str(ages[f"{n}, {NATIVE}"]["facts found [%]"]).split()[0] for n in range(TURNS)]
    assert found == ["100", "0", "0", "0"]
    difference = "difference to native [points]"
    shown = [str(ages[f"{n}, {turns.AUTO}"][difference]).split()[0] for n in range(TURNS)]
    assert shown == ["+0", "+100", "+100", "+100"]
    claims = {claim.what: claim for claim in result.claims}
    faster = claims[f"total time of {turns.AUTO}, of native"]
    assert (faster.goal, faster.verdict(), faster.repeats) == ("<= 1", "met", 3)
    assert claims[f"prefix hits, {NATIVE}"].value == pytest.approx(20.1)
    assert claims[f"facts, {PATIENT}, less native's"].value == pytest.approx(62.5)
