"""StepParts: the parts of a runner's steps, and their methods to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Raw
from msgspec.structs import replace
from torch import Tensor

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, UnsupportedError
from toolkit_lm.kv import KVCacheSpec, max_drafts
from toolkit_lm.model import Model
from toolkit_lm.parts import DraftingPart
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import Pooler
from toolkit_lm.runner.backends import boundary_of, model_options
from toolkit_lm.step import Feed, StepPart


class StepParts:
    """Holds parts by name. Each method has a list of the parts that override it, so a method that a
    part lacks costs a step nothing."""

    def __init__(self, parts: Mapping[str, StepPart], elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: layers that parts of other pipeline stages tap."""
        self.by_name = dict(parts)
        self._elsewhere = elsewhere
        self._list()

    def _list(self) -> None:
        self.add = self.calls("add")
        self.remove = self.calls("remove")
        calls = self.named_calls("begin")
        self.begin = sorted(calls, key=lambda call: self.by_name[call[0]].encodes)
        self.groups = self.calls("groups")
        self.inputs = self.calls("inputs")
        self.finish = self.named_calls("finish")

    def named_calls(self, method: str) -> list[tuple[str, Callable[..., Any]]]:
        """A method of each part that overrides it, with the part's name."""
        return [
            (name, getattr(part, method))
            for name, part in self.by_name.items()
            if _overrides(part, method)
        ]

    def calls(self, method: str) -> list[Callable[..., Any]]:
        """A method of each part that overrides it."""
        return [call for _, call in self.named_calls(method)]

    @contextmanager
    def with_part(self, name: str, part: StepPart) -> Iterator[None]:
        """Context with one more part."""
        self.by_name[name] = part
        self._list()
        try:
            yield
        finally:
            del self.by_name[name]
            self._list()

    @property
    def taps(self) -> list[str]:
        """Names of the layers that parts tap, including parts of other pipeline stages."""
        here = [name for part in self.by_name.values() for name in part.taps]
        return [*here, *self._elsewhere]

    @property
    def feeds(self) -> frozenset[Feed]:
        """The requirements of the model's layers that parts meet."""
        return frozenset().union(*(part.feeds for part in self.by_name.values()))

    def layers(self) -> dict[str, CacheLayer]:
        """Layers of all parts, by name. Raises PluginError if a layer's name does not begin with
        its own part's name."""
        layers: dict[str, CacheLayer] = {}
        for name, give in self.named_calls("layers"):
            for layer, module in give().items():
                if not layer.startswith(f"{name}/") or module.prefix != layer:
                    raise PluginError(
                        f"part {name!r} has a layer {layer!r} of prefix {module.prefix!r}: both "
                        f"are to be '{name}/...'."
                    )
                layers[layer] = module
        return layers

    def with_lookahead(self, layer: str, spec: KVCacheSpec) -> KVCacheSpec:
        """Adds the look-ahead slots that the layer's part asks for to the layer's spec."""
        part = self.by_name.get(layer.partition("/")[0]) if "/" in layer else None
        return spec if part is None else replace(spec, lookahead=part.lookahead)

    def check_drafts(self, config: VllmConfig, specs: Iterable[KVCacheSpec]) -> None:
        """Raises UnsupportedError for a drafter of an engine whose model takes no tokens back.
        `specs`: what its layers cache."""
        if (drafters := config.scheduler.drafter) and (
            config.model.runner == "pooling" or not max_drafts(specs)
        ):
            raise UnsupportedError(
                f"drafter {', '.join(drafters)!r}: drafts are for engines that generate, of models "
                "that can take tokens back: a recurrent state's spec says how many (rewinds)."
            )

    def facts(self) -> dict[str, Raw]:
        """Facts of the parts that state some, by part name."""
        return {name: state() for name, state in self.named_calls("facts")}

    def close(self) -> None:
        """Closes all parts."""
        closing = self.calls("close")
        self.by_name.clear()
        self._list()
        for close in closing:
            close()


def make_parts(
    model: Model, config: VllmConfig, device: torch.device, plugins: Plugins
) -> StepParts:
    """Makes the parts of the model, of its pooler, of plugins, and of the drafter. Raises
    PluginError, which names the plugin, for a part that cannot be made."""
    parts: dict[str, StepPart] = {}
    elsewhere: list[str] = []
    options = model_options(config, plugins)
    for name, kind in model.parts.items():
        if not _runs_here(kind, config):
            elsewhere += kind.taps_of(model, config, plugins=plugins, options=options)
            continue
        _check_model(model, name, kind)
        with boundary_of(kind, None, config, plugins):
            parts[name] = kind(model, config, device, plugins=plugins, options=options)
    if isinstance(pooler := getattr(model, "pooler", None), Pooler):
        parts["pooling"] = pooler.make_part(model, config, device, plugins=plugins, options=options)
    for entry in plugins.parts.used("worker", config):
        name = entry.key
        kind = plugins.parts.load_half(name, "worker")
        if name in model.parts or name in ("pooling", "drafter"):
            raise PluginError(f"{entry.owner}: a part {name!r} is there without it.")
        if not _runs_here(kind, config):
            own = plugins.options(entry.owner.name)
            elsewhere += kind.taps_of(model, config, plugins=plugins, options=own)
            continue
        _check_model(model, name, kind)
        parts[name] = plugins.parts.make_half(
            name,
            "worker",
            model,
            config,
            device,
            plugins=plugins,
            options=plugins.options(entry.owner.name),
        )
    if config.scheduler.drafter:
        if _runs_here(DraftingPart, config):
            parts["drafter"] = DraftingPart(model, config, device, plugins=plugins)
        else:
            for name in config.scheduler.drafter:
                drafter = plugins.drafters.load(name)
                own = plugins.options(plugins.drafters.get(name).owner.name)
                elsewhere += drafter.taps_of(model, config, plugins=plugins, options=own)
    made = StepParts(parts, elsewhere)
    for load in made.calls("load"):
        load(lambda: _weights(config, plugins))
    return made


def _weights(config: VllmConfig, plugins: Plugins) -> Iterator[tuple[str, Tensor]]:
    checkpoint = config.checkpoint
    assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
    return iter(plugins.loaders.make(config.load.load_format, checkpoint.source or checkpoint.path))


def _check_model(model: Model, name: str, kind: type[StepPart]) -> None:
    missing = [method for method in kind.asks if not hasattr(model, method)]
    if missing:
        raise PluginError(
            f"{type(model).__qualname__} has the part {name!r}, and no {', no '.join(missing)}: "
            f"{kind.__qualname__} asks for {', '.join(kind.asks)}."
        )


def _runs_here(part: type[StepPart], config: VllmConfig) -> bool:
    """Whether the worker of this config belongs to a pipeline stage that has the part."""
    parallel = config.parallel
    if part.ranks == "first_stage":
        return parallel.pipeline_parallel_rank == 0
    if part.ranks == "last_stage":
        return parallel.pipeline_parallel_rank == parallel.pipeline_parallel_size - 1
    return True


def _overrides(part: StepPart, method: str) -> bool:
    return getattr(getattr(part, method), "__func__", None) is not getattr(StepPart, method)
