"""The model runner: everything that touches the device happens here."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention import (
    Attention,
    AttentionBackend,
    AttentionType,
    BatchView,
    Binding,
    GroupMetadata,
    KVCacheConfig,
    KVCacheSpec,
    Selection,
    Shape,
    forward_context,
    tensors_per_shape,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import POOLING_TASKS, PoolingTask
from toolkit_lm.messages import BlockCopy, PoolingRules, StepPlan, StepResult, TokenLogprobs
from toolkit_lm.model import Model, load_model, torch_dtype
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import Pooler
from toolkit_lm.runner.backends import attention_layers, load_model_class, select_backends
from toolkit_lm.runner.batch import PersistentBatch, StepInputs
from toolkit_lm.runner.pooling import PoolingBatch
from toolkit_lm.runner.prompt_logprobs import prompt_logprobs
from toolkit_lm.sampling import ProcessorTable, sample, top_candidates


class ModelRunner:
    """Holds the model, its KV cache and the persistent batch, and runs the steps that the scheduler plans."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.config = config
        self.plugins = plugins
        self.device = torch.device(config.device.device)
        self.model: Model
        self.selections: dict[str, Selection] = {}
        """By attention layer: the backend that was chosen for it."""
        self._layers: dict[str, Attention] = {}
        self._bindings: dict[str, Binding] = {}
        self._group_backends: list[AttentionBackend] = []
        """Of the KV groups, then of the layers without a cache."""
        self._pooling: PoolingBatch | None = None
        self._caches: list[list[Tensor]] = []
        """Per KV group and layer."""
        self._host_caches: list[list[Tensor]] = []
        """Of the same shapes, but for the number of blocks: what preempted requests are swapped to."""
        self.kv_cache: KVCacheConfig
        self._batch: PersistentBatch

    def load(self) -> None:
        """Makes the model, loads its weights, and chooses each attention layer's backend."""
        self.model = load_model(load_model_class(self.config, self.plugins), self.config, self.device, self.plugins)
        if "embed" in self.config.model.extra_tasks:
            from toolkit_lm.pooling import embedding_pooler

            with self.device:
                self.model.pooler = embedding_pooler(self.config, default="LAST")
        pooler = getattr(self.model, "pooler", None)
        if isinstance(pooler, Pooler):
            self._pooling = PoolingBatch(pooler)
        self._layers = attention_layers(self.model)
        self.selections = select_backends(self.model, self.device, self.config, self.plugins.attention_backends)

    def pooling_rules(self) -> dict[PoolingTask, PoolingRules]:
        """The pooling tasks that the model serves, and what each allows."""
        if self._pooling is None:
            return {}
        pooler = self._pooling.pooler
        one_way = all(layer.params.attention_type is AttentionType.DECODER for layer in self._layers.values())
        return {
            task: PoolingRules(
                chunkable=one_way and pooler.chunkable(task),
                reads_prefix_cache=one_way and pooler.reads_prefix_cache(task),
                size=pooler.output_size(task),
            )
            for task in POOLING_TASKS
            if task in pooler.supported_tasks()
        }

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """By attention layer: what it caches. Layers that cache nothing are left out."""
        scheduler, cache = self.config.scheduler, self.config.cache
        if self.config.model.runner == "pooling" and not (scheduler.enable_chunked_prefill or cache.enable_prefix_caching):
            # Every prompt is computed at once, and nothing comes after it.
            return {}
        specs = {name: layer.kv_cache_spec() for name, layer in self._layers.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocates the cache, and binds each attention layer to its backend and its part of the cache."""
        self.kv_cache = kv_cache
        self._caches = self._allocate(kv_cache, kv_cache.num_blocks, self.device)
        self._host_caches = self._allocate(kv_cache, kv_cache.num_host_blocks, torch.device("cpu"))
        for index, (group, caches) in enumerate(zip(kv_cache.groups, self._caches, strict=True)):
            backend = self.selections[group.layers[0]].backend(self.device)
            self._group_backends.append(backend)
            self._bindings.update({layer: Binding(backend, cache, index) for layer, cache in zip(group.layers, caches, strict=True)})
        uncached = [layer for layer in self._layers if layer not in self._bindings]
        for backend_class in dict.fromkeys(self.selections[layer].backend for layer in uncached):
            index, backend = len(self._group_backends), backend_class(self.device)
            self._group_backends.append(backend)
            mine = [layer for layer in uncached if self.selections[layer].backend is backend_class]
            self._bindings.update({layer: Binding(backend, None, index) for layer in mine})
        self._batch = PersistentBatch(
            self.config.scheduler.max_num_seqs,
            self.config.max_model_len,
            [group.spec.block_size for group in kv_cache.groups],
            ProcessorTable(self.plugins.logits_processors, self.config, self.device),
        )

    def _allocate(self, kv_cache: KVCacheConfig, num_blocks: int, device: torch.device) -> list[list[Tensor]]:
        """The cache tensors per KV group and layer; groups of one shape share them."""
        tensors: dict[Shape, list[Tensor]] = {}
        counts = tensors_per_shape(kv_cache.groups)
        for group in kv_cache.groups:
            if group.shape not in tensors:
                shape = self.selections[group.layers[0]].backend.kv_cache_shape(group.spec, num_blocks)
                dtype = torch_dtype(group.spec.dtype)
                tensors[group.shape] = [self._zeros(shape, dtype, device) for _ in range(counts[group.shape])]
        return [tensors[group.shape][: len(group.layers)] for group in kv_cache.groups]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or self.device.type == "cuda" or 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=device.type == "cpu" and self.device.type == "cuda")
        # torch writes zeros, which takes seconds for gigabytes; these pages come when they are first used.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)

    def shutdown(self) -> None:
        """Releases the model and the cache."""
        self._caches.clear()
        self._host_caches.clear()
        self._bindings.clear()
        self._layers.clear()
        self.__dict__.pop("model", None)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: applies the plan, computes its tokens, draws the next ones."""
        self._batch.apply(plan)
        if self._pooling is not None:
            self._pooling.update(plan)
        for copies, source, target in (
            (plan.swap_out, self._caches, self._host_caches),
            (plan.swap_in, self._host_caches, self._caches),
            (plan.copies, self._caches, self._caches),
        ):
            for copy in copies:
                self._copy_block(copy, source, target)
        if not plan.scheduled:
            return StepResult(token_ids=[])
        inputs = self._batch.inputs(plan)
        extra = {}
        if self._pooling is not None:
            inputs = inputs._replace(seq_lens=self._pooling.seq_lens(plan, inputs))
        if self._pooling is not None and self.model.takes_token_types:
            extra["token_type_ids"] = self._to_device(self._pooling.token_types(plan, inputs))
        hidden_states = self._forward(inputs, extra)
        result = self._sample(plan, inputs, hidden_states)
        if self._pooling is not None:
            result.pooled, errors = self._pooling.pool(plan, inputs, self._batch, hidden_states)
            result.errors |= errors
        return result

    def _forward(self, inputs: StepInputs, extra: dict[str, Tensor]) -> Tensor:
        """[T, H] hidden states of the flat batch."""
        query_start, seq_lens = self._to_device(inputs.query_start), self._to_device(inputs.seq_lens)
        groups = []
        for index, backend in enumerate(self._group_backends):
            cached = index < len(inputs.block_tables)
            slots = self._to_device(inputs.slot_mappings[index]) if cached else None
            view = BatchView(
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                query_start_device=query_start,
                seq_lens_device=seq_lens,
                block_table=self._to_device(inputs.block_tables[index]) if cached else None,
                slot_mapping=slots,
                max_query_len=int(np.diff(inputs.query_start).max()),
                max_seq_len=int(inputs.seq_lens.max()),
            )
            groups.append(GroupMetadata(backend.build(view), slots))
        with forward_context(self._bindings, groups):
            hidden_states = self.model(self._to_device(inputs.input_ids), self._to_device(inputs.positions), **extra)
        assert isinstance(hidden_states, Tensor)
        return hidden_states

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden_states: Tensor) -> StepResult:
        """Logits, and tokens or candidates, of the rows whose last token was computed."""
        result = StepResult(token_ids=[[] for _ in plan.scheduled])
        if (self._batch.sampling.prompt_logprobs[inputs.rows] >= 0).any():
            result.prompt_logprobs = prompt_logprobs(plan, inputs, self._batch, hidden_states, self.model.compute_logits)
        if not len(inputs.sampling):
            return result
        last = self._to_device(inputs.query_start[1:][inputs.sampling].astype(np.int64) - 1)
        logits = self.model.compute_logits(hidden_states[last])
        rows = inputs.rows[inputs.sampling]
        drawing = self._batch.sampling.num_candidates[rows] == 0
        if not drawing.all():
            searching = np.flatnonzero(~drawing)
            self._search(plan, result, logits[self._to_device(searching)], inputs.sampling[searching], rows[searching])
            logits = logits[self._to_device(np.flatnonzero(drawing))]
        if drawing.any():
            self._draw(plan, result, logits, inputs.sampling[drawing], rows[drawing])
        return result

    def _search(self, plan: StepPlan, result: StepResult, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Candidates for beams. `places`: the rows' indices in the plan; `rows`: those in the persistent batch."""
        found = top_candidates(logits, self._batch.sampling.select(rows))
        seq_ids = [plan.scheduled[place].seq_id for place in places]
        result.candidates = {seq_ids[i]: candidates for i, candidates in found.candidates.items()}
        result.errors |= {seq_ids[i]: error for i, error in found.errors.items()}

    def _draw(self, plan: StepPlan, result: StepResult, logits: Tensor, places: np.ndarray, rows: np.ndarray) -> None:
        """Tokens for the others."""
        sampled = sample(logits, self._batch.sampling.select(rows))
        self._batch.append_tokens(rows, sampled.token_ids)
        for index, token in zip(places, sampled.token_ids, strict=True):
            result.token_ids[index] = [token]
        if sampled.logprobs:
            by_row: dict[int, TokenLogprobs | None] = dict(zip(places.tolist(), sampled.logprobs, strict=True))
            result.logprobs = [by_row.get(i) for i in range(len(plan.scheduled))]
        for i, error in sampled.errors.items():
            result.errors[plan.scheduled[places[i]].seq_id] = error
        if sampled.mirostat_mu:
            states = self._batch.sampling.take_mu(rows, sampled.mirostat_mu)
            result.sampler_state = {plan.scheduled[places[i]].seq_id: state for i, state in states.items()}

    def _copy_block(self, copy: BlockCopy, source: list[list[Tensor]], target: list[list[Tensor]]) -> None:
        axis = self._group_backends[copy.group].block_axis
        for layer_source, layer_target in zip(source[copy.group], target[copy.group], strict=True):
            layer_target.select(axis, copy.target).copy_(layer_source.select(axis, copy.source))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
