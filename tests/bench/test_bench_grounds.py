"""The grounds without an engine: texts, facts, statistics, tables."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vtoken.base.errors import RefusedError
from vtoken.core.config.prompt_parts import PromptParts
from vtoken.core.config.request_rules import Prompt, request_rules
from vtoken.core.config.values import VTokenConfig
from vtoken.demo.model import BOS
from vtoken.policies import make_policy, policy_names
from vtoken_bench.evaluation.bursts import BACKGROUND, LONG, NUM_ANSWER, Bursts
from vtoken_bench.evaluation.chats import FactChats, prompt_maker
from vtoken_bench.forcing import FREE
from vtoken_bench.grounds import add_arguments, run, texts
from vtoken_bench.grounds.engines import computed_tokens
from vtoken_bench.grounds.facts import FACTS
from vtoken_bench.grounds.paired import Pairs, holm, share, verdicts
from vtoken_bench.grounds.prompts import CASES, Case, PromptMaker
from vtoken_bench.grounds.settings import (
    ARMS,
    FULL,
    Setting,
    every_policy,
    model_key,
    parsed,
    settings,
    with_tools,
)
from vtoken_bench.grounds.tables import FULL_CACHE, Row, against, charts, tables
from vtoken_bench.log import Log
from vtoken_bench.target import model_folder
from vtoken_bench.texts import english

# ---------------------------------------------------------------- grounds


def test_no_sentence_is_in_the_text_of_other_benchmarks_too() -> None:
    def whole(parts: list[str]) -> str:
        return " ".join(" ".join(parts).lower().split())

    for own, other in (([english()], texts.docstrings()), (texts.docstrings(), [english()])):
        sentences = {sentence for part in own for sentence in texts.sentences(part)}
        assert len(sentences) > 1000
        assert sentences.isdisjoint(texts.sentences(whole(other)))


def test_a_fact_is_found_regardless_of_case_and_whole() -> None:
    fact = replace(FACTS["list"](random.Random(0)), gold=("tea", "Salt"))
    assert fact.is_in("Some SALT and tea.")
    assert not fact.is_in("Some salt.")


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_states_its_gold_strings_once_and_does_not_ask_with_them(name: str) -> None:
    for seed in range(200):
        fact = FACTS[name](random.Random(seed))
        assert fact == FACTS[name](random.Random(seed))
        for gold in fact.gold:
            assert fact.statement.count(gold) == 1
            assert gold not in fact.question + fact.prefix


def test_only_plain_prose_is_a_paragraph() -> None:
    code = "x = {1: 2, 3: 4}; y = [5, 6, 7]; z = (8, 9); w = {10: 11, 12: 13}; v = [14, 15]."
    prose = "The quick brown fox jumps over the lazy dog, and it does so again and again, until "
    prose += "nobody looks at it any more."
    twice = [prose, f"It begins with other words.  {prose}"]
    assert list(texts.new_prose([code, "Short.", *twice], [])) == [prose]
    assert list(texts.new_prose([prose], [prose.upper()])) == []


@pytest.fixture(scope="module")
def of_base() -> PromptMaker:
    """Of a base model, which has no chat template and wants <bos> first."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("demo"), add_bos_token=True)
    tokenizer.chat_template = None
    return PromptMaker(tokenizer, seed=0, num_tokens=600)


@pytest.mark.parametrize("case", [case for case in CASES if case != "tools"])
def test_a_base_model_gets_plain_text_and_the_beginning_of_the_answer(
    of_base: PromptMaker, case: Case
) -> None:
    for number in range(4):
        prompt = of_base.prompt(case, number)
        begin = of_base.ids(BOS)
        assert prompt.ids[: len(begin)] == begin
        whole = of_base.answer_text(prompt.ids + prompt.forced)
        assert whole.count(BOS) == 1
        assert "user:" not in whole  # as the demo's template has it
        assert whole.endswith(prompt.fact.prefix)
        if case != "before":
            assert whole.endswith(f"{prompt.fact.question}\n\n{prompt.fact.prefix}")


def test_the_text_of_a_prompt_has_no_bos_where_the_tokenizer_adds_it(of_base: PromptMaker) -> None:
    ids = of_base.prompt("prefix", 0).ids
    assert BOS not in of_base.text(ids)
    with pytest.raises(ValueError, match="encodes to other tokens"):
        of_base.text(ids[1:])


# ---------------------------------------------------------------- bursts

