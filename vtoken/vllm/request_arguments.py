"""A request's own policy and budget (`vllm_xargs`), checked before the request is admitted.

vLLM validates a request's parameters through its logits processors, in the process that answers the
client; this one does that and nothing else: it changes no logits.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor

from vtoken.errors import RefusedError
from vtoken.rules import request_rules


class RequestArguments(LogitsProcessor):
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

    def apply(self, logits: Any) -> Any:
        return logits
