"""StructuredOutputsParams, which is a mapping here."""

from __future__ import annotations

from typing import Any, TypedDict


class StructuredOutputsParams(TypedDict, total=False):
    """What an output is to be, for `SamplingParams(structured_outputs=...)`: one of the first
    six."""

    json: str | dict[str, Any]
    json_object: bool
    regex: str
    choice: list[str]
    grammar: str
    structural_tag: str | dict[str, Any]
    whitespace_pattern: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
