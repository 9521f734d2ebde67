"""Model and device of a benchmark, and the engine arguments that follow from them.

All benchmarks that run an engine share these flags, so that the same command runs on a GPU. This
module does not import vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number
STOCK_BLOCK_SIZE = {"cpu": 32, "cuda": 16}  # smallest that stock vLLM accepts
DEMO, TRAINED, GEMMA, LLAMA_8B = "demo", "trained", "gemma", "llama-8b"
MODELS = (DEMO, TRAINED)
NAMES = (*MODELS, GEMMA, LLAMA_8B)  # the last has no weights: --dummy-weights
FETCHED = {TRAINED: "smollm2", GEMMA: "gemma"}  # their names in `vtoken.demo.trained_model`
UNTRAINED = (DEMO, LLAMA_8B)
# An engine starts on a GPU only if this share of its memory is free. With a given cache size vLLM
# takes no more than it needs, and several engines share the device.
GPU_MEMORY_UTILIZATION, SHARED_GPU_MEMORY_UTILIZATION = 0.9, 0.05
HOPPER = 9  # compute capability


class TargetError(ValueError):
    """The requested target cannot run here; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Target:
    """Device, dtype and engine options of a benchmark; None: its own or vLLM's default.

    `graphs`: CUDA graphs. `threads`: per forward on CPU. `attention`: the backend, the same for
    stock vLLM.
    """

    device: Device = "cpu"
    dtype: str = "float32"
    max_model_len: int | None = None
    cache_bytes: int | None = None
    graphs: bool = False
    threads: int | None = None
    dummy_weights: bool = False
    attention: str | None = None

    @property
    def stock_block_size(self) -> int:
        return STOCK_BLOCK_SIZE[self.device]

    @property
    def number_bytes(self) -> int:
        return DTYPES[self.dtype]

    def settings(self) -> dict[str, Any]:
        """Arguments of `vtoken.vllm.engine_args` for this device."""
        return {"experimental_cuda": True} if self.device == "cuda" else {}

    def num_blocks(self, model: Path, num_tokens: int, *, block_size: int) -> int:
        """Usable blocks of a cache that holds `num_tokens` in full blocks, or of `cache_bytes`.

        A seventh is added, because the default gates open when an eighth of the pool is free.
        """
        if self.cache_bytes is None:
            return -(-num_tokens * 8 // (7 * block_size))
        block_bytes = ModelShape.of(model).token_bytes(self.number_bytes) * block_size
        return self.cache_bytes // block_bytes - 1  # one is vLLM's null block

    def engine_args(
        self,
        model: Path,
        *,
        block_size: int,
        max_model_len: int,
        num_blocks: int | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs`.

        `num_blocks`: of all layers, without vLLM's null block. Where vLLM divides the layers into
        groups, each has as many.
        """
        shape = ModelShape.of(model)
        longest = self.max_model_len or max_model_len
        args: dict[str, Any] = {
            "model": str(model),
            "dtype": self.dtype,
            "enforce_eager": not self.graphs,
            "max_model_len": longest,
            "block_size": block_size,
            "enable_prefix_caching": False,
        }
        if num_blocks is not None:
            block_bytes = shape.token_bytes(self.number_bytes) * block_size
            args["num_gpu_blocks_override"] = num_blocks * shape.num_groups + 1
            args["kv_cache_memory_bytes"] = (num_blocks + 1) * block_bytes
        if self.cache_bytes is not None:
            args.pop("num_gpu_blocks_override", None)
            args["kv_cache_memory_bytes"] = self.cache_bytes
        if self.dummy_weights:
            args["load_format"] = "dummy"
        if self.attention is not None:
            args["attention_backend"] = self.attention
        args |= others
        if self.device == "cuda":
            sized = "kv_cache_memory_bytes" in args
            share = SHARED_GPU_MEMORY_UTILIZATION if sized else GPU_MEMORY_UTILIZATION
            args.setdefault("gpu_memory_utilization", share)
        return args

    def described(self) -> dict[str, Any]:
        """Entries of a result's setup line."""
        found = {
            "device": self.device,
            "dtype": self.dtype,
            "graphs": "on" if self.graphs else "off",
            "threads": self.threads or "vLLM's choice",
        }
        return found if self.attention is None else found | {"attention": self.attention}


def share(text: str) -> float:
    """A share of a command line, as a decimal or as a fraction, `1/3`."""
    over, _, under = text.partition("/")
    value = float(over) / float(under or 1)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return round(value, 4)


def as_flags(engine_args: dict[str, Any]) -> list[str]:
    """Engine arguments as flags of vLLM's server, which takes the model without a flag."""
    flags = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that give the bytes of a token's K and V, from the model's `config.json`.

    `num_groups`: into which vLLM divides the layers, 1 where all are of one kind.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    num_groups: int = 1

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Raises TargetError if there is no `config.json`."""
        try:
            config = json.loads((folder / "config.json").read_text())
        except FileNotFoundError:
            raise TargetError(f"{folder} is no model folder: it has no config.json") from None
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kinds = Counter(config.get("layer_types", ())).values()
        groups = sum(-(-count // min(kinds)) for count in kinds) or 1
        return cls(config["num_hidden_layers"], heads, size, groups)

    def token_bytes(self, number_bytes: int) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * number_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `target` reads."""
    group = parser.add_argument_group("where it runs")
    group.add_argument("--device", choices=("cpu", "cuda"), help="(default: what torch finds)")
    group.add_argument("--dtype", choices=DTYPES, help="(default: float32 on cpu, else bfloat16)")
    group.add_argument("--max-model-len", type=int, help="(default: what the workload needs)")
    group.add_argument("--cache-bytes", type=int, help="KV cache (default: what the bench needs)")
    group.add_argument("--graphs", action="store_true", default=None, help="CUDA graphs on")
    group.add_argument(
        "--no-graphs", action="store_false", dest="graphs", help="off (on CPU: always)"
    )
    group.add_argument(
        "--threads",
        type=int,
        help="per forward on CPU (default: vLLM's choice). Use 1 on a shared machine: threads spin"
        " while they wait for each other, and CPU time counts that",
    )
    group.add_argument("--dummy-weights", action="store_true", help="use a model's shape alone")
    group.add_argument(
        "--attention-backend", help="(default: on cuda one that reads page size 1, else vLLM's)"
    )


def make_target(name: str, args: argparse.Namespace) -> str:
    """`make NAME` as the command of a result, with the given threads."""
    return f"make {name} THREADS={args.threads}" if args.threads else f"make {name}"


def target(args: argparse.Namespace) -> Target:
    """The target of parsed flags. Raises TargetError if this machine cannot run it."""
    device: Device = args.device or found_device()
    if device == "cuda" and found_device() != "cuda":
        raise TargetError("--device cuda: torch finds no CUDA device here")
    if args.graphs and device == "cpu":
        raise TargetError("--graphs: CUDA graphs need --device cuda")
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    attention = args.attention_backend
    if attention is None and device == "cuda":
        attention = paged_attention(_capability(), dtype)
    return Target(
        device=device,
        dtype=dtype,
        max_model_len=args.max_model_len,
        cache_bytes=args.cache_bytes,
        graphs=device == "cuda" if args.graphs is None else args.graphs,
        threads=args.threads,
        dummy_weights=args.dummy_weights,
        attention=attention,
    )


def paged_attention(capability: int, dtype: str) -> str:
    """The backend that reads page size 1: FlashAttention 3 on Hopper (not float32), else Triton."""
    hopper = capability == HOPPER and dtype != "float32"
    return "FLASH_ATTN" if hopper else "TRITON_ATTN"


def found_device() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Name of the CUDA device; there must be one."""
    import torch

    return str(torch.cuda.get_device_name())


def _capability() -> int:
    import torch

    return int(torch.cuda.get_device_capability()[0])


def model_folder(name: str | None) -> Path:
    """The folder of the model `name`: one of NAMES, or a folder; None is the demo model.

    The demo model and the shape of "llama-8b" are built if missing; the trained
    models are downloaded. Raises TrainedModelError, and TargetError if a folder holds no model or a
    different one.
    """
    try:
        if name in (None, DEMO):
            from vtoken.demo.model import build

            os.environ["HF_HUB_OFFLINE"] = "1"
            return build(Path(tempfile.gettempdir()) / "vtoken-demo-model")
        if name == LLAMA_8B:
            from vtoken_bench.shapes import LLAMA_3_1_8B, build_shape

            os.environ["HF_HUB_OFFLINE"] = "1"
            return build_shape(Path(tempfile.gettempdir()) / "vtoken-llama-8b", LLAMA_3_1_8B)
    except FileExistsError as error:
        raise TargetError(str(error)) from None
    if name in FETCHED:
        from vtoken.demo.trained_model import fetch

        return fetch(FETCHED[name])
    folder = Path(name)
    ModelShape.of(folder)
    return folder
