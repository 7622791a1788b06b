"""Response schemas for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from toolkit_lm_server.schema_texts import Described


class OllamaError(Described):
    error: str


class _Figures(Described):
    """With the last object of an answer."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaMessage(Described):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChat(_Figures):
    message: OllamaMessage


class OllamaText(_Figures):
    response: str
    thinking: str | None = None


class OllamaVectors(Described):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(Described):
    embedding: list[float]


class OllamaVersion(Described):
    version: str


class OllamaDetails(Described):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Described):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Described):
    models: list[OllamaModel]


class RunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Described):
    models: list[RunningModel]


class OllamaCard(Described):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
