"""`python -m scripts.sample [--out FILE]`: records what `vtoken console --sample` plays.

The engine is real: the demo's trained model under the shipped defaults, in a cache that is too
small for all of its clients. Memory is ample with two of them. A crowd comes, requests wait, and
those that run give tokens; `ana` tries the floor that the planner advises and takes it back; the
crowd leaves, and parked tokens come back. A recording in which one of these did not happen is not
kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import httpx

from vtoken import wire
from vtoken.client import Client
from vtoken.client import Server as Address
from vtoken.demo.conversations import make_conversation
from vtoken.demo.server import VTOKEN, Server, any_free_port
from vtoken.demo.trained_model import DEFAULT, MODELS, fetch
from vtoken.recording import RecordingReader
from vtoken_console.feed.replay import SAMPLE

MODEL_NAME = MODELS[DEFAULT].name
CALM, CROWD = 2, 12  # clients
CROWD_S, TRIAL_S, UNDO_S, LEFT_S = 20.0, 75.0, 110.0, 130.0  # when the crowd comes, …, has left
DURATION_S = 150
STATES_A_SECOND = 2
NUM_BLOCKS = 240  # of 16 tokens: a third of what the clients need
MAX_PASSAGE_CHARS = 3400
ANSWER_TOKENS = 240
WHO = ("crowd", "calm")  # in the ids of requests
MAX_BYTES = 300_000
FLAGS = (
    "--vtoken-policy=auto",
    f"--served-model-name={MODEL_NAME}",
    "--dtype=float32",
    "--block-size=16",
    "--enforce-eager",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=512",  # short steps, and so many states of a slow machine
    "--max-model-len=auto",
    "--kv-cache-memory-bytes=67108864",
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
)


class NoIncidentError(Exception):
    """What the recording lacks."""


async def chat(url: str, model: str, name: int) -> None:
    """One client, until it is cancelled: a question about a text after the other."""
    chance = random.Random(name)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
        while True:
            talk = make_conversation(chance, MAX_PASSAGE_CHARS)
            messages = [
                {"role": "system", "content": talk.system},
                {"role": "user", "content": f"{talk.passage}\n\n{talk.questions[0]}".strip()},
            ]
            body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
            body |= {"min_tokens": ANSWER_TOKENS if name < CALM else 0, "temperature": 0.0}
            headers = {"X-Request-Id": f"{WHO[name < CALM]}-{name}-{uuid4().hex[:4]}"}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            answer.raise_for_status()


async def traffic(url: str) -> None:
    async def one(name: int, comes_s: float, leaves_s: float) -> None:
        """It leaves without its last answer."""
        await asyncio.sleep(comes_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leaves_s - comes_s):
                await chat(url, MODEL_NAME, name)

    async def change() -> None:
        """What the planner advises, when somebody waits."""
        await asyncio.sleep(TRIAL_S)
        with Client(Address(url, actor="ana"), timeout_s=60.0) as client:
            while not (advised := [a.change for a in client.status().advice if a.change]):
                await asyncio.sleep(0.5)
            guards = [wire.Guard(metric="preemptions", above=0.0)]
            client.patch_config(advised[0], confirm_within_s=300, guards=guards)
            await asyncio.sleep(UNDO_S - TRIAL_S)
            client.undo()

    calm = [one(name, 0.0, DURATION_S) for name in range(CALM)]
    crowd = [one(CALM + n, CROWD_S + n, LEFT_S) for n in range(CROWD)]
    await asyncio.gather(*calm, *crowd, change())


def statuses(path: Path) -> Iterator[wire.Status]:
    with RecordingReader(path) as reader:
        for entry in iter(reader.next, None):
            if isinstance(entry.line, wire.Snapshot | wire.Delta) and entry.line.status is not None:
                yield entry.line.status


SCENES: dict[str, Callable[[wire.Status], object]] = {
    "ample memory": lambda s: s.requests.running and 2 * s.blocks.free > s.blocks.total,
    "a request that waits for blocks": lambda s: s.requests.waiting and short(s),
    "requests that gave": lambda s: s.pressure is not None and s.pressure.recent_tokens,
    "a lower floor on trial": lambda s: bool(s.guards),
    "the floor of before": lambda s: not s.guards,
    "ample memory again": lambda s: 2 * s.blocks.free > s.blocks.total,
    "tokens that are back": lambda s: s.parking is not None and s.parking.back_tokens,
}


def short(status: wire.Status) -> bool:
    return status.pressure is not None and status.pressure.short_blocks > 0


def missing_scene(seen: Iterator[wire.Status]) -> str:
    """The first of `SCENES` that does not come after the one before; empty if all do."""
    for scene, is_so in SCENES.items():
        if not any(is_so(status) for status in seen):
            return scene
    return ""


def check(path: Path) -> None:
    """Raises NoIncidentError unless the file has every scene and is small enough."""
    if scene := missing_scene(statuses(path)):
        raise NoIncidentError(f"{scene} does not come, or not in its order")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise NoIncidentError(f"{size:,} bytes, more than {MAX_BYTES:,}")


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of the incident's server, without clients; `flags`: more of `vtoken serve`."""
    with tempfile.TemporaryDirectory(prefix="vtoken-sample-") as folder:
        server = Server(
            str(fetch()),
            port=any_free_port(),
            arguments=[*FLAGS, f"--vtoken-state-dir={folder}/state", *flags],
            log=Path(folder, "server.log"),
            environment={"HF_HUB_OFFLINE": "1"},
            startup_timeout_s=600.0,
        )
        with server:
            yield server.url


def record(path: Path) -> None:
    with serving() as url:
        command = [*VTOKEN, "record", str(path), "--url", url]
        command += ["--fps", f"{STATES_A_SECOND}", "--duration", f"{DURATION_S}"]
        with subprocess.Popen(command) as recording:
            asyncio.run(traffic(url))
            if recording.wait():
                raise NoIncidentError(f"`vtoken record` ended with {recording.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.sample", description=__doc__)
    parser.add_argument("--out", type=Path, default=SAMPLE, help="(that of the console)")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="vtoken-sample-") as folder:
        made = Path(folder, out.name)
        record(made)
        try:
            check(made)
        except NoIncidentError as error:
            print(f"not kept: {error}", file=sys.stderr)
            return 1
        out.write_bytes(made.read_bytes())
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
