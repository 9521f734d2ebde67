"""A larger random model of another architecture: a Qwen3 of 26 million parameters.

Its output is meaningless. Keys and queries are normalised; `GAIN` makes attention as uneven as in a
trained model, so that scores differ. The tokenizer is the demo model's, one token for each byte.
"""

from __future__ import annotations

from pathlib import Path

from vtoken_bench.random_model import save

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 8, 512, 1536, 8, 2, 64
MAX_MODEL_LEN = 8192
GAIN = 3.0
SEED = 0


def build(path: Path) -> Path:
    """Make the model in `path`, or reuse an existing one; returns `path`."""
    if (path / "model.safetensors").is_file():
        return path
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from vtoken.demo.model import NUM_BYTES

    config = Qwen3Config(
        vocab_size=NUM_BYTES + 2,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=NUM_BYTES,
        eos_token_id=NUM_BYTES + 1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.mul_(GAIN)
    return save(model, path, MAX_MODEL_LEN)
