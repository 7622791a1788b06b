"""Findings of a type checker in programs that use the package: plain mypy, not strict."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import get_type_hints

import pytest
from mypy import api
from toolkit_lm.config import LLMOptions, VllmConfig, VllmOptions
from toolkit_lm.config.typed_options import APART

ROOT = Path(__file__).parents[1]
HEAD = """
from typing import Any
from toolkit_lm import LLM, AsyncLLM, LLMEngine, PoolingParams, SamplingParams, VllmConfig
from toolkit_lm_vllm_names import LLM as TheirLLM, EngineArgs, LLMEngine as TheirEngine

llm = LLM("tiny", max_model_len=5, dtype="float32", plugins=["tiny"])
config = VllmConfig.make(model="tiny", max_num_seqs=4)
engine = AsyncLLM(config.replace(seed=1))
chat = [{"role": "user", "content": "a"}]
others: dict[str, Any] = {"gpu_memory_utilization": 0.5}
"""
RIGHT = """
LLM("tiny", **others).close()
LLMEngine(config).close()
engine.close()
llm.generate("a", SamplingParams(max_tokens=5), use_tqdm=False)
llm.chat(chat, add_generation_prompt=True, **others)
llm.embed("a", PoolingParams(dimensions=4), cache_salt="me")
TheirLLM("tiny", gpu_memory_utilization=0.5)
reveal_type(engine.health().status)
reveal_type(TheirEngine.from_engine_args(EngineArgs("tiny")))
reveal_type(AsyncLLM)
"""
STRANGER = """
from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from toolkit_lm import SamplingParams
from toolkit_lm.plugin import hookimpl
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import caller_of, request_context
from toolkit_lm_serving.engine import ServingEngine


class Body(BaseModel):
    model: str | None = None
    text: str = Field(max_length=1000)


@hookimpl
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: None, api: OpenAIApi
) -> None:
    @router.post("/count")
    async def count(request: Request, body: Body) -> dict[str, str | int]:
        if not body.text:
            raise ApiError(400, "text is empty.", param="text")
        own = api.engines[body.model]
        context = request_context(request)
        with own.hold_rendering([body.text], {"context": context}):
            pass
        length = 0
        async for output in own.generate(
            body.text, SamplingParams(max_tokens=8), context=context
        ):
            length = len(output.outputs[0].token_ids)
        return {"client": caller_of(request).client, "length": length}

    @router.post("/chat-it")
    async def chat(request: Request, body: Body) -> dict[str, object]:
        answer = await api.chat.ask(
            {"messages": [{"role": "user", "content": body.text}]}, request_context(request)
        )
        return dict(await answer.completion())
"""
WRONG = {
    "from toolkit_lm import LMM": 'no attribute "LMM"',
    "from toolkit_lm import BeamSearchParams": 'no attribute "BeamSearchParams"',
    "from toolkit_lm_vllm_names import EngineArg": 'no attribute "EngineArg"',
    'LLM("tiny", max_model_len="5")': 'expected "int | None"',
    'LLM("tiny", max_modle_len=5)': 'did you mean "max_model_len"',
    'LLM("tiny", dtype="fp32")': "incompatible type",
    'VllmConfig.make(modle="tiny")': 'did you mean "model"',
    'config.replace(max_num_seqs="4")': 'expected "int"',
    'LLMEngine("tiny")': 'expected "VllmConfig"',
    "LLMEngine(config, plugin=[])": 'did you mean "plugins"',
    "AsyncLLM(config, plugin=[])": 'did you mean "plugins"',
    "SamplingParams(max_toknes=5)": 'did you mean "max_tokens"',
    'SamplingParams(max_tokens="5")': 'expected "int | None"',
    "PoolingParams(dimension=4)": 'did you mean "dimensions"',
    'llm.generate("a", prioritty=[1])': 'did you mean "priority"',
    "llm.chat(chat, tool=[])": 'did you mean "tools"',
    'llm.embed("a", cache_slat="me")': 'did you mean "cache_salt"',
    'llm.generate(["a"])[0].outputs[0].txt': 'maybe "text"',
    'engine.generate("a", timeuot=5)': 'did you mean "timeout"',
    "engine.chat(chat, tool=[])": 'did you mean "tools"',
    'engine.encode("a", cache_slat="me")': 'did you mean "cache_salt"',
    "llm.shutdown()": 'no attribute "shutdown"',
}


def checked(folder, *flags, others=()):
    """What mypy tells of the program, and of other files: it reads the packages once for all."""
    program = folder / "program.py"
    program.write_text(HEAD + RIGHT + "\n".join(WRONG))
    arguments = ["--config-file=", "--no-error-summary", "--hide-error-context", "--no-pretty"]
    files = map(str, [program, *others])
    told, failure, _ = api.run([*arguments, *flags, f"--cache-dir={folder}", *files])
    assert not failure
    return told


ROUTES = ROOT / "downstream" / "route" / "src"


@pytest.fixture(scope="module")
def strictly(tmp_path_factory):
    """What a strict type checker tells of the program, and of routes: those of the docs' plugin,
    of one of another repository, and of one with what else the docs name."""
    folder = tmp_path_factory.mktemp("programs")
    page = (ROOT / "docs" / "hooks" / "toolkit_register_routes.md").read_text(encoding="utf-8")
    example = folder / "toolkit_lm_hello.py"
    example.write_text(page.partition("```python\nfrom __future__")[2].partition("```")[0])
    example.write_text(f"from __future__{example.read_text()}")
    wrong = folder / "wrong.py"
    wrong.write_text("""
