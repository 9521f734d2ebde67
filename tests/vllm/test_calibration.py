"""`vtoken calibrate` on real models, and the engine that finds what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import engine_args
from tests.support.observe import runtime_of, scheduler_of
from tests.support.packages import install_example, installer
from tests.support.plain_signals import of_keys, of_queries, redundancy
from tests.support.profiles import RECALL, made_up
from vtoken.base.errors import UnsupportedError
from vtoken.calibration import store
from vtoken.calibration.layer_signals import Reading, measured_signals, survey
from vtoken.calibration.model_files import fingerprint
from vtoken.calibration.prompts import needle_prompts
from vtoken.cli import main
from vtoken.core.config.calibration import SignalProfile
from vtoken.policies.signals import Signal
from vtoken.wire import Status

pytestmark = pytest.mark.vllm

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, NUM_TOKENS, HEAD_SIZE = 3, 4, 2, 90, 8


# ---------------------------------------------------------------- signals of a layer


@pytest.fixture(scope="module")
def layers() -> list[tuple[Any, Any]]:
    """Of each layer causal softmax rows [H, n, n] and keys [Hkv, n, D]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(NUM_LAYERS):
        logits = 3 * torch.randn(NUM_HEADS, NUM_TOKENS, NUM_TOKENS, generator=generator)
        future = torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool()
        rows = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
        found.append((rows, torch.randn(NUM_KV_HEADS, NUM_TOKENS, HEAD_SIZE, generator=generator)))
    return found


