"""The commands `toolkit lora list` and `toolkit lora merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command

from toolkit_lm_lora.files import AdapterFolder


def list_adapters(
    folder: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, help="Folder with folders of adapters, or an adapter."
        ),
    ],
) -> None:
    """List the adapters of a folder: what they change, or why they cannot be run."""
    table = Table("name", "rank", "MiB", "digest", "changes")
    is_one = (folder / "adapter_config.json").is_file()
    folders = [folder] if is_one else sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    for path in folders:
        try:
            found = AdapterFolder(path)
        except ToolkitError as error:
            table.add_row(path.name, "", "", "", str(error))
            continue
        config = found.config
        words = [
            "DoRA" if config.use_dora else "LoRA",
            *(["rsLoRA"] if config.use_rslora else []),
            *(config.modules_to_save or []),
            *([] if config.bias == "none" else ["biases"]),
        ]
        size = f"{found.num_bytes / 2**20:.1f}"
        table.add_row(path.name, str(found.rank), size, found.digest[:12], ", ".join(words))
    Console(markup=False, emoji=False).print(table)


@engine_command()
def merge_adapter(
    config: VllmConfig,
    plugins: Plugins,
    adapter: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Adapter: a folder that PEFT saved.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write, new or empty.")],
) -> None:
    """Write a checkpoint with an adapter merged into its weights."""
    from toolkit_lm_lora.merging import merge

    changed = merge(config, plugins, [(adapter, 1.0)], out)
    typer.echo(f"{out}: {changed} tensors are changed.")
