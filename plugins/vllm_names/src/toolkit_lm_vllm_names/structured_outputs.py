"""StructuredOutputsParams, which is a mapping here."""

from __future__ import annotations

from typing import Any, TypedDict


class StructuredOutputsParams(TypedDict, total=False):
    """Form of an output, for `SamplingParams(structured_outputs=...)`: give one of the first six
    fields."""

    json: str | dict[str, Any]
    json_object: bool
    regex: str
    choice: list[str]
    grammar: str
    structural_tag: str | dict[str, Any]
    whitespace_pattern: str
    disable_any_whitespace: bool
    disable_additional_properties: bool


class GuidedDecodingParams(StructuredOutputsParams, total=False):
    """The older name, for `SamplingParams(guided_decoding=...)`. An engine's option chooses the
    library of grammars."""

    backend: str
    backend_was_auto: bool
    disable_fallback: bool