def naive(signal: Signal, layers: list[tuple[Any, Any]]) -> list[float]:
    """The signal in plain Python, number by number, without neighbours."""
    over: dict[str, Any] = {"mean": np.mean, "max": np.max}
    heads = signal.heads or tuple(range(NUM_HEADS))
    chosen = [(layers[i][0].double().numpy(), layers[i][1].double().numpy()) for i in signal.layers]

    def row(query: int, token: int) -> float:
        by_layer = [
            over[signal.over_heads]([rows[h, query, token] for h in heads]) for rows, _ in chosen
        ]
        return float(over[signal.over_layers](by_layer))

    found: Any = []
    if signal.of_keys:
        of_layers = [
            over[signal.over_heads](
                [of_keys(signal.kind, keys[h * NUM_KV_HEADS // NUM_HEADS]) for h in heads], axis=0
            )
            for _, keys in chosen
        ]
        return list(over[signal.over_layers](of_layers, axis=0))
    for token in range(NUM_TOKENS):
        queries = range(NUM_TOKENS)[-signal.window_queries :]
        got = [row(query, token) for query in queries]
        found.append(of_queries(signal.kind, got, [query + 1 for query in queries]))
    if signal.is_mixed:
        of_heads = [
            redundancy(keys[h * NUM_KV_HEADS // NUM_HEADS]) for _, keys in chosen for h in heads
        ]
        share = signal.mix_lambda
        found = share * np.array(found) - (1 - share) * np.mean(of_heads, axis=0)
    return list(found)


@pytest.mark.parametrize(
    "signal",
    [
        Signal("attention_sum", layers=(1,)),
        Signal("attention_sum", layers=(0, 2), heads=(1, 3)),
        Signal("attention_last", layers=(2,), heads=(0,)),
        Signal("attention_last", layers=(0, 1), over_heads="max", over_layers="max"),
        Signal("attention_window", 16, layers=(1,), over_heads="max"),
        Signal("attention_window", 400, layers=(1,)),  # more queries than there are
        Signal("attention_max", 8, layers=(0, 2), heads=(2, 3)),
        Signal("attention_hits", 30, layers=(0, 1)),
        Signal("attention_window", 8, layers=(0, 2), mix_lambda=0.1),
        Signal("attention_window", 8, layers=(1,), heads=(0, 1, 3), mix_lambda=0.1),
        Signal("key_norm", layers=(1,)),
        Signal("key_difference", layers=(0, 2), over_heads="max"),
    ],
    ids=str,
)
def test_a_reading_is_what_the_definition_says(
    signal: Signal, layers: list[tuple[Any, Any]]
) -> None:
    reading = Reading([signal])
    parts = [reading.look(number, *layer) for number, layer in enumerate(layers)]
    found = reading.scores(parts)[signal]
    np.testing.assert_allclose(found, naive(signal, layers), rtol=1e-5, atol=1e-7)


def test_a_survey_agrees_with_readings_of_one_layer_and_of_one_head(
    layers: list[tuple[Any, Any]],
) -> None:
    for number, layer in enumerate(layers):
        found = survey(measured_signals(), *layer)
        for kind, declared in measured_signals().items():
            of_all, of_each = found[kind]
            plain = {"kind": kind, "window_queries": declared.window_queries}
            signals = [Signal(**plain, layers=(number,))]
            if of_each is not None:
                signals += [Signal(**plain, layers=(number,), heads=(h,)) for h in range(NUM_HEADS)]
            reading = Reading(signals)
            scores = reading.scores([reading.look(n, *seen) for n, seen in enumerate(layers)])
            numbers = [of_all, *([] if of_each is None else of_each)]
            for signal, surveyed in zip(signals, numbers, strict=True):
                np.testing.assert_allclose(surveyed, scores[signal], rtol=1e-5, atol=1e-6)


def test_a_signal_of_another_package_is_measured_and_changes_no_other(tmp_path: Path) -> None:
    """At the window of the policy that reads it by default."""
    before = measured_signals()
    with installer(tmp_path) as install:
        install_example(install, "signal")
        found = measured_signals()
        assert found.pop("attention_least").window_queries == 4
    assert found == before == measured_signals()


# ---------------------------------------------------------------- prompts


def test_the_answer_is_where_the_prompt_says(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = needle_prompts(tokenizer, 8, 1200)
    for prompt in prompts:
        text = tokenizer.decode(prompt.token_ids)
        digits = tokenizer.decode([prompt.token_ids[token] for token in prompt.answer])
        assert digits.isdigit()
        assert len(digits) == 7
        assert text.count(f"is: {digits}.") == text.count(digits) == 1
        assert "mentioned in the provided text is" not in text
        reply = tokenizer.decode(prompt.reply)
        assert reply.startswith("The special magic number for ")
        assert reply.endswith(f" mentioned in the provided text is {digits}")
        assert tokenizer.decode(prompt.reply[prompt.sure :]) == digits[1:]
        assert len(prompt.token_ids) == pytest.approx(1200, abs=8)
    depths = [prompt.answer[0] for prompt in prompts]
    assert max(depths[:2]) < min(depths[3:5])
    assert max(depths[3:5]) < min(depths[6:])
    assert [p.token_ids for p in needle_prompts(tokenizer, 8, 1200)] == [
        p.token_ids for p in prompts
    ]


# ---------------------------------------------------------------- the command


def test_of_an_untrained_model_nothing_is_written(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    code = main(
        ["calibrate", str(demo_model), "--prompts", "16", "--tokens", "510", "--output", str(path)]
    )
    assert code == 1
    said = capsys.readouterr()
    assert "the model finds 0 of 8 needles with the full cache" in said.err
    assert "nothing was written" in said.err
    assert said.out == ""
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tokens", "100"], "--tokens = 100 is not at least"),
        (["--tokens", "20000"], "takes at most 16384"),
    ],
)
def test_a_length_that_does_not_fit_is_refused_before_the_work(
    demo_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert main(["calibrate", str(demo_model), "--output", "/tmp/never.json", *arguments]) == 1
    assert why in capsys.readouterr().err


def test_a_model_that_is_not_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "nobody/nothing"]) == 1
    assert "nobody/nothing is not a folder and cannot be downloaded" in capsys.readouterr().err


@pytest.mark.slow
def test_the_trained_model_finds_needles_at_two_thirds_of_its_depth(
    trained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    arguments = ["--prompts", "16", "--tokens", "600", "--output", str(path), "--json"]
    assert main(["calibrate", str(trained_model), *arguments]) == 0
    profile = store.read(path)
    assert json.loads(capsys.readouterr().out)["fingerprint"] == profile.fingerprint
    assert profile.fingerprint == fingerprint(trained_model)
    found = profile.signals["attention_last"]
    assert all(18 <= layer <= 24 for layer in found.layers)
    (at_quarter,) = [of for of in found.recall if of.keep == 0.25]
    assert at_quarter.recall >= 0.75
    assert at_quarter.samples == 8


# ---------------------------------------------------------------- the engine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


CONFIG = {"policy": {"name": "h2o", "params": {}}}


def started(engine: Any, **settings: Any) -> Status:
    with engine(**engine_args(CONFIG, **settings)) as llm:
        scheduler = scheduler_of(llm)
        runtime = runtime_of(llm)
        assert (runtime.ranking.calibration is not None) == bool(
            scheduler.vtoken_controller.reporter.status().calibration.fingerprint
        )
        status: Status = scheduler.vtoken_controller.reporter.status()
        return status


def write_profile(demo_model: Path, path: Path | None = None, **changes: Any) -> Path:
    weights = fingerprint(demo_model)
    path = path or store.default_path(weights)
    signals = {"attention_sum": SignalProfile([1], [2], RECALL)}
    store.write(made_up(**{"fingerprint": weights, "signals": signals} | changes), path)
    return path


def test_an_engine_finds_the_profile_of_its_model(
    engine: Any, demo_model: Path, cache: Path
) -> None:
    path = write_profile(demo_model)
    found = started(engine).calibration
    assert found is not None
    assert (found.source, found.layers, found.heads) == ("profile", [1], [2])
    assert (found.file, found.fingerprint) == (str(path), fingerprint(demo_model))
    off = started(engine, calibration="off").calibration
    assert off is not None
    assert (off.source, off.fingerprint) == ("default depth", "")
    assert "off" in off.detail


def test_a_profile_in_the_cache_that_cannot_be_read_is_reported_and_not_used(
    engine: Any, demo_model: Path, cache: Path
) -> None:
    path = store.default_path(fingerprint(demo_model))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = started(engine).calibration
    assert found is not None
    assert found.source == "default depth"
    assert str(path) in found.detail


def test_a_named_profile_of_another_model_is_refused(
    engine: Any, demo_model: Path, tmp_path: Path
) -> None:
    path = write_profile(demo_model, tmp_path / "other.json", fingerprint="f" * 32)
    with pytest.raises(UnsupportedError) as refused:
        started(engine, calibration=str(path))
    for part in ("f" * 32, fingerprint(demo_model), str(path), "vtoken calibrate"):
        assert part in str(refused.value)


LAYER_50 = {"num_layers": 51, "signals": {"attention_last": SignalProfile([50], [], RECALL)}}


def test_a_cached_profile_with_a_layer_that_the_model_does_not_have_is_not_used(
    engine: Any, demo_model: Path, cache: Path
) -> None:
    path = write_profile(demo_model, **LAYER_50)
    found = started(engine).calibration
    assert found is not None
    assert (found.source, found.fingerprint) == ("default depth", "")
    assert f"{path} is a profile of 51 layers" in found.detail
