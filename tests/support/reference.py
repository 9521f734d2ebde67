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

`trace_log` takes an engine's log instead, in which tokens may return: its cache keeps the K and V
of every token, and each query sees the tokens that were live in its step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

Evict = Callable[[int, list[int], int], set[int]]


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

    def behind(self) -> list[float]:
        """How far each token's logit lies below the best; 0 where the token is the best."""
        rows = torch.stack(self.logits).float()
        taken = rows.gather(1, torch.tensor(self.tokens)[:, None])[:, 0]
        found: list[float] = (rows.max(dim=1).values - taken).tolist()
        return found

    def smallest_gap(self) -> float:
        return min(self.gaps())

    def shortfalls(self) -> list[float]:
        """How far each token's logit is below the best one."""
        pairs = zip(self.logits, self.tokens, strict=True)
        return [float(row.max() - row[token]) for row, token in pairs]


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
    draft: Sequence[int] = (),
    follow: Sequence[int] = (),
) -> Trace:
    """As `generate`, with the logits and the victims of each step.

    `draft`: tokens that are expected. All are computed in one forward, as a verifier of
    speculative decoding does; victims are masked from their step on. What follows the first token
    that the model would not choose is taken out of the cache again. It changes the time and not the
    result; then `evict` is called more than once for some steps. A model with states takes no
    draft. `follow`: tokens that are taken instead of the best ones.
    """
    cache = new_cache(model)
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
        rows = forward(model, piece, start, cache, live, {}, num_rows=1)
    if has_states(model):
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
            result.tokens.append(follow[len(result.tokens)] if follow else int(row.argmax()))
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
        rows = forward(model, ids, num_tokens, cache, live, masked, num_rows=len(ids))


# ---------------------------------------------------------------- an engine's log


class Change(NamedTuple):
    """From query `num_tokens` on, `evicted` are not seen and `restored` are seen again."""

    num_tokens: int
    evicted: Collection[int] = ()
    restored: Collection[int] = ()


@dataclass(slots=True)
class Stretch:
    """One admission of a request: `known` tokens existed at its start, and all are computed anew.

    `changes`: of the live set, in order. A request that was preempted has one stretch more.
    """

    known: int
    changes: list[Change] = field(default_factory=list)


def visible(num_tokens: int, changes: Iterable[Change]) -> torch.Tensor:
    """bool [num_tokens, num_tokens]: whether query q sees token k."""
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for first, evicted, restored in changes:
        for ids, value in ((evicted, False), (restored, True)):
            seen[first:, [i for i in ids if i < num_tokens]] = value
    return seen


def check_log(changes: Iterable[Change]) -> None:
    """Raise ValueError if a token that is not live is evicted, or one that is live is restored."""
    dead: set[int] = set()
    for first, evicted, restored in changes:
        if wrong := [i for i in evicted if i in dead or not 0 <= i < first]:
            raise ValueError(f"victims {wrong} are not live")
        dead |= {*evicted}
        if wrong := [i for i in restored if i not in dead]:
            raise ValueError(f"restored tokens {wrong} are not dead")
        dead -= {*restored}


def trace_log(
    model: Any,
    prompt_ids: Sequence[int],
    num_new: int,
    stretches: Sequence[Stretch],
    *,
    draft: Sequence[int] = (),
    by_rows: bool = False,
    forced: bool = False,
) -> Trace:
    """Greedy continuation of `prompt_ids` by `num_new` tokens under the live sets of `stretches`.

    `draft`: tokens that are expected, computed in one forward with one mask a query, as in `trace`.
    `by_rows`: compute one token a forward instead, over a cache that is made of the visible rows
    before each. A model with states takes no mask and is always computed so. `forced`: a model with
    states continues by `draft`, whatever it would choose; see `Trace.shortfalls`.
    """
    if not stretches or stretches[0].known != len(prompt_ids):
        raise ValueError(f"the log does not begin with a prompt of {len(prompt_ids)} tokens")
    extend = _extend_by_rows if by_rows or has_states(model) else _extend_by_masks
    tokens, most = list(prompt_ids), len(prompt_ids) + num_new
    expected = [*prompt_ids, *draft]
    if forced:
        extend = partial(_extend_by_rows, forced=True)
    result = Trace()
    for number, stretch in enumerate(stretches):
        last = number + 1 == len(stretches)
        end = most if last else min(most, stretches[number + 1].known)
        check_log(stretch.changes)
        if len(tokens) < end:
            extend(model, tokens, end, visible(end - 1, stretch.changes), expected, result)
    result.tokens = tokens[len(prompt_ids) :]
    return result


