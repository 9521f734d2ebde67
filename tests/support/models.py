"""Tiny random models of many architectures, made on this machine: supported and refused ones.

Weights have a large variance, so that attention is peaked and an eviction changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 258  # bytes, bos, eos: prompts of `reference.random_prompt`
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 256, "eos_token_id": 257}
PLAIN: dict[str, Any] = {
    **TOKENS,
    "pad_token_id": 257,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
GPT: dict[str, Any] = {
    **TOKENS,
    "pad_token_id": 257,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# How far a token's logit may lie below the reference's best. In bfloat16 those of stock vLLM differ
# from the reference's by up to 0.15; their standard deviation is 1.6.
NEAR_TIE = {"float32": 0.0, "bfloat16": 0.2}


@dataclass(frozen=True)
class Recipe:
    """`config` over PLAIN, or the entire config if `alone`; `why`: text of the refusal."""

    model_type: str
    config: dict[str, Any]
    architecture: str = ""  # where the library's choice is not the decoder
    alone: bool = False
    why: str = ""
    dtype: str = "float32"  # that the kernels can compute


SERVED = {
    "llama": Recipe("llama", {}),
    "llama, llama3 rope": Recipe(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama, yarn": Recipe(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "qwen2": Recipe("qwen2", {}),
    "qwen3": Recipe("qwen3", {"head_dim": 32}),
    "qwen2_moe": Recipe("qwen2_moe", SHARED_EXPERT),
    "qwen3_moe": Recipe("qwen3_moe", EXPERTS | {"head_dim": 32}),
    "mistral": Recipe("mistral", {"sliding_window": None}),
    "mixtral": Recipe("mixtral", LOCAL_EXPERTS | {"sliding_window": None}),
    "gemma": Recipe("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi": Recipe("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3": Recipe("phi3", {"sliding_window": None}),
    "gpt2": Recipe("gpt2", GPT, alone=True),
    "gptj": Recipe("gptj", GPT | {"rotary_dim": 16}, alone=True),
    "gpt_bigcode": Recipe("gpt_bigcode", GPT, alone=True),
    "gpt_neox": Recipe("gpt_neox", {"num_key_value_heads": 4}),
    "opt": Recipe("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "stablelm": Recipe("stablelm", {}),
    "starcoder2": Recipe("starcoder2", {"sliding_window": None}),
    "olmo": Recipe("olmo", {}),
    "olmo2": Recipe("olmo2", {}),
    "olmoe": Recipe("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": Recipe("cohere", {"tie_word_embeddings": True}),
    "glm": Recipe("glm", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "glm4": Recipe("glm4", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "glm4_moe": Recipe("glm4_moe", ROUTED_EXPERTS | {"head_dim": 32, "use_qk_norm": True}),
    "granite": Recipe("granite", {}),
    "granitemoe": Recipe("granitemoe", LOCAL_EXPERTS),
    "nemotron": Recipe("nemotron", {"head_dim": 32}),
    "falcon": Recipe("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "smollm3": Recipe("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 0]}),
    "ernie4_5": Recipe("ernie4_5", {"head_dim": 32}),
    "arcee": Recipe("arcee", {"head_dim": 32}),
    "seed_oss": Recipe("seed_oss", {"head_dim": 32}),
    "hunyuan_v1_dense": Recipe("hunyuan_v1_dense", {"head_dim": 32}),
    "hy_v3": Recipe(
        "hy_v3",
        EXPERTS
        | {"head_dim": 32, "qk_norm": True}
        | {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True},
    ),
    "ministral3": Recipe("ministral3", {"head_dim": 32}, architecture="Ministral3ForCausalLM"),
    "persimmon": Recipe("persimmon", {"num_key_value_heads": 4}),
}
# Of these, the ones whose published models are large; every scenario of `test_hybrids.py` runs.
NAMED = ("glm4_moe", "hy_v3", "ministral3", "mistral", "qwen3_moe")

# One group of full attention beside groups of windows or chunks.
MIXED = {
    "afmoe": Recipe(
        "afmoe",
        EXPERTS
        | {"sliding_window": 64, "num_hidden_layers": 4, "head_dim": 32}
        | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "gemma2": Recipe(
        "gemma2",
        {"sliding_window": 64, "head_dim": 32, "query_pre_attn_scalar": 32}
        | {"num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "gemma3": Recipe(
        "gemma3_text",
        {"sliding_window": 64, "num_hidden_layers": 6, "head_dim": 32}
        | {"query_pre_attn_scalar": 32},
        architecture="Gemma3ForCausalLM",
    ),
    # Pages of a window are twice those of full attention, whose blocks vLLM makes twice as long.
    "gemma4": Recipe(
        "gemma4_text",
        {"sliding_window": 64, "num_hidden_layers": 4, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"head_dim": 256, "num_key_value_heads": 4}
        | {"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0},
        architecture="Gemma4ForCausalLM",
    ),
    "gpt_oss": Recipe(
        "gpt_oss",
        LOCAL_EXPERTS | {"sliding_window": 64, "head_dim": 32, "num_hidden_layers": 4},
    ),
    "llama4": Recipe(
        "llama4_text",
        LOCAL_EXPERTS
        | {"num_experts_per_tok": 1}
        | {"attention_chunk_size": 128, "num_hidden_layers": 4, "head_dim": 32},
        architecture="Llama4ForCausalLM",
    ),
    "ministral": Recipe(
        "ministral",
        {"sliding_window": 64, "num_hidden_layers": 4, "head_dim": 32}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        architecture="MinistralForCausalLM",
    ),
    "olmo3": Recipe("olmo3", {"sliding_window": 64, "num_hidden_layers": 4}),
    "exaone4": Recipe("exaone4", {"sliding_window": 64, "num_hidden_layers": 4}),
    "cwm": Recipe(
        "cwm",
        {"sliding_window": 64, "num_hidden_layers": 4, "head_dim": 32}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    ),
    "vaultgemma": Recipe(
        "vaultgemma",
        {"sliding_window": 64, "num_hidden_layers": 4, "head_dim": 32}
        | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "cohere2": Recipe(
        "cohere2",
        {"sliding_window": 64, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "exaone_moe": Recipe(
        "exaone_moe",
        EXPERTS | {"sliding_window": 64, "num_hidden_layers": 4, "head_dim": 32},
    ),
}

GDN: dict[str, Any] = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
# One group of full attention beside groups of layers with a state.
HYBRID = {
    "granitemoehybrid": Recipe(
        "granitemoehybrid",
        LOCAL_EXPERTS
        | MAMBA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "shared_intermediate_size": 64,
        },
    ),
    "nemotron_h": Recipe(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "num_hidden_layers": 4,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
            "n_routed_experts": 4,
        },
    ),
    "qwen3_next": Recipe("qwen3_next", SHARED_EXPERT | GDN, dtype="bfloat16"),
    "qwen3_5": Recipe("qwen3_5_text", GDN, dtype="bfloat16"),
    "qwen3_5_moe": Recipe(
        "qwen3_5_moe_text",
        SHARED_EXPERT | GDN | {"num_experts_per_tok": 4},  # in bfloat16 a choice may be a near tie
        dtype="bfloat16",
    ),
    "falcon_h1": Recipe("falcon_h1", MAMBA | {"mamba_d_ssm": 256, "head_dim": 32}),
}

REFUSED = {
    "mistral, window": Recipe(
        "mistral",
        {"sliding_window": 64},
        why="--disable-sliding-window serves contexts of up to 64",
    ),
    "phi3, window": Recipe("phi3", {"sliding_window": 64}, why="sliding-window attention"),
    "deepseek_v3": Recipe(
        "deepseek_v3",
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
        why="MLA: the cache holds latents",
    ),
    "mimo_v2": Recipe(
        "mimo_v2_flash",
        ROUTED_EXPERTS | {"sliding_window": 64, "head_dim": 64, "v_head_dim": 32},
        why="K of 64 and V of 32 numbers a head",
    ),
    "gemma4, shared KV": Recipe(
        "gemma4_text",
        {"sliding_window": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 32},
        architecture="Gemma4ForCausalLM",
        why="2 layers read the K and V of other layers",
    ),
    "falcon, alibi": Recipe("falcon", {"alibi": True}, why="ALiBi: the bias follows slot order"),
    "bloom": Recipe("bloom", {"n_layer": 2, "n_head": 4}, why="ALiBi"),
    "paligemma": Recipe(
        "paligemma",
        {
            "text_config": {**PLAIN, "model_type": "gemma", "head_dim": 32},
            "vision_config": {"hidden_size": 64, "image_size": 28, "num_attention_heads": 2},
            "image_token_index": 255,
        },
        architecture="PaliGemmaForConditionalGeneration",
        alone=True,
        why="prefix-LM models: the spans of images are bidirectional",
    ),
    "mamba": Recipe("mamba", {"state_size": 16}, why="there is no KV cache"),
    "jamba": Recipe(
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1},
        why="jamba: vLLM has no Mamba 1 kernel on the CPU",
    ),
    "minimax_m2": Recipe(
        "minimax_m2",
        LOCAL_EXPERTS | {"head_dim": 32},
        why="minimax_m2: vLLM cannot score its experts on the CPU",
    ),
    "bert": Recipe("bert", {}, architecture="BertModel", why="runner pooling: nothing is decoded"),
    "whisper": Recipe(
        "whisper",
        {**TOKENS, "d_model": 128, "max_target_positions": 448},
        architecture="WhisperForConditionalGeneration",
        alone=True,
        why="encoder-decoder models",
    ),
}


def write_config(recipe: Recipe, folder: Path) -> Any:
    """`config.json` of `recipe` in `folder`; the configuration."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = recipe.config if recipe.alone else PLAIN | recipe.config
    config = CONFIG_MAPPING[recipe.model_type](**{"tie_word_embeddings": False, **values})
    architecture = recipe.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[recipe.model_type]
    config.architectures = [architecture]
    config.dtype = "float32"
    config.save_pretrained(folder)
    return config


def recipe_of(family: str) -> Recipe:
    """That of a family that is served."""
    return (SERVED | MIXED | HYBRID)[family]


def make(recipe: Recipe, folder: Path) -> Path:
    """The model of `recipe` in `folder`, float32."""
    import torch
    import transformers

    config = write_config(recipe, folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = getattr(transformers, config.architectures[0])(config).float()
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "gate.weight" not in name and "router" not in name:
                is_table = weight.shape[0] >= VOCAB and ("emb" in name or "wte" in name)
                table_scale = 0.05 if config.tie_word_embeddings else 1.0
                scale = table_scale if is_table else 1.6 / weight.shape[1] ** 0.5
                weight.normal_(0.0, 0.5 if "pos" in name or "wpe" in name else scale)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    return folder
