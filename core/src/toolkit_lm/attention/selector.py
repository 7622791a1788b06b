"""Chooses the attention backend of a layer, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from toolkit_lm.attention.backend import CacheBackend, GraphSupport
from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm.plugin import AttentionBackendRegistry


class Selection(NamedTuple):
    """The backend of a layer, and all that were asked, best first, each with its reason to refuse
    (None: able)."""

    name: str
    backend: type[CacheBackend]
    candidates: list[tuple[str, str | None]]
    plugin: str | None = None
    """Name of the plugin that registered it; None: the layer brings it."""
    graphs: GraphSupport | str = GraphSupport.NEVER
    """Answer of `CacheBackend.graphs` for the layer."""


def select_backend(
    spec: AttentionSpec, registry: AttentionBackendRegistry, wanted: str = "auto"
) -> Selection:
    """The registered backend of highest priority that does not refuse `spec`; or `wanted`, by name,
    or by names for kinds of layers.

    Raises UnsupportedError when `wanted` refuses (naming those that are able) or when all refuse,
    ConfigError when it is unknown, and PluginError when it cannot be asked.
    """
    wanted = _wanted_for(spec, wanted)
    task = f"run {spec.type} layer {spec.layer!r} on {spec.device}"
    name, candidates = registry.choose(
        task, lambda entry, by_name: registry.ask(entry.key, spec, by_name=by_name), wanted
    )
    entry = registry.get(name)
    backend = registry.load(name)
    with entry.owner.boundary(f"graphs() of attention backend {name!r}", target=backend):
        graphs = backend.graphs(spec)
    return Selection(name, backend, candidates, entry.plugin, graphs)


def check_kinds(wanted: str, types: Iterable[str]) -> None:
    """Raises ConfigError for a kind in the option `attention_backend` that is neither core's nor
    one of `types`, those of the model's layers."""
    kinds = sorted({*AttentionType, "window", *types})
    for kind, _ in _items(wanted):
        if kind and kind not in kinds:
            raise ConfigError(
                f"attention_backend: {kind!r} is not a kind of layer. {nearest(kind, kinds)}"
            )


def _items(wanted: str) -> Iterator[tuple[str, str]]:
    """Kind of layer, empty for all, and backend."""
    for item in wanted.split(","):
        kind, _, name = item.strip().rpartition("=")
        yield kind, name


def _wanted_for(spec: AttentionSpec, wanted: str) -> str:
    """Backend that an option such as "decoder=sdpa,encoder=cpu" names for a layer. A name without a
    kind applies to all kinds that are not listed."""
    kinds = {str(spec.type), "window"} if spec.window is not None else {str(spec.type)}
    found = "auto"
    for kind, name in _items(wanted):
        if kind in kinds or (not kind and found == "auto"):
            found = name
    return found
