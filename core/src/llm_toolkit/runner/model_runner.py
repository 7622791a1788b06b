"""The model runner: everything that touches the device happens here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm_toolkit.attention import (
    Attention,
    AttentionBackend,
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
from llm_toolkit.config import VllmConfig
from llm_toolkit.messages import BlockCopy, StepPlan, StepResult, TokenLogprobs
from llm_toolkit.model import Model, load_model, torch_dtype
from llm_toolkit.plugin import Plugins
from llm_toolkit.runner.backends import attention_layers, select_backends
from llm_toolkit.runner.batch import PersistentBatch, StepInputs
from llm_toolkit.runner.prompt_logprobs import prompt_logprobs
from llm_toolkit.sampling import ProcessorTable, sample


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
        self._caches: list[list[Tensor]] = []
        self.kv_cache: KVCacheConfig
        self._batch: PersistentBatch
        self._processors = ProcessorTable(plugins.logits_processors, config, self.device)

    def load(self) -> None:
        """Makes the model, loads its weights, and chooses each attention layer's backend."""
        assert self.config.checkpoint is not None
        model_class = self.plugins.models.load(self.config.checkpoint.architecture)
        self.model = load_model(model_class, self.config, self.device)
        self._layers = attention_layers(self.model)
        self.selections = select_backends(self.model, self.device, self.plugins.attention_backends, self.config.attention.attention_backend)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """By attention layer: what it caches. Layers that cache nothing are left out."""
        specs = {name: layer.kv_cache_spec() for name, layer in self._layers.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocates the cache, and binds each attention layer to its backend and its part of the cache."""
        self.kv_cache = kv_cache
        tensors: dict[Shape, list[Tensor]] = {}
        counts = tensors_per_shape(kv_cache.groups)
        for index, group in enumerate(kv_cache.groups):
            backend_class = self.selections[group.layers[0]].backend
            if group.shape not in tensors:
                shape, dtype = backend_class.kv_cache_shape(group.spec, kv_cache.num_blocks), torch_dtype(group.spec.dtype)
                tensors[group.shape] = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(counts[group.shape])]
            backend = backend_class(self.device)
            caches = tensors[group.shape][: len(group.layers)]
            self._group_backends.append(backend)
            self._caches.append(caches)
            self._bindings.update({layer: Binding(backend, cache, index) for layer, cache in zip(group.layers, caches, strict=True)})
        self._batch = PersistentBatch(
            self.config.scheduler.max_num_seqs, self.config.max_model_len, [group.spec.block_size for group in kv_cache.groups]
        )

    def shutdown(self) -> None:
        """Releases the model and the cache."""
        self._caches.clear()
        self._bindings.clear()
        self._layers.clear()
        self.__dict__.pop("model", None)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step: applies the plan, computes its tokens, draws the next ones."""
        self._batch.apply(plan)
        self._processors.update(plan)
        for copy in plan.copies:
            self._copy_block(copy)
        if not plan.scheduled:
            return StepResult(token_ids=[])
        inputs = self._batch.inputs(plan)
        hidden_states = self._forward(inputs)
        return self._sample(plan, inputs, hidden_states)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """[T, H] hidden states of the flat batch."""
        query_start, seq_lens = self._to_device(inputs.query_start), self._to_device(inputs.seq_lens)
        groups = []
        for backend, block_table, slot_mapping in zip(self._group_backends, inputs.block_tables, inputs.slot_mappings, strict=True):
            slots = self._to_device(slot_mapping)
            view = BatchView(
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                query_start_device=query_start,
                seq_lens_device=seq_lens,
                block_table=self._to_device(block_table),
                slot_mapping=slots,
                max_query_len=int(np.diff(inputs.query_start).max()),
                max_seq_len=int(inputs.seq_lens.max()),
            )
            groups.append(GroupMetadata(backend.build(view), slots))
        with forward_context(self._bindings, groups):
            hidden_states = self.model(self._to_device(inputs.input_ids), self._to_device(inputs.positions))
        assert isinstance(hidden_states, Tensor)
        return hidden_states

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden_states: Tensor) -> StepResult:
        """Logits and tokens of the rows whose last token was computed."""
        result = StepResult(token_ids=[[] for _ in plan.scheduled])
        result.prompt_logprobs = prompt_logprobs(plan, inputs, self._batch, hidden_states, self.model.compute_logits)
        if not len(inputs.sampling):
            return result
        last = self._to_device(inputs.query_start[1:][inputs.sampling].astype(np.int64) - 1)
        logits = self.model.compute_logits(hidden_states[last])
        rows = inputs.rows[inputs.sampling]
        sampled = sample(logits, self._batch.sampling.pick(rows), self._processors)
        self._batch.append_tokens(rows, sampled.token_ids)
        for index, token in zip(inputs.sampling, sampled.token_ids, strict=True):
            result.token_ids[index] = [token]
        if sampled.logprobs:
            by_row: dict[int, TokenLogprobs | None] = dict(zip(inputs.sampling.tolist(), sampled.logprobs, strict=True))
            result.logprobs = [by_row.get(i) for i in range(len(plan.scheduled))]
        seq_ids = [plan.scheduled[i].seq_id for i in inputs.sampling]
        result.errors = {seq_ids[i]: error for i, error in sampled.errors.items()}
        result.mirostat_mu = {seq_ids[i]: mu for i, mu in sampled.mirostat_mu.items()}
        self._batch.sampling.mirostat_mu[rows[list(sampled.mirostat_mu)]] = list(sampled.mirostat_mu.values())
        return result

    def _copy_block(self, copy: BlockCopy) -> None:
        axis = self._group_backends[copy.group].block_axis
        for cache in self._caches[copy.group]:
            cache.select(axis, copy.target).copy_(cache.select(axis, copy.source))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
