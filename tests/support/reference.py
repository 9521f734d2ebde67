"""The oracle for exactness: a Hugging Face model whose cache is pruned by hand, float32, greedy.

Does not import vtoken or vLLM. The policies are implemented again from their papers, in the
simplest way; they are slow and allocate freely.

The moment of eviction: `evict(num_tokens, live, step)` is called between two forwards, for the
first time after the entire prompt is computed and its first token sampled. The cache then holds K
and V of the positions `live`, a sorted subset of range(num_tokens), the newest included. The
returned positions are invisible from the next forward on. `step` counts these calls from 0, so
`step + 1` tokens are sampled so far. `evict_prompt` is called in the same way between two chunks of
the prompt, with a negative `step`: the tokens computed so far less the entire prompt.

1. Row i of the cache is position live[i]; RoPE positions are logical and never renumbered. Layers
   with a window or chunks keep all positions, and see those of their window or chunk.
2. len(live) + evicted == num_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

Evict = Callable[[int, list[int], int], set[int]]
Watch = Callable[[list[int], int, Any], None]


# ---------------------------------------------------------------- policies


def full(num_tokens: int, live: list[int], step: int) -> set[int]:
    """Evicts nothing."""
    return set()


def streaming_llm(sinks: int, budget: int, interval: int) -> Evict:
    """arXiv 2309.17453: keep the first `sinks` positions and the most recent `budget - sinks`.

    Evicts when live > budget + interval, down to exactly `budget` live tokens.
    """
    if not 0 <= sinks < budget:
        raise ValueError(f"sinks {sinks} must lie in 0..{budget - 1}")

    def evict(num_tokens: int, live: list[int], step: int) -> set[int]:
        if len(live) <= budget + interval:
            return set()
        first = [position for position in live if position < sinks]
        rest = [position for position in live if position >= sinks]
        recent = rest[len(rest) - (budget - len(first)) :]
        return set(live) - set(first) - set(recent)

    return evict


def sliding_window(budget: int, interval: int) -> Evict:
    """Keep the most recent `budget` positions."""
    return streaming_llm(0, budget, interval)


def protecting(tokens: Set[int], evict: Evict) -> Evict:
    """Apply `evict` to all positions but `tokens`; its budget excludes them too."""

    def evict_others(num_tokens: int, live: list[int], step: int) -> set[int]:
        return evict(num_tokens, [position for position in live if position not in tokens], step)

    return evict_others


def replay(log: Mapping[int, set[int]]) -> Evict:
    """Evict an engine's logged victims: `log[step]` are those before decode forward `step`."""

    def evict(num_tokens: int, live: list[int], step: int) -> set[int]:
        return set(log.get(step, ()))

    return evict


