"""`toolkit pull`, `toolkit list` and `toolkit rm`: checkpoints of the hub in the cache of
huggingface_hub, where the engine looks for them too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

Id = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id: owner/name.")]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files whose loading may run any code. No engine loads them."""
_MOST_NAMES = 5
"""Most names of files that an error lists."""
_SHORT = 8
"""Characters of a commit that are shown."""
_SECONDS = 30.0
"""Seconds that the hub gets to describe a repository."""


@engine_command(PluginsConfig)
def pull(
    config: PluginsConfig,
    plugins: Plugins,
    model: Id,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit. Default: main.")
    ] = None,
) -> None:
    """Fetch a model from the hub, so that a later start needs no network."""
    _check_id(model)
    if Path(model).exists():
        raise ConfigError(f"{model!r} is here already, as a folder or file of that name.")
    names, num_bytes = _described(model, revision)
    _check_weights(model, names)
    typer.echo(f"{model}: {_size(num_bytes)} of weights", err=True)
    from toolkit_lm.resolution import find_source

    made = VllmConfig.make(model=model, revision=revision)
    typer.echo(str(find_source(made.model, plugins)))


def list_models() -> None:
    """List the models of the hub that are on this machine."""
    rows = [
        ("MODEL", "REVISIONS", "SIZE", "CHANGED"),
        *(
            (
                repo.repo_id,
                ", ".join(_revisions(repo)),
                _size(repo.size_on_disk),
                datetime.fromtimestamp(repo.last_modified).strftime("%Y-%m-%d %H:%M"),
            )
            for repo in _cached()
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        typer.echo("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def remove(
    model: Id,
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Branch, tag or commit. Default: all revisions."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model of the hub from this machine."""
    _check_id(model)
    from huggingface_hub import scan_cache_dir

    known = {repo.repo_id: repo for repo in _cached()}
    if model not in known:
        raise ConfigError(f"{model!r} is not in the cache of the hub. {nearest(model, known)}")
    hashes = [
        found.commit_hash
        for found in known[model].revisions
        if revision is None
        or revision in found.refs
        or (len(revision) >= _SHORT and found.commit_hash.startswith(revision))
    ]
    if not hashes:
        shown = ", ".join(_revisions(known[model]))
        raise ConfigError(f"{model!r} has no revision {revision!r} here. It has: {shown}.")
    strategy = scan_cache_dir().delete_revisions(*hashes)
    named = f"{model} ({', '.join(sorted(map(_short, hashes)))})"
    if not yes and not typer.confirm(
        f"Delete {named}, {_size(strategy.expected_freed_size)}?", err=True
    ):
        raise typer.Exit(1)
    strategy.execute()
    typer.echo(f"Deleted {named}: {_size(strategy.expected_freed_size)} are free again.")


def _check_id(model: str) -> None:
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"{model!r} is not a hub id: write owner/name.")


def _described(model: str, revision: str | None) -> tuple[list[str], int]:
    """Names of a repository's files, and the bytes of its weights that an engine reads. Raises
    CheckpointError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_SECONDS)
    except Exception as error:
        # The libraries below have errors of many kinds.
        raise CheckpointError(
            f"the hub does not tell of {model!r}: {type(error).__name__}: {error}"
        ) from error
    files = info.siblings or []
    weights = [file for file in files if file.rfilename.endswith(".safetensors")]
    return [file.rfilename for file in files], sum(file.size or 0 for file in weights)


def _check_weights(model: str, names: Sequence[str]) -> None:
    """Raises CheckpointError for a repository whose weights no engine would load."""
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        shown = ", ".join(pickles[:_MOST_NAMES]) + (", ..." if len(pickles) > _MOST_NAMES else "")
        raise CheckpointError(
            f"{model!r} has its weights as pickles only ({shown}): loading one can run any "
            "code. Choose a revision or a repository with safetensors."
        )
    raise CheckpointError(f"{model!r} has no weights as safetensors.")


def _cached() -> list[CachedRepoInfo]:
    """The models in the cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id
    )


def _revisions(repo: CachedRepoInfo) -> list[str]:
    """Branches and tags of what is here, and commits that have none."""
    return sorted(
        name
        for found in repo.revisions
        for name in (sorted(found.refs) or [_short(found.commit_hash)])
    )


def _short(commit: str) -> str:
    return commit[:_SHORT]


def _size(num_bytes: float) -> str:
    """A size for people: 1536 gives "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
