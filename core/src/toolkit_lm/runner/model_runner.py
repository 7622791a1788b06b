"""The model runner: all work on the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from msgspec import Raw
from torch import Tensor

from toolkit_lm.attention import (
    CacheBackend,
    CacheLayer,
    ForwardContext,
    Selection,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.kv.cache import KVCache
from toolkit_lm.kv.transfers import Transfers, make_stores
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
from toolkit_lm.runner.agreement import greatest_of_ranks
from toolkit_lm.runner.backends import (
    cache_layers,
    load_model_class,
    select_backends,
    warn_of_bits,
)
from toolkit_lm.runner.batch import PersistentBatch, StepBuffers
from toolkit_lm.runner.binding import LayerBindings, batch_limits
from toolkit_lm.runner.row_sampler import RowSampler
from toolkit_lm.runner.slots import Slots
from toolkit_lm.runner.stage import PipelineStage
from toolkit_lm.runner.step_parts import StepParts, make_parts
from toolkit_lm.runner.step_run import Run
from toolkit_lm.sampling import ProcessorTable
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
        """Compiler that runs the model's forward pass in the model's place, or None."""
        self.selections: dict[str, Selection] = {}
        """Selected attention backend of each layer, by layer name."""
        self.kv_cache: KVCacheConfig
        self._layers: dict[str, CacheLayer] = {}
        self.parts = StepParts({})
        self._run = Run(self)
        self.step_inputs: StepInputs
        """Inputs of the running step."""
        self._taps: Taps | None = None
        self._stage: PipelineStage | None = None
        """This rank's pipeline stage; None: one stage has the whole model."""
        self._feeds_uncached = False
        """A step's flat batch also passes through layers that cache nothing."""
        self._bindings: LayerBindings
        self._backends: list[CacheBackend | None]
        """Backends of the flat batch, one for each of its views."""
        self._context: ForwardContext
        """Forward context of all steps. Each step sets new metadata in it."""
        self._slots: Slots
        self._transfers: Transfers
        self._buffers: StepBuffers
        self._batch: PersistentBatch
        self._sampler: RowSampler
        self._counters = plugins.compilers.counters()
        self._num_compiled = 0
        """Number of graphs compiled in this process. It must not change after the warm-up."""
        self.is_proven = False
        """At the start, a fallback was shown to compute what its model does, or this check was
        given up."""

    def load(self) -> None:
        """Makes the model, loads its weights, and selects each layer's backend."""
        self.model = load_model(
            load_model_class(self.config, self.plugins), self.config, self.device, self.plugins
        )
        self.parts = make_parts(self.model, self.config, self.device, self.plugins)
        self._layers = cache_layers(self.model) | self.parts.layers()
        self.parts.check_drafts(self.config, self.kv_cache_specs().values())
        feeds = self.parts.feeds
        self._feeds_uncached = "sequences" not in feeds or not self.config.keeps_kv_cache
        self.selections = select_backends(
            self._layers, self.device, self.config, self.plugins.attention_backends, feeds
        )
        warn_of_bits(self.model.kernels, self.selections)
        if names := self.parts.taps:
            # All stages know every tapped layer.
            num_tokens = batch_limits(self.config).num_tokens
            self._taps = Taps(self.model, names, self.config, num_tokens, self.device)
        if self.config.parallel.pipeline_parallel_size > 1:
            self._stage = PipelineStage(self.config.parallel, self._taps)
        self.compiler = make_compiler(self.model, self.config, self.plugins)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Cache specs by layer. Layers without a cache are left out."""
        cached = self.config.keeps_kv_cache
        specs = {
            name: layer.keeps
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
        # The warm-up has made some before.
        self._release_cache()
        cache = KVCache(kv_cache, self.device)
        self._transfers = Transfers(
            cache,
            make_stores(self.config, kv_cache, self.plugins),
            partial(greatest_of_ranks, parallel=self.config.parallel, device=self.device),
        )
        self._bindings = LayerBindings(
            self._layers, self.selections, self.config, self.device, self.plugins
        )
        self._bindings.bind(kv_cache, cache)
        self._backends = self._bindings.batch_backends(self._feeds_uncached)
        limits = self._bindings.limits
        self._buffers = StepBuffers(limits, self._bindings.table_widths, self.device)
        self._processors = ProcessorTable(self.plugins.logits_processors, self.config, self.device)
        self._batch = PersistentBatch(
            self._buffers,
            [group.spec for group in kv_cache.groups],
            self.config.max_model_len,
            self._processors,
            [group.is_apart for group in kv_cache.groups],
        )
        self._batch.sampling.logprobs_mode = self.config.limits.logprobs_mode
        self._sampler = RowSampler(self.model, self._batch)
        self._slots = Slots(self.parts.by_name, limits, self.device)
        self._context = ForwardContext(
            self._bindings.by_layer, [], named_layers(self.model), self._slots.tensors
        )
        if self.compiler is not None:
            self.compiler.bind(limits, self._bindings.graph_supports(self._feeds_uncached))

    def shutdown(self) -> None:
        """Releases the model and the cache."""
        self.parts.close()
        self._release_cache()
        self._layers.clear()
        self._stage = self._taps = self.compiler = None
        self.__dict__.pop("model", None)

    def _release_cache(self) -> None:
        """Closes the tiers, and forgets all that was made with the cache."""
        if "_transfers" in self.__dict__:
            self._transfers.close()
        for name in (
            "_transfers",
            "_bindings",
            "_backends",
            "_buffers",
            "_batch",
            "_sampler",
            "_slots",
            "_context",
        ):
            self.__dict__.pop(name, None)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: applies the plan, computes its tokens, and samples the next ones."""
        self._batch.apply(plan)
        for remove in self.parts.remove:
            for seq_id in plan.dropped:
                remove(seq_id)
        for add in self.parts.add:
            for seq in plan.new:
                add(seq)
        loads: dict[int, bool] = {}
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
        if self._processors.names:
            self._sampler.begin(inputs)
        with self.model.kernels.step(len(inputs.token_index) + num_encoded):
            with forward_context(self._context):
                hidden_states = self._forward(inputs)
                if hidden_states is None:
                    return StepResult(token_ids=[], parts=answers, loads=loads)
                result = self._sampler.sample(inputs, hidden_states)
                for name, finish in self.parts.finish:
                    if (answer := finish(inputs, hidden_states, result, self._run)) is not None:
                        answers[name] = answer
            if self._processors.names:
                self._sampler.drafts(inputs, result)
            num_compiled = 0
            for count in self._counters:
                num_compiled += count()
            result.parts = answers
            result.loads = loads
            result.num_compilations = num_compiled - self._num_compiled
            self._num_compiled = num_compiled
            if not len(inputs.sampling) and self.device.type == "cuda":
                # Sampling waits for the device. Without it, this step would seem to take no time,
                # and the next one the time of both.
                torch.cuda.current_stream(self.device).synchronize()
            return result

    def _forward(self, inputs: StepInputs) -> Tensor | None:
        """Returns hidden states [T, H] of the flat batch. None: the next pipeline stage
        continues."""
        arguments: dict[str, Any] = {}
        if self._taps is not None and self._stage is None:
            parts = self.parts.by_name.values()
            self._taps.are_read = any(part.taps and part.reads_taps for part in parts)
        for change in self.parts.groups:
            change(inputs)
        for give in self.parts.inputs:
            arguments |= give(inputs)
        shape = None
        compiler = self.compiler
        if compiler and any(part.calls_modules for part in self.parts.by_name.values()):
            compiler = None
        if compiler is not None:
            num_rows = len(inputs.rows)
            num_tokens = len(inputs.token_index)
            shape = compiler.begin_step(
                num_rows, num_tokens, int(inputs.num_tokens.max()), whole=inputs.spans is None
            )
        if self._slots.fills:
            self._slots.fill(inputs)
        input_ids, positions, views = self._buffers.upload(inputs, shape)
        metadata = self._context.metadata
        metadata.clear()
        for backend, view in zip(self._backends, views, strict=True):
            metadata.append(None if backend is None else backend.build(view))
        arguments.setdefault("positions", positions)
        if self._stage is not None:
            self._stage.receive(arguments)
        out: Tensor | IntermediateTensors = (compiler or self.model)(input_ids, **arguments)
        if self._stage is not None:
            return self._stage.hand_on(out, len(input_ids))
        assert isinstance(out, Tensor), "a model of one stage gives hidden states"
        return out
