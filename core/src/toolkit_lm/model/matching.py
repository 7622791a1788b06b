"""Matches the tensors of a checkpoint with the parameters of a module."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Destination of a tensor of the checkpoint."""

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
    """Fills the parameters and persistent buffers of `module` from `weights` (name, full tensor).
    Returns the names of those filled.

    `packed` names the checkpoint's tensors that a parameter packs, in order ({"qkv_proj":
    ("q_proj", "k_proj", "v_proj")}). A checkpoint may also hold them packed. `renames` are
    (pattern, replacement) for `re.sub`, applied in order to each name of the checkpoint. `ignored`
    are patterns of renamed names to skip (`re.search`).

    If two layers share a weight, but `weights` has two different ones, the layers no longer share
    it: each gets its own.

    Raises CheckpointError, which names all weights that are missing, unexpected or do not fit.
    """
    targets, aliases = _targets(module, packed)
    # There may be many, such as the experts of other ranks: a name and its parents are looked up.
    elsewhere = {name for name, child in module.named_modules() if isinstance(child, Absent)}
    skipped = re.compile("|".join(ignored) or "(?!)")
    seen: dict[str, set[int | None]] = {}
    unexpected = []
    misfits = []
    kept: dict[str, dict[str, Tensor]] = {}

    def load(name: str, target: _Target, tensor: Tensor) -> None:
        seen.setdefault(target.name, set()).add(target.shard_id)
        loader = getattr(target.param, "weight_loader", load_whole)
        try:
            loader(target.param, tensor, target.shard_id)
        except CheckpointError as error:
            misfits.append(f"{name} {error}")

    for name, tensor in weights:
        name = _renamed(name, renames)
        if name in aliases:
            kept.setdefault(name.rpartition(".")[0], {})[name] = tensor
        elif name in targets:
            load(name, targets[name], tensor)
        elif elsewhere.isdisjoint(_with_parents(name)) and not skipped.search(name):
            unexpected.append(name)
    # A tied weight has several names. The checkpoint may hold any of them, or all.
    for tensors in kept.values():
        try:
            own = _settled(module, tensors, {} if misfits else seen, aliases)
        except CheckpointError as error:
            misfits.append(str(error))
            continue
        targets = own | targets
        unexpected += [name for name in tensors if name not in own]
        for name in tensors:
            if name in own and own[name].name not in seen:
                load(name, own[name], tensors[name])
    _complain(list(_missing(targets, seen, packed)), unexpected, misfits)
    return set(seen)


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _with_parents(name: str) -> Iterator[str]:
    """Yields a name and its parents: for "a.b.c" these are "a", "a.b" and "a.b.c"."""
    return accumulate(name.split("."), "{}.{}".format)


def _targets(
    module: nn.Module, packed: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, _Target], dict[str, _Target]]:
    """Maps names in the checkpoint to destinations: first of all parameters, packed and apart;
    second of the further names of tied ones."""
    targets: dict[str, _Target] = {}
    aliases: dict[str, _Target] = {}
    first: dict[int, _Target] = {}
    for name, param in module.state_dict(keep_vars=True).items():
        if id(param) in first:
            aliases[name] = first[id(param)]
            continue
        targets[name] = first[id(param)] = _Target(param, name, None)
        # Those of an attention layer, "a.attn.k_scale", may be the checkpoint's "a.k_scale".
        parent = ".".join(name.split(".")[:-2])
        for other in getattr(param, "names_beside", ()):
            targets[f"{parent}.{other}".lstrip(".")] = targets[name]
        for part_name, shard_id in _parts(name, packed):
            targets[part_name] = _Target(param, name, shard_id)
    return targets, aliases


def _holds(param: Tensor, tensor: Tensor) -> bool:
    """Whether a parameter holds this tensor of the checkpoint."""
    other = torch.zeros_like(param)
    vars(other).update(vars(param))
    try:
        getattr(param, "weight_loader", load_whole)(other, tensor, None)
    except CheckpointError:
        return False
    return torch.equal(param, other)


def _settled(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    seen: Collection[str],
    aliases: Mapping[str, _Target],
) -> dict[str, _Target]:
    """The targets of a layer that shares parameters with another one, of which the checkpoint holds
    `tensors`: the shared parameters; or ones of its own if one tensor differs, all of them, so that
    what the checkpoint lacks is missing."""
    shared = {name: aliases[name] for name in tensors}
    differing = (
        name
        for name, target in shared.items()
        if target.name in seen and not _holds(target.param, tensors[name])
    )
    name = next(differing, None)
    return shared if name is None else _untied(module, name, aliases)


def _untied(module: nn.Module, name: str, aliases: Mapping[str, _Target]) -> dict[str, _Target]:
    """Gives the layer of that name parameters of its own, where it shared another layer's, and
    returns all that are its own. Raises CheckpointError if one layer has both names."""
    path = name.rpartition(".")[0]
    first = aliases[name].name
    owner = module.get_submodule(path)
    if owner is module.get_submodule(first.rpartition(".")[0]):
        raise CheckpointError(f"{name} differs from {first}, and the model has one layer for both")
    logger.warning(
        "The model ties %s to %s, and the checkpoint holds both, which differ: they are not tied. "
        "`tie_word_embeddings: false` in config.json silences this.",
        name,
        first,
    )
    untie = getattr(owner, "untie", None)
    if untie is not None:
        untie()
    else:
        for alias, target in aliases.items():
            if alias.rpartition(".")[0] == path:
                param = nn.Parameter(torch.empty_like(target.param), requires_grad=False)
                vars(param).update(vars(target.param))
                setattr(owner, alias.rpartition(".")[2], param)
    shared = {id(target.param) for target in aliases.values()}
    return {
        f"{path}.{key}": _Target(param, f"{path}.{key}", None)
        for key, param in owner.state_dict(keep_vars=True).items()
        if id(param) not in shared
    }


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
    """Names of the tensors still to load. `seen`: the shards that were found, by parameter."""
    for name, target in targets.items():
        found = seen.get(target.name, set())
        # A packed parameter is reported by its parts, the form in nearly all checkpoints.
        # So is one with several names, by the first.
        is_reported = target.shard_id is not None or (
            name == target.name and not _parts(name, packed)
        )
        if is_reported and found.isdisjoint((None, target.shard_id)):
            yield name


def _complain(missing: list[str], unexpected: list[str], misfits: list[str]) -> None:
    problems = {"missing": missing, "unexpected": unexpected, "not fitting": misfits}
    found = [
        f"{len(names)} {problem}: {_listed(names)}" for problem, names in problems.items() if names
    ]
    if found:
        raise CheckpointError("; ".join(found) + ".")


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
