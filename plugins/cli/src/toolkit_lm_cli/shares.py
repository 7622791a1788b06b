"""Computes the share of each rank of an engine without reading a weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from toolkit_lm.attention import Selection
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import size_kv_cache
from toolkit_lm.errors import CapacityError
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec, plan_groups
from toolkit_lm.model import (
    FusibleLayer,
    Kernels,
    LayerParts,
    LinearBase,
    Model,
    QuantizedReader,
    construct,
    fuse_refusal,
)
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner import cache_layers, free_memory, load_model_class, select_backends
from torch import Tensor


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a model."""

    rank: int
    stage: int
    """Its pipeline parallel rank."""
    shard: int
    """Its tensor parallel rank."""
    num_parameters: int
    num_bytes: int
    """Bytes of the rank's parameters once loaded."""
    num_expert_bytes: int
    """Bytes of its routed experts, a part of num_bytes."""
    num_layers: int
    """That use the KV cache."""


@dataclass
class WeightKind:
    """Weights of all layers of one kind, on all ranks together."""

    kind: str
    """Kind of layer: "linear", "experts", "embedding", "lm_head"; "other": norms, biases and what
    else has parameters."""
    num_weights: int = 0
    num_bytes: int = 0
    """Bytes that are stored for them. A tied head has none."""
    num_float_bytes: int = 0
    """Bytes that they would have in the dtype of activations."""
    methods: dict[str, int] = field(default_factory=dict)
    """What stores them, and multiplies by them: number of layers by name."""

    def add_to(self, total: WeightKind) -> None:
        total.num_weights += self.num_weights
        total.num_bytes += self.num_bytes
        total.num_float_bytes += self.num_float_bytes
        for name, count in self.methods.items():
            total.methods[name] = total.methods.get(name, 0) + count


@dataclass
class Held:
    """Shares of all ranks."""

    models: list[Model] = field(default_factory=list)
    """Each rank's model, on the device "meta"."""
    ranks: list[RankShare] = field(default_factory=list)
    weights: dict[str, WeightKind] = field(default_factory=dict)
    """By kind."""
    selections: dict[str, Selection] = field(default_factory=dict)
    """Selections by layer, over all ranks."""
    specs: list[dict[str, KVCacheSpec]] = field(default_factory=list)
    """KV cache specs by rank and layer."""
    num_fusible: int = 0
    """Decoder layers of kinds that kernels may compute in one call each."""
    num_routed: int = 0
    """Fusible decoder layers whose feed-forward part is left to its module."""
    unfused: Counter[str] = field(default_factory=Counter)
    """Decoder layers that kernels which compute some in one call must leave to their modules, by
    the reason."""
    fuses: bool = False
    """Whether the kernels compute any layer in one call."""


def hold(config: VllmConfig, plugins: Plugins) -> Held:
    """Makes each rank's model of a resolved config, without storage: only the layers' shapes count.
    Raises what the engine would raise."""
    held = Held()
    model_class = load_model_class(config, plugins)
    device = torch.device(config.device.device)
    cached = config.keeps_kv_cache
    for rank in range(config.parallel.num_ranks):
        own = config.with_rank(rank)
        with plugins.boundary:
            model = construct(model_class, own, torch.device("meta"), plugins)
        held.models.append(model)
        layers = cache_layers(model)
        held.selections |= select_backends(
            layers,
            device,
            own,
            plugins.attention_backends,
            frozenset().union(*(part.feeds for part in model.parts.values())),
        )
        specs = {
            name: spec
            for name, layer in layers.items()
            if cached and (spec := layer.keeps) is not None
        }
        held.specs.append(specs)
        found = [module.fusible() for module in model.modules() if isinstance(module, FusibleLayer)]
        fusible = [parts for parts in found if isinstance(parts, LayerParts)]
        held.num_fusible += len(fusible)
        held.num_routed += sum(parts.feed_forward is not None for parts in fusible)
        refusal = fuse_refusal(model.kernels)
        held.fuses = refusal is None
        if type(model.kernels).fuse is not Kernels.fuse:
            reasons = (
                [refusal] * len(found)
                if refusal
                else [why for why in found if isinstance(why, str)]
            )
            held.unfused.update(reasons)
        kinds = weight_kinds(model)
        for kind in kinds:
            kind.add_to(held.weights.setdefault(kind.kind, WeightKind(kind.kind)))
        share = RankShare(
            rank=rank,
            stage=own.parallel.pipeline_parallel_rank,
            shard=own.parallel.tensor_parallel_rank,
            num_parameters=sum(kind.num_weights for kind in kinds),
            num_bytes=sum(kind.num_bytes for kind in kinds),
            num_expert_bytes=sum(weight.nbytes for weight in expert_weights(model)),
            num_layers=len(specs),
        )
        held.ranks.append(share)
    return held