def _extend_by_masks(
    model: Any,
    tokens: list[int],
    end: int,
    seen: torch.Tensor,
    expected: list[int],
    result: Trace,
) -> None:
    """Compute `tokens` in a cache of their own, and append greedy ones until there are `end`."""
    cache, num_computed = DynamicCache(), 0
    while len(tokens) < end:
        known = len(tokens)
        ahead = expected[known : end - 1] if tokens == expected[:known] else []
        ids = tokens[num_computed:] + ahead
        total = num_computed + len(ids)
        rows_seen = seen[num_computed:total, :total]
        output = run(model, ids, num_computed, cache, rows_seen, num_rows=1 + len(ahead))
        for row, follower in zip(output.logits[0], [*ahead, None], strict=True):
            result.logits.append(row)
            tokens.append(int(row.argmax()))
            if tokens[-1] != follower:
                break
        num_computed = len(tokens) - 1
        cache.crop(num_computed)


def _extend_by_rows(
    model: Any,
    tokens: list[int],
    end: int,
    seen: torch.Tensor,
    expected: list[int],
    result: Trace,
    *,
    forced: bool = False,
) -> None:
    """As `_extend_by_masks`, one token a forward: the cache has the rows that its query sees.

    `whole` keeps K and V of every token, so that a row can return. A prompt in which nothing
    vanishes is computed at once.
    """
    cache = new_cache(model)
    whole: dict[int, list[torch.Tensor]] = {}
    num_computed = 0
    while len(tokens) < end:
        num_ids = 1
        if num_computed == 0 and bool(seen[len(tokens) - 1, : len(tokens)].all()):
            num_ids = len(tokens)
        live = seen[num_computed, :num_computed].nonzero()[:, 0]
        for i, kept in whole.items():
            cache.layers[i].keys, cache.layers[i].values = (k.index_select(2, live) for k in kept)
        ids = tokens[num_computed : num_computed + num_ids]
        (row,) = forward(model, ids, num_computed, cache, live.tolist(), {}, num_rows=1)
        for i in full_layers(model):
            layer = cache.layers[i]
            new = [part[:, :, -num_ids:] for part in (layer.keys, layer.values)]
            old = whole.get(i, [part[:, :, :0] for part in new])
            whole[i] = [torch.cat(both, dim=2) for both in zip(old, new, strict=True)]
        num_computed += num_ids
        if num_computed == len(tokens):
            result.logits.append(row)
            tokens.append(expected[len(tokens)] if forced else int(row.argmax()))


WINDOWS = {"sliding_attention", "chunked_attention"}


def layer_types(model: Any) -> list[str]:
    config = model.config
    if config.model_type == "falcon_h1":  # attention and a state in every layer
        return ["hybrid"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return kinds or ["full_attention"] * config.num_hidden_layers


def has_states(model: Any) -> bool:
    """Whether some layers have a state instead of K and V."""
    return not set(layer_types(model)) <= {"full_attention"} | WINDOWS


def new_cache(model: Any) -> DynamicCache:
    """An empty cache. Without the model's configuration a layer with a window keeps all rows."""
    return DynamicCache(config=model.config) if has_states(model) else DynamicCache()


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


def masks(model: Any, start: int, seen: torch.Tensor) -> Any:
    """The attention mask of queries at positions start.., by kind of layer.

    `seen`, bool [Q, K]: what they see in layers of full attention, of the rows cached before this
    forward and of those that it appends.
    """
    appended, num_rows = seen.shape
    full_mask = hide(seen, model.dtype)
    kinds = set(layer_types(model))
    if kinds == {"full_attention"}:
        return full_mask
    if has_states(model):  # layers with a state take no mask
        if num_rows > appended > 1:
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
    masked: Mapping[int, set[int]],
    *,
    num_rows: int,
) -> torch.Tensor:
    """Append `ids` at positions start.. to cache and `live`; the logits [num_rows, V] of the last.

    Queries see every cached token, and appended tokens up to themselves; those from the i-th on do
    not see `masked[i]`.
    """
    appended = len(ids)
    seen = torch.ones(appended, len(live) + appended, dtype=torch.bool).tril(len(live))
    column = {position: n for n, position in enumerate([*live, *range(start, start + appended)])}
    for i, victims in masked.items():
        seen[i:, [column[position] for position in victims]] = False
    output = run(model, ids, start, cache, seen, num_rows=num_rows)
    live += range(start, start + appended)
    rows: torch.Tensor = output.logits[0]
    return rows


def run(
    model: Any,
    ids: list[int],
    start: int,
    cache: DynamicCache,
    seen: torch.Tensor,
    *,
    num_rows: int,
    attentions: bool = False,
) -> Any:
    """Append `ids` at positions start.. to the cache; the model's output, `seen` as in `masks`.

    The mask is explicit, because the model would derive it from the cache's length instead of
    positions.
    """
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(start, start + len(ids))[None],
            attention_mask=masks(model, start, seen),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_rows,
            output_attentions=attentions,
        )
