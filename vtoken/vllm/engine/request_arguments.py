"""Checks a request's own rules (`vllm_xargs`) before the request is admitted.

vLLM makes a request of its inputs in the API server's process, with a check of its parameters. The
rules are checked right after that, because some depend on the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vtoken.base.errors import RefusedError
from vtoken.core.config.request_rules import Prompt, request_rules


def check_arguments() -> None:
    """Make vLLM's input processor reject a request, with 400, when one of its `vtoken_…` arguments
    is invalid or does not fit its prompt. Idempotent.
    """
    process = InputProcessor.process_inputs
    if not hasattr(process, "checks_arguments"):
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

    process_inputs.checks_arguments = True  # type: ignore[attr-defined]
    return process_inputs


def _invalid(error: RefusedError) -> VLLMValidationError:
    """vLLM appends the parameter to the message; the value is in it."""
    told = error.bound is None or error.bound in error.detail
    message = error.detail if told else f"{error.detail} (allowed: {error.bound})"
    return VLLMValidationError(message, parameter=error.field)
