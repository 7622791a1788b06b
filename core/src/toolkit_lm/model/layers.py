"""The layers of a model, of which a pipeline rank owns a slice."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from toolkit_lm.config import ParallelConfig
from toolkit_lm.errors import ConfigError


class Absent(nn.Module):
    """Placeholder for a module that another rank holds: a layer of another stage, or an expert.
    Weights under its name are ignored."""


class Layers(nn.ModuleList):
    """All layers of a model, numbered as in the checkpoint. `owned` are the layers that this rank
    runs."""

    owned: tuple[nn.Module, ...]


def make_layers(
    count: int, factory: Callable[[str], nn.Module], prefix: str, parallel: ParallelConfig
) -> Layers:
    """Calls `factory` with the name ("model.layers.3") of each layer that this pipeline rank owns.

    Ranks own contiguous slices whose lengths differ by at most one. The last ranks take the longer
    ones, since the first has the embedding. Raises ConfigError if there are fewer layers than
    ranks.
    """
    rank = parallel.pipeline_parallel_rank
    ranks = parallel.pipeline_parallel_size
    if count < ranks:
        raise ConfigError(
            f"the {count} layers of {prefix} cannot be cut into {ranks} stages: lower "
            "pipeline_parallel_size."
        )
    start = count * rank // ranks
    end = count * (rank + 1) // ranks
    layers = Layers(
        factory(join(prefix, str(i))) if start <= i < end else Absent() for i in range(count)
    )
    layers.owned = tuple(layers[start:end])
    return layers


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have a `prefix`, by prefix."""
    named = ((getattr(module, "prefix", None), module) for module in model.modules())
    return {name: module for name, module in named if isinstance(name, str)}


def is_first_stage(parallel: ParallelConfig) -> bool:
    """Whether this pipeline rank embeds the tokens."""
    return parallel.pipeline_parallel_rank == 0


def is_last_stage(parallel: ParallelConfig) -> bool:
    """Whether this pipeline rank computes the final hidden states."""
    return parallel.pipeline_parallel_rank == parallel.pipeline_parallel_size - 1


def join(prefix: str, name: str) -> str:
    """The name of a module's child: "model" and "norm" -> "model.norm"; a root's prefix is
    empty."""
    return f"{prefix}.{name}" if prefix else name


def layer_index(prefix: str) -> int:
    """The number of the layer that a module belongs to: "model.layers.3.self_attn" -> 3."""
    numbers = [part for part in prefix.split(".") if part.isdigit()]
    assert numbers, f"{prefix!r} names no layer"
    return int(numbers[0])
