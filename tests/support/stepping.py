"""Drives an engine in this process step by step."""

from __future__ import annotations

from typing import Any

Outputs = dict[str, list[int]]  # request -> its tokens so far


def add(
    llm: Any,
    request_id: str,
    prompt: list[int],
    num_new: int,
    *,
    priority: int = 0,
    **sampling: Any,
) -> None:
    """A request for `num_new` greedy tokens, eos ignored; `sampling` over that."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "ignore_eos": True} | sampling, max_tokens=num_new)
    inputs = {"prompt_token_ids": prompt}
    llm.llm_engine.add_request(request_id, inputs, params, priority=priority)


def step(llm: Any, tokens: Outputs | None = None, times: int | None = None) -> Any:
    """Step the engine `times` times, or until nothing is left. Fills `tokens`; returns the last
    output of a request, if there was any.
    """
    last = None
    while llm.llm_engine.has_unfinished_requests() and (times is None or times > 0):
        for last in llm.llm_engine.step():
            if tokens is not None:
                tokens[last.request_id] = list(last.outputs[0].token_ids)
        times = None if times is None else times - 1
    return last
