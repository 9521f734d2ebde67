"""Architectures: supported ones decode exactly under eviction, all others are refused.

A few run in the suite; `make test-models` (VTOKEN_ALL_MODELS=1) runs all of `models.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import init_speculator

from tests.support import models, reference
from tests.support.engines import H2O, RELOCATING, engine_args
from tests.support.observe import Observer, scheduler_of
from vtoken.base.errors import UnsupportedError
from vtoken.vllm.startup import support
from vtoken.wire.commands import Command, PatchConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("any_architecture")]

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
FAMILIES = models.SERVED | models.MIXED | models.HYBRID
SERVED = list(FAMILIES) if ALL else ["qwen3", "llama4", "nemotron_h", "qwen3_next"]
FEW_REFUSED = ["mistral, window", "deepseek_v3", "jamba", "paligemma", "mimo_v2"]
FEW_REFUSED += ["gemma4, shared KV"]
REFUSED = list(models.REFUSED) if ALL else FEW_REFUSED
NUM_NEW = 64
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 90, 61))]

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
MP = {"distributed_executor_backend": "mp"}
EXTERNAL = {"distributed_executor_backend": "external_launcher"}
MANY = {"max_num_batched_tokens": 1 << 17}

Log = dict[int, set[int]]


def replay(
    folder: Path, dtype: str, logs: list[Log], found: list[list[int]]
) -> tuple[float, list[list[int]]]:
    """The most that a token of `found` is behind the reference's choice with the victims of `logs`,
    and the reference's tokens without victims.
    """
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, attn_implementation="eager", dtype=dtype).eval()
    traces = [
        reference.trace(model, prompt, NUM_NEW, reference.replay(log), draft=tokens, follow=tokens)
        for prompt, log, tokens in zip(PROMPTS, logs, found, strict=True)
    ]
    full = [reference.generate(model, prompt, NUM_NEW, reference.full) for prompt in PROMPTS]
    return max(max(trace.behind()) for trace in traces), full


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # GPT-BigCode's own code
@pytest.mark.parametrize("name", SERVED)
def test_tokens_under_h2o_equal_the_reference(
    name: str, engine: Any, greedy: Any, in_process: Callable[..., Any], tmp_path: Path
) -> None:
    folder = in_process(models.make, FAMILIES[name], tmp_path / "model")
    settings: dict[str, Any] = {
        "model": str(folder),
        "max_model_len": 512,
        "dtype": FAMILIES[name].dtype,
        "block_size": None if name in models.HYBRID else 16,  # vLLM fits it to the states
        "num_gpu_blocks_override": 512,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    args = engine_args(H2O | {"verify_ratio": 1.0}, check_every_step=True)
    with engine(**settings, **args) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        logs = observer.logs()
        assert observer.runtime.counters.reclamation.recycled_slots > 100
        controller = scheduler_of(llm).vtoken_controller
        reply = controller.handle(Command(call=PatchConfig(patch=RELOCATING)))
        assert reply.problem is None
        assert greedy(llm, PROMPTS, NUM_NEW) == tokens
        assert observer.logs()[len(PROMPTS) :] == logs
        counters, size = observer.runtime.counters, observer.runtime.geometry.block_size
        assert counters.reclamation.relocations > 0 or size > len(PROMPTS[0]) + NUM_NEW
        assert observer.runtime.counters.invariants.violations == 0
    behind, full = in_process(replay, folder, FAMILIES[name].dtype, logs, tokens)
    assert behind <= models.NEAR_TIE[FAMILIES[name].dtype]
    assert all(with_all != got for with_all, got in zip(full, tokens, strict=True))


def configuration(folder: Path, **arguments: Any) -> Any:
    """vLLM's own configuration of an engine with vToken, no weights needed."""
    from vllm.engine.arg_utils import EngineArgs

    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": 32}
    settings |= {"skip_tokenizer_init": True, "enforce_eager": True, **engine_args(), **arguments}
    return EngineArgs(model=str(folder), **settings).create_engine_config()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_by_their_configuration_alone(
    name: str, tmp_path: Path
) -> None:
    recipe = models.REFUSED[name]
    models.write_config(recipe, tmp_path)
    limit = 448 if name == "whisper" else 512
    with pytest.raises(UnsupportedError) as caught:
        support.check_config(configuration(tmp_path, max_model_len=limit))
    message = str(caught.value)
    assert recipe.why in message
    assert message.startswith("vToken cannot serve this configuration: ")
    assert message.endswith(". Change it, or start without vToken.")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"pipeline_parallel_size": 2, **EXTERNAL}, "every stage would sample; use"),
        ({"pipeline_parallel_size": 4, **MP}, "4 pipeline stages: never run .* at most 2"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **MP}, "stages of several ranks"),
        ({"pipeline_parallel_size": 2, "nnodes": 2, **MP}, "pipeline stages over several nodes"),
        ({"data_parallel_backend": "ray"}, "engines as actors of Ray: never run with vToken"),
        ({"data_parallel_size": 2}, "data parallelism of a mixture of experts"),
        ({"kv_transfer_config": CONNECTOR}, "leave --kv-transfer-config and"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size out"),
        ({"kv_cache_dtype": "fp8"}, r"quantised KV cache \(fp8\): pass another type"),
        ({"runner": "pooling"}, "runner pooling: nothing is decoded"),
        ({"block_size": 65_536}, "blocks of 65536 slots: at most 65,535; set --block-size"),
        ({"max_num_seqs": 65_536, **MANY}, "65,536 requests at a time, .*set --max-num-seqs"),
    ],
)
def test_unsupported_flags_are_refused_with_the_fix(
    arguments: dict[str, Any], why: str, demo_model: Path
) -> None:
    support.check_config(configuration(demo_model))
    with pytest.raises(UnsupportedError, match=why):
        support.check_config(configuration(demo_model, **arguments))


