"""Chooses the dtype of a model and the size of its KV cache, so that both fit this machine.

torch and transformers are imported inside functions.

1. cache_bytes = num_blocks * BLOCK_SIZE * bytes_per_token.
2. max_model_len <= (num_blocks - 1) * BLOCK_SIZE: one request of full length fits.
3. weights + cache_bytes + RESERVE_BYTES <= available, if `available` is known.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vtoken.demo.server import DemoError

BLOCK_SIZE = 16  # tokens
NUM_BLOCKS = 320  # of all engines: less than the traffic needs, so that reclamation is visible
MAX_MODEL_LEN = 4096  # tokens
MIN_TOKENS = 1024  # in a cache; the traffic's passages need as many
RESERVE_BYTES = 3 << 30  # vLLM's three processes without weights and cache, clients, console
BYTES_OF = {"bfloat16": 2, "float16": 2, "half": 2}  # any other type: 4
CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's


@dataclass(frozen=True, slots=True)
class Geometry:
    """The dimensions that determine the size of a token's K and V."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    max_model_len: int  # tokens

    def bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * BYTES_OF.get(dtype, 4)


@dataclass(frozen=True, slots=True)
class Size:
    """A KV cache of `num_blocks` blocks for a model of `geometry` in `dtype`."""

    geometry: Geometry
    dtype: str
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens that fit; vLLM reserves one block."""
        return (self.num_blocks - 1) * BLOCK_SIZE

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * BLOCK_SIZE * self.geometry.bytes_per_token(self.dtype)

    @property
    def max_model_len(self) -> int:
        return min(self.geometry.max_model_len, MAX_MODEL_LEN, self.num_tokens)

    def flags(self) -> list[str]:
        """The flags of `vtoken serve`."""
        return [
            f"--dtype={self.dtype}",
            f"--block-size={BLOCK_SIZE}",
            f"--kv-cache-memory-bytes={self.cache_bytes}",
            f"--max-model-len={self.max_model_len}",
        ]


def faster_dtype(cpuinfo: Path = CPUINFO) -> str:
    """The faster dtype on this CPU: bfloat16 if it has instructions for it, else float32.

    Measured with vLLM 0.32 on two cores of a Zen 5 (`avx512_bf16`), one thread, SmolLM2-135M:
    decode steps of 8 requests take 25 ms in bfloat16 and 37 ms in float32, of one request 17 and
    21 ms; prompts run at 1,500 and 760 tokens a second.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return "float32"
    named = (line.partition(":") for line in lines)
    flags = {
        flag
        for name, _, value in named
        if name.strip() in ("flags", "Features")
        for flag in value.split()
    }
    return "bfloat16" if flags & BF16_FLAGS else "float32"


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """Memory available without swapping; None if the system does not report it."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def num_blocks_of(num_engines: int) -> int:
    """Blocks of one of `num_engines` engines, which share the traffic."""
    return max(NUM_BLOCKS // num_engines, MIN_TOKENS // BLOCK_SIZE + 1)


def fit(
    model: str,
    geometry: Geometry,
    dtype: str,
    available: int | None,
    num_weights: int,
    num_engines: int = 1,
) -> Size:
    """The cache for one of `num_engines` engines of `model`, if `available` bytes are free for
    everything of that engine (None: enough).

    Raises DemoError if MIN_TOKENS do not fit beside `num_weights` numbers in `dtype`.
    """
    most = num_blocks_of(num_engines)
    if available is None:
        return Size(geometry, dtype, most)
    weights = num_weights * BYTES_OF.get(dtype, 4)
    per_token = geometry.bytes_per_token(dtype)
    left = available - weights - RESERVE_BYTES
    if left < MIN_TOKENS * per_token:
        raise DemoError(
            f"{model} does not fit: {_gib(weights)} of weights in {dtype}, {_gib(RESERVE_BYTES)} "
            f"for the server's processes and {_gib(MIN_TOKENS * per_token)} for a cache of "
            f"{MIN_TOKENS} tokens, but {_gib(available)} of memory are available; "
            "choose a smaller model"
        )
    return Size(geometry, dtype, min(most, left // (BLOCK_SIZE * per_token)))


def geometry(config: Any) -> Geometry:
    """The geometry of a Hugging Face config, or of an object with its attributes."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_heads = text.num_attention_heads
    return Geometry(
        text.num_hidden_layers,
        getattr(text, "num_key_value_heads", None) or num_heads,
        getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        getattr(text, "max_position_embeddings", None) or MAX_MODEL_LEN,
    )


def own_config(folder: Path) -> SimpleNamespace:
    """The config of a model that the demo made, read without transformers, which imports slowly."""
    return SimpleNamespace(**json.loads((folder / "config.json").read_text()))


def read_config(model: str) -> Any:
    """The Hugging Face config of a folder or hub id. Raises DemoError."""
    if not Path(model).is_dir() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise DemoError(f"the folder {model} does not exist")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoError(f"{model} cannot be read as a model: {reason}") from None


def count_parameters(config: Any) -> int:
    """The number of parameters of a model with `config`, without loading it.

    0 if transformers has no causal language model for it; vLLM then checks whether it fits.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError):
        return 0
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
