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
from tests.support.reference import Change, Stretch, random_prompt
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


# ---------------------------------------------------------------- an engine's log

# Tokens vanish and return; some of them, and some others, vanish again.
RETURNS = [
    Change(140, range(3, 60, 2)),
    Change(145, [70, 101]),
    Change(150, restored=[*range(9, 40, 2), 101]),
    Change(163, [9, 11, 80]),
    Change(170, [150], [3, 70, 9]),
    Change(190, restored=[11, 80, 150]),
]


def log_of(trace: reference.Trace, num_prompt: int) -> list[Change]:
    return [Change(num_prompt + step, ids) for step, ids in sorted(trace.victims.items())]


@pytest.mark.parametrize("by_rows", [False, True], ids=["masks", "rows"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_log_without_returns_gives_what_pruning_gives(
    hf_model: Any, name: str, by_rows: bool
) -> None:
    prompt = random_prompt(140, seed=2)
    pruned = reference.trace(hf_model, prompt, 100, POLICIES[name])
    log = [Stretch(140, log_of(pruned, 140))]
    for draft in (pruned.tokens, pruned.tokens[:30], [5, 6]):
        found = reference.trace_log(hf_model, prompt, 100, log, draft=draft, by_rows=by_rows)
        assert found.tokens == pruned.tokens
        torch.testing.assert_close(
            torch.stack(found.logits), torch.stack(pruned.logits), rtol=0, atol=1e-4
        )
        if by_rows:
            break  # it takes no draft


def test_victims_between_chunks_are_hidden_from_later_chunks(hf_model: Any) -> None:
    prompt = random_prompt(150, seed=3)
    evict = POLICIES["streaming_llm"]
    pruned = reference.trace(hf_model, prompt, 40, evict, chunk=40, evict_prompt=evict)
    assert min(pruned.victims) < -60
    log = [Stretch(150, log_of(pruned, 150))]
    for by_rows in (False, True):
        found = reference.trace_log(hf_model, prompt, 40, log, by_rows=by_rows)
        assert found.tokens == pruned.tokens


def test_tokens_that_return_are_seen_with_the_keys_that_they_had(double_model: Any) -> None:
    prompt = random_prompt(140, seed=2)

    def run(changes: list[Change], **how: Any) -> reference.Trace:
        return reference.trace_log(double_model, prompt, 100, [Stretch(140, changes)], **how)

    masked, rows = run(RETURNS), run(RETURNS, by_rows=True)
    assert masked.tokens == rows.tokens
    torch.testing.assert_close(
        torch.stack(masked.logits), torch.stack(rows.logits), rtol=0, atol=1e-5
    )
    assert run(RETURNS, draft=masked.tokens[:60]).tokens == masked.tokens
    # Controls: what follows a change depends on it.
    for number, change in enumerate(RETURNS):
        other = torch.stack(run(RETURNS[:number], draft=masked.tokens).logits)
        difference = (other - torch.stack(masked.logits)).abs()
        assert difference[: change.num_tokens - 139].max() < 1e-5
        assert difference[change.num_tokens - 139 :].max() > 1e-2


def test_a_request_that_was_preempted_is_computed_anew_from_its_second_stretch(
    hf_model: Any,
) -> None:
    prompt = random_prompt(90, seed=4)
    evict = POLICIES["streaming_llm"]
    first = reference.trace(hf_model, prompt, 25, evict)
    second = reference.trace(hf_model, prompt + first.tokens, 30, evict)
    log = [Stretch(90, log_of(first, 90)), Stretch(115, log_of(second, 115))]
    expected = first.tokens + second.tokens
    for draft in ((), expected):
        assert reference.trace_log(hf_model, prompt, 55, log, draft=draft).tokens == expected
    as_one = [Stretch(90, log[0].changes)]
    assert reference.trace_log(hf_model, prompt, 55, as_one).tokens != expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([Change(20, [7]), Change(21, [7])], r"victims \[7\] are not live"),
        ([Change(20, [20])], r"victims \[20\] are not live"),
        ([Change(20, restored=[7])], r"restored tokens \[7\] are not dead"),
        ([Change(20, [7]), Change(21, restored=[7, 8])], r"restored tokens \[8\] are not dead"),
    ],
)
def test_a_log_that_cannot_be_is_refused(
    hf_model: Any, changes: list[Change], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reference.trace_log(hf_model, random_prompt(20, 6), 4, [Stretch(20, changes)])


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
