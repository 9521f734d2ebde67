"""The files of a model on this machine, and the fingerprint of its weights.

Hub models are looked up in the hub's local cache and never downloaded here. The fingerprint is the
SHA-256 of

1. `config.json`, without the fields that affect how the model runs but not what it computes
2. for every weight file that Hugging Face loads: its name, its size, the header of a safetensors
   file, and PIECES pieces of PIECE_BYTES bytes, evenly spaced over the file

Computing it takes milliseconds for any model size. It does not depend on the folder. Another
revision, a fine-tuned or a quantised version has another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vtoken.base.errors import ProfileError

PIECES, PIECE_BYTES = 256, 256
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
RUN_FIELDS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")


def model_folder(model: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder `model`, or the snapshot of a hub id in the hub's cache.

    `cache`: the hub's cache folder, None for its default. Raises ProfileError if there is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError):
        raise ProfileError(
            f"{model} is neither a folder nor a model in the Hugging Face cache"
        ) from None


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits that identify the weights in `folder`; raises ProfileError."""
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_bytes())
        fields = {name: value for name, value in config.items() if name not in RUN_FIELDS}
        digest.update(json.dumps(fields, sort_keys=True).encode())
        for path in weight_files(folder):
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for piece in _pieces(file, path):
                    digest.update(piece)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ProfileError(f"the model in {folder} has no fingerprint: {error}") from None
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that Hugging Face loads from `folder`, by name; raises ProfileError."""
    for index in INDEXES:
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
    for name in SINGLE:
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ProfileError(f"{folder} holds no weights: neither *.safetensors nor {SINGLE[1]}")
    return found


def _pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        yield file.read(size)
    start = file.tell()
    step = (path.stat().st_size - start - PIECE_BYTES) / (PIECES - 1)
    for number in range(PIECES):
        file.seek(start + max(0, int(number * step)))
        yield file.read(PIECE_BYTES)