DOCUMENTS = FactChats("documents", 1500, 8, around_tokens=600)
BURSTS = Bursts(3, 1500, 1200, 1600, DOCUMENTS, (4.0, 20.0))  # the demo model has a token a byte


def test_a_long_request_is_asked_for_every_fact_at_its_end() -> None:
    maker = prompt_maker(model_folder("demo"), 1500, 0)
    made = maker.questions(0, 1200, NUM_ANSWER)
    stated = maker.answer_text(made.ids)
    assert sorted(fact.kind for fact in made.facts) == sorted(FACTS)
    assert all(stated.count(fact.statement) == 1 for fact in made.facts)
    said = 0
    for fact, (begin, end) in zip(made.facts, made.answers, strict=True):
        assert made.forced[begin:end] == [FREE] * NUM_ANSWER
        forced = maker.answer_text(made.forced[said:begin])
        assert forced.endswith(fact.prefix)
        assert fact.question in forced
        assert not fact.is_in(forced)
        said = end
    assert said == len(made.forced)


def test_chats_come_in_bursts_and_long_requests_before_them() -> None:
    found = BURSTS.requests(model_folder("demo"), 9, 0)
    arrivals = [request["arrival_s"] for request in found]
    assert arrivals == sorted(arrivals)
    assert max(arrivals[:3]) < LONG
    assert [request.get("priority") for request in found] == [BACKGROUND] * 3 + [None] * 6
    for number, start in enumerate(BURSTS.starts_s):
        burst = arrivals[3 + 3 * number : 6 + 3 * number]
        assert start <= burst[0] <= burst[-1] <= start + BURSTS.burst_s
    assert found == BURSTS.requests(model_folder("demo"), 9, 0)
    assert found != BURSTS.requests(model_folder("demo"), 9, 1)


@pytest.mark.parametrize("begins", [True, False], ids=["in its answer", "before its question"])
def test_a_fact_is_looked_for_in_its_own_answer(begins: bool) -> None:
    folder = model_folder("demo")
    maker = prompt_maker(folder, BURSTS.text_tokens, 0)
    requests = BURSTS.requests(folder, BURSTS.num_long, 0)
    sample = maker.questions(0, BURSTS.least_output, NUM_ANSWER)
    number = [fact.kind for fact in sample.facts].index("sum")
    place = sample.answers[number][0] if begins else 0
    gold = maker.ids(sample.facts[number].gold[0])
    outputs = [[0] * request["num_new"] for request in requests]
    (mine,) = (n for n, request in enumerate(requests) if request["prompt"] == sample.ids)
    outputs[mine][place : place + len(gold)] = gold
    found = BURSTS.found(folder, 0, outputs)
    assert len(found) == BURSTS.num_long * len(FACTS)
    assert [n for n, flag in enumerate(found) if flag] == ([number] if begins else [])


# ---------------------------------------------------------------- statistics


def test_a_share_has_the_exact_interval() -> None:
    found = share([True] * 7 + [False])  # R: binom.test(7, 8)
    assert (found.value, found.low, found.high) == pytest.approx((0.875, 0.4735, 0.9968), abs=1e-4)
    assert share([True] * 8).low == pytest.approx(0.025 ** (1 / 8))


def test_a_difference_has_the_score_interval() -> None:
    equal = Pairs(200, 0, 0).difference()  # without discordant pairs it has a closed form
    assert equal.value == 0
    closed = pytest.approx(3.8415 / (200 + 3.8415), abs=1e-4)
    assert (-equal.low, equal.high) == (closed, closed)
    for lost, gained in ((5, 2), (40, 10), (0, 7)):
        one, other = Pairs(100, gained, lost).difference(), Pairs(100, lost, gained).difference()
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-6)
        assert Pairs(100, gained, lost).score(one.low) == pytest.approx(1.96, abs=1e-3)
        assert one.low < one.value < one.high
    assert Pairs(50, 0, 50).difference().low == -1
    assert Pairs(50, 50, 0).difference().high == 1


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    drawn = np.random.default_rng(0).multinomial(200, [0.03, 0.06, 0.91], size=1500)
    found = [Pairs(200, int(g), int(n)).difference() for g, n, _ in drawn]
    covered = np.mean([i.low <= -0.03 <= i.high for i in found])
    assert 0.93 <= covered <= 0.97


