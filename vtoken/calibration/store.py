"""Calibration profiles as files: JSON, one for each model, in the user's cache.

1. A complete file appears under its name by an atomic rename.
2. A profile is used only for the weights it was measured on: `require` compares fingerprints, and
   the numbers of layers and heads.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from vtoken.base.cache import cache_folder
from vtoken.base.documents import Decoder, MalformedError
from vtoken.base.errors import ProfileError
from vtoken.core.config.calibration import FORMAT, CalibrationProfile

MOST_BYTES = 64 * 1024  # of a profile; the room that `require_writable` asks for

_profiles: Decoder[CalibrationProfile] = Decoder(CalibrationProfile)


def default_path(fingerprint: str) -> Path:
    """The default path of the profile of the weights `fingerprint`."""
    return cache_folder() / "calibration" / f"{fingerprint}.json"


def write(profile: CalibrationProfile, path: Path) -> None:
    """Write `profile` to `path`; raises ProfileError."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise _not_written(path, error) from None


def require_writable(path: Path) -> None:
    """Raises ProfileError if `write` would; called before the measurement, which would be lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(MOST_BYTES))
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> ProfileError:
    return ProfileError(
        f"{path} cannot be written: {error.strerror}; choose another file with --output"
    )


def read(path: Path) -> CalibrationProfile:
    """The profile in `path`, with its format and numbers checked; raises ProfileError."""
    try:
        profile = _profiles.decode(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    except MalformedError as error:
        raise ProfileError(
            f"{path} is not a calibration profile: {error}; make one with: vtoken calibrate MODEL"
        ) from None
    if profile.format != FORMAT:
        raise ProfileError(
            f"{path} has format {profile.format}, this version reads {FORMAT}; "
            "calibrate again: vtoken calibrate MODEL"
        )
    for kind, found in profile.signals.items():
        for name, numbers, count in (
            ("layers", found.layers, profile.num_layers),
            ("heads", found.heads, profile.num_heads),
        ):
            if not all(0 <= number < count for number in numbers):
                raise ProfileError(
                    f"{path}: {name} {numbers} of {kind} are not all in 0..{count - 1}"
                )
    return profile


def require(
    path: Path, *, model: str, fingerprint: str, num_layers: int, num_heads: int
) -> CalibrationProfile:
    """The profile in `path`, which must be that of `model`; raises ProfileError.

    `num_layers`, `num_heads` (query heads): the model's. A layer that it does not have would give
    every token the same score.
    """
    profile = read(path)
    again = f"make their profile with: vtoken calibrate {model}"
    if profile.fingerprint != fingerprint:
        raise ProfileError(
            f"{path} is a profile of other weights: {profile.model}, fingerprint "
            f"{profile.fingerprint}. Those of {model} have {fingerprint}; {again}"
        )
    if (profile.num_layers, profile.num_heads) != (num_layers, num_heads):
        raise ProfileError(
            f"{path} is a profile of {profile.num_layers} layers with {profile.num_heads} query "
            f"heads. The weights of {model} have {num_layers} layers with {num_heads}; {again}"
        )
    return profile
