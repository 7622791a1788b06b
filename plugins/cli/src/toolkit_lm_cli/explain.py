"""`toolkit explain`: what runs a model, and why each other candidate does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import page
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command

if TYPE_CHECKING:
    from toolkit_lm_cli.explanation import DrafterChoice, Explanation, LayerChoice
    from toolkit_lm_cli.shares import RankShare, WeightKind


@engine_command()
def explain(
    config: VllmConfig,
    plugins: Plugins,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what runs a model, and why each other candidate does not."""
    from toolkit_lm_cli.explanation import explain as explain_model

    found = explain_model(config, plugins)
    if json_output:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        Console(markup=False, emoji=False).print(table_of(found))


def table_of(found: Explanation) -> Table:
    """Table of an explanation, a row for each choice."""
    resolved = found.config
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row(
        "model",
        f"{resolved.model.model} ({resolved.model.dtype} on {resolved.device.device}, "
        f"{resolved.max_model_len} tokens)",
    )
    if found.untried is not None:
        table.add_row("GPU", f"{found.untried}: {page('gpu.md')}")
    taken, *others = _verdicts(found.architecture, found.models)
    table.add_row(
        "model class",
        "\n".join([f"{taken}: {found.model_class} (plugin {found.plugin!r})", *others]),
    )
    table.add_row(
        "runner",
        found.runner if found.convert == "none" else f"{found.runner}, converted: {found.convert}",
    )
    how = f"{resolved.load.load_format}, quantization: {resolved.load.quantization}"
    table.add_row("weights", "\n".join([how, *map(_weights, found.weights)]))
    table.add_row("renderer", "\n".join(_verdicts(found.renderer, found.renderers)))
    if defaults := found.sampling_defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        table.add_row(
            "sampling", f"where a request says nothing, as generation_config.json has it: {shown}"
        )
    parallel = resolved.parallel
    if parallel.data_parallel_size > 1:
        table.add_row(
            "engines",
            f"{parallel.data_parallel_size}, each with all of the model on {parallel.num_ranks} "
            "of the devices",
        )
    table.add_row("executor", "\n".join(_verdicts(found.executor, found.executors)))
    table.add_row("kernels", "\n".join(_verdicts(found.kernels, found.kernels_considered)))
    table.add_row(
        "compilation", "\n".join([*_verdicts(found.compiler, found.compilers), *found.computed])
    )
    if found.drafters:
        table.add_row("drafters", "\n".join(map(_drafter, found.drafters)))
    for name, lines in found.of_plugins.items():
        table.add_row(name, "\n".join(lines))
    for shown in _attention(found.layers):
        table.add_row("attention", shown)
    table.add_row("ranks", "\n".join(_shares(found.ranks)))
    table.add_row("KV cache", found.kv_refusal or _kv_cache(found.kv_tokens))
    table.add_row(
        "may wait", "\n".join(f"{reason}: {sentence}" for reason, sentence in found.waits.items())
    )
    if found.without_effect:
        table.add_row(
            "no effect",
            "\n".join(f"{option.option}: {option.reason}" for option in found.without_effect),
        )
    return table


def _drafter(drafter: DrafterChoice) -> str:
    options = "".join(f", {name} {value}" for name, value in drafter.options.items())
    first = f"{drafter.name}: {drafter.target} (plugin {drafter.plugin!r}{options})"
    return "\n  ".join([first, *drafter.costs])


def _weights(kind: WeightKind) -> str:
    """Bytes of the weights of one kind, and the methods of its layers."""
    methods = ", ".join(f"{count} by {name}" for name, count in kind.methods.items())
    size = f"{kind.num_bytes / 2**20:,.1f} MiB" if kind.num_bytes else "the embedding's"
    if kind.num_bytes != kind.num_float_bytes:
        bits = 8 * kind.num_bytes / kind.num_weights
        size += f" of {kind.num_float_bytes / 2**20:,.1f}, {bits:.2f} bits a weight"
    return f"{kind.kind}: {size}" + (f" ({methods})" if methods else "")


def _attention(layers: Sequence[LayerChoice]) -> Iterator[str]:
    """Lines about attention. Layers with the same decision share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        alike.setdefault(tuple(_verdicts(layer.backend, layer.candidates)), []).append(layer.layer)
    for verdicts, names in alike.items():
        first = names[0]
        last = names[-1]
        shown = first if len(names) == 1 else f"{first} ... {last} ({len(names)} layers)"
        yield "\n".join([shown, *verdicts])


def _kv_cache(num_tokens: int | None) -> str:
    if num_tokens is None:
        return "none"
    return f"{num_tokens:,} tokens, with the memory that is free now"


def _shares(ranks: list[RankShare]) -> Iterator[str]:
    for rank in ranks:
        place = (
            f"rank {rank.rank} (stage {rank.stage}, shard {rank.shard}): " if len(ranks) > 1 else ""
        )
        experts = (
            f" ({rank.num_expert_bytes / 2**20:,.1f} MiB of experts)"
            if rank.num_expert_bytes
            else ""
        )
        size = f"{rank.num_parameters:,} parameters, {rank.num_bytes / 2**20:,.1f} MiB{experts}"
        yield f"{place}{size}; {rank.num_layers} layers with a KV cache"


def _verdicts(taken: str, candidates: list[tuple[str, str | None]]) -> list[str]:
    refused = [
        f"not {name}: {reason}" if reason else f"able, not taken: {name}"
        for name, reason in candidates
        if name != taken
    ]
    return [taken, *refused]