# ---------------------------------------------------------------- generation


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` token ids: the demo model's bos, then random printable bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [256, *torch.randint(0x20, 0x7F, (length - 1,), generator=generator).tolist()]


@dataclass
class Trace:
    """One generation; `tokens[i]` was chosen from the row `logits[i]` [V]."""

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    victims: dict[int, set[int]] = field(default_factory=dict)

    def gaps(self) -> list[float]:
        """The distance between the best and the second best logit, a token."""
        top = torch.stack(self.logits).float().topk(2, dim=-1).values
        found: list[float] = (top[:, 0] - top[:, 1]).tolist()
        return found

    def smallest_gap(self) -> float:
        return min(self.gaps())


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    num_new: int,
    evict: Evict,
    *,
    chunk: int | None = None,
    evict_prompt: Evict = full,
    draft: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation of `prompt_ids` by `num_new` tokens under `evict`.

    `chunk`: compute the prompt in pieces of that many tokens (None: at once), with `evict_prompt`
    between them. `draft`: the tokens that are expected, as in `trace`.
    """
    return trace(
        model, prompt_ids, num_new, evict, chunk=chunk, evict_prompt=evict_prompt, draft=draft
    ).tokens


def trace(
    model: Any,
    prompt_ids: Sequence[int],
    num_new: int,
    evict: Evict,
    *,
    chunk: int | None = None,
    evict_prompt: Evict = full,
    watch: Watch | None = None,
    draft: Sequence[int] = (),
) -> Trace:
    """As `generate`, with the logits and the victims of each step.

    `watch(live, appended, output)` is called after every forward with the positions in the cache,
    how many of them it appended, and the model's output with its attentions and cache.

    `draft`: tokens that are expected. All are computed in one forward, as a verifier of
    speculative decoding does; victims are masked from their step on. What follows the first token
    that the model would not choose is taken out of the cache again. It changes the time and not the
    result; then `evict` is called more than once for some steps. A model with states and a run with
    `watch` take no draft.
    """
    has_states = not set(layer_types(model)) <= {"full_attention"} | WINDOWS
    cache = DynamicCache(config=model.config) if has_states else DynamicCache()
    prompt = list(prompt_ids)
    size = chunk or len(prompt)
    result = Trace()
    live: list[int] = []
    for start in range(0, len(prompt), size):
        step = start - len(prompt)
        if start and (victims := evict_prompt(start, list(live), step)):
            live = prune(cache, live, victims, full_layers(model))
            result.victims[step] = victims
        piece = prompt[start : start + size]
        rows = forward(model, piece, start, cache, live, watch, {}, num_rows=1)
    if has_states or watch is not None:
        draft = ()
    ids, step = prompt[-1:], -1
    masked: dict[int, set[int]] = {}
    while True:
        # rows[i] follows ids[i], the input of `step + i`, and ids[1:] are drafts.
        hidden: set[int] = set()
        for i, (row, follower) in enumerate(zip(rows, [*ids[1:], None], strict=True)):
            if victims := masked.get(i):
                result.victims[step + i] = victims
                hidden |= victims
            result.logits.append(row)
            result.tokens.append(int(row.argmax()))
            if len(result.tokens) == num_new:
                return result
            if result.tokens[-1] != follower:
                break
        step = len(result.tokens) - 1
        num_tokens = len(prompt) + step
        if num_rejected := live[-1] + 1 - num_tokens:
            for layer in cache.layers:
                layer.keys = layer.keys[:, :, :-num_rejected]
                layer.values = layer.values[:, :, :-num_rejected]
            live = live[:-num_rejected]
        if hidden:
            live = prune(cache, live, hidden, full_layers(model))
        if victims := evict(num_tokens, list(live), step):
            live = prune(cache, live, victims, full_layers(model))
            result.victims[step] = victims
        ids, masked, visible = [result.tokens[-1]], {}, list(live)
        if result.tokens == [*draft[: step + 1]]:
            for ahead, token in enumerate(draft[step + 1 : num_new - 1], 1):
                visible.append(num_tokens + ahead - 1)
                if victims := evict(num_tokens + ahead, list(visible), step + ahead):
                    visible = left(visible, victims)
                    masked[ahead] = victims
                ids.append(token)
        rows = forward(model, ids, num_tokens, cache, live, watch, masked, num_rows=len(ids))


FULL = {"full_attention", "attention", "hybrid"}
WINDOWS = {"sliding_attention", "chunked_attention"}


def layer_types(model: Any) -> list[str]:
    config = model.config
    if config.model_type == "falcon_h1":  # attention and a state in every layer
        return ["hybrid"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return kinds or ["full_attention"] * config.num_hidden_layers


def full_layers(model: Any) -> list[int]:
    """The layers whose tokens a policy evicts."""
    return [
        i
        for i, kind in enumerate(layer_types(model))
        if kind in ("full_attention", "attention", "hybrid")
    ]


def left(live: list[int], victims: set[int]) -> list[int]:
    """`live` without `victims`."""
    if unknown_ids := victims - set(live):
        raise ValueError(f"victims {sorted(unknown_ids)} are not live")
    return [position for position in live if position not in victims]


def prune(
    cache: DynamicCache, live: list[int], victims: set[int], layers: Sequence[int]
) -> list[int]:
    """Drop the rows of `victims` from `layers` of `cache`; the positions left."""
    kept = left(live, victims)
    rows = torch.tensor([row for row, position in enumerate(live) if position not in victims])
    for layer in [cache.layers[i] for i in layers]:
        # keys, values: [1, H, tokens, D]
        layer.keys = layer.keys.index_select(2, rows)
        layer.values = layer.values.index_select(2, rows)
    return kept


def hide(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive attention mask [1, 1, Q, K] of `visible` (bool [Q, K])."""
    mask = torch.zeros(visible.shape, dtype=dtype)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def masks(
    model: Any, start: int, appended: int, live: list[int], masked: Mapping[int, set[int]]
) -> Any:
    """The attention mask of `appended` queries at positions start.., by kind of layer.

    `live`: the positions in the caches of layers of full attention, before this forward;
    `masked[i]`: those that queries from the i-th on do not see there.
    """
    visible = torch.ones(appended, len(live) + appended, dtype=torch.bool).tril(len(live))
    column = {position: n for n, position in enumerate([*live, *range(start, start + appended)])}
    for i, victims in masked.items():
        visible[i:, [column[position] for position in victims]] = False
    full_mask = hide(visible, model.dtype)
    kinds = set(layer_types(model))
    if kinds == {"full_attention"}:
        return full_mask
    if not kinds <= {"full_attention"} | WINDOWS:  # layers with a state take no mask
        if live and appended > 1:
            raise ValueError("a model with states computes its prompt at once")
        return None
    query = torch.arange(start, start + appended)[:, None]
    key = torch.arange(start + appended)[None]
    found = {"full_attention": full_mask}
    if "sliding_attention" in kinds:
        # vLLM reads a token more in Cohere 2 than transformers: "swa layer sees
        # [pos - sliding_window, pos]" (vllm/model_executor/models/commandr.py).
        window = model.config.sliding_window + (model.config.model_type == "cohere2")
        near = (key <= query) & (key > query - window)
        found["sliding_attention"] = hide(near, model.dtype)
    if "chunked_attention" in kinds:
        size = model.config.attention_chunk_size
        same = (key <= query) & (key // size == query // size)
        found["chunked_attention"] = hide(same, model.dtype)
    return found


def forward(
    model: Any,
    ids: list[int],
    start: int,
    cache: DynamicCache,
    live: list[int],
    watch: Watch | None,
    masked: Mapping[int, set[int]],
    *,
    num_rows: int,
) -> torch.Tensor:
    """Append `ids` at positions start.. to cache and `live`; the logits [num_rows, V] of the last.

    Queries see every cached token, and appended tokens up to themselves; those from the i-th on do
    not see `masked[i]`. The mask is explicit, because the model would derive it from the cache's
    length instead of positions.
    """
    appended = len(ids)
    mask = masks(model, start, appended, live, masked)
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(start, start + appended)[None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_rows,
            output_attentions=watch is not None,
        )
    live += range(start, start + appended)
    if watch is not None:
        watch(live, appended, output)
    rows: torch.Tensor = output.logits[0]
    return rows
