"""A server with `--root-path`: every path with the prefix and without it, as vLLM's own routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.core.live import LiveEngine
from tests.support.routes import CONTROL, READ, bearer, hello_of, token_files
from tests.support.serving import Served, serve
from vtoken import wire
from vtoken.client import AsyncClient, Server
from vtoken_api.limits import RateLimits

PREFIXES = ("/llm", "")
PATCH = {"theta_f": 0.5}


class Spent(RateLimits):
    """Notes what is spent, and limits nothing."""

    def __init__(self) -> None:
        super().__init__({})
        self.spent: list[tuple[str, float]] = []

    def spend(self, _: str, kind: str, cost: float = 1.0) -> None:
        self.spent.append((kind, cost))


@pytest.fixture(params=["/llm", "/llm/"])
async def served(
    request: pytest.FixtureRequest, core: LiveEngine, tmp_path: Path
) -> AsyncIterator[Served]:
    tokens = token_files(tmp_path, read=True, control=True)
    async with serve(core.handle, root_path=request.param, **tokens) as served:
        yield served


@pytest.fixture
async def prefixes(served: Served) -> tuple[str, ...]:
    """The prefixes under which vLLM's own routes answer."""
    async with httpx.AsyncClient(base_url=served.url) as http:
        answers = {prefix: await http.get(f"{prefix}/v1/models") for prefix in PREFIXES}
    return tuple(prefix for prefix, answer in answers.items() if answer.is_success)


async def test_every_route_answers_wherever_those_of_vllm_do(
    served: Served, prefixes: tuple[str, ...]
) -> None:
    assert "" in prefixes
    async with httpx.AsyncClient(base_url=served.url, headers=bearer(CONTROL)) as http:
        for prefix in prefixes:
            base = f"{prefix}/vtoken/v1"
            assert (await http.get(f"{base}/status")).json()["epoch"]
            assert (await http.get(f"{base}/requests/a/tokens")).json()["rows"]
            samples = (await http.get(f"{prefix}/metrics")).text
            assert "vllm:vtoken_up" in [f.name for f in text_string_to_metric_families(samples)]
            unknown = await http.get(f"{base}/nothing")
            assert unknown.status_code == 404
            assert "/llm/vtoken/v1/nothing does not exist" in unknown.json()["detail"]


async def test_location_is_an_address_from_outside(
    served: Served, prefixes: tuple[str, ...]
) -> None:
    async with httpx.AsyncClient(base_url=served.url, headers=bearer(CONTROL)) as http:
        for prefix in prefixes:
            made = await http.post(f"{prefix}/vtoken/v1/compactions", json={"dry_run": True})
            location = made.headers["Location"]
            assert location == f"/llm/vtoken/v1/operations/{made.json()['id']}"
            address = urljoin("http://outside/llm/vtoken/v1/compactions", location)
            assert address.startswith("http://outside/llm/vtoken/v1/operations/")


async def test_rights_and_rates_do_not_depend_on_the_prefix(
    served: Served, prefixes: tuple[str, ...], core: LiveEngine
) -> None:
    limits = served.service.auth.limits = Spent()
    for prefix in prefixes:
        limits.spent.clear()
        base = f"{served.url}{prefix}/vtoken/v1"
        async with httpx.AsyncClient(base_url=base) as http:
            assert (await http.get("/status")).status_code == 401
            assert (await http.patch("/config", json=PATCH)).status_code == 401
            http.headers.update(bearer(READ))
            assert (await http.patch("/config", json=PATCH)).status_code == 403
            tried = await http.patch("/config?validate_only=true", json=PATCH)
            assert tried.status_code == 200
            assert (await http.post("/requests/a/forget", json={"spans": []})).status_code == 403
            assert (await http.get("/blocks")).status_code == 200
            assert (await http.get("/status?token=x")).status_code == 401
        assert ("change", 1.0) in limits.spent  # the call to forget
        assert ("read", 5.0) in limits.spent  # the blocks
    assert core.runtime.config.theta_f != PATCH["theta_f"]


async def test_stream_opens_with_and_without_the_prefix(
    served: Served, prefixes: tuple[str, ...]
) -> None:
    address = served.stream_url
    for prefix in prefixes:
        url = address.replace("/vtoken", f"{prefix}/vtoken")
        hello = await hello_of(url, CONTROL)
        assert hello["can_control"]
        hello = await hello_of(url, READ, first_message=True)
        assert not hello["can_control"]


async def test_descriptions_name_addresses_from_outside(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, headers=bearer(READ)) as http:
        described = (await http.get("/vtoken/v1/asyncapi.json")).json()
        assert described["channels"]["stream"]["address"] == "/llm/vtoken/v1/stream"
        openapi = (await http.get("/openapi.json")).json()
        assert openapi["servers"] == [{"url": "/llm"}]
        assert "/vtoken/v1/status" in openapi["paths"]


async def test_client_takes_an_address_with_a_path(
    served: Served, prefixes: tuple[str, ...]
) -> None:
    for prefix in prefixes:
        async with AsyncClient(Server(f"{served.url}{prefix}/", CONTROL)) as client:
            assert (await client.compact(dry_run=True)).dry_run
            async with client.stream() as stream:
                assert isinstance(await anext(stream), wire.Hello)
