"""Request bodies of Text Embeddings Inference's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import SkipValidation, WithJsonSchema
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Prompt
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.fields import Items
from toolkit_lm_server.pooling_protocol import AnyInput, RerankBody, read_inputs
from toolkit_lm_server.protocol import Body, EngineBody, examples
from toolkit_lm_server.request_fields import POOLING, TOKENS
from toolkit_lm_server.schema_texts import Described

Direction = Literal["Left", "Right", "left", "right"]
NAMES = {"input": "inputs", "truncate_prompt_tokens": "truncate"}
"""TEI's names of fields, by ours."""
_PREDICT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                ]
            },
        },
    ]
}


_IDS = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


class TeiBody(EngineBody):
    """The fields that all routes share."""

    verdicts = POOLING

    truncate: bool | None = None
    """Inputs that are too long are cut at their end; else they are an error."""
    truncation_direction: Direction | None = None
    """The side at which inputs are cut: "Right"."""

    def most_tokens(self, max_model_len: int) -> int | None:
        """Most tokens of an input. None where longer ones are an error. Raises RequestError."""
        return most_tokens(self.truncate, self.truncation_direction, max_model_len)


class InputsBody(TeiBody):
    """Inputs, as texts or token ids."""

    model_config = examples({"inputs": "Once upon a time"}, {"inputs": ["Once", "The cat"]})

    inputs: AnyInput
    """The inputs: a text, a list of token ids, or a list of both."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint's, which each input gets before it."""

    def prompts(self, most: int) -> tuple[list[Prompt], list[str]]:
        """The inputs with their names in errors. Raises RequestError, and ApiError (413) for more
        than `most`."""
        check_size(self.inputs, most)
        found = read_inputs(self.inputs, most)
        return found.prompts, [name.replace("input", "inputs", 1) for name in found.names]


class TeiEmbedBody(InputsBody):
    """The body of POST /embed."""

    normalize: bool = True
    """Vectors are of length 1."""
    dimensions: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""


class PredictBody(TeiBody):
    """The body of POST /predict."""

    model_config = examples({"inputs": "I like it"}, {"inputs": [["I like it"], ["a", "b"]]})

    inputs: Annotated[Any, SkipValidation, WithJsonSchema(_PREDICT)]
    """A text, a pair of texts, or a list of lists with one or two texts."""
    raw_scores: bool = False
    """Scores are the model's logits."""

    @property
    def is_several(self) -> bool:
        """Whether the body has a list of inputs, and not one text or pair."""
        return isinstance(self.inputs, list) and any(
            isinstance(texts, list) for texts in self.inputs
        )

    def texts(self, most: int) -> list[list[str]]:
        """The inputs, each of one or two texts. Raises RequestError, and ApiError (413) for more
        than `most`."""
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        if self.is_several:
            check_size(self.inputs, most)
        found = self.inputs if self.is_several else [self.inputs]
        for texts in found:
            if (
                not isinstance(texts, list)
                or len(texts) not in (1, 2)
                or not all(isinstance(text, str) for text in texts)
            ):
                raise RequestError(
                    "inputs must be a text, a pair of texts, or a list of lists with one or two "
                    "texts.",
                    "inputs",
                )
        return found


class DecodeBody(Body):
    """The body of POST /decode."""

    verdicts = TOKENS
    model_config = examples({"ids": [5, 6, 7]}, {"ids": [[5, 6], [7]]})

    ids: Annotated[Any, SkipValidation, WithJsonSchema(_IDS)]
    """Token ids, or a list of lists with token ids."""
    skip_special_tokens: bool = True
    """Special tokens are left out of texts."""

    def lists(self, most: int) -> list[list[int]]:
        """The token ids, list by list. Raises RequestError, and ApiError (413) for more than `most`
        lists."""
        if not isinstance(self.ids, list) or not self.ids:
            raise RequestError("ids must be a list of token ids, or a list of such lists.", "ids")
        is_several = any(isinstance(ids, list) for ids in self.ids)
        found = self.ids if is_several else [self.ids]
        if is_several:
            check_size(found, most, "ids")
        for ids in found:
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise RequestError(
                    "ids must be a list of token ids, or a list of such lists.", "ids"
                )
        return found


