"""The request's parameters: what the output is to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import structs
from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import ProcessorParams, param

_ALIAS = "Older name of structured_outputs."


class StructuredOutputs(ProcessorParams):
    """OpenAI's response_format, vLLM's structured_outputs with the names that it had before, and
    those of llama.cpp and SGLang."""

    changes_forward = False
    structured_outputs: Annotated[
        dict[str, Any] | None,
        param(
            "What the output is to be: a JSON document of a schema, a choice, ...",
            max_items=64,
            flag=False,
        ),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        param(
            "What the output is to be, as OpenAI has it: json_object, json_schema.",
            max_items=64,
            flag=False,
        ),
    ] = None
    guided_json: Annotated[
        dict[str, Any] | str | None, param(f"{_ALIAS[:-1]}.json.", flag=False)
    ] = None
    guided_json_object: Annotated[bool | None, param(f"{_ALIAS[:-1]}.json_object.", flag=False)] = (
        None
    )
    guided_regex: Annotated[str | None, param(f"{_ALIAS[:-1]}.regex.", flag=False)] = None
    guided_choice: Annotated[list[str] | None, param(f"{_ALIAS[:-1]}.choice.", flag=False)] = None
    guided_grammar: Annotated[str | None, param(f"{_ALIAS[:-1]}.grammar.", flag=False)] = None
    guided_whitespace_pattern: Annotated[
        str | None, param(f"{_ALIAS[:-1]}.whitespace_pattern.", flag=False)
    ] = None
    grammar: Annotated[
        str | None,
        param("A grammar, as structured_outputs.grammar: its name in llama.cpp.", flag=False),
    ] = None
    json_schema: Annotated[
        dict[str, Any] | str | None,
        param(
            "A JSON Schema, as structured_outputs.json: its name in llama.cpp and SGLang.",
            flag=False,
        ),
    ] = None
    regex: Annotated[
        str | None, param("SGLang's name of structured_outputs.regex.", flag=False)
    ] = None
    ebnf: Annotated[
        str | None, param("SGLang's name of structured_outputs.grammar.", flag=False)
    ] = None

    def __post_init__(self) -> None:
        for name in ("structured_outputs", "response_format"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise RequestError(f"{name} must be a mapping, not a {type(value).__name__}.", name)

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        # Here, because most requests ask for no structure.
        from toolkit_lm_structured_output.preparing import prepare

        return prepare(
            {name: value for name, value in structs.asdict(self).items() if value is not None},
            renderer,
        )
