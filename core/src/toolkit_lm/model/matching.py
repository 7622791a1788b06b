"""Matches the tensors of a checkpoint with the parameters of a module."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit_lm.errors import CheckpointError
from toolkit_lm.model.layers import Absent
from toolkit_lm.model.parameters import load_whole

logger = logging.getLogger(__name__)
MOST_NAMED = 10


class _Target(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    param: Tensor
    name: str
    shard_id: int | None


def load_parameters(
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    *,
    packed: Mapping[str, tuple[str, ...]],
    renames: Sequence[tuple[str, str]],
    ignored: Sequence[str],
) -> set[str]:
    """Fills the parameters and persistent buffers of `module` from `weights` (name, full tensor);
    returns the names of those filled.

    `packed` names the checkpoint's tensors that a parameter packs, in order ({"qkv_proj":
    ("q_proj", "k_proj", "v_proj")}); a checkpoint may also hold them packed. `renames` are
    (pattern, replacement) for `re.sub`, tried in order on each name of the checkpoint; `ignored`
    are patterns of renamed names to pass over (`re.search`).

    A weight that two layers share, and of which `weights` holds two that differ, is no longer
    shared: each layer gets its own.

    Raises CheckpointError that names all weights that are missing, unexpected or do not fit.
    """
    targets, aliases = _targets(module, packed)
    # They may be many, such as the experts that other ranks hold: a name and those of its parents
    # are looked up.
    elsewhere = {name for name, child in module.named_modules() if isinstance(child, Absent)}
    skipped = re.compile("|".join(ignored) or "(?!)")
    seen: dict[str, set[int | None]] = {}
    unexpected = []
    misfits = []
    kept: dict[str, Tensor] = {}

    def load(name: str, target: _Target, tensor: Tensor) -> None:
        seen.setdefault(target.name, set()).add(target.shard_id)
        try:
            getattr(target.param, "weight_loader", load_whole)(
                target.param, tensor, target.shard_id
            )
        except CheckpointError as error:
            misfits.append(f"{name} {error}")

    for name, tensor in weights:
        name = _renamed(name, renames)
        if name in aliases:
            kept[name] = tensor
        elif name in targets:
            load(name, targets[name], tensor)
        elif elsewhere.isdisjoint(_with_parents(name)) and not skipped.search(name):
            unexpected.append(name)
    # A tied weight has several names. The checkpoint may hold any of them, or all.
    for name, tensor in kept.items():
        target = aliases[name]
        if target.name not in seen:
            load(name, target, tensor)
        elif not misfits and not _holds(target.param, tensor):
            try:
                load(name, _Target(_untied(module, name, target), name, None), tensor)
            except CheckpointError as error:
                misfits.append(f"{name} {error}")
    _complain(list(_missing(targets, seen, packed)), unexpected, misfits)
    return set(seen)


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _with_parents(name: str) -> Iterator[str]:
    """Of "a.b.c": "a", "a.b" and "a.b.c"."""
    return accumulate(name.split("."), "{}.{}".format)


def _targets(
    module: nn.Module, packed: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, _Target], dict[str, _Target]]:
    """By name in the checkpoint: all parameters, packed and apart; and the second names of tied
    ones."""
    targets: dict[str, _Target] = {}
    aliases: dict[str, _Target] = {}
    first: dict[int, _Target] = {}
    for name, param in module.state_dict(keep_vars=True).items():
        if id(param) in first:
            aliases[name] = first[id(param)]
            continue
        targets[name] = first[id(param)] = _Target(param, name, None)
        for part_name, shard_id in _parts(name, packed):
            targets[part_name] = _Target(param, name, shard_id)
    return targets, aliases


def _holds(param: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor of the checkpoint is what a parameter has been filled with."""
    other = torch.zeros_like(param)
    vars(other).update(vars(param))
    try:
        getattr(param, "weight_loader", load_whole)(other, tensor, None)
    except CheckpointError:
        return False
    return torch.equal(param, other)


def _untied(module: nn.Module, name: str, target: _Target) -> Tensor:
    """A new parameter of that name, which is one with another parameter so far. Raises
    CheckpointError where one layer has both names."""
    path, _, attribute = name.rpartition(".")
    first = target.name.rpartition(".")[0]
    owner = module.get_submodule(path)
    if owner is module.get_submodule(first):
        raise CheckpointError(f"differs from {target.name}, and the model has one layer for both")
    logger.warning(
        "The model ties %s to %s, and the checkpoint holds both, which differ: they are not tied. "
        "`tie_word_embeddings: false` in config.json silences this.",
        name,
        target.name,
    )
    untie = getattr(owner, "untie", None)
    if untie is not None:
        untie()
    else:
        param = nn.Parameter(torch.empty_like(target.param), requires_grad=False)
        vars(param).update(vars(target.param))
        setattr(owner, attribute, param)
    untied: Tensor = getattr(owner, attribute)
    return untied


def _parts(name: str, packed: Mapping[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    """The names of the tensors that a parameter packs: "a.qkv_proj.weight" -> [("a.q_proj.weight",
    0), ...]."""
    components = name.split(".")
    for i, component in enumerate(components):
        if component in packed:
            return [
                (".".join([*components[:i], part, *components[i + 1 :]]), shard_id)
                for shard_id, part in enumerate(packed[component])
            ]
    return []


def _missing(
    targets: Mapping[str, _Target],
    seen: Mapping[str, set[int | None]],
    packed: Mapping[str, tuple[str, ...]],
) -> Iterator[str]:
    """The names of what is still to fill. `seen`: by parameter, the shards that were found."""
    for name, target in targets.items():
        found = seen.get(target.name, set())
        # A packed parameter is reported by its parts, which is how nearly all checkpoints hold it.
        is_reported = target.shard_id is not None or not _parts(name, packed)
        if is_reported and found.isdisjoint((None, target.shard_id)):
            yield name


def _complain(missing: list[str], unexpected: list[str], misfits: list[str]) -> None:
    problems = {"missing": missing, "unexpected": unexpected, "not fitting": misfits}
    found = [f"{len(names)} {what}: {_listed(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError("; ".join(found) + ".")


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
