"""The soak's last phase: a real `vtoken serve`, clients that disconnect, changes over HTTP.

Unlike the engine phases it depends on time, so it cannot be repeated step by step.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.soak.phases import START
from tests.soak.tally import Tally
from tests.soak.traffic_generator import NEEDS_BUDGET, Chance
from tests.support.account import pressure_contradictions
from vtoken.demo.server import DemoError, Server, any_free_port
from vtoken.wire import ConfigDocument, PolicyInfo, RequestRow, Status

NUM_CLIENTS = 8
NUM_VIEWERS = 3
MAX_MODEL_LEN = 1024
ARGUMENTS = (
    "--served-model-name=soak",
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--block-size=16",
    "--num-gpu-blocks-override=96",
    "--kv-cache-memory-bytes=67108864",
    "--max-num-batched-tokens=256",
    "--vtoken-policy=auto",
    f"--vtoken-budget-floor-tokens={START['budget_floor_tokens']}",
    f"--vtoken-restore-after-ms={START['restore_after_ms']}",
    "--vtoken-verify-ratio=1",
    "--vtoken-check-every-step",
)
DISCONNECTED = object()


class ServerSoak:
    """Clients, viewers and an operator against one server at `url`."""

    def __init__(self, url: str, seed: int) -> None:
        self.tally = Tally()
        self._url = url
        self._seed = seed
        self._stop = False

    async def run(self, seconds: float) -> Tally:
        started = time.monotonic()
        async with httpx.AsyncClient(base_url=self._url, timeout=120, trust_env=False) as http:
            policies = msgspec.json.decode(
                (await http.get("/vtoken/v1/policies")).content, type=list[PolicyInfo]
            )
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_CLIENTS):
                    tasks.create_task(self._client(http, number, policies))
                for number in range(NUM_VIEWERS):
                    tasks.create_task(self._viewer(number))
                tasks.create_task(self._operator(http, policies))
                tasks.create_task(self._reader(http))
                await asyncio.sleep(seconds)
                self._stop = True
            await self._settle(http)
        self.tally.seconds = time.monotonic() - started
        return self.tally

    # ------------------------------------------------------------ clients, viewers, operator

    async def _client(
        self, http: httpx.AsyncClient, number: int, policies: list[PolicyInfo]
    ) -> None:
        chance = Chance(self._seed + number, max_model_len=MAX_MODEL_LEN)
        while not self._stop:
            draw = chance.request(policies)
            sampling = {k: v for k, v in draw.sampling.items() if k != "detokenize"}
            own = sampling.pop("extra_args", None)
            body: dict[str, Any] = {
                "model": "soak",
                "prompt": draw.prompt,
                "stream": True,
                "stream_options": {"include_usage": True},
                **sampling,
            }
            if own is not None:
                body["vllm_xargs"] = own
            patience = chance.rng.randint(1, 20) if chance.happens(0.15) else None
            self.tally.requests += 1
            try:
                used = await _complete(http, body, patience)
            except (httpx.HTTPError, ValueError) as error:
                self._fail(f"request of client {number}: {type(error).__name__}: {error}")
                self.tally.failed += 1
                continue
            if used is DISCONNECTED:
                self.tally.aborted += 1
                continue
            self.tally.finished += 1
            self.tally.tokens += used or 0
            if used != body["max_tokens"] and "stop" not in body:
                self._fail(f"client {number} got {used} of {body['max_tokens']} tokens")
                self.tally.failed += 1

    async def _viewer(self, number: int) -> None:
        """A console that connects, reads for a while and disconnects, sometimes abruptly."""
        from websockets.asyncio.client import connect

        chance = Chance(self._seed - 1 - number, max_model_len=2)
        url = self._url.replace("http", "ws", 1) + "/vtoken/v1/stream?format=msgpack"
        while not self._stop:
            async with connect(url, max_size=None, proxy=None) as socket:
                for _ in range(chance.rng.randint(1, 40)):
                    await socket.recv()
                if chance.happens(0.5):
                    socket.transport.abort()

    async def _reader(self, http: httpx.AsyncClient) -> None:
        """Compares the statements of one status, and with the rows if both are of one step."""
        base = "/vtoken/v1"
        while not self._stop:
            answers = [await http.get(f"{base}/{name}") for name in ("status", "requests") * 2]
            first, status = (msgspec.json.decode(a.content, type=Status) for a in answers[::2])
            rows = msgspec.json.decode(answers[1].content, type=list[RequestRow])
            is_still = first.step == status.step and first.config_revision == status.config_revision
            found = [*pressure_contradictions(status, rows if is_still else ())]
            self.tally.statements += 1
            self.tally.contradictions += len(found)
            for text in found:
                self._fail(text)
            await asyncio.sleep(0.05)

    async def _operator(self, http: httpx.AsyncClient, policies: list[PolicyInfo]) -> None:
        chance = Chance(self._seed - 100, max_model_len=2)
        base = "/vtoken/v1"
        while not self._stop:
            await asyncio.sleep(chance.rng.uniform(0.05, 0.5))
            config = msgspec.json.decode(
                (await http.get(f"{base}/config")).content, type=ConfigDocument
            )
            patch = chance.patch(config, policies)
            answer = await http.patch(f"{base}/config", json=patch)
            if answer.status_code == 200:
                self.tally.switches += 1
            elif answer.status_code == 422 and NEEDS_BUDGET & patch.keys():
                self.tally.refused += 1
            else:
                self._fail(f"PATCH {patch}: {answer.status_code} {answer.text}")
            if chance.happens(0.3):
                answer = await http.post(f"{base}/compactions", json={})
                self.tally.compactions += 1
                if answer.status_code != 202:
                    self._fail(f"POST compactions: {answer.status_code} {answer.text}")
            if chance.happens(0.3):
                await self._restore(http, chance)
            bad = await http.patch(f"{base}/config", json=chance.bad_patch())
            if bad.status_code != 422:
                self._fail(f"a bad patch got status {bad.status_code}, not 422")

    async def _restore(self, http: httpx.AsyncClient, chance: Chance) -> None:
        """Ask for the parked tokens of a request; it may have ended meanwhile."""
        base = "/vtoken/v1/requests"
        rows = msgspec.json.decode((await http.get(base)).content, type=list[RequestRow])
        if rows:
            name = chance.rng.choice(rows).id
            answer = await http.post(f"{base}/{name}/restore")
            if answer.status_code not in (200, 404, 409):
                self._fail(f"POST restore of {name}: {answer.status_code} {answer.text}")

    # ------------------------------------------------------------ afterwards

    async def _settle(self, http: httpx.AsyncClient) -> None:
        """Check that the idle server holds no block and is healthy; collect its counters."""
        deadline = time.monotonic() + 30
        while True:
            answer = await http.get("/vtoken/v1/status")
            status = msgspec.json.decode(answer.content, type=Status)
            if status.blocks.used == 0 and status.requests.running == 0:
                break
            if time.monotonic() > deadline:
                self._fail(
                    f"idle, but {status.blocks.used} blocks are used and "
                    f"{status.requests.running} requests run"
                )
                break
            await asyncio.sleep(0.2)
        if status.blocks.free != status.blocks.total:
            self._fail(f"idle, but {status.blocks.free} of {status.blocks.total} blocks are free")
        if (await http.get("/health")).status_code != 200:
            self._fail("/health fails")
        tally, reclamation = self.tally, status.reclamation
        tally.evictions = status.tokens.evicted
        tally.relocations, tally.recycled = reclamation.relocations, reclamation.recycled_slots
        if (parking := status.parking) is not None:
            tally.parked, tally.restored = parking.copied_tokens, parking.restored_tokens
            tally.dropped, tally.swapped = parking.dropped_tokens, parking.swapped_requests
        tally.preemptions = status.requests.preempted
        tally.checks = status.invariants.checked
        tally.violations = status.invariants.violations
        tally.verified = status.invariants.verified_relocations
        tally.verify_us = status.invariants.verify_us
        tally.steps = status.step

    def _fail(self, text: str) -> None:
        self.tally.failures.append(f"server: {text}")


async def _complete(http: httpx.AsyncClient, body: dict[str, Any], patience: int | None) -> Any:
    """Tokens of a streamed completion; DISCONNECTED after `patience` chunks."""
    used = None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
        chunks = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            usage = chunk.get("usage")
            used = usage["completion_tokens"] if usage else used
            chunks += 1
            if patience is not None and chunks >= patience:
                return DISCONNECTED
    return used


def soak_server(*, model: str, seconds: float, seed: int, log: Path) -> Tally:
    """Start a server, soak it and stop it."""
    try:
        with Server(
            model,
            port=any_free_port(),
            arguments=ARGUMENTS,
            log=log,
            environment={
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            startup_timeout_s=300,
        ) as server:
            soak = ServerSoak(server.url, seed)
            try:
                asyncio.run(soak.run(seconds))
            except Exception as error:
                errors = [error, *getattr(error, "exceptions", ())]
                soak.tally.failures += [f"server: {one!r}" for one in errors]
                soak.tally.failures.append(f"server: first in {log}: {server.first_error()}")
                soak.tally.failed += 1
            return soak.tally
    except DemoError as error:
        return Tally(failed=1, failures=[f"server: {error}"])
