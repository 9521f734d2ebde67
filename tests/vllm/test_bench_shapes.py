"""A model shape without weights on vLLM's engine, as with `--model llama-8b --dummy-weights`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import engine_args
from vtoken_bench.shapes import LLAMA_3_1_8B, build_shape
from vtoken_bench.target import ModelShape, Target, as_flags

pytestmark = pytest.mark.vllm

# The same builder and rope, small enough for a CPU.
SMALL = replace(
    LLAMA_3_1_8B,
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=1024,
    max_model_len=16_384,
)
BUDGET = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 96,
    "interval_tokens": 8,
    "evict_when": "always",
}


def test_an_engine_serves_a_shape_without_weights(tmp_path: Path, engine: Any, greedy: Any) -> None:
    folder = build_shape(tmp_path / "shape", SMALL)
    target = Target(dummy_weights=True)
    args = target.engine_args(folder, block_size=32, max_model_len=1024, num_blocks=64)
    with engine(**args, **engine_args(BUDGET, **target.settings())) as llm:
        core = llm.llm_engine.engine_core.engine_core
        config = llm.llm_engine.vllm_config.model_config
        assert config.get_num_layers(llm.llm_engine.vllm_config.parallel_config) == 2
        assert config.hf_text_config.rope_parameters["rope_type"] == "llama3"
        assert config.hf_text_config.rope_parameters["rope_theta"] == SMALL.rope_theta
        assert llm.get_tokenizer().encode("abc", add_special_tokens=False) == [97, 98, 99]
        (tokens,) = greedy(llm, [[7 * i % 120 + 3 for i in range(200)]], 40)
        assert len(tokens) == 40
        assert core.scheduler.vtoken.counters.tokens.evicted > 100
        assert core.scheduler.vtoken.geometry.num_blocks == 64 + 1  # vLLM's null block
        assert not core.scheduler.vtoken.counters.invariants.violations


def test_vllms_server_reads_the_flags_as_the_engine_reads_the_arguments(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder = build_shape(tmp_path / "shape", SMALL)
    on_gpu = Target(
        device="cuda", dtype="bfloat16", graphs=True, dummy_weights=True, attention="TRITON_ATTN"
    )
    for target in (on_gpu, Target()):
        args = target.engine_args(
            folder, block_size=16, max_model_len=1024, num_blocks=64, max_logprobs=7
        )
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        found = EngineArgs.from_cli_args(
            parser.parse_args(["--model", str(folder), *as_flags(args)])
        )
        read = {name: getattr(found, name) for name in args}
        backend = read.pop("attention_backend", None)
        assert read == {name: v for name, v in args.items() if name != "attention_backend"}
        assert getattr(backend, "name", backend) == target.attention


def test_a_shape_is_made_once_and_nothing_else_is_replaced(tmp_path: Path) -> None:
    folder = build_shape(tmp_path / "shape", SMALL)
    assert ModelShape.of(folder) == ModelShape(2, 2, 32)
    before = (folder / "config.json").stat().st_mtime_ns
    assert build_shape(folder, SMALL) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    build_shape(folder, replace(SMALL, num_layers=3))
    assert ModelShape.of(folder).num_layers == 3
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="is not empty"):
        build_shape(tmp_path, SMALL)
