"""Random calls drawn from a server's OpenAPI description, reproducible."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.waiting import LIMIT_S
from vtoken_api.plugin import MOUNT_PATH

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
DETERMINISTIC = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def described_operations(url: str) -> dict[str, Any]:
    """The operations of vToken that the server at `url` describes, by operation id."""
    document = httpx.get(url + "/openapi.json").json()
    document["paths"] = {p: o for p, o in document["paths"].items() if p.startswith(MOUNT_PATH)}
    schema = schemathesis.openapi.from_dict(document)
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.definition.raw["operationId"]: operation for operation in found}


def call_at_random(
    operation: Any, url: str, max_examples: int, headers: dict[str, str] | None = None
) -> None:
    """Make valid and invalid calls; raises if a response does not fit the description."""
    modes = schemathesis.GenerationMode
    drawn = st.one_of(*[operation.as_strategy(generation_mode=mode) for mode in modes])

    @settings(DETERMINISTIC, max_examples=max_examples)
    @given(case=drawn)
    def call(case: Any) -> None:
        response = case.call(base_url=url, headers=headers, timeout=LIMIT_S)
        case.validate_response(response, checks=CHECKS)

    call()
