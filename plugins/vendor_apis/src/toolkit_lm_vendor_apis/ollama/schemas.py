"""Response schemas for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class OllamaError(BaseModel):
    error: str


class _Figures(BaseModel):
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


class OllamaMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChat(_Figures):
    message: OllamaMessage


class OllamaText(_Figures):
    response: str
    thinking: str | None = None


class OllamaVectors(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(BaseModel):
    embedding: list[float]


class OllamaVersion(BaseModel):
    version: str


class OllamaDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class RunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(BaseModel):
    models: list[RunningModel]


class OllamaCard(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
