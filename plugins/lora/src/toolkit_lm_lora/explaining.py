"""What `toolkit explain` says of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm.model import Model, Rows

from toolkit_lm_lora.enabled import own_adapter
from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.front import OWN
from toolkit_lm_lora.joining import Part
from toolkit_lm_lora.listed import listed
from toolkit_lm_lora.names import Names
from toolkit_lm_lora.resolvers import FolderResolver
from toolkit_lm_lora.weights import Reading

_MOST = 32
"""Most adapters that are shown."""


def explain(
    config: VllmConfig, models: Sequence[Model], options: Any
) -> Mapping[str, Sequence[str]]:
    """The bounds on adapters, and each adapter of the start: its rank, layers and bytes, and what
    computes it; or why it cannot run."""
    resolver = FolderResolver(config, options=options)
    paths = {name: str(resolver.resolve(name)) for name in resolver.names()}
    if (own := own_adapter(config)) is not None:
        paths[OWN] = str(own)
    paths |= {
        name: path
        for name, _, path in (entry.partition("=") for entry in listed(options.modules, "modules"))
    }
    device = "" if options.device_gib is None else f" and {options.device_gib:g} GiB"
    lines = [
        f"{options.max_adapters} slots{device}: adapters of one step; more take turns",
        f"{options.max_host_adapters} adapters and {options.host_gib:g} GiB at most in each "
        "worker's memory, beside those of requests that run",
    ]
    names = [Names(model) for model in models]
    lines += [
        f"{name}: {_described(path, models, names, options)}"
        for name, path in [*paths.items()][:_MOST]
    ]
    if len(paths) > _MOST:
        lines.append(f"and {len(paths) - _MOST} more")
    if not paths:
        lines.append("none at the start: requests or operators name them")
    return {"adapters": lines}


def _described(path: str, models: Sequence[Model], names: Sequence[Names], options: Any) -> str:
    """Rank, bytes, layers and kernels of one adapter, or why it cannot run."""
    try:
        folder = AdapterFolder(path, int(options.max_file_gib * 2**30))
        if folder.rank > options.max_rank:
            return f"cannot run: its rank is {folder.rank}, and max_rank is {options.max_rank}"
        readings = []
        for model, own in zip(models, names, strict=True):
            paths = {id(module): name for name, module in model.named_modules()}
            is_first = model is models[0]
            reading = Reading(model, own, paths, {}, folder, is_first)
            reading.parse(keeps_all=True)
            readings.append(reading)
    except ToolkitError as error:
        return f"cannot run: {error}"
    inside = outside = 0
    sizes = []
    for model, reading in zip(models, readings, strict=True):
        adds = model.kernels.low_rank() is not None
        for prefix, parts in reading.parts.items():
            layer = reading.layers[prefix]
            is_plain = layer.spec.kind == "linear" and layer.rows is Rows.FLAT
            if adds and is_plain and all(map(_is_added, parts.values())):
                inside += 1
            else:
                outside += 1
        sizes.append(_num_bytes(reading))
        outside += len(reading.adapter.modules)
    how = [
        *([f"{inside} in the kernels' own products"] if inside else []),
        *([f"{outside} beside them"] if outside else []),
    ]
    size = max(sizes) / 2**20
    of_rank = " on a rank" if len(models) > 1 else ""
    return f"rank {folder.rank}, {size:.1f} MiB{of_rank}; layers: {', '.join(how)}"


def _is_added(part: Part) -> bool:
    """Whether a part is A and B alone."""
    return part.low is not None and (part.magnitude, part.weight, part.shift) == (None, None, None)


def _num_bytes(reading: Reading) -> int:
    """Bytes of an adapter's share in the dtype of the layers."""
    total = sum(
        tensor.numel() * reading.layers[prefix].spec.dtype.itemsize
        for prefix, parts in reading.parts.items()
        for part in parts.values()
        for tensor in (part.low, part.high, part.shift, part.magnitude, part.weight)
        if tensor is not None
    )
    modules = reading.adapter.modules.values()
    rows = sum(rows.nbytes for _, rows in reading.tokens.values())
    return total + rows + sum(tensor.nbytes for each in modules for tensor in each.values())
