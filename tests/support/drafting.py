"""Drafts under a test's control, in place of those of vLLM's n-gram drafter.

A step of a request begins when `num_out` tokens are sampled. It computes the newest of them and its
drafts, and samples one token behind those that are right. So how many drafts are right at each
`num_out` decides where steps begin, and with that the moments of eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.support.observe import scheduler_of
from tests.support.reference import Evict, forward, full_layers, new_cache, prune

MOST = 4
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": MOST,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
Script = Callable[[int], tuple[int, int]]  # num_out -> the number of drafts, and of right ones


def wrong(num_out: int) -> tuple[int, int]:
    return MOST, 0


def right(num_out: int) -> tuple[int, int]:
    return MOST, MOST


def mixed(num_out: int) -> tuple[int, int]:
    """Any number of drafts, none included, and of right ones."""
    num = (7 * num_out // 3) % (MOST + 1)
    return num, (5 * num_out // 2) % (num + 1)


def none(num_out: int) -> tuple[int, int]:
    return 0, 0


SCRIPTS: dict[str, Script] = {"wrong": wrong, "right": right, "mixed": mixed, "none": none}


def moments(num_new: int, script: Script) -> set[int]:
    """The decode steps, as `reference.Evict` counts them, at which a step of the engine begins."""
    found, num_out = set(), 1
    while num_out < num_new:
        found.add(num_out - 1)
        num_out += 1 + script(num_out)[1]
    return found


def at(steps: Collection[int], evict: Evict) -> Evict:
    """`evict` at `steps` alone."""

    def evict_there(num_tokens: int, live: list[int], step: int) -> set[int]:
        return evict(num_tokens, live, step) if step in steps else set()

    return evict_there


def speculate(
    model: Any,
    drafter: Any,
    prompt: Sequence[int],
    num_new: int,
    evict: Evict,
    num_drafts: int = MOST,
) -> tuple[list[int], list[int]]:
    """Greedy tokens of `model`, and how many drafts of `drafter` it accepts, by step.

    A drafter has a cache of its own, which loses the same tokens as the model's. Drafts of a step
    are proposed at the end of the step before: the eviction between both is not in them.
    """
    caches = new_cache(model), new_cache(drafter)
    live, tokens, accepted = list[int](), list[int](), list[int]()
    ids, drafts, num_computed = list(prompt), list[int](), 0
    while True:
        before, inputs = list(live), list(ids)
        for draft in [*drafts, None]:
            rows = forward(model, ids, num_computed, caches[0], live, {}, num_rows=1)
            num_computed += len(ids)
            tokens.append(int(rows[-1].argmax()))
            if tokens[-1] != draft:
                break
            ids = [draft]
            inputs.append(draft)
        accepted.append(len(inputs) - 1)
        if len(tokens) >= num_new:
            return tokens[:num_new], accepted[1:]
        forward(drafter, inputs, num_computed - len(inputs), caches[1], before, {}, num_rows=1)
        ids, drafts = [tokens[-1]], []
        for position in range(num_computed, num_computed + num_drafts):
            rows = forward(drafter, ids, position, caches[1], before, {}, num_rows=1)
            drafts.append(int(rows[-1].argmax()))
            ids = [drafts[-1]]
        for layer in caches[1].layers:
            layer.keys = layer.keys[:, :, :-num_drafts]
            layer.values = layer.values[:, :, :-num_drafts]
        ids = [tokens[-1]]
        if victims := evict(num_computed, list(live), len(tokens) - 1):
            prune(caches[1], live, victims, full_layers(drafter))
            live = prune(caches[0], live, victims, full_layers(model))


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The length of the prefix that both have."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def runner_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


Draft = Callable[[list[int]], list[int]]  # a request's tokens -> its next drafts


def scripted(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], script: Script
) -> Draft:
    """Draft the `answers` to `prompts` by `script`.

    Of several answers to one prompt, the one that agrees longest.
    """

    def draft(tokens: list[int]) -> list[int]:
        found = [i for i, p in enumerate(prompts) if tokens[: len(p)] == list(p)]
        number = max(found, key=lambda i: agreed(tokens[len(prompts[i]) :], answers[i]))
        num_out = len(tokens) - len(prompts[number])
        num, num_right = script(num_out)
        known = [*answers[number][num_out : num_out + num]]
        known += [0] * (num - len(known))
        return known[:num_right] + [(token + 1) % 256 for token in known[num_right:]]

    return draft


def use_drafts(
    llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], script: Script
) -> None:
    """Let vLLM's n-gram drafter, in an engine of this process, draft what is `scripted`."""
    draft = scripted(prompts, answers, script)

    def propose(_: int, sampled: list[list[int]], num_tokens: Any, ids: Any, **_rest: Any) -> Any:
        return [
            draft(ids[i, : num_tokens[i]].tolist()) if tokens else []
            for i, tokens in enumerate(sampled)
        ]

    runner_of(llm).drafter.propose = propose


def replace_drafts(
    llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], script: Script
) -> None:
    """The same for any drafter: its passes run, and what it drafts is replaced."""
    draft, scheduler = scripted(prompts, answers, script), scheduler_of(llm)
    update = partial(type(scheduler).update_draft_token_ids, scheduler)

    def update_scripted(found: Any) -> None:
        known = {name: request.all_token_ids for name, request in scheduler.requests.items()}
        drafts = [draft([*known[name]]) if name in known else [] for name in found.req_ids]
        update(replace(found, draft_token_ids=drafts))

    scheduler.update_draft_token_ids = update_scripted
