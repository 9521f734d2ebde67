"""The part of vLLM's KV cache that vToken manages: its spec, and its group among the others.

vLLM puts layers of one spec into groups. All groups take blocks from one pool, and layer i of every
group lies in the same memory. A model with windows or chunks in most layers has one group of full
attention, which grows with the context, and groups whose size is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs


@dataclass(frozen=True, kw_only=True)
class VTokenAttentionSpec(FullAttentionSpec):
    """A full-attention spec whose blocks are managed by `VTokenAttentionManager`."""

    @classmethod
    def of(cls, spec: Any) -> Any:
        """Convert a plain full-attention `spec`; return any other spec unchanged."""
        if type(spec) is not FullAttentionSpec:
            return spec
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})


def spec_of_model(group: Any, num_layers: int | None) -> Any:
    """The spec of the model's layers in vLLM's `group`; its first `num_layers`, None: all, are its.

    Beside a drafter whose K and V have another shape, a worker's group has a spec a layer.
    """
    spec = group.kv_cache_spec
    if num_layers is None or not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    first, *others = (spec.kv_cache_specs[name] for name in group.layer_names)
    is_one = all(other == first for other in others[: num_layers - 1])
    managed = all(isinstance(one, VTokenAttentionSpec) for one in (first, *others))
    return first if is_one and managed else spec


@dataclass(frozen=True, slots=True)
class ManagedGroup:
    """The group whose tokens have a token table.

    `index`: its number among vLLM's groups, managers and block tables. `layer_names`: the model's
    layers in it, first to last. A layer's number, in probes and profiles, is its place among them.
    `drafter_names`: layers of the model that drafts for this one. Their K and V of a token are in
    the token's slot, so every copy and every eviction concerns both.
    """

    index: int
    spec: VTokenAttentionSpec
    layer_names: tuple[str, ...]
    drafter_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, kv_cache_config: Any, num_layers: int | None = None) -> ManagedGroup:
        """The only managed group of a cache that `support.managed_group` accepts.

        `num_layers`: how many of its layers are the model's; None: all. vLLM registers a drafter's
        layers after the model's.
        """
        (found,) = (
            cls(
                index,
                spec,
                tuple(sorted(group.layer_names[:num_layers], key=_depth)),
                () if num_layers is None else tuple(group.layer_names[num_layers:]),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(spec := spec_of_model(group, num_layers), VTokenAttentionSpec)
        )
        return found


def _depth(layer_name: str) -> list[int]:
    return [int(part) for part in layer_name.split(".") if part.isdigit()]
