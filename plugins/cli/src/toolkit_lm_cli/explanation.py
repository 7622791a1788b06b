"""Why an engine would run as it would: the choices, and why each other candidate was refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.events import WAITS, Wait
from toolkit_lm.model import construct, select_kernels
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import (
    NoEffect,
    choose_executor,
    choose_model,
    choose_renderer,
    resolve_configured,
    resolve_device,
    without_effect,
)
from toolkit_lm.runner import graph_supports, load_model_class

from toolkit_lm_cli.shares import Held, RankShare, WeightKind, hold, kv_capacity

HOOK = "toolkit_explain"
UNTRIED_ON_GPUS = "flashinfer, xformers and NCCL have run on no GPU yet, all others on one H100"


@dataclass(frozen=True)
class LayerChoice:
    """The attention backend of one layer."""

    layer: str
    backend: str
    candidates: list[tuple[str, str | None]]
    """Each backend that was asked, with its reason to refuse (None: able)."""


@dataclass(frozen=True)
class DrafterChoice:
    """One drafter of speculative decoding."""

    name: str
    target: str
    """Its class, "module:Class"."""
    plugin: str
    options: dict[str, Any]
    """The plugin's options that were given."""
    costs: list[str]
    """What it holds and costs, a line each, as the drafter says it."""


@dataclass(frozen=True)
class Explanation:
    """Output of `toolkit explain`."""

    config: VllmConfig
    """Resolved."""
    architecture: str
    """The model class's key in the registry: the checkpoint's architecture, or a fallback's
    name."""
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
    compiler: str
    """Compiler of the forward pass; "none" if the model computes it, layer by layer."""
    compilers: list[tuple[str, str | None]]
    """Each compiler that was considered, with its reason to refuse (None: able)."""
    computed: list[str]
    """How the forward pass is computed, and why."""
    drafters: list[DrafterChoice]
    """Drafters, in the order in which they are asked; empty: no speculative decoding."""
    layers: list[LayerChoice]
    weights: list[WeightKind]
    """Weights by kind of layer: their bytes, and what multiplies by them."""
    ranks: list[RankShare]
    sampling_defaults: dict[str, float]
    """Sampling parameters of generation_config.json, which hold where a request says nothing."""
    kv_tokens: int | None
    """Tokens that the KV cache has room for, with the memory that this machine has to spare now.
    None: the model has none."""
    kv_refusal: str | None
    """Why it would be refused."""
    of_plugins: dict[str, list[str]]
    """Lines of the hook `toolkit_explain`, by their row's name."""
    without_effect: list[NoEffect]
    """Options that were given and do nothing, with the reasons."""
    waits: dict[Wait, str]
    """Each reason for which a request may wait, as a sentence with the values of its options."""
    untried: str | None
    """Features that have not yet run on any device of this kind; None: all have."""


def explain(config: VllmConfig, plugins: Plugins | Sequence[object] = ()) -> Explanation:
    """Makes the choices that an engine makes at its start, without reading or holding weights.
    Raises what the engine would raise."""
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
    compiler, compilers, computed = _compilation(resolved, plugins, held, kernels)
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
        compiler=compiler,
        compilers=compilers,
        computed=computed,
        drafters=_drafters(resolved, plugins),
        layers=[
            LayerChoice(layer, found.name, found.candidates)
            for layer, found in held.selections.items()
        ],
        weights=list(held.weights.values()),
        ranks=held.ranks,
        sampling_defaults=resolved.sampling_defaults,
        kv_tokens=kv_tokens,
        kv_refusal=kv_refusal,
        of_plugins=_of_plugins(resolved, plugins, held),
        without_effect=without_effect(config, resolved, plugins),
        waits=waits_of(resolved, plugins),
        untried=UNTRIED_ON_GPUS if resolved.device.device.startswith("cuda") else None,
    )


def _of_plugins(config: VllmConfig, plugins: Plugins, held: Held) -> dict[str, list[str]]:
    """Rows that the hook `toolkit_explain` gives. Raises PluginError."""
    rows: dict[str, list[str]] = {}
    for info, call in plugins.implementations(HOOK):
        with info.boundary(HOOK):
            found = call(config=config, models=held.models, options=plugins.options(info.name))
            for name, lines in (found or {}).items():
                rows.setdefault(name, []).extend(lines)
    return rows


def _drafters(config: VllmConfig, plugins: Plugins) -> list[DrafterChoice]:
    names = config.scheduler.drafter or ()
    if not names:
        return []
    # Drafters are on the last pipeline stage.
    own = config.with_rank(config.parallel.num_ranks - 1)
    found = []
    with plugins.boundary:
        model_class = load_model_class(config, plugins)
        model = construct(model_class, own, torch.device("meta"), plugins)
        for name in names:
            entry = plugins.drafters.get(name)
            found.append(
                DrafterChoice(
                    entry.key,
                    entry.target,
                    entry.plugin,
                    config.plugins.plugin_option.get(entry.plugin, {}),
                    plugins.drafters.load(name).describe(
                        model, own, plugins=plugins, options=plugins.options(entry.plugin)
                    ),
                )
            )
    return found


def waits_of(config: VllmConfig, plugins: Plugins) -> dict[Wait, str]:
    """The reasons for which a request may wait in an engine of this resolved config."""
    architecture = "" if config.checkpoint is None else config.checkpoint.architecture
    absent: set[Wait] = set()
    if not config.keeps_kv_cache:
        absent.add("blocks")
    entry = plugins.models.get(architecture)
    if not (entry.multimodal or entry.encoder_decoder):
        absent.add("media")
    if not plugins.parts.used("planner", config):
        absent.add("part")
    if not plugins.kv_tiers.entries():
        absent.add("loading")
    sections = [getattr(config, name) for name in config.__struct_fields__]

    def with_value(found: re.Match[str]) -> str:
        option = found[0]
        values = [getattr(section, option) for section in sections if hasattr(section, option)]
        return f"{option} {values[0]}" if values and values[0] is not None else option

    return {
        reason: re.sub(r"(?<=[( ])[a-z]+_\w+", with_value, sentence)
        for reason, sentence in WAITS.items()
        if reason not in absent
    }


def _compilation(
    config: VllmConfig, plugins: Plugins, held: Held, kernels: str
) -> tuple[str, list[tuple[str, str | None]], list[str]]:
    """Its name, the candidates, and how the forward pass is computed. Raises UnsupportedError where
    all refuse."""
    level = config.compilation.optimization_level
    registry = plugins.compilers
    if not level:
        if held.fuses and held.num_fusible:
            but = f", {held.num_routed} of them up to the experts" if held.num_routed else ""
            how = (
                f"kernels {kernels!r} compute decoder layers in one call each where they have "
                f"one for it, {held.num_fusible} at most{but}"
            )
        else:
            how = f"each layer by itself, with kernels {kernels!r}"
        unfused = [
            f"{count} decoder layers module by module: {why}" for why, count in held.unfused.items()
        ]
        return "none", [], ["optimization_level is 0, which starts fastest", how, *unfused]
    name, candidates = registry.choose(
        "compile the model", lambda entry, by_name: registry.ask(entry.key, config, by_name=by_name)
    )
    supports = graph_supports(
        held.selections,
        {layer for specs in held.specs for layer in specs},
        feeds_uncached=not any(held.specs),
    )
    return (
        name,
        candidates,
        [f"optimization_level is {level}", *registry.load(name).describe(config, supports)],
    )
