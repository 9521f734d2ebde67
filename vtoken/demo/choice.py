"""Chooses the demo's model (named by the user, trained, random) and the flags of `vtoken serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llvmlite.binding import get_host_cpu_features

from vtoken.demo.trained_model import DEFAULT, MODELS, TrainedModel, TrainedModelError, fetch

FLAGS = (
    "--vtoken-policy=auto",
    "--vtoken-budget-tokens=256",
    "--vtoken-interval-tokens=64",
    "--vtoken-theta-f=0.15",
    "--vtoken-show-text",  # all clients are the demo's own
    "--enforce-eager",
    "--max-num-seqs=32",
    "--block-size=16",
    "--max-model-len=auto",  # as many tokens as the cache holds
)
NUM_BLOCKS = 320  # of all engines: less than the traffic needs, so that reclamation is visible
MIN_BLOCKS = 65  # of one engine: a passage of the traffic fits
# Times this for a model with windows: of 222 blocks that 900 tokens of Gemma take, 165 are those of
# its windows.
WINDOWS_FACTOR = 4
# How a model without a chat template gets a conversation: as text that it continues.
AS_TEXT = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "user" %}Question: {{ message.content }}
{% elif message.role == "assistant" %}Answer: {{ message.content }}

{% else %}{{ message.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"""
# With an explicit size vLLM does not reserve a share of the machine's memory. The number of blocks
# decides what is allocated.
EXPLICIT_SIZE = "--kv-cache-memory-bytes=67108864"
# Engines of one machine's cores. vLLM would pin all of them to the same ones.
SHARED_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
BF16_FEATURES = ("avx512bf16", "amx-bf16", "bf16")  # LLVM's names; the last is Arm's


@dataclass(frozen=True, slots=True)
class Choice:
    """The model, flags and environment of `vtoken serve`."""

    model: str
    flags: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def choose(model: str | None, out: Path, num_engines: int = 1) -> Choice:
    """The given model, else the trained one, else (without a network) a random one made in `out`.

    With `num_engines`, data-parallel engines serve it and share the blocks, as they share the
    traffic. Raises TrainedModelError if `model` is a name in `MODELS` and cannot be fetched.
    """
    trained = MODELS.get(model or DEFAULT)
    factor = WINDOWS_FACTOR if trained is not None and trained.has_windows else 1
    num_blocks = factor * max(NUM_BLOCKS // num_engines, MIN_BLOCKS)
    flags = [*FLAGS, EXPLICIT_SIZE, f"--num-gpu-blocks-override={num_blocks}"]
    environment = {}
    if num_engines > 1:
        flags += [f"--data-parallel-size={num_engines}"]
    if serves_on_cpu():
        flags += [f"--dtype={faster_dtype()}"]
        environment = SHARED_CORES if num_engines > 1 else {}
    if trained is None:
        return Choice(str(model), flags, environment)
    folder, own_flags = _own_model(model, trained, out)
    environment = {"HF_HUB_OFFLINE": "1", **environment}
    return Choice(str(folder), [*flags, *own_flags], environment)


def _own_model(name: str | None, trained: TrainedModel, out: Path) -> tuple[Path, list[str]]:
    """Folder and flags of the trained model. If it was not named and cannot be fetched, those of a
    random one made in `out`.
    """
    try:
        folder = fetch(name or DEFAULT)
    except TrainedModelError as error:
        if name is not None:
            raise
        from vtoken.demo.model import build

        instead = "using a small random model instead, whose answers are meaningless"
        print(f"{error}; {instead}", file=sys.stderr, flush=True)
        return build(out / "model"), ["--served-model-name=random"]
    print(trained.licence, file=sys.stderr, flush=True)
    flags = [f"--served-model-name={trained.name}"]
    if not trained.chats:
        flags.append(f"--chat-template={AS_TEXT}")
    return folder, flags


def serves_on_cpu() -> bool:
    """Whether the CPU build of vLLM is installed."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def faster_dtype() -> str:
    """The faster dtype on this CPU: bfloat16 if it has instructions for it, else float32.

    Measured with vLLM 0.32 on two cores of a Zen 5 (`avx512_bf16`), one thread, SmolLM2-135M:
    decode steps of 8 requests take 25 ms in bfloat16 and 37 ms in float32, of one request 17 and
    21 ms; prompts run at 1,500 and 760 tokens a second.
    """
    features = get_host_cpu_features()
    return "bfloat16" if any(features.get(name) for name in BF16_FEATURES) else "float32"
