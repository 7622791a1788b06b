"""A wrong value of each option and of each field of a request: the error names it as the user wrote
it, says what it must be and what was given, and names no type of a library."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from pydantic_core._pydantic_core import list_all_errors
from toolkit_lm.config import VllmConfig, load_options, options_of
from toolkit_lm.errors import ConfigError
from toolkit_lm_bench import options as bench
from toolkit_lm_cli.converse import ClientOptions
from toolkit_lm_commands.config_file import merge_options
from toolkit_lm_commands.options import in_flags
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_server.batch.command import BatchOptions
from toolkit_lm_server.errors import as_api_error, validated
from toolkit_lm_server.options import ServerOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from generate_request_fields import bodies

SECTIONS = [
    ServerOptions,
    RouterOptions,
    BatchOptions,
    ClientOptions,
    *(
        kind
        for kind in vars(bench).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__module__ == bench.__name__
    ),
]
OPTIONS = {
    o.name: o
    for options in (VllmConfig.options(), *map(options_of, SECTIONS))
    for o in options
    if o.default is not None or o.kinds
}
OF_LIBRARIES = ("`", "NoneType", "Expected ", "pydantic", "msgspec", "Input should", "<class")
WRONG = ("abc", "-3", 2.5, [[1]], {"a": [1]}, True)


def refusals(call, error):
    """The messages of `call` for the wrong values that it refuses, with those values."""
    for value in WRONG:
        try:
            call(value)
        except error as refused:
            yield value, refused


def check(message: str, name: str, value: object) -> None:
    assert message.startswith(name), message
    assert "must be" in message or "write NAME.KEY=VALUE" in message, message
    assert not [word for word in OF_LIBRARIES if word in message.partition(". ")[0]], message
    shown = message.partition(", not ")[2]
    assert str(value) in shown or shown.startswith(("text", "a ", "true or false", "[1]")), message


def test_the_options_of_all_distributions_are_looked_at():
    assert len(OPTIONS) > 120 and {"port", "block_size", "num_prompts", "concurrency"} <= {*OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_has_the_name_that_the_user_wrote(name, tmp_path):
    o = OPTIONS[name]
    file = tmp_path / "options.yaml"
    found = list(refusals(lambda value: load_options([o], {name: value}), ConfigError))
    assert found, f"no value is wrong for {name}"
    for value, error in found:
        check(str(error), name, value)
        with pytest.raises(ConfigError) as of_flag:
            merge_options([o], {name: value}, environ={}, file=None)
        check(str(of_flag.value), o.flag, value)
        file.write_text(f"{name}: {value!r}\n")
        with pytest.raises(ConfigError) as of_file:
            merge_options([o], {}, environ={}, file=file)
        check(str(of_file.value), f"config file {str(file)!r}: {name}", value)
        if isinstance(value, str):
            with pytest.raises(ConfigError) as of_variable:
                load_options([o], {}, environ={o.env: value})
            check(str(of_variable.value), f"environment variable {o.env}", value)


OF_THE_COMMAND_LINE = (
    *(f"plugins/{name}/" for name in ("bench", "cli", "devkit", "vllm_names")),
    "libs/commands/",
    "contrib_backends/compile/src/toolkit_lm_compile/cli.py",
    "contrib_backends/compile/src/toolkit_lm_compile/describe.py",
    "contrib_backends/executor_mp/src/toolkit_lm_executor_mp/cli.py",
    # `toolkit quantize` and `toolkit quality`.
    *(
        f"plugins/quantize/src/toolkit_lm_quantize/{name}.py"
        for name in ("cli", "convert", "quality")
    ),
    # Flags of `toolkit` itself.
    "plugins/lora/src/toolkit_lm_lora/flags.py",
    # Flags of `toolkit`, as options.
    "plugins/kv_disk/src/toolkit_lm_kv_disk/flags.py",
    "plugins/kv_redis/src/toolkit_lm_kv_redis/flags.py",
    # `toolkit kv`.
    "plugins/kv_disk/src/toolkit_lm_kv_disk/cli.py",
    "plugins/kv_transfer/src/toolkit_lm_kv_transfer/flags.py",
    # `toolkit ps`, `toolkit load` and `toolkit unload`.
    "plugins/model_pool/src/toolkit_lm_model_pool/remote.py",
    # `toolkit worker`.
    "contrib_backends/executor_mp/src/toolkit_lm_executor_mp/node.py",
    # The start of `toolkit serve`, and `toolkit batch`. Their clients have no flags.
    *(f"plugins/server/src/toolkit_lm_server/{name}" for name in ("batch/", "cli.py")),
    *(f"plugins/server/src/toolkit_lm_server/{name}.py" for name in ("listening", "report")),
)
"""Code whose texts only users of commands read."""


def texts(source: str) -> Iterator[str]:
    """The texts of a module, but for its documentation."""
    tree = ast.parse(source)
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in left_out:
            yield str(node.value)


def test_only_commands_name_flags():
    """Errors name options as Python does. `in_flags` makes flags of them on the command line."""
    root = Path(__file__).parents[1]
    named = [
        f"{file}: {text}"
        for room in ("core", "libs", "plugins", "contrib_models", "contrib_backends")
        for path in root.glob(f"{room}/**/src/**/*.py")
        if not (file := path.relative_to(root).as_posix()).startswith(OF_THE_COMMAND_LINE)
        for text in texts(path.read_text())
        # A whole command has its flags, between backticks.
        if re.search(r"(?<![\w-])--[a-z]", re.sub("`(toolkit|ray) [^`]*`", "", text))
    ]
    assert not named


WAYS_OUT = re.compile(
    r"\b([Ll]eave (it|some) out|[Ss]end|Shorten|Split|Use|Ask (for|with)|"
    r"[Tt]ry again|at most)\b"
)
"""A client's own way out. It cannot change an option."""


