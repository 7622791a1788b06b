"""Chooses the attention backend of a layer, and says why."""

from __future__ import annotations

from typing import NamedTuple

from llm_toolkit.attention.backend import AttentionBackend
from llm_toolkit.attention.spec import AttentionSpec
from llm_toolkit.errors import UnsupportedError
from llm_toolkit.plugin import AttentionBackendRegistry


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

    Raises UnsupportedError when `wanted` refuses (naming those that are able), is unknown, or when all refuse.
    """
    entries = sorted(registry.entries(), key=lambda e: (-e.priority, e.key))
    if wanted != "auto":
        registry.get(wanted)
    candidates, classes = [], {}
    for entry in entries:
        backend = registry.load(entry.key)
        classes[entry.key] = backend
        candidates.append(Candidate(entry.key, backend.refuses(spec)))
    able = [c.name for c in candidates if c.refusal is None]
    refused = {c.name: c.refusal for c in candidates if c.refusal is not None}
    what = f"{spec.type} layer {spec.layer!r} on {spec.device}"
    if wanted in refused:
        raise UnsupportedError(f"attention backend {wanted!r} cannot run {what}: {refused[wanted]}. Able: {', '.join(able) or 'none'}.")
    if not able:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "none is installed"
        raise UnsupportedError(f"no attention backend can run {what}: {reasons}.")
    chosen = wanted if wanted != "auto" else able[0]
    return Selection(chosen, classes[chosen], candidates)
