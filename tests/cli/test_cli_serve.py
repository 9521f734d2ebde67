"""`vtoken serve`: token files are checked before the model loads; only their paths are passed."""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtoken.base.errors import UnsupportedError
from vtoken.core.config.values import AUTO_PATCH, default_config, merge_patch
from vtoken.vllm import serve
from vtoken.vllm.launch import refusals, server_arguments
from vtoken.vllm.serve import server_command
from vtoken.vllm.startup import startup_error
from vtoken.vllm.startup.settings import read_settings

TOKEN = "the-control-token-0123"


def test_only_the_names_of_token_files_are_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").write_text(TOKEN)
    monkeypatch.chdir(tmp_path)
    flags = ["--vtoken-control-token-file", "control", "--vtoken-state-dir", "state"]
    command = server_command(["m", *flags])
    assert TOKEN not in " ".join(command)
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config["vtoken"]["api"] == {
        "control_token_file": str(tmp_path / "control"),
        "state_dir": str(tmp_path / "state"),
    }


@pytest.mark.parametrize("content", [None, "", "short", "no spaces in it, please!"])
def test_bad_token_file_ends_with_2_and_names_the_file(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "read"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        server_command(["m", "--vtoken-read-token-file", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert not content or content not in said


def test_every_setting_has_a_flag_of_its_type() -> None:
    values = {"int": 3, "float": 0.5, "bool": False, "str": "ttft<2s, itl<80ms"}
    for name, bound in serve.plain_settings().items():
        value = bound.choices[-1] if bound.choices else values[bound.type]
        flag = serve.flag_of(name)
        words = [flag.replace("--", "--no-", 1)] if value is False else [flag, f"{value}"]
        parsed = serve.build_parser().parse_args(words)
        assert serve.initial_patch(parsed) == {name: value}


def test_an_slo_that_cannot_be_read_stops_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        server_command(["m", "--vtoken-slo", "ttft<2"])
    error = capsys.readouterr().err
    assert "slo = 'ttft<2': 2 has no unit of ms, s, min (allowed: as in ttft<2s, itl<80ms" in error


def test_a_setting_for_experiments_has_a_flag_apart_from_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parsed = serve.build_parser().parse_args(["--vtoken-planner", "pack"])
    assert serve.initial_patch(parsed) == {"experiment": {"planner": "pack"}}
    with pytest.raises(SystemExit):
        serve.build_parser().parse_args(["--help"])
    listed, _, apart = capsys.readouterr().out.partition("vToken, for experiments")
    for flag in ("--vtoken-planner", "--vtoken-round-rule", "--vtoken-admission"):
        assert flag not in listed
        assert flag in apart


def test_copying_in_step_with_the_host_is_an_experiment() -> None:
    command = server_command(["m", "--vtoken-experimental-cuda", "--vtoken-copy-sync"])
    told = json.loads(command[command.index("--additional-config") + 1])
    assert read_settings(told).experiment.copy_sync
    assert not read_settings({}).experiment.copy_sync


def test_auto_is_the_recommended_policy_under_pressure() -> None:
    def patch(*words: str) -> dict[str, Any]:
        parsed = serve.build_parser().parse_args(["--vtoken-policy", "auto", *words])
        return serve.initial_patch(parsed)

    assert patch() == AUTO_PATCH | {"park_bytes": "auto"}
    assert patch("--vtoken-budget-ratio", "0.25")["budget_ratio"] == 0.25
    assert "budget_ratio" not in patch("--vtoken-budget-tokens", "900")
    config = merge_patch(default_config(256), AUTO_PATCH, num_blocks=256, num_layers=4)
    assert (config.policy.name, config.evict_when) == ("keydiff", "pressure")
    with pytest.raises(ValueError, match="not auto"):
        patch("--vtoken-policy-params", "{}")


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--port", "8001", "--enforce-eager"],
        ["--vtoken-policy", "h2o", "--served-model-name", "a", "b", "--enforce-eager", "m"],
        ["m", "--headless", "--nnodes=2", "--node-rank=1"],
        ["--vtoken-recycle", "--config", "file.yaml"],
    ],
)
def test_all_but_its_own_flags_are_passed_on_as_they_are(words: list[str]) -> None:
    command = server_command(words)
    passed = command[command.index("vtoken.vllm.launch") + 1 : command.index("--scheduler-cls")]
    own = ("--vtoken-policy", "h2o", "--vtoken-recycle")
    assert passed == [word for word in words if word not in own]


ARGS = {
    "model": None,
    "model_tag": "m",
    "grpc": False,
    "data_parallel_multi_port_external_lb": False,
    "data_parallel_size": 1,
    "api_server_count": None,
    "headless": False,
    "nnodes": 1,
    "node_rank": 0,
}


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, None),
        ({"model_tag": None, "model": "m"}, None),
        ({"model_tag": None}, "MODEL is missing"),
        ({"api_server_count": 2}, None),
        ({"api_server_count": 0}, "--api-server-count 0 is not supported"),
        ({"grpc": True}, "--grpc is not supported"),
        ({"data_parallel_multi_port_external_lb": True}, "--data-parallel-multi-port-external-lb"),
        ({"headless": True}, "there would be no API server"),
        ({"headless": True, "nnodes": 2}, "there would be no API server"),
        ({"headless": True, "nnodes": 2, "node_rank": 1}, None),
        (
            {"headless": True, "nnodes": 2, "node_rank": 1, "data_parallel_size": 2},
            "the node would hold an engine",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    others: dict[str, Any], said: str | None
) -> None:
    reasons = [*refusals(argparse.Namespace(**ARGS | others))]
    assert [said is not None and said in reason for reason in reasons] == [True] * bool(said)