@pytest.mark.parametrize(
    "room",
    [
        "plugins/server/src",
        "libs/serving/src",
        "core/src/toolkit_lm/frontend/queue.py",
    ],
)
def test_errors_of_the_server_say_what_a_client_can_do(room):
    """Each function whose texts name an option in parentheses: the operator alone can change it."""
    root = Path(__file__).parents[1]
    names = {o.name for o in OPTIONS.values()} | {"max_sequences"}
    found = {}
    for path in [root / room] if room.endswith(".py") else (root / room).rglob("*.py"):
        file = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            said = " ".join(texts(ast.unparse(node)))
            if names & {*re.findall(r"\(([a-z_]+)\b", said)}:
                found[f"{file}: {node.name}"] = said
    found = {name: said for name, said in found.items() if not name.startswith(OF_THE_COMMAND_LINE)}
    assert found
    assert not {name: said for name, said in found.items() if not WAYS_OUT.search(said)}


def test_names_and_values_of_python_are_flags_on_the_command_line():
    message = "Use extra_tasks=['embed', 'x'], convert='none' or enable_prefix_caching=False."
    assert in_flags(message, VllmConfig.options()) == (
        "Use --extra-tasks embed,x, --convert none or --no-enable-prefix-caching."
    )
    message = "option 'quantization_skip': 'skip' names no layer. It has no option 'seet'."
    assert in_flags(message, VllmConfig.options()) == (
        "--quantization-skip: 'skip' names no layer. It has no option 'seet'."
    )


bodies_of_routes = bodies()
FIELDS = [(route, name) for route, body in bodies_of_routes.items() for name in body.model_fields]


