"""Model folders without weights: a shape and a tokenizer, for engines with `--dummy-weights`.

The output of such an engine is meaningless; its cache size and step times are those of a model of
the shape. Nothing is downloaded: the tokenizer is the demo model's, one token per byte, and all
other ids of the vocabulary have no text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama model; `rope_factor`: its context length over the base's 8,192."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    rope_theta: float = 500_000.0
    rope_factor: float = 8.0

    def config(self) -> dict[str, Any]:
        """`config.json` as transformers writes it for a `LlamaForCausalLM`."""
        from vtoken.demo.model import NUM_BYTES

        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "initializer_range": 0.02,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": NUM_BYTES,
            "eos_token_id": NUM_BYTES + 1,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


LLAMA_3_1_8B = Shape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=128_256,
    max_model_len=131_072,
)
SHAPE_FILE = "vtoken_shape.json"


def build_shape(path: Path, shape: Shape) -> Path:
    """Make the model folder of `shape` in `path`, or reuse the existing one; return `path`.

    Raises FileExistsError if `path` holds files that this function did not make.
    """
    from vtoken.demo.model import save_tokenizer

    marker = path / SHAPE_FILE
    if marker.is_file() and json.loads(marker.read_text()) == asdict(shape):
        return path
    if path.exists() and any(path.iterdir()) and not marker.is_file():
        raise FileExistsError(f"{path} is not empty and holds no {SHAPE_FILE}; remove it")
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, shape.max_model_len)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    marker.write_text(json.dumps(asdict(shape), indent=2) + "\n")  # last: the folder is complete
    return path
