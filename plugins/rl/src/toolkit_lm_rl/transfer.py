"""Weights that a trainer sends to a server over a group of the two, after it has announced them by
HTTP: the bodies of vLLM's routes, and the server's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field
from toolkit_lm_server.errors import ApiError

# The server's own process loads no torch before a trainer comes.
if TYPE_CHECKING:
    from torch import Tensor

    from toolkit_lm_rl.weight_group import WeightGroup

_SECONDS = 120.0
"""Time that the trainer may take to come, and for each tensor."""
_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
"""Bytes of an element, by dtype."""
_MOST_TENSORS = 1 << 20
_MOST_BYTES = 1 << 36
"""Bytes of one tensor."""


class InitInfo(BaseModel):
    """Place where a trainer and the server meet."""

    model_config = {"extra": "forbid"}
    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    """The trainer's address."""
    master_port: Annotated[int, Field(ge=1, le=65535)]
    """The trainer's port."""
    rank_offset: int = 1
    """Ranks of the group before those of the server: the trainer's, 1."""
    world_size: int
    """Ranks of the trainer and of the server."""
    packed: bool | None = None
    """No effect: tensors come one after the other."""


class InitBody(BaseModel):
    """Body of /init_weight_transfer_engine."""

    model_config = {"extra": "forbid"}
    init_info: InitInfo


class UpdateInfo(BaseModel):
    """New weights: the path of a file, or the tensors that a trainer sends next."""

    model_config = {"extra": "forbid"}
    path: str | None = None
    """A file in the format of safetensors, or a folder of such files, in the folder that the option
    `rl.folder` names."""
    names: Annotated[list[str], Field(max_length=_MOST_TENSORS)] = []
    """Names of the tensors in the checkpoint, in the order in which they come."""
    dtype_names: Annotated[list[str], Field(max_length=_MOST_TENSORS)] = []
    """Their dtypes, such as bfloat16."""
    shapes: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]],
        Field(max_length=_MOST_TENSORS),
    ] = []
    packed: bool | None = None
    """No effect: tensors come one after the other."""

    def announced(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor that comes. Raises ApiError."""
        if (self.path is None) != bool(self.names):
            raise ApiError(
                400,
                "Give path, of a file, or names, dtype_names and shapes of the tensors that come.",
                param="update_info",
            )
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            counts = f"{len(self.names)}, {len(self.dtype_names)} and {len(self.shapes)}"
            raise ApiError(
                400,
                f"names, dtype_names and shapes have {counts} entries: each needs one per tensor.",
                param="update_info",
            )
        tensors = [*zip(self.names, self.dtype_names, self.shapes, strict=True)]
        for tensor in tensors:
            _check(*tensor)
        return tensors


def _check(name: str, dtype: str, shape: list[int]) -> None:
    """Raises ApiError for an unknown dtype, and for a tensor that is too large."""
    if (size := _SIZES.get(dtype)) is None:
        known = ", ".join(_SIZES)
        raise ApiError(400, f"{name}: dtype {dtype!r} is none of {known}.", param="dtype_names")
    for length in shape:
        size *= length
    if size > _MOST_BYTES:
        raise ApiError(400, f"{name}: shape {shape} is of over 64 GiB.", param="shapes")


class Transfer:
    """The server's end of a group with a trainer."""

    def __init__(self, *, is_on: bool, world_size: int, seconds: float = _SECONDS) -> None:
        """`world_size`: ranks of the server."""
        self._is_on = is_on
        self._world_size = world_size
        self._seconds = seconds
        self._group: WeightGroup | None = None
        self.lock = asyncio.Lock()
        """Of the calls that join or receive: they come one after the other."""

    async def join(self, info: InitInfo) -> None:
        """Meets a trainer, and leaves that of before. Raises ApiError."""
        if not self._is_on:
            raise ApiError(
                400,
                "This server meets no trainer. Its option rl.weight_transfer is off: set it to "
                "gloo, or give files by path.",
                param="init_info",
            )
        expected = {"rank_offset": 1, "world_size": 1 + self._world_size}
        for name, value in expected.items():
            if (found := getattr(info, name)) != value:
                raise ApiError(
                    400,
                    f"{name} is {found}, and not {value}: a group has a trainer's rank, 0, and the "
                    f"{self._world_size} of this server.",
                    param=name,
                )
        from toolkit_lm_rl.weight_group import WeightGroup, WeightGroupError

        async with self.lock:
            self.close()
            # The workers get what comes from this process: two members are enough.
            arguments = (info.master_address, info.master_port, 1, 2, self._seconds)
            try:
                self._group = await asyncio.to_thread(WeightGroup, *arguments)
            except WeightGroupError as error:
                raise ApiError(504, f"No trainer was met: {error}", code="timeout") from error

    def tensors(self, announced: list[tuple[str, str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, as they come. Raises ApiError, and leaves the group, if one does not."""
        import torch

        from toolkit_lm_rl.weight_group import WeightGroupError

        group = self._group
        if group is None:
            raise ApiError(
                400,
                "No trainer is there: /init_weight_transfer_engine comes before its tensors.",
                param="update_info",
            )
        for name, dtype, shape in announced:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                group.broadcast(tensor, 0)
            except WeightGroupError as error:
                self.close()
                raise ApiError(
                    504, f"The trainer did not send {name}: {error}", code="timeout"
                ) from error
            yield name, tensor

    def close(self) -> None:
        """Leaves the group. Safe to call twice."""
        if self._group is not None:
            self._group.close()
        self._group = None