def test_layers_with_query_heads_of_several_numbers_are_refused() -> None:
    def layers(*counts: int) -> dict[str, Any]:
        impls = [SimpleNamespace(num_heads=count) for count in counts]
        return {f"layer {i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}

    support.check_layers(layers(4, 4))
    with pytest.raises(UnsupportedError, match=r"query heads of several numbers.*2 of 2"):
        support.check_layers(layers(4, 8))


def test_a_cache_in_another_type_than_the_models_is_refused(demo_model: Path) -> None:
    """From vLLM 0.33 on, vLLM itself refuses the flag where the model is in float32."""
    config = configuration(demo_model)
    config.cache_config.cache_dtype = "bfloat16"
    with pytest.raises(UnsupportedError, match="a KV cache in bfloat16 for a model in float32"):
        support.check_config(config)


def test_of_ray_only_the_executor_that_runs_ranks_as_actors_is_served(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.envs

    config = configuration(demo_model)
    config.parallel_config.distributed_executor_backend = "ray"
    support.check_config(config)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UnsupportedError, match="pipeline stages as actors of Ray: never run"):
        support.check_config(config)
    config.parallel_config.pipeline_parallel_size = 1
    if "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" not in vllm.envs.environment_variables:
        return  # vLLM 0.33 has only that one
    vllm.envs.disable_envs_cache()  # an earlier engine of this process has turned it on
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(UnsupportedError, match="first executor for Ray: never run with vToken"):
        support.check_config(config)


DRAFTERS = (
    *("dflash", "dspark", "extract_hidden_states", "medusa", "mlp_speculator"),
    *("ngram_gpu", "custom_class"),
)


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_that_were_never_compared_are_refused_by_name_without_weights(
    method: str, demo_model: Path
) -> None:
    config = configuration(demo_model, speculative_config=NGRAM)
    support.check_config(config)
    config.speculative_config.method = method
    why = f"drafts of {method}: never compared; take the method ngram, .* or leave it out"
    with pytest.raises(UnsupportedError, match=why):
        support.check_config(config)


def mtp_of(model_type: str, num_modules: int = 1) -> Any:
    found = SimpleNamespace(model_type=model_type, num_nextn_predict_layers=num_modules)
    return SimpleNamespace(hf_config=found, uses_mrope=False)


REFUSED_DRAFTERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "parallel": ("draft_model", {"parallel_drafting": True}, "leave parallel_drafting out of"),
    "modules": (
        "mtp",
        {"draft_model_config": mtp_of("mimo_mtp", 2), "num_speculative_tokens": 2},
        "several modules of MTP: never compared; set num_speculative_tokens to 1",
    ),
    "gemma4": ("mtp", {"draft_model_config": mtp_of("gemma4_mtp")}, "leave --speculative"),
    "step3p5": ("mtp", {"draft_model_config": mtp_of("step3p5_mtp")}, "leave --speculative"),
}


