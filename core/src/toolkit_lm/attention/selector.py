"""Chooses the attention backend of a layer, and says why."""

from __future__ import annotations

from typing import NamedTuple

from toolkit_lm.attention.backend import AttentionBackend
from toolkit_lm.attention.spec import AttentionSpec
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import AttentionBackendRegistry


class Candidate(NamedTuple):
    """A backend that was asked whether it can run a layer."""

    name: str
    refusal: str | None
    """Why not; None when it can."""


class Selection(NamedTuple):
    """The backend of a layer, and all that were asked, best first."""

    name: str
    backend: type[AttentionBackend]
    candidates: list[Candidate]


def select_backend(spec: AttentionSpec, registry: AttentionBackendRegistry, wanted: str = "auto") -> Selection:
    """The registered backend of highest priority that does not refuse `spec`; or `wanted`, by name.

    Raises UnsupportedError when `wanted` refuses (naming those that are able) or when all refuse, ConfigError when it is unknown, and
    PluginError when it cannot be asked.
    """
    entries = sorted(registry.entries(), key=lambda e: (-e.priority, e.key))
    if wanted != "auto" and (refusal := registry.ask(wanted, spec, by_name=True)) is None:
        return Selection(wanted, registry.load(wanted), [Candidate(wanted, None)])
    candidates = [Candidate(entry.key, registry.ask(entry.key, spec)) for entry in entries]
    able = [c.name for c in candidates if c.refusal is None]
    what = f"{spec.type} layer {spec.layer!r} on {spec.device}"
    if wanted != "auto":
        raise UnsupportedError(f"attention backend {wanted!r} cannot run {what}: {refusal}. Supported: {', '.join(able) or 'none'}.")
    if not able:
        reasons = "; ".join(f"{c.name}: {c.refusal}" for c in candidates) or "none is installed"
        raise UnsupportedError(f"no attention backend can run {what}: {reasons}.")
    return Selection(able[0], registry.load(able[0]), candidates)
