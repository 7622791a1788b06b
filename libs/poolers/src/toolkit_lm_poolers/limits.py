"""Checks a request's pooling parameters without torch: the front end also calls it before anything
runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.pooling_params import PoolingParams

_OF_EMBEDDINGS = ("dimensions", "normalize")
_OF_CLASSES = ("use_activation",)
_OF_TOKEN_CLASSES = ("step_tag_id", "returned_token_ids")
_MEANINGLESS = {
    "embed": (*_OF_CLASSES, *_OF_TOKEN_CLASSES),
    "token_embed": (*_OF_CLASSES, *_OF_TOKEN_CLASSES),
    "classify": (*_OF_EMBEDDINGS, *_OF_TOKEN_CLASSES),
    "score": (*_OF_EMBEDDINGS, *_OF_TOKEN_CLASSES),
    "token_classify": _OF_EMBEDDINGS,
}
"""Parameters that say nothing to a task."""

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")


def check_params(params: PoolingParams, size: int, matryoshka: Sequence[int] | None = ()) -> None:
    """Raises RequestError, with `param` set, for parameters that a task cannot have. `size`: of an
    embedding, or the number of logits.

    `matryoshka`: the numbers of dimensions that the model was trained for, in addition to the full
    number; empty: any; None: only the full number."""
    for name in _MEANINGLESS[params.task]:
        if getattr(params, name) is not None:
            raise RequestError(
                f"{name} has no effect on the task {params.task!r}: leave it out.", name
            )
    if params.dimensions is not None and params.dimensions > size:
        raise RequestError(
            f"dimensions is {params.dimensions}, but the model's embeddings have {size}: ask for "
            f"1 to {size}.",
            "dimensions",
        )
    if params.dimensions not in (None, size) and matryoshka is None:
        raise RequestError(
            f"dimensions is {params.dimensions}, but nothing says that the model's embeddings "
            "may be cut (Matryoshka): leave it out, or "
            f"start with matryoshka=True. All are {size}.",
            "dimensions",
        )
    if (
        params.dimensions is not None
        and matryoshka
        and params.dimensions not in (*matryoshka, size)
    ):
        known = ", ".join(map(str, sorted({*matryoshka, size})))
        raise RequestError(
            f"dimensions is {params.dimensions}, but the model is made for {known} "
            "(matryoshka_dimensions).",
            "dimensions",
        )
    if wrong := [i for i in params.returned_token_ids or () if i >= size]:
        raise RequestError(
            f"returned_token_ids has {wrong[0]}, but the model gives {size} logits.",
            "returned_token_ids",
        )


def matryoshka_dimensions(
    hf_config: dict[str, Any], stated: bool | None = None
) -> tuple[int, ...] | None:
    """Matryoshka dimensions in a checkpoint's config.json: empty if it says only that there are
    some; None if it says nothing.

    `stated`: the operator's setting, which overrides it. Raises CheckpointError."""
    found = hf_config.get("matryoshka_dimensions")
    if stated is False:
        return None
    if found is None:
        return () if stated or hf_config.get("is_matryoshka") is True else None
    if not isinstance(found, list) or not all(type(size) is int and size > 0 for size in found):
        raise CheckpointError(
            "config.json: matryoshka_dimensions must be a list of numbers of dimensions."
        )
    return tuple(found)


def hidden_size(hf_config: dict[str, Any]) -> int:
    """Size of a token's vector, of a checkpoint's config.json. Raises CheckpointError."""
    for values in (hf_config, hf_config.get("text_config") or {}):
        for key in _HIDDEN_SIZE:
            if type(values.get(key)) is int:
                return int(values[key])
    raise CheckpointError(
        f"config.json has none of {', '.join(_HIDDEN_SIZE)}: the size of embeddings is unknown."
    )
