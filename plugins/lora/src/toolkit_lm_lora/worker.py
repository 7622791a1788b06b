"""On each worker: the adapters in its memory, and whose rows are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Raw, msgpack
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.messages import NewSequence, StepPlan
from toolkit_lm.model import FusibleLayer, LinearBase, LinearMethod, Rows
from toolkit_lm.step import StepInputs, StepPart, StepRun, worker_method
from torch import Tensor

from toolkit_lm_lora.encoders import EncodedRows, Encoders, ItemAdapters
from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.groups import Key, Kind, StepGroup
from toolkit_lm_lora.memory import Memory
from toolkit_lm_lora.method import Group, LoraEmbedding, LoraMethod, Product
from toolkit_lm_lora.modules import Replacement
from toolkit_lm_lora.names import Names
from toolkit_lm_lora.opaque import OpaqueMethod
from toolkit_lm_lora.share import Counts, Order, Reading, Report, Use
from toolkit_lm_lora.weights import Adapter, Reader


class LoraPart(StepPart):
    """Wraps the layers that adapters change, in the steps that have rows of them."""

    _grouped: tuple[Any, ...] | None = None
    """What `_step` was made of. A step with the same rows need not make it again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.config.compilation.details.cudagraph_mode != "none":
            raise ConfigError(
                "adapters do not run in CUDA graphs, which would replay the kernels of the rows "
                "that were there when they were captured: give the cudagraph_mode none."
            )
        names = Names(self.model)
        parallel = self.config.parallel
        self._group = tensor_parallel_group(parallel)
        self.low_rank = self.model.kernels.low_rank()
        self._reader = Reader(
            self.model,
            names,
            is_first=parallel.tensor_parallel_rank == 0,
            low_rank=self.low_rank,
        )
        self._layers = {
            layer.prefix: layer for layer in self.model.modules() if isinstance(layer, LinearBase)
        }
        is_first = (parallel.tensor_parallel_rank, parallel.pipeline_parallel_rank) == (0, 0)
        self._memory = Memory(self._read, self.options, counts=is_first)
        self._reported: Report | None = None
        self._uses: dict[int, tuple[Key, ...]] = {}
        """By sequence."""
        self._starts: dict[int, dict[Key, int]] = {}
        """By sequence, the first token of each adapter, where it is not the first of all."""
        self._pooled: dict[int, tuple[int, str | None]] = {}
        """By sequence that pools, tokens of its prompt and its task."""
        self._fused = {
            linear.prefix
            for layer in self.model.modules()
            if isinstance(layer, FusibleLayer) and layer.fused is not None
            for linear in _linear_layers(layer)
        }
        """Layers in layers that kernels compute in one call."""
        self._encoders = Encoders(self.model, self._layers)
        self._encoded = EncodedRows(self._memory.active, self.device)
        self._items: ItemAdapters | None = None
        if self._encoders.has_media:
            self._items = ItemAdapters(self.model, self._encoded, self._encoders, self._wrap)
            self.model.encode_items = self._items
        self._opaque = self._hidden() if self.config.compilation.optimization_level else {}
        """By layer, what a compiled model sees of its method."""
        self._methods: dict[str, tuple[Any, LoraMethod]] = {}
        """By layer, the method without adapters, and with them."""
        self._kinds: dict[tuple[Key, ...], Kind] = {}
        """Those of steps since adapters were last activated."""
        self._modules: dict[str, Replacement] = {}
        self._wrapped: set[str] = set()
        """Layers and modules that are changed at the moment."""
        self._of_tokens = torch.zeros(0, dtype=torch.int64)
        self._step: list[StepGroup] = []
        self._added: set[str] = set()
        """Layers whose own methods add to products."""
        self._num_tokens = 0
        self._num_sampled = 0
        self._num_pooled = 0
        """Rows whose prompts end in the step, and that pool for one task; 0: for several."""

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._reader.row_order.weights = weights

    def facts(self) -> Raw:
        return Raw(msgpack.encode(Report({}, {}, [])))

    # Memory

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        memory = self._memory
        encoded = plan.parts.get("lora")
        if encoded is not None:
            order = msgpack.decode(encoded, type=Order)
            for digest in order.deactivate:
                memory.active.pop(digest, None)
            for digest, path, pinned in order.load:
                memory.failed.pop(digest, None)
                memory.want(digest, path, pinned=pinned)
        else:
            order = Order([], [], [])
        memory.collect()
        if order.activate or order.deactivate:
            self._kinds.clear()
            self._grouped = None
        for digest in order.activate:
            self._activate(digest)
        memory.evict()
        self._begin_encoders(plan)
        dropped, memory.dropped = memory.dropped, []
        report = Report(dict(memory.sizes), memory.failed, dropped, [*memory.forgotten])
        if encoded is None and report == self._reported:
            return None
        self._reported = Report(report.held, dict(report.failed), [], report.unwanted)
        return Raw(msgpack.encode(report))

    def _begin_encoders(self, plan: StepPlan) -> None:
        if self._items is not None:
            self._items.begin(plan, self._uses)
        elif self._encoders.there and (plan.encoders or self._encoded.groups):
            self._encoded.begin(plan, self._uses)
            self._wrap()

    @worker_method
    def read(self, reading: Reading) -> list[str]:
        """Begins to read an adapter. Returns "reading", "read", or "failed" and the error."""
        memory = self._memory
        if (why := memory.failed.pop(reading.digest, None)) is not None:
            return ["failed", why]
        memory.want(reading.digest, reading.path, pinned=reading.pinned)
        memory.collect()
        memory.evict()
        return ["read" if reading.digest in memory.held else "reading", ""]

    @worker_method
    def forget(self, digest: str) -> None:
        """Drops an adapter, as soon as no row may have it."""
        self._memory.forget(digest)

    @worker_method
    def counts(self) -> Counts:
        """Counts of this worker since its start."""
        return self._memory.counts()

    def _read(self, digest: str, path: str) -> Adapter:
        folder = AdapterFolder(path)
        if folder.digest != digest:
            raise CheckpointError(
                f"adapter {path!r}: its files have changed since it was registered. Load it anew."
            )
        adapter = self._reader.read(folder, self.options.max_rank)
        self._encoders.check(adapter, folder)
        return adapter

    def _activate(self, digest: str) -> None:
        """Makes an adapter ready for rows, on all ranks in the same step. Raises ToolkitError where
        this rank could not read it."""
        adapter = self._memory.adapter(digest)
        for prefix, (magnitude, squares, high) in adapter.dora.items():
            spec = self._layers[prefix].spec
            if spec.inputs.size < spec.inputs.full:
                squares = self._group.all_reduce(squares.to(self.device)).cpu()
            factor = torch.where(magnitude.isnan(), 1.0, magnitude / squares.sqrt())
            change = adapter.changes[prefix]
            scaled = (high * factor[change.where].unsqueeze(1)).to(self.device, spec.dtype)
            adapter.changes[prefix] = change._replace(
                high=Product(self.model.kernels, scaled),
                magnitude=factor.to(self.device, spec.dtype),
            )
        adapter.dora.clear()
        self._memory.active[digest] = adapter

    # Rows

    def add(self, seq: NewSequence) -> None:
        if seq.features and self._items is not None:
            self._items.add(seq.seq_id, [feature.mm_identifier for feature in seq.features])
        if (params := seq.inputs.pooling) is not None:
            self._pooled[seq.seq_id] = seq.num_prompt_tokens, params.task
        if (share := seq.inputs.parts.get("lora")) is not None:
            uses = msgpack.decode(share, type=list[Use])
            self._uses[seq.seq_id] = tuple(sorted((use.digest, use.scale) for use in uses))
            starts = {(use.digest, use.scale): use.start for use in uses}
            if any(starts.values()):
                self._starts[seq.seq_id] = starts
            for use in uses:
                self._memory.use(use.digest)

    def remove(self, seq_id: int) -> None:
        self._uses.pop(seq_id, None)
        self._pooled.pop(seq_id, None)
        self._starts.pop(seq_id, None)
        if self._items is not None:
            self._items.remove(seq_id)

    def groups(self, inputs: StepInputs) -> None:
        # Before other parts embed tokens in `inputs`.
        self._encoded.is_running = False
        kinds: dict[tuple[Key, ...], int] = {(): 0}
        of_rows = np.array(
            [
                kinds.setdefault(self._uses.get(row.seq_id, ()), len(kinds))
                for row in inputs.plan.scheduled
            ],
            np.int64,
        )
        of_tokens = np.repeat(of_rows, inputs.num_tokens)
        if self._starts:
            self._begin_later(inputs, kinds, of_tokens)
        if not of_tokens.any():
            if self._grouped != ():
                self._step = []
                self._wrap()
                self._grouped = ()
            return
        lasts = inputs.query_start[1:][inputs.sampling] - 1
        pooled = self._pooled_rows(inputs)
        grouped = (*kinds, of_tokens.tobytes(), lasts.tobytes(), *pooled)
        if grouped == self._grouped:
            return
        self._num_tokens = len(of_tokens)
        self._num_sampled = len(lasts)
        self._num_pooled = len(pooled)
        rows = of_tokens, of_tokens[lasts], of_tokens[inputs.query_start[1:][pooled] - 1]
        self._step = [
            StepGroup(
                self._kind(keys),
                place,
                number,
                rows,
                self.device,
                frozenset(np.flatnonzero(of_rows == number).tolist()),
            )
            for keys, number in kinds.items()
            for place in range(len(keys))
        ]
        self._of_tokens = torch.from_numpy(of_tokens).to(self.device)
        self._wrap()
        self._grouped = grouped

    def _begin_later(
        self, inputs: StepInputs, kinds: dict[tuple[Key, ...], int], of_tokens: np.ndarray
    ) -> None:
        """Sets the kinds of tokens before an adapter's first."""
        for index, row in enumerate(inputs.plan.scheduled):
            if (starts := self._starts.get(row.seq_id)) is None:
                continue
            mine = slice(inputs.query_start[index], inputs.query_start[index + 1])
            positions = inputs.token_index[mine]
            of_row = of_tokens[mine]
            for start in sorted({0, *starts.values()}):
                keys = tuple(key for key in self._uses[row.seq_id] if starts[key] <= start)
                of_row[positions >= start] = kinds.setdefault(keys, len(kinds))

    def _pooled_rows(self, inputs: StepInputs) -> list[int]:
        """Rows that are pooled, if all are for one task."""
        ends = inputs.starts + inputs.num_tokens
        found = []
        tasks = set()
        for index, row in enumerate(inputs.plan.scheduled):
            if (known := self._pooled.get(row.seq_id)) is not None:
                tasks.add(known[1])
                if known[0] == ends[index]:
                    found.append(index)
        return found if len(tasks) == 1 else []

    def _kind(self, keys: tuple[Key, ...]) -> Kind:
        if (known := self._kinds.get(keys)) is None:
            adapters = [self._memory.active[digest] for digest, _ in keys]
            methods = self._reader.methods
            known = self._kinds[keys] = Kind(keys, adapters, methods)
        return known

    def _wrap(self) -> None:
        """Has the kernels add what they can, and wraps what else the step's adapters change. Layers
        go on in one call where nothing is wrapped."""
        self._grouped = None
        linear: set[str] = set()
        modules: set[str] = set()
        self._added = set()
        for group in self._step:
            linear |= group.kind.rest
            modules |= group.adapter.modules.keys()
            self._added |= group.kind.paired
        for encoded in self._encoded.groups:
            linear |= encoded.adapter.changes.keys()
            modules |= encoded.adapter.modules.keys()
        linear |= self._added - self._fused
        if self.low_rank is not None:
            groups = [group.adapted() for group in self._step if group.pairs and not group.flat[2]]
            self.low_rank.set(groups, self._num_tokens)
        self.calls_modules = bool(modules)
        for prefix in self._wrapped - linear - modules:
            if prefix in self._methods:
                self._set(prefix, self._methods[prefix][0])
            else:
                self._modules[prefix].remove()
        for prefix in linear - self._wrapped:
            if prefix not in self._methods:
                self._methods[prefix] = self._made(prefix)
            self._set(prefix, self._methods[prefix][1])
        for path in modules - self._wrapped:
            if path not in self._modules:
                self._modules[path] = Replacement(self.model.get_submodule(path), path, self)
            self._modules[path].install()
        self._wrapped = linear | modules

    def adds_to(self, layer: str) -> bool:
        return layer in self._added

    def _made(self, prefix: str) -> tuple[Any, LoraMethod]:
        layer = self._layers[prefix]
        kind = LoraEmbedding if layer.spec.kind == "embedding" else LoraMethod
        method = self._opaque[prefix].inner if prefix in self._opaque else layer.method
        return method, kind(method, grouping=self, layer=prefix)

    def _set(self, prefix: str, method: LinearMethod) -> None:
        """Gives a layer the method of the step."""
        if prefix in self._opaque:
            self._opaque[prefix].current = method
        else:
            self._layers[prefix].method = method

    def _hidden(self) -> dict[str, OpaqueMethod]:
        """Hides the layers that compiled passes call from the compiler."""
        hidden = {}
        for prefix, layer in self._layers.items():
            if layer.rows is not Rows.CACHED and layer.spec.kind in ("linear", "embedding"):
                layer.method = hidden[prefix] = OpaqueMethod(layer.method, layer)
        return hidden

    def groups_of(self, rows: Rows | Tensor, count: int, layer: str) -> list[Group]:
        """Groups as in Grouping. Rows of a drafter's calls have no adapter."""
        if rows is Rows.ENCODER or self._encoded.is_running:
            return self._encoded.groups_of(count, layer)
        found = []
        for group in self._step:
            if layer not in group.adapter.changes or layer in group.kind.paired:
                continue
            if rows is Rows.FLAT:
                if count != self._num_tokens:
                    continue
                mine, is_all, is_none = group.flat
            elif rows is Rows.SAMPLED:
                if count != self._num_sampled:
                    continue
                mine, is_all, is_none = group.sampled
            elif isinstance(rows, Tensor):
                mine, is_all, is_none = group.of(self._of_tokens[rows])
            else:
                continue
            if not is_none:
                found.append(Group(group.adapter.changes, group.scale, None if is_all else mine))
        return found

    def replaced(
        self, path: str, count: int
    ) -> list[tuple[dict[str, Tensor], float, Tensor | None]]:
        """Parameters in the place of a module's own, their scale and rows, in a call with `count`
        rows. The module is not a linear layer."""
        if self._encoded.is_running:
            return self._encoded.replaced(path, count)
        if self.model.current_rows is not None:
            return self._replaced_of_rows(path, count, self.model.current_rows)
        found = []
        for group in self._step:
            if path not in group.adapter.modules:
                continue
            by_count = {
                self._num_pooled: group.pooled,
                self._num_sampled: group.sampled,
                self._num_tokens: group.flat,
            }
            is_either = self._num_sampled == self._num_pooled == count != self._num_tokens
            if count not in by_count or is_either:
                raise UnsupportedError(
                    f"an adapter changes {path}, which is called for {count} of the "
                    f"{self._num_tokens} tokens of a step: whose they are is not known"
                )
            if not (rows := by_count[count])[2]:
                parameters = group.adapter.modules[path]
                found.append((parameters, group.scale, None if rows[1] else rows[0]))
        return found

    def _replaced_of_rows(
        self, path: str, count: int, rows: Sequence[int]
    ) -> list[tuple[dict[str, Tensor], float, Tensor | None]]:
        """The same in a call for some rows of the step, each of which has as many of the call's."""
        each, left = divmod(count, max(len(rows), 1))
        found = []
        for group in self._step:
            if path not in group.adapter.modules:
                continue
            mine = [place for place, row in enumerate(rows) if row in group.rows]
            if len(mine) not in (0, len(rows)) and left:
                raise UnsupportedError(
                    f"an adapter changes {path}, which is called for {count} rows of "
                    f"{len(rows)} sequences: whose they are is not known"
                )
            if mine:
                at = torch.arange(count, device=self.device)
                of_rows = torch.isin(at // max(each, 1), torch.tensor(mine, device=self.device))
                is_all = len(mine) == len(rows)
                parameters = group.adapter.modules[path]
                found.append((parameters, group.scale, None if is_all else at[of_rows]))
        return found

    def close(self) -> None:
        self._memory.pool.shutdown(cancel_futures=True)


def _linear_layers(layer: FusibleLayer) -> list[LinearBase]:
    parts = layer.parts()
    if parts is None:
        return []
    layers = parts.qkv, parts.out, parts.gate_up, parts.down, *(parts.gate or ())
    return [linear for linear in layers if isinstance(linear, LinearBase)]
