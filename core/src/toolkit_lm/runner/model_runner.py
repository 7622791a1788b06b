"""The model runner: everything that touches the device happens here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from msgspec import Raw
from torch import Tensor

from toolkit_lm.attention import (
    BatchLimits,
    BatchView,
    Binding,
    CacheBackend,
    CacheLayer,
    ForwardContext,
    GroupSetup,
    Selection,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import pipeline_parallel_group
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec, max_drafts
from toolkit_lm.kv.cache import KVCache
from toolkit_lm.kv.transfers import Transfers
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.model import (
    IntermediateTensors,
    Model,
    ModelCompiler,
    Taps,
    load_model,
    make_compiler,
    named_layers,
)
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner.backends import (
    boundary_of,
    cache_layers,
    graph_supports,
    load_model_class,
    select_backends,
)
from toolkit_lm.runner.batch import PersistentBatch, StepBuffers
from toolkit_lm.runner.row_sampler import RowSampler
from toolkit_lm.runner.slots import Slots
from toolkit_lm.runner.step_parts import StepParts, make_parts
from toolkit_lm.runner.step_run import Run
from toolkit_lm.sampling import ProcessorTable
from toolkit_lm.sampling.transfer import to_device
from toolkit_lm.step import StepInputs


class ModelRunner:
    """Holds the model, its KV cache and the persistent batch, and runs the steps that the scheduler
    plans."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.config = config
        self.plugins = plugins
        self.device = torch.device(config.device.device)
        self.model: Model
        self.compiler: ModelCompiler | None = None
        """What computes the model's forward pass in its place."""
        self.selections: dict[str, Selection] = {}
        """By layer: the backend that was chosen for it."""
        self.kv_cache: KVCacheConfig
        self._layers: dict[str, CacheLayer] = {}
        self.parts = StepParts({})
        self._run = Run(self)
        self.step_inputs: StepInputs
        """Of the step that runs."""
        self._taps: Taps | None = None
        self._slots: Slots
        self._bindings: dict[str, Binding] = {}
        self._context: ForwardContext
        """Of all steps: each sets its metadata anew."""
        self._backends: list[CacheBackend | None] = []
        """Of the KV groups, then of the layers without a cache."""
        self._cache: KVCache
        self._transfers: Transfers
        self._buffers: StepBuffers
        self._batch: PersistentBatch
        self._sampler: RowSampler
        self._counters = plugins.compilers.counters()
        self._num_compiled = 0
        """Graphs that were compiled in this process. It is to be the same when the warm-up is
        over."""
        self.is_proven = False
        """The start has shown that a fallback computes what its model does, or has given that
        up."""

    def load(self) -> None:
        """Makes the model, loads its weights, and chooses each layer's backend."""
        self.model = load_model(
            load_model_class(self.config, self.plugins), self.config, self.device, self.plugins
        )
        self._context = ForwardContext(self._bindings, [], named_layers(self.model))
        self.parts = make_parts(self.model, self.config, self.device, self.plugins)
        self._layers = cache_layers(self.model) | self.parts.layers()
        feeds = self.parts.feeds
        self._feeds_uncached = "sequences" not in feeds or not self.config.keeps_kv_cache
        if (drafter := self.config.scheduler.drafter) is not None and (
            self.config.model.runner == "pooling" or not max_drafts(self.kv_cache_specs().values())
        ):
            raise UnsupportedError(
                f"drafter {drafter!r}: drafts are for engines that generate, of models that can "
                "take tokens back: a recurrent state's spec says how many (rewinds)."
            )
        self.selections = select_backends(
            self._layers, self.device, self.config, self.plugins.attention_backends, feeds
        )
        self._tap_layers()
        self.compiler = make_compiler(self.model, self.config, self.plugins)

    def _tap_layers(self) -> None:
        """Has the model's layers give what parts tap. All stages know what any of them taps."""
        if names := self.parts.taps:
            num_tokens = _limits(self.config).num_tokens
            self._taps = Taps(self.model, names, self.config, num_tokens, self.device)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """By layer: what it caches. Layers that cache nothing are left out."""
        cached = self.config.keeps_kv_cache
        specs = {
            name: layer.kv_cache_spec()
            for name, layer in self._layers.items()
            if layer.shares_with is None and (cached or layer.needs_cache)
        }
        return {
            name: self.parts.with_lookahead(name, spec)
            for name, spec in specs.items()
            if spec is not None
        }

    def init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocates the cache, and binds each layer to its backend and its part of the cache."""
        self.kv_cache = kv_cache
        self._bindings.clear()
        self._backends.clear()
        max_len = self.config.max_model_len
        limits = _limits(self.config)
        self._cache = KVCache(kv_cache, self.device)
        # The warm-up has made some before.
        self._close_tiers()
        self._transfers = Transfers(
            self._cache,
            {
                entry.key: self.plugins.kv_tiers.make(
                    entry.key, self.config, kv_cache, options=self.plugins.options(entry.plugin)
                )
                for entry in self.plugins.kv_tiers.entries()
            },
        )
        for index, group in enumerate(kv_cache.groups):
            if not group.layers:
                # Another pipeline stage has them.
                self._backends.append(None)
                continue
            selection = self.selections[group.layers[0]]
            with boundary_of(selection.backend, selection.plugin, self.config, self.plugins):
                layout = selection.backend.page_layout(group.spec)
                caches = self._cache.tensors(index, layout)
            of = dict(zip(group.layers, caches, strict=True))
            shared = {n: of[o] for n, one in self._layers.items() if (o := one.shares_with) in of}
            layers = [*of, *shared]
            self._bind(selection, layers, group.spec, limits, [*caches, *shared.values()])
        uncached: dict[str, list[str]] = {}
        for layer in self._layers:
            if layer not in self._bindings:
                uncached.setdefault(self.selections[layer].name, []).append(layer)
        for layers in uncached.values():
            self._bind(self.selections[layers[0]], layers, None, limits, [None] * len(layers))
        specs = [group.spec for group in kv_cache.groups]
        most_encoded = self.config.max_encoder_len
        widths = [
            spec.num_blocks(most_encoded if spec.of_encoder else max_len) for spec in specs
        ] + [0] * len(uncached)
        self._buffers = StepBuffers(limits, widths, self.device)
        self._processors = ProcessorTable(self.plugins.logits_processors, self.config, self.device)
        self._batch = PersistentBatch(self._buffers, specs, max_len, self._processors)
        self._sampler = RowSampler(self.model, self._batch)
        self._slots = Slots(self.parts.by_name, limits, self.device)
        self._context = self._context._replace(slots=self._slots.tensors)
        if self.compiler is not None:
            cached = {name for name, one in self._bindings.items() if one.kv_cache is not None}
            self.compiler.bind(
                limits, graph_supports(self.selections, cached, self._feeds_uncached)
            )

    def _bind(
        self,
        selection: Selection,
        layers: list[str],
        spec: KVCacheSpec | None,
        limits: BatchLimits,
        caches: Any,
    ) -> None:
        asked = [
            self._layers[layer].attention_spec(self.device, cached=spec is not None)
            for layer in layers
        ]
        setup = GroupSetup(
            layers=[one for one in asked if one is not None],
            kv_cache=spec,
            limits=limits,
            device=self.device,
            options=None if selection.plugin is None else self.plugins.options(selection.plugin),
        )
        with boundary_of(selection.backend, selection.plugin, self.config, self.plugins):
            backend = selection.backend(setup)
        for name, cache in zip(layers, caches, strict=True):
            layer = self._layers[name]
            shared = layer.shares_with is not None
            self._bindings[name] = Binding(
                backend, layer.params, cache, len(self._backends), shared
            )
        self._backends.append(backend)

    def shutdown(self) -> None:
        """Releases the model and the cache."""
        self._bindings.clear()
        self._backends.clear()
        self._layers.clear()
        self.parts.close()
        self._close_tiers()
        self.compiler = self._taps = None
        for name in (
            "model",
            "_cache",
            "_transfers",
            "_batch",
            "_buffers",
            "_sampler",
            "_context",
            "_slots",
        ):
            self.__dict__.pop(name, None)

    def _close_tiers(self) -> None:
        if "_transfers" in self.__dict__:
            self._transfers.close()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: applies the plan, computes its tokens, draws the next ones."""
        self._batch.apply(plan)
        for remove in self.parts.remove:
            for seq_id in plan.dropped:
                remove(seq_id)
        for add in self.parts.add:
            for seq in plan.new:
                add(seq)
        loads: dict[int, str] = {}
        if plan.copies or plan.swap_out or plan.swap_in or plan.tiers is not None:
            loads = self._transfers.run(plan)
        answers: dict[str, Raw] = {}
        for name, begin in self.parts.begin:
            if (answer := begin(plan, self._run)) is not None:
                answers[name] = answer
        if not plan.scheduled:
            return StepResult(token_ids=[], parts=answers, loads=loads)
        inputs = self.step_inputs = self._batch.inputs(plan)
        num_encoded = 0 if inputs.encoders is None else len(inputs.encoders.positions)
        users = (
            self._batch.sampling.users(inputs.rows[inputs.sampling])
            if self._processors.names
            else None
        )
        if users is not None:
            self._processors.begin(*users)
        with self.model.kernels.step(len(inputs.token_index) + num_encoded):
            with forward_context(self._context):
                hidden_states = self._forward(inputs)
                if hidden_states is None:
                    return StepResult(token_ids=[], parts=answers, loads=loads)
                result = self._sampler.sample(inputs, hidden_states)
                for name, finish in self.parts.finish:
                    if (answer := finish(inputs, hidden_states, result, self._run)) is not None:
                        answers[name] = answer
            if users is not None:
                self._sampler.certain = self._processors.drafts(*users)
                result.drafts |= self._sampler.certain
            num_compiled = 0
            for count in self._counters:
                num_compiled += count()
            result.parts = answers
            result.loads = loads
            result.num_compilations = num_compiled - self._num_compiled
            self._num_compiled = num_compiled
            if not len(inputs.sampling) and self.device.type == "cuda":
                # A draw waits for the device. Without one a step would seem to take no time, and
                # the next one the time of both.
                torch.cuda.current_stream(self.device).synchronize()
            return result

    def _forward(self, inputs: StepInputs) -> Tensor | None:
        """[T, H] hidden states of the flat batch. None: another pipeline stage goes on with
        them."""
        arguments: dict[str, Any] = {}
        for change in self.parts.groups:
            change(inputs)
        for give in self.parts.inputs:
            arguments |= give(inputs)
        shape = None
        if self.compiler is not None:
            num_rows = len(inputs.rows)
            num_tokens = len(inputs.token_index)
            shape = self.compiler.begin_step(
                num_rows, num_tokens, int(inputs.num_tokens.max()), whole=inputs.spans is None
            )
        if self._slots.fills:
            self._slots.fill(inputs)
        input_ids, positions, views = self._buffers.upload(inputs, shape)
        metadata = self._context.metadata
        metadata.clear()
        for backend, view in zip(self._backends, views, strict=True):
            # Beside layers with a cache, those without are of an encoder.
            metadata.append(
                None
                if backend is None or not (view.block_table is not None or self._feeds_uncached)
                else backend.build(view)
            )
        arguments.setdefault("positions", positions)
        pipeline = (
            pipeline_parallel_group(self.config.parallel)
            if self.config.parallel.pipeline_parallel_size > 1
            else None
        )
        if pipeline is not None and pipeline.rank > 0:
            arguments["intermediate"] = pipeline.recv(pipeline.rank - 1)
            if self._taps is not None:
                self._taps.receive(arguments["intermediate"])
        out: Tensor | IntermediateTensors = (self.compiler or self.model)(input_ids, **arguments)
        if isinstance(out, Tensor):
            return out
        assert pipeline is not None, "a model of one stage gives hidden states"
        if self._taps is not None:
            out |= self._taps.sent(len(input_ids))
        pipeline.send(out, pipeline.rank + 1)
        return None

    def _sequences(self, lengths: Sequence[int] | np.ndarray) -> AbstractContextManager[None]:
        """Has the layers of an encoder see a flat batch of sequences of these lengths."""
        seq_lens = np.asarray(lengths, np.int32)
        query_start = np.zeros(len(seq_lens) + 1, np.int32)
        seq_lens.cumsum(out=query_start[1:])
        view = BatchView(
            query_start=query_start,
            seq_lens=seq_lens,
            starts=np.zeros(len(seq_lens), np.int64),
            query_start_device=to_device(query_start, self.device),
            seq_lens_device=to_device(seq_lens, self.device),
            block_table=None,
            slot_mapping=None,
            max_query_len=int(seq_lens.max()),
            max_seq_len=int(seq_lens.max()),
        )
        num_cached = len(self.kv_cache.groups)
        metadata = [
            None if i < num_cached or backend is None else backend.build(view)
            for i, backend in enumerate(self._backends)
        ]
        return forward_context(self._context._replace(metadata=metadata))


def _limits(config: VllmConfig) -> BatchLimits:
    scheduler = config.scheduler
    # The warm-up computes two tokens.
    num_tokens = max(scheduler.token_budget, scheduler.max_num_seqs, 2)
    return BatchLimits(scheduler.max_num_seqs, num_tokens, config.max_model_len)
