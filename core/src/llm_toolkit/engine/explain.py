"""Why an engine would run as it would: the choices, and why each other candidate was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_toolkit.attention import Selection
from llm_toolkit.config import VllmConfig
from llm_toolkit.engine.resolve import choose_renderer, resolve
from llm_toolkit.executor import InProcessExecutor
from llm_toolkit.plugin import Plugins


@dataclass(frozen=True)
class LayerChoice:
    """The attention backend of one layer."""

    layer: str
    backend: str
    candidates: list[tuple[str, str | None]]
    """Each backend that was asked, with its reason to refuse (None: able)."""


@dataclass(frozen=True)
class Explanation:
    """What `toolkit explain` shows."""

    config: VllmConfig
    """Resolved."""
    architecture: str
    model_class: str
    plugin: str
    """The plugin that registered the model class."""
    runner: str
    renderer: str
    renderers: list[tuple[str, str | None]]
    """Each renderer that was considered, with its reason to refuse (None: able)."""
    layers: list[LayerChoice]


def explain(config: VllmConfig, plugins: Plugins | Sequence[object] = ()) -> Explanation:
    """Makes the choices that an engine makes at its start, without reading weights. Raises what the engine would raise."""
    plugins = plugins if isinstance(plugins, Plugins) else Plugins.load(config.plugins, plugins)
    resolved = resolve(config, plugins)
    assert resolved.checkpoint is not None
    entry = plugins.models.get(resolved.checkpoint.architecture)
    _, renderers = choose_renderer(plugins.configure(config).with_checkpoint(resolved.checkpoint), plugins)
    executor = InProcessExecutor(resolved.replace(load_format="dummy"), plugins)
    executor.load()
    try:
        layers = [_layer_choice(layer, selection) for layer, selection in executor.selections().items()]
    finally:
        executor.shutdown()
    return Explanation(
        config=resolved,
        architecture=entry.key,
        model_class=entry.target,
        plugin=entry.plugin,
        runner=entry.runner,
        renderer=resolved.renderer.renderer,
        renderers=renderers,
        layers=layers,
    )


def _layer_choice(layer: str, selection: Selection) -> LayerChoice:
    return LayerChoice(layer, selection.name, [(c.name, c.refusal) for c in selection.candidates])
