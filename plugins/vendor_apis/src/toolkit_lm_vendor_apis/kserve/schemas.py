"""Shapes of the Open Inference Protocol's answers, for the description of the API."""

from __future__ import annotations

from pydantic import ConfigDict
from toolkit_lm_server.schema_texts import Described


class KserveServer(Described):
    """The server."""

    name: str
    """Its name."""
    version: str
    """The version of toolkit-lm."""
    extensions: list[str]
    """Extensions of the protocol: none."""


class KserveLive(Described):
    live: bool
    """The server answers."""


class KserveReady(Described):
    live: bool
    """The server answers."""
    ready: bool
    """Requests are served."""


class KserveModelReady(Described):
    name: str
    """The model's name."""
    ready: bool
    """Requests are served."""


class KserveTensor(Described):
    name: str
    """The tensor's name."""
    datatype: str
    """The type of its elements."""
    shape: list[int]
    """Sizes of its dimensions; -1: any."""


class KserveModel(Described):
    """A served model."""

    name: str
    """The model's name."""
    platform: str
    """What runs it."""
    inputs: list[KserveTensor]
    """Input tensors: requests have `text`, or `input_ids` with or without `attention_mask`."""
    outputs: list[KserveTensor]
    """Output tensors."""


class KserveOutput(KserveTensor):
    data: list[float]
    """The elements in row-major order."""


class KserveAnswer(Described):
    """The answer of /infer."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    """The model's name."""
    id: str | None = None
    """The request's id, where it has one."""
    outputs: list[KserveOutput]
    """Output tensors."""
