"""Makes `vtoken_api/rest/examples.json`: answers of a real server, for the API descriptions.

Run from the repository: `python -m tests.examples.make`. The engine is the real core over a small
pool (`make_quiet`), the server is the real plugin; the problems 429, 408 and 503 are provoked.
`tests/api/test_examples.py` checks the file against the schemas and the wire's structs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import websockets

from tests.support.core.live import LiveEngine, make_quiet
from tests.support.serving import Served, serve
from vtoken.config.request_rules import RequestRules
from vtoken_api.limits import Rate, RateLimits
from vtoken_api.rest import inputs

TARGET = Path(__file__).parents[2] / "api/vtoken_api/rest/examples.json"
BODIES: dict[str, Any] = {
    "vtoken_patch_config": {"theta_f": 0.25, "policy": {"name": "streaming_llm"}},
    "vtoken_compact": {"request_id": "cmpl-1", "batch_size": 8, "dry_run": True},
    "vtoken_forget": {"spans": [[12, 60]]},
}
JSON = {"Content-Type": "application/json"}


def make_engine() -> LiveEngine:
    core = make_quiet(num_blocks=24)
    core.configure(
        policy={"name": "random"},
        budget_tokens=64,
        interval_tokens=16,
        recycle=False,
        reclamation="paused",
        shadow={"name": "streaming_llm"},
    )
    core.admit("cmpl-1", 100)
    core.admit("cmpl-2", 80, rules=RequestRules(evict_when="pressure"))
    core.steps(3)
    return core


async def answers(http: httpx.AsyncClient) -> dict[str, Any]:
    """One good answer an operation."""
    root, found = "/vtoken/v1", {}

    async def call(name: str, method: str, path: str, **more: Any) -> httpx.Response:
        answer = await http.request(method, root + path, **more)
        assert answer.is_success, answer.text
        found[name] = answer.json()
        return answer

    patch = BODIES["vtoken_patch_config"]
    named = {"X-VToken-Change": "nightly-0001"}
    path = "/config?confirm_within_s=300"
    await call("vtoken_patch_config", "PATCH", path, json=patch, headers=named)
    await call("vtoken_change", "GET", "/changes/nightly-0001")
    await call("vtoken_config", "GET", "/config")
    await call("vtoken_confirm", "POST", "/confirm")
    started = await call("vtoken_compact", "POST", "/compactions", json=BODIES["vtoken_compact"])
    await call("vtoken_operation", "GET", f"/operations/{started.json()['id']}")
    path = "/requests/cmpl-1/forget"
    await call("vtoken_forget", "POST", path, json=BODIES["vtoken_forget"])
    await call("vtoken_undo", "POST", "/undo")
    for name, path in {
        "vtoken_status": "/status",
        "vtoken_policies": "/policies",
        "vtoken_blocks": "/blocks",
        "vtoken_block": "/blocks/3",
        "vtoken_requests": "/requests",
        "vtoken_request": "/requests/cmpl-1",
        "vtoken_tokens": "/requests/cmpl-1/tokens?start=96&limit=4",
        "vtoken_text": "/requests/cmpl-1/text?start=39&limit=5",
        "vtoken_events": "/events?limit=4",
        "vtoken_audit": "/audit",
    }.items():
        await call(name, "GET", path)
    found["vtoken_policies"] = found["vtoken_policies"][:2]
    return found


async def problems(served: Served, http: httpx.AsyncClient) -> dict[str, Any]:
    """One problem document a status."""
    root = "/vtoken/v1"
    inputs.BODY_TIMEOUT_S = 0.2

    async def slow() -> Any:
        yield b'{"theta_f"'
        await asyncio.sleep(1)

    calls: list[dict[str, Any]] = [
        {"method": "PATCH", "url": "/config", "content": b'{"theta_f": 0.', "headers": JSON},
        {"method": "GET", "url": "/status", "headers": {"Host": "gpu7.example"}},
        {"method": "GET", "url": "/status?token=x"},
        {"method": "GET", "url": "/requests/cmpl-9"},
        {"method": "PATCH", "url": "/config", "content": slow(), "headers": JSON},
        {"method": "POST", "url": "/confirm"},
        {"method": "PATCH", "url": "/config", "json": {}, "headers": {"If-Match": '"1"'}},
        {"method": "PATCH", "url": "/config", "content": b"x" * 70_000, "headers": JSON},
        {"method": "PATCH", "url": "/config", "content": b"theta_f=1"},
        {"method": "PATCH", "url": "/config", "json": {"theta_f": 1.5}},
    ]
    found = {}
    for call in calls:
        answer = await http.request(**{**call, "url": root + call["url"]})
        assert answer.is_error, (call, answer.text)
        found[str(answer.status_code)] = answer.json()
    served.service.auth.limits = RateLimits({"change": Rate(20, 0)})
    found["429"] = (await http.post(root + "/undo")).json()
    served.client.errored = True
    found["503"] = (await http.get(root + "/status")).json()
    served.client.errored = False
    return found


async def messages(served: Served, http: httpx.AsyncClient, core: LiveEngine) -> dict[str, Any]:
    """One message a kind, as they came."""
    found: dict[str, Any] = {"auth": {"type": "auth", "token": "0123456789abcdef"}}
    async with websockets.connect(served.stream_url + "?fps=30") as stream:
        while not {"hello", "snapshot", "delta", "event", "heartbeat"} <= set(found):
            message = msgspec.json.decode(await stream.recv())
            if message["type"] == "snapshot" and "hello" in found:
                await http.post("/vtoken/v1/compactions", json={})
                core.steps()
            found.setdefault(message["type"], message)
    found["hello"]["policies"] = found["hello"]["policies"][:1]
    head = {name: found["heartbeat"][name] for name in ("epoch", "step", "ts")}
    found["dropped"] = {"type": "dropped", **head, "seq": found["heartbeat"]["seq"] + 1, "n": 2412}
    return found


async def main() -> None:
    core = make_engine()
    async with (
        serve(core.handle, show_text=True) as served,
        httpx.AsyncClient(base_url=served.url) as http,
    ):
        found = {
            "answers": await answers(http),
            "bodies": BODIES,
            "messages": await messages(served, http, core),
            "problems": await problems(served, http),
        }
    core.close()
    TARGET.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
