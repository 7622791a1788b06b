"""What each rank of an engine would hold, without a weight that is read."""

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
    """Of its parameters, as they are loaded."""
    num_expert_bytes: int
    """Of them, those of routed experts."""
    num_layers: int
    """That use the KV cache."""


@dataclass
class Held:
    """What all ranks hold."""

    ranks: list[RankShare] = field(default_factory=list)
    selections: dict[str, Selection] = field(default_factory=dict)
    """By layer, of all ranks."""
    specs: list[dict[str, KVCacheSpec]] = field(default_factory=list)
    """By rank and layer."""
    num_fusible: int = 0
    """Decoder layers of kinds that kernels may compute in one call each."""
    num_routed: int = 0
    """Those among them whose feed-forward is left to its module."""
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
            if cached and (spec := layer.kv_cache_spec()) is not None
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
        weights = list(model.parameters())
        share = RankShare(
            rank=rank,
            stage=own.parallel.pipeline_parallel_rank,
            shard=own.parallel.tensor_parallel_rank,
            num_parameters=sum(weight.numel() for weight in weights),
            num_bytes=sum(weight.nbytes for weight in weights),
            num_expert_bytes=sum(weight.nbytes for weight in expert_weights(model)),
            num_layers=len(specs),
        )
        held.ranks.append(share)
    return held


def expert_weights(model: Model) -> Iterator[Tensor]:
    """The parameters of a model's routed experts, of those that this rank holds."""
    for module in model.modules():
        if isinstance(module, LinearBase) and module.spec.kind == "experts":
            yield from module.parameters()


def kv_capacity(config: VllmConfig, held: Held) -> tuple[int | None, str | None]:
    """How many tokens the KV cache would have room for, with what this machine has to spare once
    the weights are loaded.

    Or None, where nothing is cached; and why the engine would refuse it. What a step takes is not
    known without one.
    """
    names = {layer: selection.name for layer, selection in held.selections.items()}
    planned = plan_groups({layer: spec for one in held.specs for layer, spec in one.items()}, names)
    if not planned.pools:
        return None, None
    of_ranks = zip(*(planned.of_layers(one).pools for one in held.specs), strict=True)
    widest = KVCacheConfig(
        planned.groups, [max(pools, key=lambda pool: pool.num_pages) for pools in of_ranks]
    )
    device = torch.device(config.device.device)
    sizes = [one.num_bytes for one in held.ranks]
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
