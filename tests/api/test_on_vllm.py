"""The plugin against vLLM's own code: its plugin contract, its app, its wire to the engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vtoken.wire.commands import Command, Request
from vtoken.wire.routes import ROUTES
from vtoken_api.plugin import MOUNT_PATH, VTokenEndpointPlugin

pytestmark = pytest.mark.vllm


@pytest.mark.filterwarnings("ignore")
def test_plugin_fulfils_the_contract_and_is_described_on_the_real_app(
    monkeypatch: pytest.MonkeyPatch, demo_model: Path
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vtoken")
    from fastapi.routing import APIRoute
    from fastapi.testclient import TestClient
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert isinstance(VTokenEndpointPlugin(), EndpointPlugin)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(demo_model)])
    app = build_app(args, supported_tasks=("generate",))
    document = app.openapi()
    ours = [path for path in document["paths"] if path.startswith(MOUNT_PATH)]
    assert set(ours) == {MOUNT_PATH + route.path for route in ROUTES}
    assert "/v1/chat/completions" in document["paths"]
    client = TestClient(app, base_url="http://127.0.0.1")
    assert client.get("/openapi.json").json()["paths"].keys() == document["paths"].keys()
    assert "swagger" in client.get("/docs").text
    early = client.get(MOUNT_PATH + "/status")
    assert early.status_code == 503
    assert early.headers["Content-Type"] == "application/problem+json"
    (metrics,) = [r for r in app.routes if isinstance(r, APIRoute) and r.path == "/metrics"]
    assert metrics.endpoint.__module__ == "vtoken_api.scrape"
    page = client.get("/metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    assert "python_info" in page.text  # what vLLM shows is still there
    assert client.get("/nowhere").headers["Content-Type"] == "application/json"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("insecure", ["0", "1"])
def test_bytes_survive_the_utility_call_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, insecure: str
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    def vtoken_command(payload: bytes) -> bytes:
        return payload

    sent = msgspec.msgpack.encode(Command(call=Request(request_id="x" * 300_000)))
    request = MsgpackEncoder().encode((0, 1, "vtoken_command", (sent,)))
    *_, args = MsgpackDecoder().decode(request)
    (arrived,) = EngineCoreProc._convert_msgspec_args(vtoken_command, args)
    assert type(arrived) is bytes
    assert arrived == sent
    answer = UtilityOutput(1, result=UtilityResult(arrived))
    reply = MsgpackEncoder().encode(EngineCoreOutputs(utility_output=answer))
    returned = MsgpackDecoder(EngineCoreOutputs).decode(reply).utility_output.result.result
    assert type(returned) is bytes
    assert returned == sent
