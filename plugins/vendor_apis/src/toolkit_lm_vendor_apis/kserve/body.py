"""The request body of POST /v2/models/{name}/infer, and its tensors as prompts."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation, WithJsonSchema
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, TextPair, TokensPrompt
from toolkit_lm_server.fields import Items
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import POOLING
from toolkit_lm_server.schema_texts import Described

Task = Literal["embed", "classify"]
TASKS: tuple[Task, ...] = ("embed", "classify")
"""Tasks with one vector for each input, which is what a tensor has room for."""
OUTPUTS: dict[str, str] = {"embed": "embedding", "classify": "scores"}
"""Names of output tensors, by task."""
IDS = "input_ids"
MASK = "attention_mask"
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64))
Datatype = Literal[
    "BYTES", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"
]
_DATA = {"type": "array", "items": {}}
_MOST_TENSORS = 8


class InferTensor(Described):
    """An input tensor."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    """The tensor's name: "input_ids" and "attention_mask" for token ids, any for texts."""
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1, max_length=2)]
    """Sizes of the dimensions. Texts: [inputs], [inputs, 1], or [inputs, 2] for pairs. Token ids:
    [inputs, tokens]."""
    datatype: Datatype
    """"BYTES" for texts, or an integer type."""
    parameters: dict[str, Any] | None = None
    """Parameters of the tensor: none has an effect."""
    data: Annotated[list[Any], SkipValidation, WithJsonSchema(_DATA)]
    """The elements in row-major order, flat or as nested lists."""


class InferOutput(Described):
    """An output tensor that is asked for."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    """The tensor's name: "embedding" or "scores"."""
    parameters: dict[str, Any] | None = None
    """Parameters of the tensor: none has an effect."""


class InferParameters(Described):
    """Parameters of the pooling."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task: Task | None = None
    """The result to compute. null: the one that the model serves."""
    dimensions: int | None = None
    """Dimensions that vectors are cut to, for models that allow it."""
    normalize: bool | None = None
    """Vectors are of length 1. null: as the model's config says."""
    use_activation: bool | None = None
    """Scores go through softmax or sigmoid. null: as the model's config says."""
    truncate: bool | None = None
    """Inputs that are too long are cut at their end; else they are an error."""


class InferBody(EngineBody):
    """The body of POST /v2/models/{name}/infer."""

    verdicts = {name: row for name, row in POOLING.items() if name not in ("parameters", "inputs")}
    model_config = examples(
        {
            "inputs": [
                {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["Once", "The cat"]}
            ]
        },
        {
            "id": "42",
            "inputs": [
                {"name": IDS, "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]},
                {"name": MASK, "shape": [1, 3], "datatype": "INT64", "data": [1, 1, 0]},
            ],
            "outputs": [{"name": "embedding"}],
        },
    )

    id: str | None = None
    """The request's id, which the answer has, too."""
    parameters: InferParameters | None = None
    """Parameters of the pooling."""
    inputs: Annotated[Items[InferTensor], Field(min_length=1, max_length=_MOST_TENSORS)]
    """The tensors: one of texts, or input_ids with or without attention_mask."""
    outputs: Annotated[Items[InferOutput], Field(max_length=_MOST_TENSORS)] | None = None
    """The tensors that are asked for. null: all that there are, which is one."""

    def task(self, served: tuple[str, ...]) -> Task:
        """The task. `served`: those of the model. Raises RequestError."""
        asked = self.parameters.task if self.parameters else None
        found = [task for task in TASKS if task in served and asked in (None, task)]
        if not found:
            raise RequestError(
                f"this model does not serve {asked or 'embed or classify'}, whose results are "
                f"tensors. It serves: {', '.join(served)}.",
                "parameters",
            )
        for output in self.outputs or ():
            if output.name != OUTPUTS[found[0]]:
                raise RequestError(
                    f"outputs: this model has the tensor {OUTPUTS[found[0]]!r} alone.", "outputs"
                )
        return found[0]

    def params(self, task: Task) -> PoolingParams:
        """The pooling parameters. Raises RequestError."""
        how = self.parameters or InferParameters()
        return PoolingParams(
            task=task,
            dimensions=how.dimensions,
            normalize=how.normalize,
            use_activation=how.use_activation,
        )

    def prompts(self, most: int) -> list[Prompt | TextPair]:
        """The inputs, at most `most`. Raises RequestError."""
        first, *others = self.inputs
        if first.datatype == "BYTES":
            if others:
                raise RequestError(
                    "inputs: texts are one tensor. Pairs have the shape [inputs, 2].", "inputs"
                )
            return _texts(first, most)
        named = {tensor.name: tensor for tensor in self.inputs}
        if IDS not in named or len(named) < len(self.inputs) or named.keys() - {IDS, MASK}:
            raise RequestError(
                f"inputs must be one tensor of texts (BYTES), or {IDS} with or without {MASK}.",
                "inputs",
            )
        rows = _rows(named[IDS], most)
        if MASK not in named:
            return [TokensPrompt(prompt_token_ids=row) for row in rows]
        mask = _rows(named[MASK], most)
        if named[MASK].shape != named[IDS].shape:
            raise RequestError(f"inputs: {MASK} must have the shape of {IDS}.", "inputs")
        kept = [
            [token for token, is_on in zip(row, on, strict=True) if is_on]
            for row, on in zip(rows, mask, strict=True)
        ]
        return [TokensPrompt(prompt_token_ids=row) for row in kept]


def _texts(tensor: InferTensor, most: int) -> list[Prompt | TextPair]:
    """The texts of a tensor, or its pairs. Raises RequestError."""
    count, width = (*tensor.shape, 1)[:2]
    _check_count(count, most)
    if width not in (1, 2):
        raise RequestError(
            f"inputs: {tensor.name!r} must have the shape [inputs], [inputs, 1] or [inputs, 2].",
            "inputs",
        )
    found = _elements(tensor)
    if not all(isinstance(text, str) for text in found):
        raise RequestError(f"inputs: {tensor.name!r} must have texts as its data.", "inputs")
    if width == 1:
        return [*found]
    return [(found[index], found[index + 1]) for index in range(0, len(found), 2)]


def _rows(tensor: InferTensor, most: int) -> list[list[int]]:
    """The rows of a tensor of integers. Raises RequestError."""
    if tensor.datatype not in _INTEGERS or len(tensor.shape) != 2:
        raise RequestError(
            f"inputs: {tensor.name!r} must have integers and the shape [inputs, tokens].", "inputs"
        )
    count, width = tensor.shape
    _check_count(count, most)
    found = _elements(tensor)
    if not all(type(value) is int for value in found):
        raise RequestError(f"inputs: {tensor.name!r} must have integers as its data.", "inputs")
    return [found[row * width : (row + 1) * width] for row in range(count)]


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise RequestError(
            f"inputs: a tensor must have from 1 to {most} inputs (max_inputs), not {count}.",
            "inputs",
        )


def _elements(tensor: InferTensor) -> list[Any]:
    """The elements of a tensor in row-major order. Raises RequestError where they do not fill its
    shape."""
    found: Any = tensor.data
    if isinstance(found, list) and len(tensor.shape) == 2 and any(map(_is_list, found)):
        width = tensor.shape[1]
        if len(found) != tensor.shape[0] or not all(
            _is_list(row) and len(row) == width for row in found
        ):
            found = None
        else:
            found = [value for row in found for value in row]
    if not isinstance(found, list) or len(found) != math.prod(tensor.shape):
        raise RequestError(
            f"inputs: the data of {tensor.name!r} must have the shape {tensor.shape}.", "inputs"
        )
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