@pytest.mark.parametrize(("route", "name"), FIELDS)
def test_a_wrong_field_is_named_as_in_the_body(route, name):
    body = bodies_of_routes[route]
    key = body.model_fields[name].alias or name
    for value in (*WRONG, None):
        try:
            validated(body, {key: value})
        except RequestValidationError as error:
            own = [one for one in error.errors() if one["loc"][1:2] == (key,)]
            if not own:
                continue
            api = as_api_error(RequestValidationError(own))
            message = api.body["error"]["message"]
            assert api.body["error"]["param"] == key, message
            assert key in message
            assert not [word for word in OF_LIBRARIES if word in message], message


ERRORS_OF_SCHEMAS = {
    "any": (),
    "bool": ("bool_type", "bool_parsing"),
    "dict": ("dict_type",),
    "float": ("float_type", "float_parsing", "finite_number"),
    "int": ("int_type", "int_parsing", "int_parsing_size", "int_from_float"),
    "list": ("list_type",),
    "literal": ("literal_error",),
    "model": ("model_type",),
    "model-fields": ("model_attributes_type",),
    "str": ("string_type", "string_unicode"),
    # They hold a schema, and add no error of pydantic's.
    **dict.fromkeys(("default", "model-field", "nullable", "union"), ()),
    # Functions raise errors of `unknown_fields`, or FastAPI's of a file.
    **dict.fromkeys(("function-before", "function-wrap", "function-plain"), ("custom",)),
    **dict.fromkeys(("no-info", "with-info"), ()),
}
"""Errors that pydantic can report for each type of schema."""
ERRORS_OF_BOUNDS = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
    "max_length": "too_long",
    "min_length": "too_short",
    "pattern": "string_pattern_mismatch",
    "multiple_of": "multiple_of",
    "custom_error_type": "of its own",
}


def schemas(inside: object) -> Iterator[dict[str, Any]]:
    """The parts of a body's schema that have a type."""
    if isinstance(inside, dict):
        if isinstance(inside.get("type"), str):
            yield inside
        for name, part in inside.items():
            if name not in ("metadata", "expected", "default"):
                yield from schemas(part)
    elif isinstance(inside, list | tuple):
        for part in inside:
            yield from schemas(part)


def kinds_of_errors() -> Iterator[str]:
    """The types of pydantic's errors that a body of a route can have."""
    for body in bodies_of_routes.values():
        for schema in schemas(body.__pydantic_core_schema__):
            yield from ERRORS_OF_SCHEMAS[schema["type"]]
            for bound in ERRORS_OF_BOUNDS.keys() & schema.keys():
                of_text = schema["type"] == "str" and bound.endswith("length")
                yield f"string_{ERRORS_OF_BOUNDS[bound]}" if of_text else ERRORS_OF_BOUNDS[bound]


@pytest.mark.parametrize("kind", sorted({*kinds_of_errors(), "missing"} - {"custom"}))
def test_no_text_of_pydantics_reaches_a_client(kind):
    [known] = [one for one in list_all_errors() if one["type"] == kind]
    context = known["example_context"] or {}
    text = known["example_message_python"]
    wrong = {"type": kind, "loc": ("body", "top", 3, "inner"), "msg": text, "ctx": context}
    [message, two] = [
        as_api_error(RequestValidationError([{**wrong, "input": {}}, *others])).body["error"][
            "message"
        ]
        for others in ([], [{**wrong, "loc": ("body", "other"), "input": 7}])
    ]
    if kind == "missing":
        assert message == "You must provide the parameter 'top[3].inner'."
    else:
        start = "Invalid value for 'top[3].inner': it must be "
        assert message.startswith(start) and message.endswith(", not <dict of 0 items>.")
    assert two.startswith(f"2 validation errors: {message}") and "'other'" in two
    assert text not in two and kind not in two


def test_an_item_of_a_list_is_named_and_not_the_unions_other_members():
    with pytest.raises(RequestValidationError) as error:
        validated(bodies_of_routes["/v1/completions"], {"prompt": ["a", None]})
    message = as_api_error(error.value).body["error"]["message"]
    assert message == "Invalid value for 'prompt[1]': it must be text, not null."
