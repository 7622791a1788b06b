"""The commands `toolkit quality` and `toolkit quantize`. What computes is imported when it is asked
for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command

if TYPE_CHECKING:
    from toolkit_lm_quantize.quality import Report

_MOST_LAYERS = 20
_BAR = 24
"""Columns of the longest bar."""


@engine_command()
def quality(
    config: VllmConfig,
    plugins: Plugins,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGINAL",
            help="Checkpoint to compare with. Default: the weights of MODEL, not quantized.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Text in UTF-8. Default: the reference writes texts itself."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text.")] = 4096,
    window: Annotated[
        int,
        typer.Option(min=2, help="Length of the sequences into which the text is cut, in tokens."),
    ] = 512,
    layer_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens on which each layer is measured alone. 0: layers are not measured.",
        ),
    ] = 256,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how far a quantized model is from its original: the KL divergence of its
    distributions of the next token, how often both have the same most probable one, and both
    perplexities."""
    from toolkit_lm_quantize.quality import measure

    found = measure(
        config,
        plugins,
        reference=reference,
        text=text,
        max_tokens=max_tokens,
        window=window,
        layer_tokens=layer_tokens,
    )
    if json_output:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    console = Console(markup=False, emoji=False)
    console.print(table_of(found))
    if found.layers:
        console.print(picture_of(found))


@engine_command()
def quantize(
    config: VllmConfig,
    plugins: Plugins,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="What to write: a folder, new or empty; or a file, if the format is one (.gguf).",
        ),
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="Format: compressed-tensors, gguf, or a plugin's."
        ),
    ] = "compressed-tensors",
    shard_gib: Annotated[
        float,
        typer.Option(
            min=0.001, help="Most GiB of a file of weights, where the format has several."
        ),
    ] = 2.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a quantized checkpoint: toolkit quantize MODEL --quantization int4 --out FOLDER.

    The format decides which weights are quantized, and which stay as they are.
    """
    from toolkit_lm_quantize.convert import write_checkpoint

    found = write_checkpoint(
        config, plugins, out, format=format_, shard_bytes=int(shard_gib * 2**30)
    )
    if json_output:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    for name, count in found.quantized.items():
        typer.echo(f"{count} weights in {name}")
    shown = ", ".join(found.kept[:_MOST_LAYERS]) or "none"
    more = len(found.kept) - _MOST_LAYERS
    typer.echo(f"as they were: {shown}" + (f", and {more} more" if more > 0 else ""))
    size = f"{found.num_bytes / 2**20:,.1f} MiB of {found.num_original_bytes / 2**20:,.1f}"
    typer.echo(f"written: {found.path} ({size})")


def table_of(found: Report) -> Table:
    """The figures of the whole model."""
    quality = found.quality
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("model", f"{found.model} ({found.quantization})")
    table.add_row("reference", found.reference)
    table.add_row("text", f"{quality.num_tokens:,} tokens, {found.text}")
    verdict = "indistinguishable" if quality.is_indistinguishable else "distinguishable"
    table.add_row(
        "KL divergence", f"mean {quality.mean_kl:.5f} +- {quality.kl_error:.5f}: {verdict}"
    )
    table.add_row("", f"median {quality.median_kl:.5f}, 99th percentile {quality.p99_kl:.5f}")
    table.add_row("same top token", f"{quality.top1_agreement:.2%}")
    ratio = quality.perplexity / quality.reference_perplexity
    table.add_row(
        "perplexity",
        f"{quality.perplexity:.4f}, the reference {quality.reference_perplexity:.4f}: {ratio:.4f}x",
    )
    return table


def picture_of(found: Report) -> Table:
    """A bar for each layer that is quantized alone, the worst first."""
    worst = found.layers[0].mean_kl
    table = Table(title="one layer quantized at a time: mean KL divergence", box=None)
    table.add_column("layer", overflow="fold")
    for _ in range(2):
        table.add_column(no_wrap=True)
    for layer in found.layers[:_MOST_LAYERS]:
        length = round(_BAR * layer.mean_kl / worst) if worst else 0
        table.add_row(layer.layer, f"{layer.mean_kl:.6f}", "█" * length)
    if (more := len(found.layers) - _MOST_LAYERS) > 0:
        table.add_row(f"and {more} more", f"below {found.layers[_MOST_LAYERS - 1].mean_kl:.6f}", "")
    return table
