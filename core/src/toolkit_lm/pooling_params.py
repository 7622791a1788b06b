"""What a user may ask of a pooling model: PoolingParams. It crosses process boundaries, so it is a msgspec struct."""

from __future__ import annotations

import reprlib

import msgspec
from msgspec import Struct

from toolkit_lm.config.tasks import POOLING_TASKS, PoolingTask
from toolkit_lm.errors import RequestError

MAX_RETURNED_TOKENS = 2**18


class PoolingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which task, and how its vector or scores are finished. Raises RequestError (with `param` set) when a value is out of range."""

    task: PoolingTask = "embed"
    """embed: one vector; token_embed: one per token; classify: one distribution; token_classify: one per token; score: one number."""
    dimensions: int | None = None
    """Keep so many of an embedding's first dimensions (matryoshka). More than the model has is an error."""
    normalize: bool | None = None
    """embed and token_embed: to length 1 (L2). None: as the model says."""
    use_activation: bool | None = None
    """classify, token_classify and score: sigmoid or softmax over the logits. None: as the model says."""
    step_tag_id: int | None = None
    """token_classify of a process reward model: only the tokens of this id count as the ends of steps. None: as the model says."""
    returned_token_ids: list[int] | None = None
    """token_classify of a process reward model: which of the logits are returned. None: as the model says."""

    def __post_init__(self) -> None:
        _require(self.task in POOLING_TASKS, "task", f"one of {', '.join(POOLING_TASKS)}", self.task)
        for name in ("normalize", "use_activation"):
            _require(type(getattr(self, name)) is bool or getattr(self, name) is None, name, "true or false", getattr(self, name))
        dimensions = self.dimensions
        _require(dimensions is None or (type(dimensions) is int and dimensions >= 1), "dimensions", "an integer of at least 1", dimensions)
        tag, returned = self.step_tag_id, self.returned_token_ids
        _require(tag is None or _is_token_id(tag), "step_tag_id", "a token id", tag)
        _require(isinstance(returned, list | None), "returned_token_ids", "a list of token ids", returned)
        _require(len(returned or ()) <= MAX_RETURNED_TOKENS, "returned_token_ids", f"at most {MAX_RETURNED_TOKENS} token ids", "more")
        _require(all(_is_token_id(i) for i in returned or ()), "returned_token_ids", "a list of token ids", returned)
        # Together with the range that a pooler checks, this bounds what a request can make of a token.
        if returned and len(set(returned)) < len(returned):
            raise RequestError(f"returned_token_ids must name each once, not {reprlib.repr(returned)}.", "returned_token_ids")

    def replace(self, **changes: object) -> PoolingParams:
        return msgspec.structs.replace(self, **changes)


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _require(ok: bool, name: str, wanted: str, got: object) -> None:
    if not ok:
        raise RequestError(f"{name} must be {wanted}, not {reprlib.repr(got)}.", name)
