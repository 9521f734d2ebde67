"""Structured output under eviction, while policy, settings and layout change.

The reference masks the logits of the pruned model with a grammar matcher of its own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, scheduler_of
from vtoken.wire.commands import Compact

pytestmark = pytest.mark.vllm

COLOURS = ["red", "green", "blue", "ultramarine"]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "colours": {"type": "array", "items": {"enum": COLOURS}, "minItems": 6, "maxItems": 8},
        "done": {"type": "boolean"},
    },
    "required": ["title", "colours", "done"],
    "additionalProperties": False,
}
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((200, 90, 150))]
NUM_NEW = 240
CHANGES: list[dict[str, Any]] = [
    {"policy": {"name": "h2o"}},
    {"policy": {"name": "streaming_llm"}, "budget_tokens": 48},
    {"policy": {"name": "tova"}, "recycle": False},
    {"policy": {"name": "none"}, "experiment": {"planner": "pack"}},
    {"policy": {"name": "random"}, "budget_tokens": 64, "recycle": True},
]


class Constrained:
    """A model whose next token the grammar restricts; one generation, token by token."""

    def __init__(self, model: Any, grammar: Any) -> None:
        import xgrammar

        self.dtype, self.config = model.dtype, model.config
        self._model = model
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, model.config.vocab_size)
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._began = False

    def __call__(self, *, input_ids: Any, **inputs: Any) -> Any:
        output = self._model(input_ids=input_ids, **inputs)
        if self._began:
            assert self._matcher.accept_token(int(input_ids[0, -1]))
        self._began = True
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._mask)
            self._apply(output.logits[:, -1], self._mask)
        return output


# vLLM passes it, and compiles grammars in a thread of its own
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_output_is_valid_and_equals_the_masked_reference_under_live_changes(
    engine: Any, hf_model: Any, prefix_caching: bool
) -> None:
    import xgrammar
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    config = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": 64,
        "evict_when": "always",
        "interval_tokens": 8,
        "verify_ratio": 1.0,
    }
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    texts: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    with engine(
        enable_prefix_caching=prefix_caching,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **engine_args(config, check_every_step=True),
    ) as llm:
        observer = Observer(llm)
        controller = scheduler_of(llm).vtoken_controller
        for number, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
        num_steps = 0
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                request = output.request_id
                tokens[request] = list(output.outputs[0].token_ids)
                if output.finished:
                    assert output.outputs[0].finish_reason == "stop"
                    texts[request] = output.outputs[0].text
            num_steps += 1
            if num_steps % 9 == 0:
                controller.patch_config(CHANGES[num_steps // 9 % len(CHANGES)])
            if num_steps % 7 == 0:
                controller.compact(Compact(), "ann")
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 200
        assert counters.reclamation.relocations > 0
        logs = observer.logs()
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            llm.get_tokenizer(), vocab_size=hf_model.config.vocab_size
        )
    for text in texts.values():
        found = json.loads(text)
        assert set(found) == set(SCHEMA["required"])
        assert set(found["colours"]) <= set(COLOURS)
    compiler = xgrammar.GrammarCompiler(vocabulary)
    grammar = compiler.compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False, separators=(",", ":")
    )
    for number, prompt in enumerate(PROMPTS):
        seen = tokens[f"{number}"]
        evict = reference.replay(logs[number])
        model = Constrained(hf_model, grammar)
        assert reference.generate(model, prompt, len(seen), evict) == seen