@pytest.mark.parametrize("name", REFUSED_DRAFTERS)
def test_drafters_with_layers_are_refused_where_their_places_are_others(
    name: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, facts, why = REFUSED_DRAFTERS[name]
    config = configuration(demo_model, speculative_config=NGRAM)
    config.speculative_config.method = method
    support.check_config(config)
    for fact, value in facts.items():
        monkeypatch.setattr(config.speculative_config, fact, value)
    with pytest.raises(UnsupportedError, match=why):
        support.check_config(config)


@pytest.mark.parametrize("whose", ["model", "drafter"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafters_with_layers_are_refused_where_one_of_both_has_m_rope(
    method: str, whose: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(demo_model, speculative_config=NGRAM)
    config.speculative_config.method = method
    drafts = config.speculative_config
    drafts.draft_model_config = SimpleNamespace(uses_mrope=whose == "drafter")
    monkeypatch.setattr(type(config.model_config), "uses_mrope", whose == "model")
    with pytest.raises(UnsupportedError, match=r"M-RoPE: .* take the method ngram or suffix"):
        support.check_config(config)


def test_drafts_are_refused_where_they_were_never_compared(
    demo_model: Path, tmp_path: Path
) -> None:
    config = configuration(demo_model, speculative_config=NGRAM)
    config.device_config.device_type = "cuda"
    for method in ("ngram", "suffix"):
        config.speculative_config.method = method
        with pytest.raises(UnsupportedError, match=r"on cuda: .* takes no rejected draft"):
            support.check_config(config)
    models.write_config(models.HYBRID["granitemoehybrid"], tmp_path)
    config = configuration(tmp_path, speculative_config=NGRAM)
    with pytest.raises(UnsupportedError, match=r"prefix cache: .* use --no-enable-prefix-caching"):
        support.check_config(config)
    config.speculative_config.method = "draft_model"
    with pytest.raises(UnsupportedError, match=r"draft_model beside states: never compared"):
        support.check_config(config)
    models.write_config(models.MIXED["ministral"], tmp_path)
    config = configuration(tmp_path, speculative_config=NGRAM)
    support.check_config(config)
    config.speculative_config.method = "eagle"
    with pytest.raises(UnsupportedError, match=r"layers beside layers with a window: never"):
        support.check_config(config)
    models.write_config(models.MIXED["llama4"], tmp_path)
    config = configuration(tmp_path, speculative_config=NGRAM)
    with pytest.raises(UnsupportedError, match="drafts beside layers with chunks: never compared"):
        support.check_config(config)
    config = configuration(demo_model, speculative_config=NGRAM, tensor_parallel_size=2, **MP)
    with pytest.raises(UnsupportedError, match="with tensor or pipeline parallelism: never"):
        support.check_config(config)


def test_vllms_runner_on_cuda_has_no_drafts_of_suffix(demo_model: Path) -> None:
    config = configuration(demo_model, speculative_config=NGRAM)
    config.speculative_config.method = "suffix"
    with pytest.raises(NotImplementedError, match="suffix is not supported yet"):
        init_speculator(config, torch.device("cpu"), None)


def test_vllm_itself_plans_no_step_of_drafts_before_the_report_of_the_last(
    demo_model: Path,
) -> None:
    with pytest.raises(ValueError, match=r"(?i)async scheduling"):
        configuration(demo_model, speculative_config=NGRAM, async_scheduling=True)
    config = configuration(demo_model, speculative_config=NGRAM)
    assert config.scheduler_config.async_scheduling is False


def test_a_window_that_is_disabled_is_served_up_to_its_length(tmp_path: Path) -> None:
    models.write_config(models.REFUSED["mistral, window"], tmp_path)
    config = configuration(tmp_path, max_model_len=64, disable_sliding_window=True)
    support.check_config(config)
    assert config.model_config.max_model_len == 64


def test_a_prefix_lm_without_images_is_served(tmp_path: Path) -> None:
    models.write_config(models.REFUSED["paligemma"], tmp_path)
    support.check_config(configuration(tmp_path, limit_mm_per_prompt={"image": 0}))


def layer(**attributes: Any) -> Any:
    impl = attributes.pop("impl", {})
    return SimpleNamespace(impl=SimpleNamespace(**impl), **attributes)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (layer(impl={"alibi_slopes": [1.0]}), "ALiBi"),
        (layer(impl={"sliding_window": (63, 0)}), "sliding-window attention"),
        (layer(impl={"kv_sharing_target_layer_name": "a.0"}), "KV sharing"),
        (layer(attn_type="encoder_only"), "encoder_only attention"),
        (layer(kv_cache_dtype="fp8_e4m3"), r"a quantised KV cache \(fp8_e4m3\)"),
    ],
)
def test_unsupported_layers_are_reported_once_with_their_number(odd: Any, why: str) -> None:
    plain = layer(attn_type="decoder", kv_cache_dtype="auto", impl={"sliding_window": (-1, -1)})
    support.check_layers({"a.0.attn": plain, "a.1.attn": plain})
    with pytest.raises(
        UnsupportedError, match=rf"{why}.* \(2 of 3 attention layers, a\.1\.attn the"
    ):
        support.check_layers({"a.0.attn": plain, "a.1.attn": odd, "a.2.attn": odd})
