"""Chooses the attention backend of a layer, and says why."""

from __future__ import annotations

from typing import NamedTuple

from toolkit_lm.attention.backend import CacheBackend
from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.errors import ConfigError, UnsupportedError, nearest
from toolkit_lm.plugin import AttentionBackendRegistry

_KINDS = (*AttentionType, "window")
"""Of layers, as the option `attention_backend` names them."""


class Candidate(NamedTuple):
    """A backend that was asked whether it can run a layer."""

    name: str
    refusal: str | None
    """Why not; None when it can."""


class Selection(NamedTuple):
    """The backend of a layer, and all that were asked, best first."""

    name: str
    backend: type[CacheBackend]
    candidates: list[Candidate]
    plugin: str | None = None
    """Name of the plugin that registered it; None: the layer brings it."""


def select_backend(spec: AttentionSpec, registry: AttentionBackendRegistry, wanted: str = "auto") -> Selection:
    """The registered backend of highest priority that does not refuse `spec`; or `wanted`, by name, or by names for kinds of layers.

    Raises UnsupportedError when `wanted` refuses (naming those that are able) or when all refuse, ConfigError when it is unknown, and
    PluginError when it cannot be asked.
    """
    wanted = _wanted_for(spec, wanted)
    entries = sorted(registry.entries(), key=lambda e: (-e.priority, e.key))
    if wanted != "auto" and (refusal := registry.ask(wanted, spec, by_name=True)) is None:
        return Selection(wanted, registry.load(wanted), [Candidate(wanted, None)], registry.get(wanted).plugin)
    candidates = [Candidate(entry.key, registry.ask(entry.key, spec)) for entry in entries]
    able = [c.name for c in candidates if c.refusal is None]
    what = f"{spec.type} layer {spec.layer!r} on {spec.device}"
    if wanted != "auto":
        raise UnsupportedError(f"attention backend {wanted!r} cannot run {what}: {refusal}. Supported: {', '.join(able) or 'none'}.")
    if not able:
        reasons = "; ".join(f"{c.name}: {c.refusal}" for c in candidates) or "none is installed"
        raise UnsupportedError(f"no attention backend can run {what}: {reasons}.")
    return Selection(able[0], registry.load(able[0]), candidates, registry.get(able[0]).plugin)


def _wanted_for(spec: AttentionSpec, wanted: str) -> str:
    """What "decoder=sdpa,encoder=cpu" says of a layer; a name without a kind is for all that are not named."""
    kinds = {spec.type.value, "window"} if spec.window is not None else {spec.type.value}
    found = "auto"
    for item in wanted.split(","):
        kind, _, name = item.strip().rpartition("=")
        if kind and kind not in _KINDS:
            raise ConfigError(f"option 'attention_backend': {kind!r} is no kind of layer. {nearest(kind, _KINDS)}")
        if kind in kinds or (not kind and found == "auto"):
            found = name
    return found
