"""The runtime configuration: one frozen value, its bounds, and the all-or-nothing merge patch.

Knows the policies' parameters; knows nothing of vLLM or of who asks. A patch either yields a
whole new valid configuration or raises `RefusedError` naming field, value and bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vtoken.errors import RefusedError
from vtoken.policies import Policy, make_policy, params_dict, policy_names
from vtoken.wire import Bound, ConfigValues, PolicyChoice, Probe

PLANNERS = ("plug", "pack")
MODES = ("auto", "paused", "off")
PHASES = ("decode", "prefill", "both")
ADMISSIONS = ("compressed", "stock")
SHARING = ("skip", "index", "copy")
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class VTokenConfig:
    """What operators may change live. Defaults: evict nothing, reclaim when the pool runs low."""

    policy: Policy = field(default_factory=lambda: make_policy("none", {}))
    theta_f: float = 0.25  # paper 3.3
    batch_size: int = 32  # B: most source blocks in one planning round
    low_watermark_blocks: int = 0  # plan only when this few blocks or fewer are free
    headroom_blocks: int = 0  # fresh blocks that one planning round may take
    planner: str = "plug"
    reclamation: str = "auto"
    recycle: bool = True
    budget_tokens: int = 2048
    interval_tokens: int = 128
    evict_during: str = "decode"
    admission: str = "compressed"
    verify_ratio: float = 0.0  # share of relocations whose K/V is hashed before and after (I1)
    probe_layers: tuple[int, ...] = ()  # empty: the middle layer
    probe_every_steps: int = 1
    prefix_sharing: str = "index"
    shadow: Policy | None = None  # asked at every eviction, never obeyed

    def values(self) -> ConfigValues:
        return ConfigValues(
            policy=_choice(self.policy),
            theta_f=self.theta_f,
            batch_size=self.batch_size,
            low_watermark_blocks=self.low_watermark_blocks,
            headroom_blocks=self.headroom_blocks,
            planner=self.planner,  # type: ignore[arg-type]
            reclamation=self.reclamation,  # type: ignore[arg-type]
            recycle=self.recycle,
            budget_tokens=self.budget_tokens,
            interval_tokens=self.interval_tokens,
            evict_during=self.evict_during,  # type: ignore[arg-type]
            admission=self.admission,  # type: ignore[arg-type]
            verify_ratio=self.verify_ratio,
            probe=Probe(layers=list(self.probe_layers), every_steps=self.probe_every_steps),
            prefix_sharing=self.prefix_sharing,  # type: ignore[arg-type]
            shadow=None if self.shadow is None else _choice(self.shadow),
        )

    @property
    def evicts(self) -> bool:
        return self.policy.name != "none"


def _choice(policy: Policy) -> PolicyChoice:
    return PolicyChoice(name=policy.name, params=params_dict(policy))


def default_config(num_blocks: int) -> VTokenConfig:
    """The defaults that depend on the pool: watermark an eighth of it, headroom a 32nd."""
    return VTokenConfig(
        batch_size=min(32, num_blocks),
        low_watermark_blocks=max(1, num_blocks // 8),
        headroom_blocks=min(max(2, num_blocks // 32), num_blocks // 2),
    )


def bounds(num_blocks: int, num_layers: int) -> dict[str, Bound]:
    """The bounds of every field, for people and programs; `merge_patch` enforces the same ones."""

    def integer(low: int, high: int, summary: str) -> Bound:
        return Bound(type="int", summary=summary, minimum=low, maximum=high)

    return {
        "policy": Bound(
            type="object",
            summary="{name, params}; parameters: GET /vtoken/v1/policies",
            choices=policy_names(),
        ),
        "theta_f": Bound(
            type="float", summary="reclaim when F exceeds this", minimum=0.0, maximum=1.0
        ),
        "batch_size": integer(1, max(1, num_blocks), "B: most source blocks in one round"),
        "low_watermark_blocks": integer(
            0, num_blocks, "reclaim only when this few blocks or fewer are free"
        ),
        "headroom_blocks": integer(0, num_blocks // 2, "fresh blocks that one round may take"),
        "planner": Bound(
            type="enum", summary="plug: fill holes; pack: copy out", choices=[*PLANNERS]
        ),
        "reclamation": Bound(
            type="enum", summary="auto, paused (no new plans), off (naive-evict)", choices=[*MODES]
        ),
        "recycle": Bound(type="bool", summary="write new tokens into dead slots"),
        "budget_tokens": integer(1, MAX_TOKENS, "live tokens that a request may keep"),
        "interval_tokens": integer(
            0, MAX_TOKENS, "evict when live exceeds the budget by more than this"
        ),
        "evict_during": Bound(
            type="enum",
            summary="decode: once the prompt is computed; prefill: between its chunks; both",
            choices=[*PHASES],
        ),
        "admission": Bound(
            type="enum",
            summary="compressed: by what a request will hold after eviction; stock: vLLM's rule",
            choices=[*ADMISSIONS],
        ),
        "verify_ratio": Bound(
            type="float",
            summary="share of relocations verified by content hash",
            minimum=0.0,
            maximum=1.0,
        ),
        "probe": Bound(
            type="object",
            summary=f"{{layers: [0..{num_layers - 1}], every_steps: 1..1024}}; [] = middle layer",
        ),
        "prefix_sharing": Bound(
            type="enum",
            summary="shared blocks: skip; index: let go of all-dead ones; copy: also copy out",
            choices=[*SHARING],
        ),
        "shadow": Bound(
            type="object",
            summary="{name, params} of a policy that is asked and not obeyed; null: none",
            choices=policy_names(),
        ),
    }


def _refuse(name: str, value: Any, bound: str) -> RefusedError:
    return RefusedError(f"{name} = {value!r} is not {bound}", field=name, value=value, bound=bound)


def _check_scalar(name: str, value: Any, bound: Bound) -> Any:
    if bound.type == "bool":
        if not isinstance(value, bool):
            raise _refuse(name, value, "true or false")
        return value
    if bound.type == "enum":
        if value not in (bound.choices or []) or not isinstance(value, str):
            raise _refuse(name, value, "one of " + ", ".join(bound.choices or []))
        return value
    kinds = (int,) if bound.type == "int" else (int, float)
    noun = "an integer" if bound.type == "int" else "a number"
    text = f"{noun} in {bound.minimum:g}..{bound.maximum:g}"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise _refuse(name, value, text)
    assert bound.minimum is not None
    assert bound.maximum is not None
    if not bound.minimum <= value <= bound.maximum:  # NaN fails here too
        raise _refuse(name, value, text)
    return float(value) if bound.type == "float" else value


def _merge_policy(current: Policy, patch: Any) -> Policy:
    if not isinstance(patch, dict):
        raise _refuse("policy", patch, "an object {name, params}")
    for key in patch:
        if key not in ("name", "params"):
            raise _refuse(f"policy.{key}", patch[key], "name or params")
    name = patch.get("name", current.name)
    params = patch.get("params", {})
    if name == current.name and isinstance(params, dict):
        merged = params_dict(current) | params
        params = {k: v for k, v in merged.items() if v is not None}  # RFC 7396: null resets
    return make_policy(name, params)


def _merge_shadow(current: Policy | None, patch: Any) -> Policy | None:
    """The shadow after a patch; null and the policy that evicts nothing both mean that none is."""
    if patch is None:
        return None
    try:
        shadow = _merge_policy(make_policy("none", {}) if current is None else current, patch)
    except RefusedError as error:
        error.field = (error.field or "policy").replace("policy", "shadow", 1)
        raise
    return None if shadow.name == "none" else shadow


def _merge_probe(patch: Any, num_layers: int) -> dict[str, Any]:
    if not isinstance(patch, dict):
        raise _refuse("probe", patch, "an object {layers, every_steps}")
    out: dict[str, Any] = {}
    for key, value in patch.items():
        if key == "layers":
            ok = isinstance(value, list) and all(
                isinstance(v, int) and not isinstance(v, bool) and 0 <= v < num_layers
                for v in value
            )
            if not ok:
                raise _refuse("probe.layers", value, f"a list of layers in 0..{num_layers - 1}")
            out["probe_layers"] = tuple(sorted(set(value)))
        elif key == "every_steps":
            bound = Bound(type="int", summary="", minimum=1, maximum=1024)
            out["probe_every_steps"] = _check_scalar("probe.every_steps", value, bound)
        else:
            raise _refuse(f"probe.{key}", value, "layers or every_steps")
    return out


def merge_patch(
    config: VTokenConfig, patch: Any, *, num_blocks: int, num_layers: int
) -> VTokenConfig:
    """`config` with the JSON merge patch applied, or RefusedError; never a partial result."""
    if not isinstance(patch, dict):
        raise _refuse("body", patch, "a JSON object")
    limits = bounds(num_blocks, num_layers)
    changes: dict[str, Any] = {}
    for name, value in patch.items():
        if name not in limits:
            raise _refuse(name, value, "a known field: " + ", ".join(limits))
        if name == "policy":
            changes["policy"] = _merge_policy(config.policy, value)
        elif name == "shadow":
            changes["shadow"] = _merge_shadow(config.shadow, value)
        elif name == "probe":
            changes |= _merge_probe(value, num_layers)
        else:
            changes[name] = _check_scalar(name, value, limits[name])
    merged = replace(config, **changes)
    for role, policy in (("policy", merged.policy), ("shadow", merged.shadow)):
        least = 1 if policy is None else policy.min_budget_tokens()
        if policy is not None and merged.budget_tokens < least:
            raise _refuse(
                "budget_tokens",
                merged.budget_tokens,
                f"at least {least}, which {role} {policy.name} needs with these parameters",
            )
    return merged


def diff(old: ConfigValues, new: ConfigValues) -> dict[str, list[Any]]:
    """Field -> [old, new] of what differs, in builtins."""
    import msgspec

    a, b = msgspec.to_builtins(old), msgspec.to_builtins(new)
    return {name: [a[name], b[name]] for name in a if a[name] != b[name]}
