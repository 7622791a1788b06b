"""Binds layers to their backends and to their parts of the KV cache, whenever a cache is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from toolkit_lm.attention import (
    BatchLimits,
    BatchView,
    Binding,
    CacheBackend,
    CacheLayer,
    GraphSupport,
    GroupSetup,
    Selection,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.kv.cache import KVCache
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner.backends import boundary_of, graph_supports
from toolkit_lm.sampling.transfer import to_device


class LayerBindings:
    """The binding of each layer, and the backends of the layers.

    The layers of a KV group share a backend. Layers that cache nothing share one if they have
    selected the same.
    """

    def __init__(
        self,
        layers: Mapping[str, CacheLayer],
        selections: Mapping[str, Selection],
        config: VllmConfig,
        device: torch.device,
        plugins: Plugins,
    ) -> None:
        self._layers = layers
        self._selections = selections
        self._config = config
        self._device = device
        self._plugins = plugins
        self.limits = batch_limits(config)
        self.by_layer: dict[str, Binding] = {}
        self.backends: list[CacheBackend | None] = []
        """One for each KV group, then one for each group of layers that cache nothing. None:
        another pipeline stage has the layers."""
        self.table_widths: list[int] = []
        """Most entries of a row's block table, per backend."""
        self.num_cached = 0
        """Number of `backends` that belong to KV groups."""
        self._apart: list[bool] = []

    def bind(self, kv_cache: KVCacheConfig, cache: KVCache) -> None:
        """Makes the backends, once. An exception of a backend names the plugin."""
        config = self._config
        self.num_cached = len(kv_cache.groups)
        self._apart = [group.is_apart for group in kv_cache.groups]
        for index, group in enumerate(kv_cache.groups):
            spec = group.spec
            most = config.max_encoder_len if spec.of_encoder else config.max_model_len
            self.table_widths.append(spec.num_blocks(most))
            if not group.layers:
                self.backends.append(None)
                continue
            selection = self._selections[group.layers[0]]
            with boundary_of(selection.backend, selection.plugin, config, self._plugins):
                layout = selection.backend.page_layout(spec)
                caches = cache.tensors(index, layout)
            own = dict(zip(group.layers, caches, strict=True))
            shared = {
                name: own[owner]
                for name, layer in self._layers.items()
                if (owner := layer.shares_with) in own
            }
            self._bind(selection, spec, own | shared)
        uncached: dict[str, list[str]] = {}
        for layer in self._layers:
            if layer not in self.by_layer:
                uncached.setdefault(self._selections[layer].name, []).append(layer)
        for layers in uncached.values():
            self.table_widths.append(0)
            self._bind(self._selections[layers[0]], None, dict.fromkeys(layers))

    def _bind(
        self, selection: Selection, spec: KVCacheSpec | None, caches: Mapping[str, Any]
    ) -> None:
        """Makes a backend for layers. `caches`: the tensors of each of them."""
        asked = [
            self._layers[name].attention_spec(self._device, cached=spec is not None)
            for name in caches
        ]
        plugin = selection.plugin
        setup = GroupSetup(
            layers=[name for name in asked if name is not None],
            kv_cache=spec,
            limits=self.limits,
            device=self._device,
            options=None if plugin is None else self._plugins.options(plugin),
        )
        with boundary_of(selection.backend, plugin, self._config, self._plugins):
            backend = selection.backend(setup)
        for name, cache in caches.items():
            layer = self._layers[name]
            shared = layer.shares_with is not None
            self.by_layer[name] = Binding(backend, layer.params, cache, len(self.backends), shared)
        self.backends.append(backend)

    def batch_backends(self, with_uncached: bool) -> list[CacheBackend | None]:
        """Backends that see a step's flat batch. `with_uncached`: also those of layers that cache
        nothing. An encoder's layers see their own sequences instead, and a part's their own
        passes."""
        uncached = [not with_uncached] * (len(self.backends) - self.num_cached)
        return [
            None if is_apart else backend
            for backend, is_apart in zip(self.backends, self._apart + uncached, strict=True)
        ]

    def graph_supports(self, with_uncached: bool) -> dict[str, GraphSupport | str]:
        """The weakest graph support of each backend's layers, by backend name."""
        cached = {name for name, layer in self.by_layer.items() if layer.kv_cache is not None}
        return graph_supports(self._selections, cached, with_uncached)

    def encoder_metadata(self, lengths: Sequence[int] | np.ndarray) -> list[Any]:
        """Metadata, per backend, of a flat batch of whole sequences of these lengths, for layers
        that cache nothing; None for KV groups."""
        seq_lens = np.asarray(lengths, np.int32)
        query_start = np.zeros(len(seq_lens) + 1, np.int32)
        seq_lens.cumsum(out=query_start[1:])
        view = BatchView(
            query_start=query_start,
            seq_lens=seq_lens,
            starts=np.zeros(len(seq_lens), np.int64),
            query_start_device=to_device(query_start, self._device),
            seq_lens_device=to_device(seq_lens, self._device),
            block_table=None,
            slot_mapping=None,
            max_query_len=int(seq_lens.max()),
            max_seq_len=int(seq_lens.max()),
        )
        return [
            None if index < self.num_cached or backend is None else backend.build(view)
            for index, backend in enumerate(self.backends)
        ]


def batch_limits(config: VllmConfig) -> BatchLimits:
    """The largest step of an engine of this config."""
    scheduler = config.scheduler
    # The warm-up computes two tokens.
    num_tokens = max(scheduler.token_budget, scheduler.max_num_seqs, 2)
    return BatchLimits(scheduler.max_num_seqs, num_tokens, config.max_model_len)
