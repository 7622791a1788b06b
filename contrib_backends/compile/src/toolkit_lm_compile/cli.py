"""The commands `toolkit compile` and `toolkit cache ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command

from toolkit_lm_compile.archive import read_archive, write_archive
from toolkit_lm_compile.store import DamagedError, Entry, Manifest, default_root, open_root

CacheDir = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of the cache. Default: the user's.")
]
Key = Annotated[str, typer.Argument(help="Key of the entry, or how it begins.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@engine_command()
def compile_model(config: VllmConfig, plugins: Plugins) -> None:
    """Compile a model, so that later starts with the same options find it in the cache."""
    from toolkit_lm import LLM

    if not config.compilation.optimization_level:
        config = config.replace(optimization_level=1)
    if not config.compilation.compile_cache:
        raise ConfigError(
            "toolkit compile fills the cache: --no-compile-cache leaves nothing to do."
        )
    LLM(config=config.replace(engine_process=False), plugins=plugins)
    typer.echo(f"compiled: {config.model.model} at level {config.compilation.optimization_level}")


@engine_command(PluginsConfig)
def list_entries(cache_dir: CacheDir = None, json_output: AsJson = False) -> None:
    """List what the compile cache holds."""
    rows = [_row(folder) for folder in _folders(cache_dir)]
    if json_output:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("key", "rank", "model", "parts", "MiB", box=None)
    for row in rows:
        table.add_row(
            row["key"], row["rank"], row["model"], str(row["parts"]), f"{row['bytes'] / 2**20:.1f}"
        )
    Console(markup=False, emoji=False).print(table)


@engine_command(PluginsConfig)
def show(key: Key, cache_dir: CacheDir = None) -> None:
    """Show what an entry was made of: a digest of each ingredient of its key, and its files."""
    for folder in _found(cache_dir, key):
        typer.echo(f"{folder}")
        try:
            manifest = _entry(folder).read()
        except DamagedError as error:
            typer.echo(f"damaged: {error}")
            continue
        shown = msgspec.to_builtins(manifest)
        shown["plans"] = [plan.parts for plan in manifest.plans] if manifest is not None else []
        typer.echo(json.dumps(shown, indent=2))


@engine_command(PluginsConfig)
def prune(
    key: Annotated[
        str | None, typer.Argument(help="Key of the entry, or how it begins. Default: all.")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Delete entries. A running engine keeps what it has loaded."""
    folders = _folders(cache_dir) if key is None else _found(cache_dir, key)
    for folder in folders:
        entry = _entry(folder)
        # The key's folder stays: the lock lies in it, and an engine may wait for that.
        with entry.locked():
            entry.discard()
    typer.echo(f"deleted: {len(folders)}")


@engine_command(PluginsConfig)
def export(
    key: Key,
    archive: Annotated[Path, typer.Argument(help="Archive to write (.tar.gz).")],
    cache_dir: CacheDir = None,
) -> None:
    """Write an entry to an archive, which `toolkit cache import` takes on another machine of the
    kind."""
    folders = _found(cache_dir, key)
    try:
        write_archive(archive, folders)
    except DamagedError as error:
        raise ConfigError(
            f"the entry {folders[0].parent.name} is damaged: {error}. The next start makes it anew."
        ) from error
    except OSError as error:
        raise ConfigError(f"{archive} cannot be written: {error}") from error
    typer.echo(f"written: {archive}")


@engine_command(PluginsConfig)
def import_(
    archive: Annotated[Path, typer.Argument(help="Archive of an entry.")],
    cache_dir: CacheDir = None,
) -> None:
    """Take an archive into the cache. What it holds is run as code: take those alone that you have
    made."""
    found = read_archive(archive, open_root(cache_dir or default_root()))
    for key in found.taken:
        typer.echo(
            "taken: "
            f"{key}{', in place of another entry, which is gone' if key in found.replaced else ''}"
        )
    for key in found.present:
        typer.echo(f"unchanged: {key}, which the cache has already")


def _folders(cache_dir: Path | None) -> list[Path]:
    root = cache_dir or default_root()
    return sorted(path for path in root.glob("*/rank_*") if path.is_dir()) if root.is_dir() else []


def _found(cache_dir: Path | None, key: str) -> list[Path]:
    folders = _folders(cache_dir)
    found = [folder for folder in folders if folder.parent.name.startswith(key)]
    keys = sorted({folder.parent.name for folder in found})
    if len(keys) != 1:
        known = sorted({folder.parent.name for folder in folders})
        raise ConfigError(
            f"{len(keys)} entries of the compile cache begin with {key!r}. {nearest(key, known)}"
        )
    return found


def _entry(folder: Path) -> Entry:
    return Entry(folder.parent.parent, folder.parent.name, folder.name)


def _manifest(folder: Path) -> Manifest | None:
    try:
        return _entry(folder).read()
    except DamagedError:
        return None


def _row(folder: Path) -> dict[str, Any]:
    manifest = _manifest(folder)
    return {
        "key": folder.parent.name,
        "rank": folder.name,
        "model": "damaged" if manifest is None else manifest.model,
        "parts": 0
        if manifest is None
        else len({part for plan in manifest.plans for part in plan.parts}),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }
