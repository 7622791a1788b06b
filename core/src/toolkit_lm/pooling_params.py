"""PoolingParams: the pooling parameters of a request. It crosses process boundaries, so it is a
msgspec struct."""

from __future__ import annotations

import reprlib
from typing import Annotated

import msgspec
from msgspec import Struct

from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import (
    MAX_TOKEN_ID,
    ParamsMeta,
    check_fields,
    checks_of,
    param,
    params_of,
)


class PoolingParams(Struct, metaclass=ParamsMeta, frozen=True, kw_only=True, omit_defaults=True):
    """The task, and the final processing of its vector or scores. Raises RequestError (with `param`
    set) if a value is out of range."""

    task: Annotated[
        PoolingTask,
        param(
            "Result to compute: one vector, distribution or score per prompt, or one per token "
            "(token_...)."
        ),
    ] = "embed"
    dimensions: Annotated[
        int | None,
        param("Number of first dimensions of an embedding to keep.", none="all", ge=1),
    ] = None
    """Matryoshka embeddings. More than the model has is an error."""
    normalize: Annotated[
        bool | None, param("Scale embeddings to length 1 (L2).", none="the model's")
    ] = None
    use_activation: Annotated[
        bool | None,
        param("Classes and scores: apply sigmoid or softmax to the logits.", none="the model's"),
    ] = None
    step_tag_id: Annotated[
        int | None,
        param(
            "Process reward models: token that ends a step.",
            none="the model's",
            ge=0,
            le=MAX_TOKEN_ID,
        ),
    ] = None
    returned_token_ids: Annotated[
        list[int] | None,
        param("Reward models: which logits are returned.", none="the model's", max_items=2**18),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)
        # Together with the range that a pooler checks, this bounds the output that a request can
        # make of a token.
        if self.returned_token_ids and len(set(self.returned_token_ids)) < len(
            self.returned_token_ids
        ):
            raise RequestError(
                "returned_token_ids must name each token id once, not "
                f"{reprlib.repr(self.returned_token_ids)}.",
                "returned_token_ids",
            )

    def replace(self, **changes: object) -> PoolingParams:
        return msgspec.structs.replace(self, **changes)


POOLING_PARAMS = params_of(PoolingParams)
"""The stated pooling parameters, by name."""
_CHECKS = checks_of(PoolingParams)
