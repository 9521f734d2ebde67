"""The reference is right: against plain `generate`, and against masking instead of pruning."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support import reference
from tests.support.reference import random_prompt
from vtoken.demo.model import BOS, EOS, Recipe, build

SINKS, BUDGET, INTERVAL = 4, 48, 16
POLICIES = {
    "full": reference.full,
    "streaming_llm": reference.streaming_llm(SINKS, BUDGET, INTERVAL),
    "sliding_window": reference.sliding_window(BUDGET, INTERVAL),
    "holes": reference.replay({0: set(range(3, 60, 2)), 5: {70, 101}, 40: {130, 139, 6}}),
}


@pytest.fixture(scope="module")
def double_model(hf_model: Any) -> Any:
    """The same weights in float64 (norms and softmax stay float32): far less rounding."""
    return deepcopy(hf_model).double()


def masked_logits(
    model: Any, ids: list[int], num_prompt: int, victims: dict[int, set[int]]
) -> torch.Tensor:
    """Logits [num_new, V] of one forward over `ids`, victims hidden by the mask alone.

    The query at position num_prompt + step is the forward that follows eviction `step`, so it and
    all later ones do not see victims[step].
    """
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for step, positions in victims.items():
        visible[num_prompt + step :, list(positions)] = False
    mask = reference.hide(visible, model.dtype)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=mask).logits[0]
    return logits[num_prompt - 1 : -1]


def test_full_cache_equals_plain_generate(hf_model: Any) -> None:
    prompt = random_prompt(90, seed=1)
    plain = hf_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=120,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    assert reference.generate(hf_model, prompt, 120, reference.full) == plain[len(prompt) :]


@pytest.mark.parametrize("name", POLICIES)
def test_pruning_equals_masking(hf_model: Any, double_model: Any, name: str) -> None:
    prompt = random_prompt(140, seed=2)
    trace = reference.trace(double_model, prompt, 100, POLICIES[name])
    assert bool(trace.victims) == (name != "full")
    expected = masked_logits(double_model, prompt + trace.tokens, len(prompt), trace.victims)
    torch.testing.assert_close(torch.stack(trace.logits), expected, rtol=0, atol=1e-5)
    assert reference.generate(hf_model, prompt, 100, POLICIES[name]) == trace.tokens


def test_one_victim_spared_is_seen(double_model: Any) -> None:
    prompt = random_prompt(140, seed=2)
    trace = reference.trace(double_model, prompt, 100, POLICIES["holes"])
    spared = {step: set(sorted(gone)[1:]) for step, gone in trace.victims.items()}
    other = masked_logits(double_model, prompt + trace.tokens, len(prompt), spared)
    assert float((torch.stack(trace.logits) - other).abs().max()) > 0.1


def test_chunked_prompt_gives_the_same_tokens(hf_model: Any) -> None:
    prompt = random_prompt(150, seed=3)
    evict = POLICIES["streaming_llm"]
    whole = reference.generate(hf_model, prompt, 60, evict)
    assert reference.generate(hf_model, prompt, 60, evict, chunk=32) == whole


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("wrong", [(), (0,), (1,), (40, 41, 70)], ids=str)
def test_a_draft_saves_forwards_and_changes_nothing(
    hf_model: Any, name: str, wrong: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(140, seed=2)
    plain = reference.trace(hf_model, prompt, 100, POLICIES[name])
    assert bool(plain.victims) == (name != "full")
    draft = [(t + 1) % 256 if n in wrong else t for n, t in enumerate(plain.tokens)]
    forward, widths = reference.forward, []

    def count(model: Any, ids: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        widths.append(len(ids))
        return forward(model, ids, *args, **kwargs)

    monkeypatch.setattr(reference, "forward", count)
    drafted = reference.trace(hf_model, prompt, 100, POLICIES[name], draft=draft)
    assert drafted.tokens == plain.tokens
    assert drafted.victims == plain.victims
    torch.testing.assert_close(
        torch.stack(drafted.logits), torch.stack(plain.logits), rtol=0, atol=1e-4
    )
    first_wrong = min(wrong, default=100)
    rows = [width for width in widths[1:] if width > 1]
    assert bool(rows) == (first_wrong > 0)
    if not wrong:
        assert widths == [140, 99]


def test_streaming_llm_keeps_sinks_and_the_recent_rest() -> None:
    evict = POLICIES["streaming_llm"]
    assert evict(64, list(range(64)), 0) == set()
    assert evict(65, list(range(65)), 1) == set(range(SINKS, 65 - (BUDGET - SINKS)))
    live = [0, 1, 2, 3, *range(1000, 1061)]
    assert len(set(live) - evict(1061, live, 2)) == BUDGET


def test_first_eviction_follows_the_prompt_and_later_ones_the_interval(hf_model: Any) -> None:
    trace = reference.trace(hf_model, random_prompt(100, seed=4), 60, POLICIES["streaming_llm"])
    assert len(trace.victims[0]) == 100 - BUDGET
    assert sorted(trace.victims) == [0, INTERVAL + 1, 2 * (INTERVAL + 1), 3 * (INTERVAL + 1)]


def test_eviction_changes_the_output_soon_and_for_good(hf_model: Any) -> None:
    for seed in range(3):
        prompt = random_prompt(140, seed=seed)
        kept = reference.generate(hf_model, prompt, 64, reference.full)
        cut = reference.generate(hf_model, prompt, 64, POLICIES["streaming_llm"])
        assert kept[0] == cut[0]  # sampled before the first eviction
        assert kept[:24] != cut[:24]


@pytest.mark.parametrize("name", ["full", "streaming_llm"])
def test_greedy_output_does_not_fall_into_a_cycle(hf_model: Any, name: str) -> None:
    tail = reference.generate(hf_model, random_prompt(140, seed=5), 300, POLICIES[name])[-150:]
    assert all(tail[period:] != tail[:-period] for period in range(1, 60))
    assert len(set(tail)) > 16


def test_a_victim_that_is_not_live_is_refused(hf_model: Any) -> None:
    with pytest.raises(ValueError, match=r"victims \[7\] are not live"):
        reference.generate(hf_model, random_prompt(20, 6), 4, reference.replay({0: {7}, 1: {7}}))


# ---------------------------------------------------------------- the model itself


def test_build_reuses_a_complete_folder_and_replaces_another_recipe(tmp_path: Path) -> None:
    small = Recipe(num_layers=1, hidden_size=32, intermediate_size=32, head_size=8)
    weights = build(tmp_path / "model", recipe=small) / "model.safetensors"
    first = (weights.stat().st_ino, weights.read_bytes())
    build(tmp_path / "model", recipe=small)
    assert weights.stat().st_ino == first[0]
    build(tmp_path / "again", recipe=small)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first[1]
    build(tmp_path / "model", recipe=replace(small, seed=1))
    assert weights.read_bytes() != first[1]
    assert {entry.name for entry in tmp_path.iterdir() if entry.is_dir()} == {"model", "again"}


def test_build_leaves_a_foreign_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(FileExistsError, match="choose another folder"):
        build(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_tokenizer_maps_one_byte_to_one_token(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = "naïve — 水 \n\t\x00~"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(BOS + EOS, add_special_tokens=False) == [256, 257]


def test_chat_template_opens_the_answer(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}user: hello\nassistant: "
