"""The client bench without an engine: flags of servers and client, tables, claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vtoken_bench import client
from vtoken_bench.client import (
    FLEET_VARIANTS,
    IDLE,
    NAIVE,
    NATIVE,
    PRESSURE,
    VARIANTS,
    VTOKEN,
    Run,
    Situation,
)
from vtoken_bench.output import as_text, new_result
from vtoken_bench.serving_client import (
    METRICS,
    PERCENTILES,
    ClientError,
    Load,
    ServingClient,
    read_metrics,
)
from vtoken_bench.target import Device, Target, model_folder
from vtoken_bench.texts import passages

LOAD = Load(num_clients=4, num_requests=6, prompt_tokens=100, new_tokens=50)


def result_file(**changes: Any) -> dict[str, Any]:
    """The fields of a `vllm bench serve --save-result` file that are read."""
    found: dict[str, Any] = {
        "duration": 12.5,
        "completed": 6,
        "total_input_tokens": 600,
        "total_output_tokens": 300,
        "request_throughput": 0.48,
        "output_throughput": 24.0,
    }
    for i, metric in enumerate(METRICS):
        found |= {f"p{p}_{metric}_ms": 1000.0 * i + p for p in PERCENTILES}
    return found | changes


def situation(num_blocks: int = 12, device: Device = "cpu", num_engines: int = 1) -> Situation:
    target, model = Target(device=device), model_folder("demo")
    return Situation(model, LOAD, num_blocks, 16, target, Path("/bench"), num_engines)


def runs(*speeds: dict[str, float], where: str = client.CLIENT) -> list[Run]:
    """A run of every variant in each repeat; a latency is the inverse of the speed."""
    out = []
    for repeat, speed in enumerate(speeds):
        for variant in speed:
            fast = speed[variant]
            names = [name for name, _, _ in (*client.RATES, *client.TOKENS)]
            one = dict.fromkeys(names, 1e6 / fast)
            one |= {"output_tokens_per_second": fast, "preemptions": 0.0}
            out.append(Run(variant, repeat, where, one))
    return out


TWO = (
    {NATIVE: 100.0, NAIVE: 50.0, VTOKEN: 120.0, PRESSURE: 110.0},
    {NATIVE: 80.0, NAIVE: 50.0, VTOKEN: 120.0, PRESSURE: 110.0},
)


def test_metrics_come_from_the_clients_result_file() -> None:
    found = read_metrics(result_file(), LOAD)
    assert found["seconds"] == 12.5
    assert found["output_tokens_per_second"] == 24.0
    assert found["ttft_p50_ms"] == 50.0
    assert found["e2el_p99_ms"] == 3099.0
    assert len(found) == 3 + len(METRICS) * len(PERCENTILES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completed": 5}, "completed is 5 in the client's result, not 6"),
        ({"total_input_tokens": 606}, "total_input_tokens is 606 .* not 600"),
        ({"total_output_tokens": 299}, "total_output_tokens is 299 .* not 300"),
    ],
)
def test_a_run_with_other_counts_than_requested_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        read_metrics(result_file(**changes), LOAD)


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
            model="model",
            tokenizer=tmp_path,
            prompts=tmp_path / "prompts.jsonl",
            load=LOAD,
            result=tmp_path / "result.json",
            timeout_s=30.0,
        )
    assert (tmp_path / "result.log").read_text() == "no such dataset\n"


def test_the_servers_differ_in_vtokens_flags_alone() -> None:
    found = {variant: client.server_arguments(situation(), variant) for variant in VARIANTS}
    native = found[NATIVE]
    assert not [flag for flag in native if "vtoken" in flag]
    for variant in (NAIVE, VTOKEN, PRESSURE):
        plain = [flag for flag in found[variant] if not flag.startswith("--vtoken-")]
        assert plain == native
    assert "--vtoken-reclamation=off" in found[NAIVE]
    assert not [flag for flag in found[VTOKEN] if "reclamation" in flag]
    assert "--vtoken-budget-tokens=75" in found[VTOKEN]
    kept = set(found[VTOKEN]) & set(found[PRESSURE])
    assert set(found[PRESSURE]) - kept == {
        "--vtoken-evict-when=pressure",
        "--vtoken-state-dir=/bench/vtoken-pressure-state",
    }
    flags = client.server_arguments(situation(device="cuda"), VTOKEN)
    assert "--vtoken-experimental-cuda" in flags


def test_servers_of_several_engines_differ_in_vtokens_flags_alone() -> None:
    two = situation(num_engines=2)
    assert two.variants == FLEET_VARIANTS
    found = {variant: client.server_arguments(two, variant) for variant in two.variants}
    assert {"--data-parallel-size=2", "--api-server-count=1"} <= set(found[NATIVE])
    for variant in (IDLE, VTOKEN):
        plain = [flag for flag in found[variant] if not flag.startswith("--vtoken-")]
        assert plain == found[NATIVE]
    ours = [flag.partition("=")[0] for flag in found[IDLE] if flag.startswith("--vtoken-")]
    assert ours == ["--vtoken-state-dir"]
    assert "--vtoken-policy=tova" in found[VTOKEN]


def test_three_repeats_give_an_interval() -> None:
    speeds = [{NATIVE: 100.0, IDLE: 100.0 * ratio, VTOKEN: 150.0} for ratio in (0.9, 1.0, 1.1)]
    assert client.intervals_table(runs(*speeds[:2])) is None
    table = client.intervals_table(runs(*speeds))
    assert table is not None
    cells = {row[0]: row[1] for row in table.rows}
    assert list(cells) == ["vToken / native", f"{IDLE} / native", f"vToken / {IDLE}"]
    assert cells[f"{IDLE} / native"] == "1.00, 0.75 .. 1.25"  # 4.303 · 0.1 / √3


def test_only_requests_of_full_length_count_as_fitting() -> None:
    assert situation(12).resident_requests == 2  # 150 tokens are 5 blocks
    assert situation(12, num_engines=2).resident_requests == 4
    assert situation(15).resident_requests == 3


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


def test_ratios_are_of_runs_of_the_same_repeat() -> None:
    found = client.ratios(
        runs(*TWO), (VTOKEN, client.CLIENT), (NATIVE, client.CLIENT), "output_tokens_per_second"
    )
    assert found == [1.2, 1.5]
    table = client.ratios_table(runs(*TWO))
    cells = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert cells["vToken / native"]["output tok/s"] == "1.35 [1.20 .. 1.50]"
    assert cells["vToken / naive-evict"]["request p95"] == "0.42 [0.42 .. 0.42]"


def test_repeats_on_both_sides_of_one_show_no_difference() -> None:
    assert client.ratio([0.9, 1.2]) == "≈ 1.05 [0.90 .. 1.20]"
    assert client.ratio([1.1, 1.3]) == "1.20 [1.10 .. 1.30]"
    assert client.ratio([1.1]) == "1.10"


def test_one_repeat_has_no_range() -> None:
    table = client.ratios_table(runs(TWO[0]))
    assert table.rows[0][1] == "1.20"


def test_claims_are_differences_in_percent_with_their_range() -> None:
    found = {claim.what: claim for claim in client.claims(runs(*TWO), "tiny")}
    claim = found["output tokens/s, vToken against native"]
    assert (claim.row, claim.unit, claim.repeats) == ("Real client", "%", 2)
    assert (claim.value, claim.low, claim.high) == pytest.approx((35.0, 20.0, 50.0))
    latency = found["request latency p95, vToken against naive-evict"]
    assert latency.value == pytest.approx(100 * (50 / 120 - 1))


def test_agreement_compares_the_repeats_that_were_measured_both_ways() -> None:
    speeds = {NATIVE: 200.0, NAIVE: 100.0, VTOKEN: 240.0, PRESSURE: 220.0}
    inside = runs(speeds, where=client.IN_PROCESS)
    assert client.agreement_table(runs(*TWO)) is None
    table = client.agreement_table([*runs(*TWO), *inside])
    assert table is not None
    row = dict(zip(table.columns[:4], table.rows[2][:4], strict=True))
    assert row["client / in process"] == "0.50"
    assert row["against native"] == "1.20"


def test_a_result_has_its_tables_claims_and_chart() -> None:
    result = new_result("client", "make bench-client", {"model": "tiny"})
    result.raw = {"situation": client.described(situation())}
    client.fill(result, runs(*TWO))
    assert len(result.tables) == 3
    assert len(result.claims) == 9
    (chart,) = result.charts
    assert [bars.name for bars in chart.panels[0].bars] == list(VARIANTS)
    assert chart.panels[0].bars[0].values == [90.0]
    assert "vToken / naive-evict" in as_text(result)


def test_a_passage_encoded_alone_has_its_stated_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog, the sea and the sun"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = passages(tmp_path, 3, 40)
    assert len({text for text, _ in found}) == 3
    for text, ids in found:
        assert ids == tokenizer.encode(text).ids
        assert len(ids) == 40
        assert ids[0] == tokenizer.token_to_id("<bos>")
    with pytest.raises(ValueError, match="the text has"):
        passages(tmp_path, 3, 10_000_000)
