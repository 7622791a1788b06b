"""The package toolkit_lm_vllm: vLLM's modules, also as `vllm`, and what it says of others."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
import toolkit_lm_vllm
from toolkit_lm.errors import RequestError, ToolkitError, UnsupportedError
from toolkit_lm_vllm import LLM, EngineArgs, PoolingParams, SamplingParams
from toolkit_lm_vllm.assets.image import ImageAsset
from toolkit_lm_vllm.config import CompilationConfig, CompilationMode, PoolerConfig
from toolkit_lm_vllm.engine.arg_utils import AsyncEngineArgs
from toolkit_lm_vllm.lora.request import LoRARequest
from toolkit_lm_vllm.multimodal.utils import encode_image_url, fetch_image
from toolkit_lm_vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from toolkit_lm_vllm.utils import Counter, cdiv, get_open_port, random_uuid
from toolkit_lm_vllm.v1.engine.async_llm import AsyncLLM
from toolkit_lm_vllm_names.absent import METHODS, MODULES, NAMES
from toolkit_lm_vllm_names.table import translate
from toolkit_lm_vllm_names.vllm_processors import (
    BatchUpdate,
    MoveDirectionality,
    process_dict_updates,
)

PATHS = sorted(
    module.name
    for module in pkgutil.walk_packages(toolkit_lm_vllm.__path__, f"{toolkit_lm_vllm.__name__}.")
    if not module.name.endswith(".aliases")
)
INSTALLED = """
import sys
import toolkit_lm_vllm
heavy = [name for name in ("torch", "transformers", "fastapi", "PIL") if name in sys.modules]
assert not heavy, heavy
toolkit_lm_vllm.install()
toolkit_lm_vllm.install()
import vllm
import vllm.sampling_params
from vllm import LLM, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
assert vllm is toolkit_lm_vllm and vllm.__spec__.name == "toolkit_lm_vllm"
assert vllm.sampling_params is sys.modules["toolkit_lm_vllm.sampling_params"]
assert vllm.sampling_params.SamplingParams is SamplingParams
try:
    import vllm.model_executor.models
except ModuleNotFoundError as error:
    assert "toolkit_register_models" in str(error), error
else:
    raise AssertionError("there is no such module")
print("ok")
"""
TAKEN = """
import sys, types
sys.modules["vllm"] = types.ModuleType("vllm")
import toolkit_lm_vllm
try:
    toolkit_lm_vllm.install()
except ImportError as error:
    assert "call toolkit_lm_vllm.install() before" in str(error), error
    print("ok")
"""


@pytest.mark.parametrize("path", PATHS)
def test_a_module_has_what_it_lists(path):
    module = importlib.import_module(path)
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=r"cannot import 'Nothing' from '.*vllm\.md"):
        _ = module.Nothing


@pytest.mark.parametrize("code", [INSTALLED, TAKEN], ids=["installed", "taken"])
def test_install(code):
    """In a process of its own: it changes what `import vllm` means."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert found.stdout == "ok\n", found.stderr


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_that_is_not_here_says_what_to_use(name):
    with pytest.raises(ImportError) as told:
        exec(f"from toolkit_lm_vllm.config import {name}")
    assert NAMES[name] in str(told.value)


@pytest.mark.parametrize("path", sorted(MODULES))
def test_a_module_that_is_not_here_says_what_to_use(path):
    with pytest.raises(ModuleNotFoundError) as told:
        importlib.import_module(f"toolkit_lm_vllm.{path}.deeper")
    assert MODULES[path] in str(told.value) and "'vllm." in str(told.value)


class TestSamplingParams:
    def test_the_older_form_of_structured_outputs(self):
        guided = GuidedDecodingParams(choice=["a", "b"], backend="xgrammar")
        given = SamplingParams(guided_decoding=guided, temperature=0)
        assert given.structured_outputs == {"choice": ["a", "b"]}
        with pytest.raises(RequestError, match="not both"):
            SamplingParams(guided_decoding=guided, structured_outputs={"regex": "a"})

    def test_a_clone_is_its_own(self):
        given = SamplingParams(stop=["a"], n=2)
        other = given.clone()
        other.stop.append("b")
        other.n = 3
        assert (given.stop, given.n, type(other)) == (["a"], 2, SamplingParams)
        assert PoolingParams(dimensions=3).clone() == PoolingParams(dimensions=3)

    def test_arguments_by_place_and_optional_ones(self):
        assert SamplingParams(2, 0.5).presence_penalty == 0.5
        made = SamplingParams.from_optional(n=None, temperature=0, skip_clone=True)
        assert (made.n, made.sampling_type) == (1, "greedy")
        assert SamplingParams(seed=3).sampling_type == "random_seed"

    def test_functions_per_request_are_refused(self):
        with pytest.raises(RequestError, match="option logits_processors"):
            SamplingParams(logits_processors=[print])


def test_sections_of_a_config_are_values_of_options():
    pooling = PoolerConfig(pooling_type="MEAN", normalize=True, task="embed")
    assert translate({"pooler_config": pooling}) == {"pooling_type": "MEAN", "normalize": True}
    compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    assert compiled.mode == 3 and compiled.cudagraph_mode is None
    assert translate({"compilation_config": compiled}) == {"optimization_level": 2}


def test_an_adapter_has_vllms_properties():
    one = LoRARequest("sql", 1, "a/folder")
    assert (one.name, one.adapter_id, one.path) == ("sql", 1, "a/folder")


