"""Chooses the attention backend of a layer, and says why."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from toolkit_lm.attention.backend import AttentionBackend
from toolkit_lm.attention.spec import AttentionSpec
from toolkit_lm.errors import PluginError, UnsupportedError
from toolkit_lm.plugin import AttentionBackendRegistry, PluginWarning


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
        backend = registry.load(wanted)
        if (refusal := backend.refuses(spec)) is None:
            return Selection(wanted, backend, [Candidate(wanted, None)])
    candidates, classes = [], {}
    for entry in entries:
        try:
            classes[entry.key] = registry.load(entry.key)
            candidates.append(Candidate(entry.key, classes[entry.key].refuses(spec)))
        except PluginError as error:
            # Nobody asked for it by name: it is passed over, and said to be.
            candidates.append(Candidate(entry.key, str(error)))
            warnings.warn(str(error), PluginWarning, stacklevel=2)
    able = [c.name for c in candidates if c.refusal is None]
    what = f"{spec.type} layer {spec.layer!r} on {spec.device}"
    if wanted != "auto":
        raise UnsupportedError(f"attention backend {wanted!r} cannot run {what}: {refusal}. Able: {', '.join(able) or 'none'}.")
    if not able:
        reasons = "; ".join(f"{c.name}: {c.refusal}" for c in candidates) or "none is installed"
        raise UnsupportedError(f"no attention backend can run {what}: {reasons}.")
    return Selection(able[0], classes[able[0]], candidates)
