"""A request's own policy and budget (`vllm_xargs`), checked before the request is admitted.

vLLM validates a request's parameters through its logits processors, in the process that answers the
client; this one does that and nothing else: it changes no logits. It is a processor of both of
vLLM's model runners, since either may be chosen after it is named.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as LogitsProcessorV2,
)

from vtoken.config.request_rules import request_rules
from vtoken.errors import RefusedError


class RequestArguments(LogitsProcessor, LogitsProcessorV2):
    """Fails a request with 400 when one of its `vtoken_…` arguments is bad; it alone."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        try:
            request_rules(sampling_params.extra_args)
        except RefusedError as error:
            raise VLLMValidationError(
                f"{error.detail} (allowed: {error.bound})",
                parameter=error.field,
                value=error.value,
            ) from None

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
