"""The route /v1/moderations: labels of a classifier as categories of what is to be flagged."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import SkipValidation, WithJsonSchema
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import answer
from toolkit_lm_server.errors import described, printable
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.pooled import pool
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import POOLING
from toolkit_lm_server.schema_texts import Described

from toolkit_lm_vendor_apis.moderations import Options

_SAFE = {
    *("safe", "neutral", "normal", "ok", "okay", "none", "benign", "clean", "harmless"),
    *("acceptable", "appropriate", "innocent", "legit", "legitimate", "sfw"),
    *("nontoxic", "nonhate", "nonoffensive"),
}
"""Names of labels that flag nothing, as do those that begin with "not " or "non-"."""
_NEGATED = re.compile(r"(not|non|no)[ _-].+")
_NAMELESS = re.compile(r"label_\d+")
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_INPUT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _PART, "minItems": 1},
    ]
}


class ModerationBody(EngineBody):
    """The body of POST /v1/moderations."""

    verdicts = POOLING
    model_config = examples({"input": "Once upon a time"}, {"input": ["Once", "The cat"]})

    input: Annotated[Any, SkipValidation, WithJsonSchema(_INPUT)]
    """A text, a list of texts, or a list of parts of one input, which are texts."""

    def texts(self, most: int) -> list[str]:
        """The inputs. Raises RequestError, also for more than `most`."""
        found = self.input
        if isinstance(found, str):
            return [found]
        if not isinstance(found, list) or not found:
            raise RequestError(
                "input must be a text, a list of texts, or a list of parts.", "input"
            )
        if len(found) > most:
            raise RequestError(
                f"input has {len(found)} entries; at most {most} are allowed (max_inputs).", "input"
            )
        if all(isinstance(text, str) for text in found):
            return found
        return ["\n".join(_text_of(part, f"input[{index}]") for index, part in enumerate(found))]


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind == "image_url":
        raise RequestError(f"{where}: this model classifies texts, and no images.", "input")
    raise RequestError(f'{where} must be a text, or {{"type": "text", "text": ...}}.', "input")


class Moderation(Described):
    flagged: bool
    """Any category holds."""
    categories: dict[str, bool]
    """Whether the probability of a category reaches the server's threshold."""
    category_scores: dict[str, float]
    """Probabilities of the categories, which are the model's labels but for those of safe texts."""
    category_applied_input_types: dict[str, list[str]]
    """The kinds of input that each category was looked for in: texts."""


class ModerationObject(Described):
    id: str
    """The answer's id."""
    model: str
    """The model that answered, by its first name."""
    results: list[Moderation]
    """A result for each input."""


class Moderations:
    """Answers by a classifier, in the form of OpenAI's moderations."""

    def __init__(self, options: Options, api: OpenAIApi) -> None:
        self._options = options
        self._api = api

    async def create(self, body: ModerationBody, request: Request) -> Response:
        """Tells of each input which categories it belongs to, by the labels of a classifier."""
        engine = self._api.engines[body.model]
        if "classify" not in engine.tasks:
            raise RequestError(
                "this model does not classify, so it cannot moderate. Serve a classifier of texts "
                f"at this route. Supported: {', '.join(engine.tasks)}.",
                "model",
            )
        texts = body.texts(self._api.options.max_inputs)
        categories = _categories(engine.config.hf_config, self._options.safe_labels)
        outputs = await pool(
            engine,
            body,
            request,
            texts,
            PoolingParams(task="classify", use_activation=True),
            names=[f"input[{index}]" for index in range(len(texts))]
            if len(texts) > 1
            else ["input"],
        )

        def made() -> dict[str, Any]:
            results = [self._result(output.outputs.data, categories) for output in outputs]
            name = f"modr-{uuid.uuid4().hex}"
            return {"id": name, "model": engine.served_model_name, "results": results}

        return await answer(made)

    def _result(self, data: np.ndarray | None, categories: Mapping[str, int]) -> dict[str, Any]:
        assert data is not None, "`pool` gives results with data"
        scores = {name: float(data[index]) for name, index in categories.items()}
        found = {name: score >= self._options.threshold for name, score in scores.items()}
        return {
            "flagged": any(found.values()),
            "categories": found,
            "category_scores": scores,
            "category_applied_input_types": {name: ["text"] for name in scores},
        }


def _categories(config: Mapping[str, Any], safe: Sequence[str] | None) -> dict[str, int]:
    """The labels that are categories, with their places among the model's. Raises RequestError
    where nobody can know which these are."""
    labels = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    names = [labels[index] for index in sorted(labels)]
    found = {
        name: index for index, name in enumerate(names) if not _is_safe(name.lower().strip(), safe)
    }
    is_nameless = not names or any(_NAMELESS.fullmatch(name.lower()) for name in names)
    # Probabilities that add up to 1 flag every text, unless some label is that of safe ones.
    has_others = len(names) > 1 and config.get("problem_type") != "multi_label_classification"
    if safe is None and (is_nameless or (has_others and len(found) == len(names))):
        raise RequestError(
            f"which labels of this model flag a text is not known: {printable(', '.join(names))}. "
            "The operator names the others (moderations.safe_labels).",
            "model",
        )
    if not found:
        raise RequestError(
            "no label of this model flags a text (moderations.safe_labels).", "model"
        )
    return found


def _is_safe(name: str, safe: Collection[str] | None) -> bool:
    if safe is not None:
        return name in {label.lower().strip() for label in safe}
    return name in _SAFE or _NEGATED.fullmatch(name) is not None


def add_routes(router: APIRouter, options: Options, api: OpenAIApi) -> None:
    """Adds the route."""
    router.add_api_route(
        "/v1/moderations",
        Moderations(options, api).create,
        methods=["POST"],
        response_model=None,
        responses=answers(ModerationObject) | described(404, 429, 504),
    )