def test_helpers():
    numbers = Counter(3)
    assert [next(numbers), next(numbers), numbers.counter] == [3, 4, 5]
    numbers.reset()
    assert next(numbers) == 0
    assert cdiv(7, 2) == 4 and len(random_uuid()) == 32 and 0 < get_open_port() < 65536


def test_pictures():
    from PIL import Image

    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    assert fetch_image(encode_image_url(picture)).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(UnsupportedError, match="in a message of chat"):
        fetch_image("https://example.org/cat.png")


def test_an_asset_that_is_not_there_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"PIL\.Image\.open"):
        _ = ImageAsset("hato").pil_image


def test_states_by_index():
    states: dict[int, str] = {}

    def state(params, prompt, output):
        return params

    added = [(0, "a", [], []), (1, "b", [], []), (2, None, [], [])]
    assert process_dict_updates(states, BatchUpdate(3, [], added, []), state)
    assert states == {0: "a", 1: "b"}
    swap = [(0, 1, MoveDirectionality.SWAP)]
    process_dict_updates(states, BatchUpdate(3, [], [], swap), state)
    assert states == {0: "b", 1: "a"}
    move = [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]
    process_dict_updates(states, BatchUpdate(1, [0], [], move), state)
    assert states == {0: "a"}
    assert not process_dict_updates(states, None, state)


@pytest.fixture(scope="module")
def llm():
    args = EngineArgs("tiny", max_model_len=64, disable_log_stats=True)
    with LLM.from_engine_args(args) as made:
        yield made


class TestLLM:
    def test_what_it_tells(self, llm):
        assert llm.supported_tasks == ("generate",) and llm.runner_type == "generate"
        assert llm.get_world_size() == 1 and llm.reset_prefix_cache() is True
        config = llm.llm_engine.vllm_config
        assert config.model_config.max_model_len == llm.model_config.max_model_len == 64
        assert config.model_config.get_vocab_size() == llm.model_config.hf_config.vocab_size
        assert config.cache_config.block_size == llm.config.cache.block_size
        with pytest.raises(ToolkitError, match="disable_log_stats=False"):
            llm.get_metrics()

    def test_queued_requests(self, llm):
        params = SamplingParams(temperature=0, max_tokens=3)
        ids = llm.enqueue(["Once", "The cat"], params)
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [output.request_id for output in outputs] == ids
        again = llm.generate(["Once", "The cat"], params, use_tqdm=print)
        assert [o.outputs[0].text for o in again] == [o.outputs[0].text for o in outputs]
        with pytest.raises(RequestError):
            llm.enqueue(["Once", ""], params)
        assert llm.wait_for_completion() == []

    def test_arguments_that_are_not_here(self, llm):
        with pytest.raises(RequestError, match="trace_headers must be None"):
            llm.generate("a", trace_headers={"a": "b"})

    def test_methods_that_are_not_here_say_what_to_use(self, llm):
        for face in (llm, llm.llm_engine):
            for name, way in METHODS.items():
                if name not in vars(face) and not hasattr(type(face), name):
                    with pytest.raises(AttributeError, match=re.escape(way)):
                        getattr(face, name)
            with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
                _ = face.nothing

    def test_a_profile_needs_a_folder(self, llm, monkeypatch):
        monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
        with pytest.raises(ToolkitError, match="torch_profiler_dir"):
            llm.start_profile()
        with pytest.raises(ToolkitError, match="begin by start_profile"):
            llm.stop_profile()

    def test_arguments_of_processors_need_a_processor(self, llm):
        params = SamplingParams(extra_args={"vllm_xargs": {"a": 1}})
        [output] = llm.generate("a", params)
        assert "option logits_processors names them" in output.error


def test_an_async_engine():
    asyncio.run(check_async())


async def check_async():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs("tiny", max_model_len=64, engine_process=False, extra_tasks=["embed"])
    )
    try:
        assert engine.is_running and not engine.errored and not engine.is_stopped
        assert await engine.get_supported_tasks() == ("generate", "embed", "token_embed")
        await engine.check_health()
        found = [o async for o in engine.encode("a cat", PoolingParams(task="embed"), "1")]
        assert found[-1].finished
        awaited = await engine.encode("a cat", PoolingParams(task="embed"))
        assert awaited.outputs.embedding == found[-1].outputs.embedding
        params = SamplingParams(
            max_tokens=2, structured_outputs=StructuredOutputsParams(choice=["a"])
        )
        outputs = [o async for o in engine.generate("x", params, "2", lora_request=None)]
        assert outputs[-1].outputs[0].text == "a"
        assert await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.abort(["1", "2"])
    finally:
        engine.shutdown(timeout=1)
    assert engine.is_stopped


def test_engines_sleep_and_pause():
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM("tiny") as llm:
        [expected] = llm.generate("Once", params)
        llm.sleep(level=1)
        assert llm.wake_up()
        [again] = llm.generate("Once", params)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids

    async def pauses():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny"))
        try:
            await engine.pause_generation(mode="keep")
            assert await engine.is_paused()
            await engine.resume_generation()
            await engine.sleep(level=2)
            assert await engine.is_sleeping()
            assert await engine.wake_up()
            async for output in engine.generate("Once", params, "1"):
                last = output
        finally:
            engine.shutdown()
        return last.outputs[0].token_ids

    assert asyncio.run(pauses()) == expected.outputs[0].token_ids
