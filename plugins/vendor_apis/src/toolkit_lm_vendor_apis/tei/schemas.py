"""Shapes of Text Embeddings Inference's answers, for the description of the API."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, RootModel
from toolkit_lm_server.schema_texts import Described


class TeiVectors(RootModel[list[list[float]]]):
    """A vector of each input."""


class TeiTokenVectors(RootModel[list[list[list[float]]]]):
    """A vector of each token, by input."""


class TeiSparseValue(Described):
    index: int
    value: float


class TeiSparseVectors(RootModel[list[list[TeiSparseValue]]]):
    """The entries of each input's vector that are not 0."""


class TeiLabel(Described):
    score: float
    label: str


class TeiLabels(RootModel[list[TeiLabel] | list[list[TeiLabel]]]):
    """The labels of an input, the likeliest first, or those of each of several."""


class TeiRank(Described):
    index: int
    score: float
    text: str | None = None


class TeiRanks(RootModel[list[TeiRank] | dict[str, Any]]):
    """The texts, best first; or the answer of /v1/rerank to a body with `documents`."""


class TeiSimilarities(RootModel[list[float]]):
    """The cosine of each text with the first."""


class TeiTexts(RootModel[list[str]]):
    """The text of each list of token ids."""


class TeiInfo(Described):
    """The served model, and the server's limits."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