@pytest.mark.vllm
def test_vllms_parser_reads_the_words_that_are_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*words: str) -> argparse.Namespace:
        return server_arguments(server_command([*words])[3:])

    for words in (
        ["m", "--port", "8001"],
        ["--port", "8001", "m", "--enforce-eager"],
        ["--enforce_eager", "-tp", "2", "--served_model_name", "a", "b", "--port=1", "m"],
    ):
        assert read(*words).model_tag == "m"
    args = read("m", "--chat_template=chat.jinja")
    assert read_settings(args.additional_config).chat_template == "chat.jinja"
    assert args.host == "127.0.0.1"
    for words, engines in (
        ((), 1),
        (("-dp=3",), 3),
        (("-dp=3", "--data-parallel-size-local=2"), 2),
    ):
        assert read_settings(read("m", *words).additional_config).local_engines == engines
    (tmp_path / "file.yaml").write_text("model: m\nhost: 0.0.0.0\nheadless: true\n")
    with pytest.raises(SystemExit) as ended:
        read("--config", str(tmp_path / "file.yaml"))
    assert ended.value.code == 2
    assert "vtoken serve: error: --headless is not" in capsys.readouterr().err
    (tmp_path / "file.yaml").write_text("model: m\nhost: 0.0.0.0\n")
    args = read("--config", str(tmp_path / "file.yaml"))
    assert (args.model, args.host) == ("m", "0.0.0.0")


def test_front_end_without_python_plugins_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit) as ended:
        server_command(["m"])
    assert ended.value.code == 2
    assert "runs no Python plugin" in capsys.readouterr().err


SERVER = """
import subprocess, sys
from vtoken.vllm.startup import startup_error
startup_error.offer()
startup_error.print_at_exit()
engine = "from vtoken.vllm.startup import startup_error as w\\n"
engine += "from vtoken.base.errors import UnsupportedError as E\\n"
engine += "w.print_at_exit()\\nwith w.kept(): raise E('a window in all layers')"
assert subprocess.run([sys.executable, "-c", engine]).returncode == 1
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


def test_the_reason_of_a_refusal_is_the_last_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[-1] == "vtoken serve: a window in all layers"
    assert sum(line.startswith("vtoken serve: ") for line in lines) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_without_a_server_is_an_exception_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(startup_error.PLACE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match="why"), startup_error.kept():
        raise UnsupportedError("why")
    assert list(tmp_path.iterdir()) == []


HFValidationError = type("HFValidationError", (ValueError,), {"__module__": "huggingface_hub.x"})
# vLLM 0.32's own words.
NO_ROOM = (
    "To serve at least one request with the model's max seq len (2048), (0.09 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.03 GiB). Based on the available "
    "memory, the estimated maximum model length is 624. Try increasing `gpu_memory_utilization` "
    "(which also controls CPU memory on the CPU backend) or decreasing `max_model_len` when "
    "initializing the engine. See https://docs.vllm.ai/ for more details."
)
TOO_LONG = (
    "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (20480) is "
    "greater than the derived max_model_len (max_position_embeddings=8192.0 or "
    "model_max_length=None in model's config.json). [type=value_error, input_value=ArgsKwargs()]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ValueError(NO_ROOM),
            "one request of 2048 tokens needs 0.09 GiB of KV cache, and there are 0.03 GiB; set "
            "--max-model-len 624 or lower, or give the cache more memory: where they are set, "
            "--kv-cache-memory-bytes and --num-gpu-blocks-override, else --gpu-memory-utilization",
        ),
        (ValueError(TOO_LONG), "--max-model-len 20480 is more than the model's 8192 positions"),
        (
            ValueError(TOO_LONG.replace("User-specified max_model_len", "The length")),
            "The length (20480) is greater than the derived max_model_len "
            "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json).",
        ),
        (ValueError("No memory. See https://docs.vllm.ai/"), "No memory."),
        (RuntimeError("Engine core initialization failed. See root cause above."), ""),
        (UnsupportedError("vToken cannot serve it: leave it out"), None),
    ],
)
def test_what_the_engine_raises_is_said_with_cause_and_remedy(
    error: Exception, words: str | None
) -> None:
    assert startup_error.words_of(error) == (str(error) if words is None else words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EADDRINUSE, "Address already in use"),
            "127.0.0.1, port 8000 is in use; end the server that listens there, or set another "
            "--port",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"),
            "this machine has no address 127.0.0.1; set another --host",
        ),
        (
            HFValidationError("no such repository"),
            "the model no/such is no folder here, and Hugging Face does not give it (no such "
            "repository); check the name, HF_TOKEN if it is gated, and HF_HUB_OFFLINE",
        ),
        (KeyError("a fault"), ""),
    ],
)
def test_what_the_servers_process_raises_is_said_with_cause_and_remedy(
    error: Exception, words: str
) -> None:
    args = argparse.Namespace(host="127.0.0.1", port=8000, uds=None, model="no/such")
    assert startup_error.words_of_server(error, args) == words


def test_the_first_process_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(startup_error.PLACE, "")  # as before at the end
    startup_error.offer()
    for error in (RuntimeError("see root cause above"), ValueError("first"), ValueError("second")):
        with pytest.raises(type(error)), startup_error.kept():
            raise error
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "first"


def test_a_folder_that_does_not_exist_ends_with_2_before_the_engine_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        server_command([str(tmp_path / "none")])
    assert ended.value.code == 2
    assert f"MODEL: there is no {tmp_path}/none; name a folder" in capsys.readouterr().err
    assert server_command([str(tmp_path)])