from toolkit_lm_serving.engine import ServingEngine

async def misuse(engine: ServingEngine) -> None:
    engine.close()
    engine.hold_rendring([])
    engine.generate("a", timeuot=5)
""")
    stranger = folder / "stranger.py"
    stranger.write_text(STRANGER)
    return checked(folder, "--strict", others=[example, wrong, stranger, ROUTES])


# A plain type checker takes the same, and refuses the same with the same words.
@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_type_checker_takes_what_is_right_and_refuses_what_is_misspelt(request, tmp_path, strict):
    told = request.getfixturevalue("strictly") if strict else checked(tmp_path)
    lines = [
        line.partition("program.py:")[2].partition(": ")
        for line in told.splitlines()
        if "program.py:" in line
    ]
    first = len((HEAD + RIGHT).splitlines()) + 1
    errors: dict[int, str] = {}
    for number, _, text in lines:
        if text.startswith("error: "):
            errors[int(number)] = errors.get(int(number), "") + text
    assert sorted(errors) == [*range(first, first + len(WRONG))]
    for (statement, expected), error in zip(
        WRONG.items(), map(errors.get, sorted(errors)), strict=True
    ):
        assert expected in error, statement
    revealed = [text for _, _, text in lines if "Revealed type" in text]
    assert len(revealed) == 3 and not any('"Any"' in one for one in revealed)
    assert "toolkit_lm.frontend.async_llm.AsyncLLM" in revealed[-1]


@pytest.mark.slow
def test_routes_of_plugins_pass_a_strict_type_checker(strictly):
    errors = [
        line for line in strictly.splitlines() if ": error: " in line and "program.py:" not in line
    ]
    assert all("wrong.py" in line for line in errors), strictly
    assert len(errors) == 3, strictly
    for line, expected in zip(errors, ('"close"', '"hold_rendring"', '"timeout"'), strict=True):
        assert expected in line


def test_the_options_for_type_checkers_are_those_of_the_config():
    path = ROOT / "docs" / "generate_typed_options.py"
    spec = importlib.util.spec_from_file_location("generate_typed_options", path)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.FILE.read_text(encoding="utf-8") == generator.text(), (
        "run python docs/generate_typed_options.py"
    )
    names = {one.name for one in VllmConfig.options()}
    assert get_type_hints(VllmOptions).keys() == names
    assert get_type_hints(LLMOptions).keys() == names - {*APART}


def test_packages_say_that_they_are_typed():
    packages = {one.parent for one in ROOT.glob("*/*/src/*/__init__.py")} | {
        ROOT / "core" / "src" / "toolkit_lm"
    }
    packages = {one for one in packages if one.parents[2].name != "downstream"}
    assert {one.name for one in packages if not (one / "py.typed").exists()} == set()
