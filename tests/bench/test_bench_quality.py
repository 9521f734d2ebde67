"""The quality bench without an engine: prompts, metrics, log, tables."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vtoken.base.errors import RefusedError
from vtoken.policies import make_policy, policy_names
from vtoken_bench import main
from vtoken_bench.log import Log
from vtoken_bench.output import Result, as_markdown
from vtoken_bench.quality import ruler
from vtoken_bench.quality.curves import charts
from vtoken_bench.quality.measures import (
    divergence,
    equal_share,
    mean,
    repetition,
    rouge_l,
    string_match_all,
)
from vtoken_bench.quality.ruler import TASKS, Sample, fitted
from vtoken_bench.quality.settings import FULL, Setting, every_policy, model_key, parsed, settings
from vtoken_bench.quality.tables import (
    FULL_CACHE,
    Row,
    clears_chance,
    continuation_row,
    continuation_tables,
    exact_table,
    full_row,
    task_rows,
    task_tables,
)


def words(sample: Sample) -> int:
    return len(f"{sample.context} {sample.question} {sample.answer_prefix}".split())


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [700, 5000])
def test_a_sample_fills_its_length_and_contains_its_gold_strings(name: str, length: int) -> None:
    sample = fitted(name, 3, length, words)
    spare = length - TASKS[name].num_new - words(sample)
    assert 0 <= spare < (80 if name == "fwe" else 30)  # no more than the next larger one needs
    assert all(answer in sample.context for answer in sample.gold)
    assert not any(answer in sample.question + sample.answer_prefix for answer in sample.gold)
    assert fitted(name, 3, length, words) == sample
    assert fitted(name, 4, length, words) != sample


@pytest.mark.parametrize(
    ("name", "needles", "gold"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_the_number_of_needles_is_rulers(name: str, needles: int, gold: int) -> None:
    sample = fitted(name, 0, 900, words)
    assert sample.context.count("One of the special magic numbers for ") == needles
    assert len(set(sample.gold)) == gold
    one = gold == 1
    assert sample.question.startswith("What is the" if one else "What are all the")
    assert sample.context.startswith("A special" if one else "Some special")


def test_a_chain_of_variables_differs_from_the_worked_example() -> None:
    sample = fitted("vt", 0, 900, words)
    value = sample.question.split("the value ")[1].split()[0]
    chain = [line for line in sample.context.splitlines() if line.startswith("VAR")]
    example, own = chain[:5], chain[5:]
    assert own[0] == f"VAR {sample.gold[0]} = {value}"
    assert own[1:] == [
        f"VAR {b} = VAR {a}" for a, b in zip(sample.gold, sample.gold[1:], strict=False)
    ]
    assert not any(name in " ".join(example) for name in sample.gold)


@pytest.mark.parametrize(("length", "common", "uncommon"), [(900, 6, 1), (5000, 30, 3)])
def test_word_counts_are_rulers(length: int, common: int, uncommon: int) -> None:
    sample = fitted("cwe", 0, length, words)
    listed = sample.context.rpartition("ones that appear most often.\n")[2].split()[1::2]
    counts = {word: listed.count(word) for word in listed}
    assert {counts[word] for word in sample.gold} == {common}
    assert {n for word, n in counts.items() if word not in sample.gold} == {uncommon}
    assert sample.chance == 10 / len(counts)


def test_the_three_most_frequent_coded_words_are_the_answer() -> None:
    sample = fitted("fwe", 0, 900, words)
    listed = sample.context.rpartition("coded words. ")[2].split()
    counts = {word: listed.count(word) for word in set(listed)}
    assert sorted(counts, key=lambda word: -counts[word])[:4] == ["...", *sample.gold]


def test_the_largest_sample_is_the_one_before_the_first_that_does_not_fit() -> None:
    def made(size: int) -> Sample:
        return Sample("x" * size, "", "", ())

    for limit in range(3, 40):
        found = ruler.largest(made, lambda s, n=limit: len(s.context) <= n, 3)  # type: ignore[misc]
        assert found == made(limit)
    assert ruler.largest(made, lambda _: False, 3) is None
    with pytest.raises(ValueError, match="niah_single_2 does not fit in 30 tokens"):
        fitted("niah_single_2", 0, 30, words)


# ---------------------------------------------------------------- measures


def test_gold_strings_are_found_regardless_of_case() -> None:
    assert string_match_all("It is ABC, and 12.", ["abc", "12", "13", "x y"]) == 0.5


def test_divergence_is_a_lower_bound_that_is_exact_where_everything_is_listed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(12, 0.3)), rng.dirichlet(np.full(12, 0.3))
        p, q = (np.maximum(x, 1e-6) / np.maximum(x, 1e-6).sum() for x in (p, q))
        true = float(np.sum(p * np.log(p / q)))

        def top(x: Any, k: int) -> dict[int, float]:
            return {int(i): math.log(x[i]) for i in np.argsort(-x)[:k]}

        assert divergence(top(p, 12), top(q, 12)) == pytest.approx(true, abs=1e-4)
        assert divergence(top(p, 5), top(q, 5)) <= true + 1e-4
        assert divergence(top(p, 5), top(p, 5)) == pytest.approx(0)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    def naive(a: list[str], b: list[str]) -> int:
        if not a or not b:
            return 0
        if a[0] == b[0]:
            return 1 + naive(a[1:], b[1:])
        return max(naive(a[1:], b), naive(a, b[1:]))

    rng = random.Random(0)
    for _ in range(40):
        a, b = (rng.choices("abc", k=rng.randint(1, 8)) for _ in range(2))
        assert rouge_l(a, b) == pytest.approx(2 * naive(a, b) / (len(a) + len(b)))
    assert (rouge_l([], []), rouge_l([], ["a"])) == (1.0, 0.0)


def test_shares_of_equal_and_of_repeated_tokens() -> None:
    assert equal_share([1, 2, 3], [1, 9, 3, 4]) == 0.5
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1, 2] * 4) == pytest.approx(1 - 2 / 5)
    assert repetition([1, 2]) == 0


def test_an_interval_holds_its_mean_and_shrinks_with_samples() -> None:
    few, many = mean([0.0, 1.0] * 5), mean([0.0, 1.0] * 200)
    assert few.low < few.value == 0.5 < few.high
    assert many.high - many.low < (few.high - few.low) / 3
    assert mean([1.0, 1.0]) == mean([1.0, 1.0])
    raised = few.mapped(math.exp)
    assert (raised.low, raised.high) == (math.exp(few.low), math.exp(few.high))
    with pytest.raises(ValueError, match="no sample"):
        mean([])


# ---------------------------------------------------------------- settings and the log


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "0 is not 1 or more"),
        (["--keep", "4/3"], "4/3 is not between 0 and 1"),
        (["--tasks", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_a_bad_option_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["quality", *arguments])
    assert message in capsys.readouterr().err


def test_an_invalid_run_is_refused_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", "--new-tokens", "500", "--lengths", "1024", "400"]) == 1
    assert "--new-tokens 500 is not below --lengths 400" in capsys.readouterr().err
    on_cpu = ["quality", "--device", "cpu", "--model", str(tmp_path)]
    assert main(on_cpu) == 1
    assert f"{tmp_path} is no model folder" in capsys.readouterr().err
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert main(on_cpu) == 1
    assert f"{tmp_path} holds no weights" in capsys.readouterr().err


def test_a_log_returns_finished_samples_and_ignores_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "quality" / "samples.jsonl"
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


# ---------------------------------------------------------------- tables


def rows_of(policy: str, keep: float, scores: dict[str, list[float]]) -> list[Row]:
    facts = {"what": "task", "length": 1024, "question": "aware", "policy": policy, "keep": keep}
    return task_rows(facts, {task: dict(enumerate(found)) for task, found in scores.items()})


def test_a_task_counts_where_the_full_cache_is_well_above_chance() -> None:
    def samples(score: float, chance: float) -> list[Row]:
        return [{"score": score, "chance": chance}] * 12

    assert clears_chance(samples(0.5, 0.2))
    assert not clears_chance(samples(0.35, 0.2))
    assert not clears_chance([{"score": score, "chance": 0.0} for score in (1.0, 0.0, 0.0, 0.0)])
    assert not clears_chance([])


def test_policies_are_ranked_and_each_keep_has_a_column() -> None:
    rows = [
        *rows_of(FULL_CACHE, 1.0, {"vt": [1.0, 1.0], "cwe": [1.0, 0.8]}),
        *rows_of("tova", 0.5, {"vt": [0.0, 0.2], "cwe": [0.5, 0.5]}),
        *rows_of("h2o", 0.5, {"vt": [1.0, 0.8], "cwe": [0.5, 0.5]}),
        *rows_of("h2o", 0.25, {"vt": [0.0, 0.0], "cwe": [0.2, 0.2]}),
    ]
    hard = {"task": "fwe", "length": 1024, "score": asdict(mean([0.0, 0.2]))}
    by_keep, by_task, dropped = task_tables(rows, [hard])
    assert by_keep.columns == ["policy", "0.5", "0.25"]
    assert [row[0] for row in by_keep.rows] == [FULL_CACHE, "h2o", "tova"]
    assert by_keep.rows[0][1] == by_keep.rows[0][2] == "95 [90 .. 100]"
    assert by_keep.rows[1][1] == "70 [65 .. 75]"
    assert by_keep.rows[2][2] is None  # tova has not been measured there
    assert by_task.columns == ["policy, kept", "vt", "cwe"]
    assert by_task.rows[0] == [FULL_CACHE, "100 [100 .. 100]", "90 [80 .. 100]"]
    assert dropped.rows == [["fwe, 1024", "10 [0 .. 20]"]]


def test_continuations_are_ranked_by_divergence_beside_the_full_cache() -> None:
    def sample(kl: float) -> Row:
        names = "kl first nll full_nll equal rouge longer judged agree repeats full_repeats"
        return dict.fromkeys(names.split(), 0.5) | {"kl": kl}

    facts = {"what": "prose", "length": 1024, "new": 64}
    rows = [
        continuation_row(facts | {"policy": "h2o", "keep": 0.5}, [sample(0.4), sample(0.6)]),
        continuation_row(facts | {"policy": "tova", "keep": 0.5}, [sample(0.1), sample(0.1)]),
        full_row(facts | {"policy": FULL_CACHE, "keep": 1.0}, [sample(0.1)]),
    ]
    (table,) = continuation_tables(rows)
    assert [row[0] for row in table.rows] == [FULL_CACHE, "tova, 0.5", "h2o, 0.5"]
    assert table.rows[0][1] is None
    assert table.rows[2][1] == "0.500 [0.400 .. 0.600]"
    perplexity = f"{math.exp(0.5):.2f}"
    assert table.rows[1][3] == f"{perplexity} [{perplexity} .. {perplexity}]"


def test_tokens_are_compared_with_those_of_the_first_variant() -> None:
    table = exact_table({"h2o": {"naive": [1, 2, 3], "plug": [1, 2, 3], "pack": [1, 9, 3]}}, "T")
    assert table.columns == ["policy", "plug", "pack"]
    assert table.rows == [["h2o", "equal, 3 tokens", "differs at token 1"]]


def test_the_chart_has_a_line_for_every_policy_and_none_of_the_full_cache_alone() -> None:
    rows = rows_of(FULL_CACHE, 1.0, {"vt": [1.0]})
    for policy in ("h2o", "tova"):
        for keep in (0.25, 0.5):
            rows += rows_of(policy, keep, {"vt": [keep, 1.0]})
    (chart,) = charts(rows)
    (panel,) = chart.panels
    lines = {line.name: line for line in panel.lines}
    assert lines[FULL_CACHE].reference
    assert lines[FULL_CACHE].y == [100.0]
    assert {name for name in lines if name != FULL_CACHE} == {"h2o", "tova"}
    assert lines["h2o"].x == [0.25, 0.5]
    assert lines["h2o"].y == pytest.approx([62.5, 75.0])
    assert all(low <= y <= high for y, low, high in zip(
        lines["tova"].y, lines["tova"].low, lines["tova"].high, strict=True
    ))  # fmt: skip
    assert charts(rows[:1]) == []


def test_a_result_survives_its_file() -> None:
    rows = [*rows_of(FULL_CACHE, 1.0, {"vt": [1.0]}), *rows_of("h2o", 0.5, {"vt": [0.5, 1.0]})]
    result = Result("quality", "make bench-quality", {}, task_tables(rows, []), raw={"rows": rows})
    result.machine = {"cpu": "c", "python": "3", "versions": {}}
    again = msgspec.json.decode(msgspec.json.encode(result), type=Result)
    assert as_markdown(again) == as_markdown(result)
    assert task_tables(again.raw["rows"], []) == result.tables
