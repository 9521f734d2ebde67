"""The calibration profile that an engine starts with.

A profile named by the user must belong to the model. A profile in the user's cache that cannot be
read is reported and not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.base.errors import ProfileError, UnsupportedError
from vtoken.calibration import store
from vtoken.calibration.model_files import fingerprint, model_folder
from vtoken.core.config.calibration import CalibrationProfile

OFF = "off"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and its file; without a profile, `detail` has the reason."""

    profile: CalibrationProfile | None = None
    file: str = ""
    detail: str = ""


def load_calibration(choice: str, config: Any) -> Calibration:
    """Load the profile of the model in vLLM's `config`; `choice`: see `Settings.calibration`.

    Raises UnsupportedError when the file named by `choice` cannot be used.
    """
    if choice == OFF:
        return Calibration(detail="turned off by --vtoken-calibration")
    model = config.model_config.model
    try:
        folder = model_folder(
            model,
            revision=config.model_config.revision,
            cache=config.load_config.download_dir,
        )
        weights = fingerprint(folder)
        path = Path(choice) if choice else store.default_path(weights)
        if not choice and not path.exists():
            short = str(model).replace(f"{Path.home()}/", "~/", 1)
            return Calibration(
                detail=f"none for this model; create one with: vtoken calibrate {short}"
            )
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        profile = store.require(
            path,
            model=model,
            fingerprint=weights,
            num_layers=num_full_layers(config.model_config),
            num_heads=heads * config.parallel_config.tensor_parallel_size,
        )
    except ProfileError as error:
        if choice:
            raise UnsupportedError(f"--vtoken-calibration: {error}") from None
        return Calibration(detail=str(error))
    return Calibration(profile, str(path))


def num_full_layers(model: Any) -> int:
    """How many layers of vLLM's `model` configuration have full attention: those of a profile."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        return int(model.get_total_num_hidden_layers())
    return sum(kind in ("full_attention", "attention") for kind in kinds)
