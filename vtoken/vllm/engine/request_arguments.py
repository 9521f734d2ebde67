"""Checks a request's own rules (`vllm_xargs`) before the request is admitted.

vLLM validates a request's parameters through logits processors, in the API server's process.
`RequestArguments` only validates and changes no logits. It is a processor of both of vLLM's model
runners, because vLLM may choose either afterwards. A processor does not see the prompt, so rules
that depend on the prompt are checked when vLLM has made the request, in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as LogitsProcessorV2,
)

from vtoken.base.errors import RefusedError
from vtoken.core.config.request_rules import Prompt, request_rules


def check_prompts() -> None:
    """Make vLLM's input processor check a request's arguments against its prompt. Idempotent."""
    process = InputProcessor.process_inputs
    if not hasattr(process, "checks_prompts"):
        InputProcessor.process_inputs = _checking(process)


def _checking(process: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(process)
    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        request = process(*args, **kwargs)
        try:
            rules = request_rules(getattr(request.sampling_params, "extra_args", None))
            if rules is not None:
                ids, embeds = request.prompt_token_ids, request.prompt_embeds
                rules.prompt = Prompt(
                    len(embeds if ids is None else ids), is_embedded=embeds is not None
                )
                rules.check_prompt()
        except RefusedError as error:
            raise _invalid(error) from None
        return request

    process_inputs.checks_prompts = True  # type: ignore[attr-defined]
    return process_inputs


def _invalid(error: RefusedError) -> VLLMValidationError:
    return VLLMValidationError(
        f"{error.detail} (allowed: {error.bound})", parameter=error.field, value=error.value
    )


class RequestArguments(LogitsProcessor, LogitsProcessorV2):
    """Rejects a request with 400 when one of its `vtoken_…` arguments is invalid."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        try:
            request_rules(sampling_params.extra_args)
        except RefusedError as error:
            raise _invalid(error) from None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore vLLM's arguments: there is no state."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: there is no state."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:  # noqa: ARG002
        return False

    def apply(self, logits: Any, ctx: Any = None) -> Any:  # noqa: ARG002
        return logits