def test_mcnemars_test_is_exact_and_holms_correction_is_monotone() -> None:
    assert Pairs(100, 1, 9).p_equal() == pytest.approx(2 * 11 / 2**10)
    assert Pairs(100, 0, 0).p_equal() == 1
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_pairs_count_what_only_one_of_both_finds() -> None:
    assert Pairs.of([True, False, True], [False, True, True]) == Pairs(3, 1, 1)
    with pytest.raises(ValueError, match="longer"):
        Pairs.of([True], [True, False])


def test_a_verdict_follows_the_corrected_tests() -> None:
    equal, lost, few, small = (
        Pairs(400, 2, 2),
        Pairs(400, 1, 90),
        Pairs(20, 0, 1),
        Pairs(2000, 2, 40),
    )
    assert verdicts([equal, lost, few, small]) == [
        "as good",
        "worse",
        "undecided",
        "worse, within 5%",
    ]
    assert verdicts([Pairs(200, 2, 5)]) == ["as good"]
    assert verdicts([Pairs(200, 32, 8)]) == ["better"]
    assert verdicts([Pairs(200, 2, 5)] * 12) == ["undecided"] * 12  # the same, among twelve


# ---------------------------------------------------------------- settings and tables


def test_a_policy_is_named_with_its_parameters() -> None:
    label, policy = parsed("snapkv:window=8,pool_radius=3")
    assert label == "snapkv window=8 pool_radius=3"
    assert policy == make_policy("snapkv", {"window": 8, "pool_radius": 3})
    with pytest.raises(RefusedError, match="unknown policy 'magic'"):
        parsed("magic")
    with pytest.raises(RefusedError, match="window"):
        parsed("snapkv:window=0")


def test_every_registered_policy_is_measured() -> None:
    assert {policy.name for _, policy in every_policy()} == set(policy_names()) - {"none"}


def test_a_budget_is_the_share_of_the_prompt_and_no_less_than_the_policy_needs() -> None:
    (setting,) = settings([parsed("snapkv:window=64")], [0.25])
    arguments = setting.arguments(1000)
    assert arguments["vtoken_budget_tokens"] == 250
    assert json.loads(arguments["vtoken_policy_params"])["window"] == 64
    assert setting.fits(1000)
    assert not setting.fits(100)
    assert FULL.arguments(1000) == {"vtoken_policy": "none"}


def test_settings_with_different_parameters_have_different_keys() -> None:
    keys = [
        Setting("x", make_policy("snapkv", {"window": window}), keep).key()
        for window in (8, 16)
        for keep in (0.25, 0.5)
    ]
    assert all(keys[i] != keys[j] for i in range(4) for j in range(i))


def test_a_log_returns_finished_samples_and_ignores_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "grounds" / "samples.jsonl"
    log = Log(path)
    log.add({"task": "vt", "keep": 0.25}, {"score": 1.0}, 2.5)
    log.add({"task": "vt", "keep": 0.5}, {"score": 0.5}, 0.5)
    with path.open("ab") as file:
        file.write(b'{"key":{"task":"cwe"},"val')
    again = Log(path)
    assert again.get({"keep": 0.25, "task": "vt"}) == {"score": 1.0}
    assert again.seconds({"keep": 0.25, "task": "vt"}) == 2.5
    assert again.get({"task": "cwe"}) is None
    assert again.seconds({"task": "cwe"}) == 0
    again.add({"task": "cwe"}, {"score": 0.0}, 1.0)
    last = Log(path)
    assert last.get({"task": "cwe"}) == {"score": 0.0}
    assert last.get({"task": "vt", "keep": 0.5}) == {"score": 0.5}


def test_the_key_of_a_model_depends_on_tokenizer_and_template(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1 << 20))
    first = model_key(tmp_path)
    assert model_key(tmp_path) == first
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    second = model_key(tmp_path)
    assert second["model"] == first["model"]
    assert second["tokenizer"] != first["tokenizer"]


@pytest.mark.parametrize(
    ("policy", "computed"),
    [
        ("random", 1),
        ("knorm", 1),
        ("tova", 1),
        ("snapkv:window=48", 48),
        ("r_kv:window=24", 24),
        ("h2o", 500),
        ("scissorhands:history_queries=400", 400),
    ],
)
def test_a_policy_computes_the_queries_that_it_ranks_by(policy: str, computed: int) -> None:
    (setting,) = settings([parsed(policy)], [0.5])
    assert computed_tokens(setting, 500) == computed