class TeiRerankBody(EngineBody):
    """The body of POST /rerank: TEI's has `texts`, and Jina's has `documents`."""

    verdicts = RerankBody.verdicts
    model_config = examples(
        {"query": "capital of France", "texts": ["Paris", "Rome"]},
        {"query": "capital of France", "documents": ["Paris", "Rome"]},
    )

    query: str
    """The text that others are compared with."""
    texts: Items[str] | None = None
    """The texts, at least one."""
    raw_scores: bool = False
    """Scores are the model's logits. It is for `texts`, as are the next three."""
    return_text: bool = False
    """The answer has the texts."""
    truncate: bool | None = None
    """Texts that are too long are cut at their end; else they are an error."""
    truncation_direction: Direction | None = None
    """The side at which texts are cut: "Right"."""
    documents: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}})] = None
    """The documents, in place of texts: the answer is that of /v1/rerank."""
    top_n: int | None = None
    """Most documents in the answer. It is for `documents`, as are the next ones."""
    return_documents: bool | None = None
    """The answer has the documents' texts."""
    max_tokens_per_doc: int | None = None
    """Longer documents are cut to so many tokens."""
    instruction: str | None = None
    """An instruction for models that take one."""
    use_activation: bool | None = None
    """Outputs go through softmax or sigmoid. null: as the model's config says."""
    truncate_prompt_tokens: int | None = None
    """Longer inputs are cut to so many tokens."""

    def check(self) -> None:
        """Raises RequestError for fields of both shapes together."""
        if (self.texts is None) == (self.documents is None):
            raise RequestError("Give either 'texts' or 'documents'.", "texts")
        others = _OF_TEXTS if self.texts is None else _OF_DOCUMENTS
        for name in others:
            if getattr(self, name) not in (None, False):
                shape = "texts" if self.texts is None else "documents"
                raise RequestError(f"{name} is for {shape}.", name)


_OF_TEXTS = ("raw_scores", "return_text", "truncate", "truncation_direction")
_OF_DOCUMENTS = (
    "top_n",
    "return_documents",
    "max_tokens_per_doc",
    "instruction",
    "use_activation",
    "truncate_prompt_tokens",
)


class Compared(Described):
    """A text, and those that it is compared with."""

    source_sentence: str
    """The text."""
    sentences: Items[str]
    """Texts that it is compared with."""


class Comparing(Described):
    """How texts are compared."""

    truncate: bool | None = None
    """Texts that are too long are cut at their end; else they are an error."""
    truncation_direction: Direction | None = None
    """The side at which texts are cut: "Right"."""
    prompt_name: str | None = None
    """The name of a prompt of the checkpoint's, which each text gets before it."""


class SimilarityBody(EngineBody):
    """The body of POST /similarity."""

    verdicts = {name: row for name, row in POOLING.items() if name != "parameters"}
    model_config = examples({"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}})

    inputs: Compared
    """The texts."""
    parameters: Comparing | None = None
    """How they are compared."""


def most_tokens(truncate: bool | None, direction: str | None, max_model_len: int) -> int | None:
    """Most tokens of an input. None where longer ones are an error. Raises RequestError."""
    if truncate and direction in ("Left", "left"):
        raise RequestError(
            'truncation_direction must be "Right": inputs are cut at their end.',
            "truncation_direction",
        )
    return max_model_len if truncate else None


def check_size(values: Any, most: int, param: str = "inputs") -> None:
    """Raises ApiError (413) for a list of more than `most` inputs."""
    if not isinstance(values, list) or len(values) <= most:
        return
    if not all(type(value) is int for value in values):
        message = f"batch size {len(values)} > maximum allowed batch size {most} (max_inputs)"
        raise ApiError(413, message, param=param)
