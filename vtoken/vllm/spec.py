"""The KV cache spec of the layers that vToken manages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass(frozen=True, kw_only=True)
class VTokenAttentionSpec(FullAttentionSpec):
    """A full-attention spec whose blocks are managed by `VTokenAttentionManager`."""

    @classmethod
    def of(cls, spec: Any) -> Any:
        """Convert a plain full-attention `spec`; return any other spec unchanged."""
        if type(spec) is not FullAttentionSpec:
            return spec
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})