def weight_kinds(model: Model) -> list[WeightKind]:
    """The weights that a rank's model holds, by kind of layer."""
    kinds: dict[str, WeightKind] = {}
    seen: set[int] = set()
    for layer in model.modules():
        if not isinstance(layer, LinearBase):
            continue
        stored = [*layer.named_parameters(), *layer.named_buffers()]
        own = [tensor for name, tensor in stored if name != "bias" and id(tensor) not in seen]
        seen.update(map(id, own))
        outputs, inputs = layer.spec.shape
        kind = kinds.setdefault(layer.spec.kind, WeightKind(layer.spec.kind))
        method = layer.method
        has_name = type(method).__str__ is not object.__str__
        name = str(method) if has_name else type(method).__name__
        if isinstance(method, QuantizedReader):
            name += f", multiplied by {_multiplier(method)}"
        kind.methods[name] = kind.methods.get(name, 0) + 1
        if own:
            kind.num_weights += outputs * inputs
            kind.num_bytes += sum(tensor.nbytes for tensor in own)
            kind.num_float_bytes += outputs * inputs * layer.spec.dtype.itemsize
    others = [tensor for tensor in model.parameters() if id(tensor) not in seen]
    other = WeightKind("other", sum(tensor.numel() for tensor in others))
    other.num_bytes = other.num_float_bytes = sum(tensor.nbytes for tensor in others)
    return [*kinds.values(), other]


def _multiplier(reader: QuantizedReader) -> str:
    """The kernel that will multiply by the weight in words, and why none is faster."""
    loaded = {name: parameter.data for name, parameter in reader.parameters.items()}
    try:
        weight = reader.read(reader.spec, loaded)
        return reader.kernels.explain_quantized(reader.spec, weight)
    except Exception:
        # Tensors of the meta device have no values, and a reader raises whatever their lack leads
        # to.
        return "what suits its values, which are not read here"


def expert_weights(model: Model) -> Iterator[Tensor]:
    """The parameters of a model's routed experts, of those that this rank holds."""
    for module in model.modules():
        if isinstance(module, LinearBase) and module.spec.kind == "experts":
            yield from module.parameters()


def kv_capacity(config: VllmConfig, held: Held) -> tuple[int | None, str | None]:
    """Tokens that the KV cache would have room for in this machine's free memory after the weights
    are loaded.

    (None, None) if the model caches nothing. The second value is the reason why the engine would
    refuse the capacity. The memory of a step is not known without one."""
    names = {layer: selection.name for layer, selection in held.selections.items()}
    planned = plan_groups(
        {layer: spec for specs in held.specs for layer, spec in specs.items()}, names
    )
    if not planned.pools:
        return None, None
    of_ranks = zip(*(planned.of_layers(specs).pools for specs in held.specs), strict=True)
    widest = KVCacheConfig(
        planned.groups, [max(pools, key=lambda pool: pool.num_pages) for pools in of_ranks]
    )
    device = torch.device(config.device.device)
    sizes = [rank.num_bytes for rank in held.ranks]
    free = free_memory(device)
    # Ranks have a GPU each; of a host they share the memory.
    spare = free - max(sizes) if device.type == "cuda" else (free - sum(sizes)) // len(sizes)
    try:
        kv_cache = size_kv_cache(
            widest, config, spare, free_memory(torch.device("cpu")) // len(sizes)
        )
    except CapacityError as error:
        return None, str(error)
    needed = kv_cache.max_blocks(
        config.max_model_len, config.scheduler.token_budget, config.max_encoder_len
    )
    fitting = min(
        pool.num_blocks / count for pool, count in zip(kv_cache.pools, needed, strict=True) if count
    )
    return int(fitting * config.max_model_len), None
