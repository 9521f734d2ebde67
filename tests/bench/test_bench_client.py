"""The client bench without an engine: flags of servers and client, tables, claims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.waiting import until
from vtoken_bench import client, client_report
from vtoken_bench.client import VARIANTS, Servers
from vtoken_bench.counters import cpu_s
from vtoken_bench.evaluation.answers import CHATS, FIXED, PRESSURE
from vtoken_bench.evaluation.curve import points_at
from vtoken_bench.evaluation.points import Point, Run, Setting
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.output import new_result
from vtoken_bench.serving_client import (
    METRICS,
    PERCENTILES,
    ClientError,
    ServingClient,
    read_result,
)
from vtoken_bench.target import Device, Target

SETTING = Setting("demo", 32, quick=False, repeats=2)


def result_file(**changes: Any) -> dict[str, Any]:
    """The fields of a `vllm bench serve --save-detailed` file that are read: 6 requests of 50."""
    found: dict[str, Any] = {
        "duration": 12.5,
        "completed": 6,
        "total_input_tokens": 611,
        "total_output_tokens": 300,
        "request_throughput": 0.48,
        "output_throughput": 24.0,
        "generated_texts": ["one", "two"],
    }
    for i, metric in enumerate(METRICS):
        found |= {f"p{p}_{metric}_ms": 1000.0 * i + p for p in PERCENTILES}
    return found | changes


def points() -> dict[str, Point]:
    return {str(p.labels["variant"]): p for p in points_at(SETTING, {}, 0.45)}


def servers(device: Device = "cpu", threads: int | None = None) -> Servers:
    runner = cast(ServingClient, None)  # no load is run
    return Servers(runner, Target(device=device, threads=threads), Path("/bench"))


def flags(variant: str, device: Device = "cpu") -> list[str]:
    return servers(device).server_arguments(points()[variant])


def runs(*speeds: dict[str, float]) -> list[Run]:
    """A run of every variant in each repeat; a latency is the inverse of the speed."""
    out = []
    for repeat, speed in enumerate(speeds):
        for variant, fast in speed.items():
            names = [f"{m}_p{p}_ms" for m in METRICS for p in PERCENTILES]
            one: dict[str, Any] = dict.fromkeys(names, 1e6 / fast)
            one |= {"output_tokens_per_second": fast, "requests_per_second": fast / 128}
            one |= {"preemptions": 0.0, "server_cpu_s": 80.0, "found": [True, variant != NAIVE]}
            out.append(Run({"variant": variant}, repeat, one, 60.0, f"day {repeat}", "abc"))
    return out


SPEEDS = {NATIVE: 100.0, NAIVE: 50.0, FIXED: 125.0, PRESSURE: 120.0}
TWO = (SPEEDS, SPEEDS | {NATIVE: 80.0})
THREE = (*TWO, SPEEDS | {NATIVE: 90.0})


def test_metrics_and_outputs_come_from_the_clients_result_file() -> None:
    found = read_result(result_file(), 6, 611, 50)
    assert found.texts == ["one", "two"]
    assert found.metrics["seconds"] == 12.5
    assert found.metrics["output_tokens_per_second"] == 24.0
    assert found.metrics["ttft_p50_ms"] == 50.0
    assert found.metrics["e2el_p99_ms"] == 3099.0
    assert len(found.metrics) == 3 + len(METRICS) * len(PERCENTILES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completed": 5}, "completed is 5 in the client's result, not 6"),
        ({"total_input_tokens": 617}, "total_input_tokens is 617 .* not 611"),
        ({"total_output_tokens": 299}, "total_output_tokens is 299 .* not 300"),
    ],
)
def test_a_run_with_other_counts_than_requested_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        read_result(result_file(**changes), 6, 611, 50)


def executable(folder: Path, script: str) -> Path:
    """A `vllm` whose interpreter is the shell script `script`."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder / "vllm"


def test_an_environment_without_the_packages_is_refused_before_any_server_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(ClientError, match=r"cannot be started.*make an environment"):
        ServingClient(tmp_path / "vllm")
    with pytest.raises(ClientError, match="lacks pandas; make an environment"):
        ServingClient(executable(tmp_path, "echo pandas"))


def test_a_failed_client_is_reported_with_its_last_output(tmp_path: Path) -> None:
    script = 'case "$*" in *"bench serve"*) echo "no such dataset"; exit 3;; esac'
    runner = ServingClient(executable(tmp_path, script))
    with pytest.raises(ClientError, match="status 3:\nno such dataset"):
        runner.run(
            "http://127.0.0.1:1",
            tokenizer=tmp_path,
            prompts=["a", "b"],
            prompt_tokens=611,
            new_tokens=50,
            num_clients=2,
            result=tmp_path / "result.json",
            timeout_s=30.0,
        )
    assert (tmp_path / "result.log").read_text() == "no such dataset\n"


def test_a_load_leaves_its_prompts_beside_its_result(tmp_path: Path) -> None:
    written = json.dumps(result_file(completed=2, total_output_tokens=100))
    name = tmp_path / "result.json"
    script = f"""case "$*" in *"bench serve"*) printf %s '{written}' > {name};; esac"""
    found = ServingClient(executable(tmp_path, script)).run(
        "http://127.0.0.1:1",
        tokenizer=tmp_path,
        prompts=["a", "b"],
        prompt_tokens=611,
        new_tokens=50,
        num_clients=2,
        result=name,
        timeout_s=30.0,
    )
    assert found.texts == ["one", "two"]
    lines = (tmp_path / "result.prompts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": "a"}, {"prompt": "b"}]