def test_tables_pair_each_policy_with_the_full_cache_on_the_same_samples() -> None:
    rows = [
        Row("chat", FULL_CACHE, 1.0, "1" * 90 + "0" * 10),
        Row("chat", "good", 0.5, "1" * 89 + "0" * 10 + "1"),
        Row("chat", "bad", 0.5, "0" * 100),
        Row("chat", "large", 0.5, "-" * 100),
    ]
    (table,) = tables(rows)
    assert [row[0] for row in table.rows] == [FULL_CACHE, "good", "bad", "large"]
    assert table.columns == ["policy", "half: found", "half: difference"]
    assert table.rows[1][1:] == ["90.0 [82.4 .. 95.1]", "+0.0 [-4.6 .. +4.6] as good"]
    assert table.rows[2][1:] == ["0.0 [0.0 .. 3.6]", "-90.0 [-94.5 .. -82.6] worse"]
    assert table.rows[3][1:] == ["", "needs a larger budget"]
    assert charts(rows) == []  # one share is no curve
    (chart,) = charts([*rows, *(replace(rows[1], keep=keep) for keep in (0.25, 0.75))])
    assert [line.name for line in chart.panels[0].lines] == [FULL_CACHE, "good", "bad"]


def test_unprotected_tools_have_the_same_share_or_as_many_tokens() -> None:
    arms = with_tools(settings([parsed("keydiff")], [0.5]))
    assert [arm.tools for arm in arms] == [*ARMS]
    assert len({json.dumps(arm.key()) for arm in arms}) == 3
    assert [arm.budget_tokens(1000, 600) for arm in arms] == [200, 500, 200 + 600]
    rules = request_rules(arms[0].arguments(1000, 600))
    assert rules is not None
    rules.prompt = Prompt(1000, lambda: PromptParts(tools=((10, 610),)))
    assert rules.under(VTokenConfig()).budget_tokens == 800


def test_protected_tools_are_paired_with_unprotected_ones() -> None:
    rows = [
        Row("tools", FULL_CACHE, 1.0, "1" * 80 + "0" * 20),
        Row("tools", "a", 0.5, "1" * 60 + "0" * 40, ARMS[0]),
        Row("tools", "a", 0.5, "0" * 50 + "1" * 5 + "0" * 45, ARMS[1]),
    ]
    facts, paired = tables(rows)
    assert [row[0] for row in facts.rows] == [FULL_CACHE, "a; protected", "a; unprotected"]
    (row,) = paired.rows
    assert row[:2] == ["a, half", "unprotected"]
    assert row[5:] == [55, 0]


def test_the_ground_of_tools_has_a_template_of_its_own_and_runs_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--model", "demo", "--cases", "tools", "chat", "--device", "cpu"])
    args.quick = False
    assert run(args) == 1
    assert "run it without others" in capsys.readouterr().err


def test_two_runs_are_paired_row_by_row() -> None:
    before = [Row("chat", "a", 0.5, "0" * 100), Row("chat", "b", 0.5, "1" * 100)]
    after = [
        Row("chat", FULL_CACHE, 1.0, "1" * 50),
        Row("chat", "a", 0.5, "1" * 50),  # fewer samples: the first 50 of both
        Row("chat", "b", 0.5, "1" * 49 + "0"),
        Row("chat", "b", 0.25, "1" * 50),
    ]
    table = against(after, before)
    assert [row[0] for row in table.rows] == ["a, half", "b, half"]
    assert table.rows[0][4:] == [50, 0, "better"]
    assert table.rows[1][4:] == [0, 1, "undecided"]


def test_an_output_is_found_by_its_fact_and_prompts_fit_their_bound() -> None:
    from transformers import AutoTokenizer

    folder = model_folder("demo")
    workload = FactChats("chats", 600, 16, around_tokens=250)
    requests = workload.requests(folder, 4, 1)
    assert requests == workload.requests(folder, 4, 1)
    assert requests != workload.requests(folder, 4, 2)
    assert max(len(request["prompt"]) for request in requests) <= workload.longest_prompt
    outputs = [request["prompt"] for request in requests]  # they state the fact
    assert workload.found(folder, 1, outputs) == [True] * 4
    assert workload.found(folder, 1, [ids[:8] for ids in outputs]) == [False] * 4
    texts = workload.texts(folder, 4, 1)  # what a server decodes
    end = AutoTokenizer.from_pretrained(folder).eos_token
    assert workload.found_in(folder, 1, texts) == [True] * 4
    assert workload.found_in(folder, 1, [end + text for text in texts]) == [False] * 4
    with pytest.raises(ValueError, match="raise around_tokens"):
        FactChats("chats", 600, 16).requests(folder, 4, 1)
