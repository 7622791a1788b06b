"""Transfers of weights over NCCL, which trainers import and an engine here does not take."""

from __future__ import annotations

from typing import NoReturn

from toolkit_lm.errors import UnsupportedError, page

_USE = (
    "no NCCL group carries weights to an engine here. Write them as safetensors into a folder, and "
    f"send its path to /update_weights: {page('rl.md')}."
)


def trainer_init(*arguments: object, **keywords: object) -> NoReturn:
    """Raises UnsupportedError, which says what to use."""
    raise UnsupportedError(f"trainer_init: {_USE}")


def packed_nccl_broadcast_producer(*arguments: object, **keywords: object) -> NoReturn:
    """Raises UnsupportedError, which says what to use."""
    raise UnsupportedError(f"packed_nccl_broadcast_producer: {_USE}")
