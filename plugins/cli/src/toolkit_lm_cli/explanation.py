"""Why an engine would run as it would: the choices, and why each other candidate was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import select_kernels
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import choose_executor, choose_model, choose_renderer, resolve_configured, resolve_device

from toolkit_lm_cli.shares import RankShare, hold, kv_capacity


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
    """The model class's key in the registry: the checkpoint's architecture, or a fallback's name."""
    models: list[tuple[str, str | None]]
    """Each model class or fallback that was considered, with its reason to refuse (None: able)."""
    model_class: str
    plugin: str
    """The plugin that registered the model class."""
    runner: str
    convert: str
    """The pooling adapter; "none" where the class is taken as it is."""
    renderer: str
    renderers: list[tuple[str, str | None]]
    """Each renderer that was considered, with its reason to refuse (None: able)."""
    executor: str
    executors: list[tuple[str, str | None]]
    """Each executor that was considered, with its reason to refuse (None: able)."""
    kernels: str
    kernels_considered: list[tuple[str, str | None]]
    """All kernels that were considered, with their reasons to refuse (None: able)."""
    layers: list[LayerChoice]
    ranks: list[RankShare]
    kv_tokens: int | None
    """Tokens that the KV cache has room for, with the memory that this machine has to spare now. None: the model has none."""
    kv_refusal: str | None
    """Why it would be refused."""


def explain(config: VllmConfig, plugins: Plugins | Sequence[object] = ()) -> Explanation:
    """Makes the choices that an engine makes at its start, without reading or holding weights. Raises what the engine would raise."""
    plugins = plugins if isinstance(plugins, Plugins) else Plugins.load(config.plugins, plugins)
    configured = plugins.configure(config)
    resolved = resolve_device(resolve_configured(configured, plugins))
    assert resolved.checkpoint is not None
    entry = plugins.models.get(resolved.checkpoint.architecture)
    open_config = configured.with_checkpoint(resolved.checkpoint)
    _, models = choose_model(open_config, plugins)
    _, renderers = choose_renderer(open_config, plugins)
    held = hold(resolved, plugins)
    kernels, kernels_considered = select_kernels(resolved, plugins)
    kv_tokens, kv_refusal = kv_capacity(resolved, held)
    return Explanation(
        config=resolved,
        architecture=entry.key,
        models=models,
        model_class=entry.target,
        plugin=entry.plugin,
        runner=resolved.model.runner,
        convert=resolved.model.convert,
        renderer=resolved.renderer.renderer,
        renderers=renderers,
        executor=resolved.parallel.executor,
        executors=choose_executor(open_config, plugins)[1],
        kernels=kernels,
        kernels_considered=kernels_considered,
        layers=[LayerChoice(layer, found.name, found.candidates) for layer, found in held.selections.items()],
        ranks=held.ranks,
        kv_tokens=kv_tokens,
        kv_refusal=kv_refusal,
    )
