"""The parameter of a request that another server has begun. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import ProcessorParams, param

_MOST = 1_048_576


class BegunParams(ProcessorParams):
    """Parameters of a request that another server has begun."""

    changes_forward = False
    begun_token_ids: Annotated[
        list[int] | None,
        param(
            "Output tokens that another server has drawn for this request, with the same seed. "
            "They are computed many at a time, and the answer has them, too. For n 1.",
            max_items=_MOST,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        """The tokens. Raises RequestError for tokens that are not in the vocabulary."""
        tokens = self.begun_token_ids
        if not tokens:
            return None
        if not all(0 <= token < renderer.vocab_size for token in tokens):
            raise RequestError(
                "begun_token_ids must have token ids of the vocabulary: from 0 to "
                f"{renderer.vocab_size - 1}.",
                "begun_token_ids",
            )
        return {"tokens": tokens}
