"""A request's own rules (`vllm_xargs`), checked before the request is admitted.

vLLM validates a request's parameters through its logits processors, in the process that answers the
client; `RequestArguments` does that and nothing else: it changes no logits. It is a processor of
both of vLLM's model runners, since either may be chosen after it is named. A processor does not see
the prompt: what has to fit it is checked when vLLM has made the request, in the same process.
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

from vtoken.config.request_rules import Prompt, request_rules
from vtoken.errors import RefusedError


def check_prompts() -> None:
    """From now on vLLM's input processor also checks a request's arguments against its prompt.

    A second call changes nothing.
    """
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
    """Fails a request with 400 when one of its `vtoken_…` arguments is bad; it alone."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        try:
            request_rules(sampling_params.extra_args)
        except RefusedError as error:
            raise _invalid(error) from None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing to follow."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:  # noqa: ARG002
        return False

    def apply(self, logits: Any, ctx: Any = None) -> Any:  # noqa: ARG002
        return logits