def test_the_load_is_the_curves() -> None:
    found = points()
    assert [*found] == list(VARIANTS)
    assert {point.workload for point in found.values()} == {CHATS}
    assert {point.concurrency for point in found.values()} == {8}
    assert {point.engine.num_blocks for point in found.values()} == {47}  # 45% of 8 times 13
    assert [name for name, point in found.items() if point.engine.stock] == [NATIVE]


def test_memory_is_a_share() -> None:
    assert client.memory_share("1") == 1.0
    for text in ("0", "1.1"):
        with pytest.raises(ArgumentTypeError, match="not above 0 and at most 1"):
            client.memory_share(text)


def test_the_servers_differ_in_vtokens_flags_alone() -> None:
    native = flags(NATIVE)
    assert not [flag for flag in native if "vtoken" in flag]
    for variant in VARIANTS[1:]:
        assert [flag for flag in flags(variant) if not flag.startswith("--vtoken-")] == native
    fixed, naive, pressure = (set(flags(name)) for name in (FIXED, NAIVE, PRESSURE))
    assert {"--vtoken-policy=keydiff", "--vtoken-budget-ratio=0.3333"} <= fixed
    assert "--vtoken-evict-when=always" in fixed
    state = "--vtoken-state-dir=/bench/"
    assert naive - fixed == {"--vtoken-reclamation=off", f"{state}naive-evict-state"}
    assert pressure - fixed == {"--vtoken-evict-when=pressure", f"{state}vtoken-pressure-state"}
    assert "--vtoken-experimental-cuda" in flags(FIXED, device="cuda")


def test_a_server_has_the_pool_and_the_threads_of_its_point() -> None:
    assert "--num-gpu-blocks-override=48" in flags(NATIVE)  # and vLLM's null block
    found = servers(threads=2).environment(points()[NATIVE])
    assert (found["OMP_NUM_THREADS"], found["VTOKEN_ENABLED"]) == ("2", "0")
    assert "OMP_NUM_THREADS" not in servers().environment(points()[NATIVE])


def metrics(evicted: float | None) -> str:
    return "" if evicted is None else f'vllm:vtoken_evicted_tokens_total{{engine="0"}} {evicted}\n'


@pytest.mark.parametrize(
    ("variant", "right", "wrong"),
    [
        (NATIVE, None, 0.0),
        (NAIVE, 3.0, 0.0),
        (FIXED, 3.0, None),
        (PRESSURE, 0.0, None),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_refused(
    variant: str, right: float | None, wrong: float | None
) -> None:
    assert client.evicted_tokens(variant, metrics(right)) == right
    with pytest.raises(ClientError, match=f"{variant}: {wrong} evicted tokens"):
        client.evicted_tokens(variant, metrics(wrong))


async def test_cpu_time_is_of_a_process_and_those_below_it() -> None:
    endless = f"{sys.executable} -c 'while True: pass' & wait"
    with subprocess.Popen(["sh", "-c", endless], start_new_session=True) as process:
        try:
            await until(lambda: cpu_s(process.pid) > 0.1, "no CPU time is counted")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_counter_is_summed_over_its_labels() -> None:
    text = (
        "# HELP vllm:num_preemptions_total Preemptions\n"
        'vllm:num_preemptions_total{engine="0",model_name="model"} 4.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="model"} 3.0\n'
        "vllm:vtoken_evicted_tokens_total 1e3\n"
    )
    assert client.counter(text, "vllm:num_preemptions_total") == 7.0
    assert client.counter(text, "vllm:vtoken_evicted_tokens_total") == 1000.0
    assert client.counter(text, "vllm:num_preemptions") is None


def test_a_result_has_tables_and_claims_of_the_same_repeats() -> None:
    result = new_result("client", "make bench-client", {"model": "tiny"})
    client_report.report(result, "tiny", runs(*THREE), 0.45)
    measured, ratios = result.tables
    row = dict(zip(measured.columns, measured.rows[1], strict=True))
    assert row["facts found [%]"] == "50 [12 .. 88]"
    assert str(row["difference to native [points]"]).startswith("-50 [")
    cells = {row[0]: dict(zip(ratios.columns, row, strict=True)) for row in ratios.rows}
    # e^(0.292 ± 4.303 · 0.112 / √3)
    assert cells["vToken, pressure / native"]["output tok/s"] == "1.34 [1.01 .. 1.77]"
    assert cells["vToken, pressure / naive-evict"]["request p95"] == "0.42 [0.42 .. 0.42]"
    assert len(result.claims) == 3 * 5  # servers, metrics
    claim = next(c for c in result.claims if c.what.endswith("tokens a second of native, " + FIXED))
    assert (claim.row, claim.unit, claim.repeats) == ("Real client", "x", 3)
    assert claim.values == pytest.approx([1.25, 125 / 80, 125 / 90])
    assert result.measured == {"tiny": "day 0 to day 2 at abc"}
    assert result.seconds == 720.0
