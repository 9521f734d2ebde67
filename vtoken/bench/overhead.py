"""What vToken costs: engine step time and throughput against stock vLLM, paired round by round.

Every variant is an engine in a process of its own; in each round all of them run the same workload
in turn, so that a machine whose speed drifts slows them alike. Reported are the medians over rounds
of the ratio to stock in the same round, with their spread. CPU time a step is the steadiest figure
on a shared machine; the second stock engine shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVICTING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 256,
    "interval_tokens": 0,
}


KEYS = ("tokens_per_second", "p50_ms", "p95_ms", "cpu_ms")


@dataclass(frozen=True)
class Variant:
    """`config` is the initial vToken configuration, None for stock vLLM."""

    name: str
    config: dict[str, Any] | None
    console: bool = False


VARIANTS = (
    Variant("stock vLLM", None),
    Variant("stock vLLM, again", None),
    Variant("plugin idle", {}),
    Variant("plugin idle, console connected", {}, console=True),
    Variant("eviction, recycling", EVICTING),
    Variant("eviction, recycling, console connected", EVICTING, console=True),
    Variant("eviction, naive (holes)", EVICTING | {"reclamation": "off", "interval_tokens": 64}),
    Variant(
        "eviction, eager plug",
        EVICTING
        | {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 512, "interval_tokens": 64},
    ),
)


class Engine:
    """A worker process with one engine in it."""

    def __init__(self, variant: Variant, engine_args: dict[str, Any]) -> None:
        self.variant = variant
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vtoken.vllm.bench_worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read)
        facts = self.ask({"vtoken": variant.config, "engine": engine_args})
        if variant.console:
            threading.Thread(target=_drain, args=(facts["endpoint"],), daemon=True).start()
            time.sleep(0.3)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine of {self.variant.name!r} died; run it by hand")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _drain(endpoint: str) -> None:
    """A console's share of the engine's work: subscribe to everything and read it."""
    import zmq

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    while True:
        socket.recv_multipart()


def _workload(requests: int, num_new: int) -> dict[str, Any]:
    rng = random.Random(0)
    lengths = [rng.randrange(64, 640) for _ in range(requests)]
    prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
    return {"prompts": prompts, "num_new": num_new}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="pairs of every variant")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--model", help="a model folder (default: the demo model)")


def run(args: argparse.Namespace) -> int:
    from vtoken.demo.model import build

    os.environ["HF_HUB_OFFLINE"] = (
        "1" if args.model is None else os.environ.get("HF_HUB_OFFLINE", "0")
    )
    model = args.model or str(build(Path(tempfile.gettempdir()) / "vtoken-demo-model"))
    engine_args = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
    }
    workload = _workload(args.requests, args.new_tokens)
    engines: list[Engine] = []
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for variant in VARIANTS:
            print(f"starting {variant.name}", file=sys.stderr, flush=True)
            engines.append(Engine(variant, engine_args))
        for engine in engines:
            engine.ask(workload)  # warm-up
        for number in range(args.rounds):
            order = engines if number % 2 == 0 else engines[::-1]
            result = {}
            for engine in order:
                answer = engine.ask(workload)
                if answer.get("violations"):
                    raise RuntimeError(f"{engine.variant.name}: an invariant broke")
                steps = sorted(answer["steps_ms"])
                result[engine.variant.name] = {
                    "tokens_per_second": answer["tokens"] / answer["seconds"],
                    "p50_ms": steps[len(steps) // 2],
                    "p95_ms": steps[int(len(steps) * 0.95)],
                    "hook_us": answer["hook_seconds"] * 1e6 / len(steps),
                    "cpu_ms": answer["cpu_seconds"] * 1e3 / len(steps),
                }
            rounds.append(result)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            engine.close()
    rows = [_row(variant.name, rounds) for variant in VARIANTS]
    _print(rows, args)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                    "rounds": rounds,
                    "rows": rows,
                },
                indent=1,
            )
        )
    return 0


def _row(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    stock = VARIANTS[0].name

    def ratios(key: str) -> list[float]:
        return sorted(r[name][key] / r[stock][key] for r in rounds)

    out: dict[str, Any] = {"variant": name}
    for key in KEYS:
        values = ratios(key)
        out[key] = statistics.median(r[name][key] for r in rounds)
        out[f"{key}_ratio"] = statistics.median(values)
        out[f"{key}_ratio_range"] = [values[0], values[-1]]
    out["hook_us"] = statistics.median(r[name]["hook_us"] for r in rounds)
    return out


def _print(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"{args.requests} requests, {args.new_tokens} new tokens each, {args.rounds} rounds; "
        "ratios to stock vLLM of the same round: median [lowest .. highest]"
    )
    heads = ("tok/s ratio", "step p50 ratio", "step p95 ratio", "CPU a step ratio")
    print(f"{'variant':40} {'tok/s':>8} " + " ".join(f"{head:>22}" for head in heads) + "  µs*")
    for row in rows:
        cells = []
        for key in KEYS:
            low, high = row[f"{key}_ratio_range"]
            cells.append(f"{row[f'{key}_ratio']:.3f} [{low:.2f} .. {high:.2f}]")
        print(
            f"{row['variant']:40} {row['tokens_per_second']:8.0f} "
            + " ".join(f"{cell:>22}" for cell in cells)
            + f"{row['hook_us']:5.0f}"
        )
    print("* time a step in vToken's own scheduler code, publishing included")
