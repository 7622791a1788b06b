"""Imports of vLLM that trainers make, and their calls: each fits a name here, or is told in docs.

NAME_VERSION.json has, of one version of a trainer: its imports (MODULE:NAME, or a module); its
calls, with the number of positional arguments and the names of the others ("**": a mapping of
further ones; ENGINE: an instance of `engine`); arguments of its engines; attributes of engines and
of workers that it reads.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm_rl.extension import Worker
from toolkit_lm_vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from toolkit_lm_vllm.inputs import TokensPrompt
from toolkit_lm_vllm.utils import random_uuid
from toolkit_lm_vllm_names.table import TABLE

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs/rl.md").read_text(encoding="utf-8")
FACTS = {
    name: json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("openrlhf_0.11.2", "verl_0.9.1")
}
ABSENT_MODULES = (
    "vllm._custom_ops",
    "vllm.config.lora",
    "vllm.distributed.weight_transfer",
    "vllm.entrypoints",
    "vllm.lora.layers",
    "vllm.lora.lora_model",
    "vllm.lora.models",
    "vllm.lora.peft_helper",
    "vllm.lora.utils",
    "vllm.lora.worker_manager",
    "vllm.model_executor",
    "vllm.transformers_utils",
    "vllm.v1.attention",
    "vllm.v1.engine:",
)
"""Beginnings of imports that are not here: docs/rl.md says why."""
ABSENT_CALLS = {
    "ENGINE.engine_core.abort_requests_async",
    "ENGINE.list_loras",
    "ENGINE.output_processor.abort_requests",
    "ENGINE.start_profile",
    "ENGINE.stop_profile",
    "worker.model_runner.model.load_weights",
}
"""Calls that are not here, and one of workers, which has a test of its own."""
CALLS = [
    pytest.param(facts, call, id=f"{name}-{call['target']}-{'-'.join(call['keywords'])}")
    for name, facts in FACTS.items()
    for call in facts["calls"]
]


def found(entry: str):
    """The module or name that `from MODULE import NAME` gives."""
    module, _, name = entry.partition(":")
    made = importlib.import_module(module.replace("vllm", "toolkit_lm_vllm", 1))
    if not name:
        return made
    # Python imports a module below a package for the statement.
    return getattr(__import__(made.__name__, fromlist=[name]), name)


def resolves(entry: str) -> bool:
    try:
        found(entry)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("name", FACTS)
def test_imports_resolve_or_are_told(name):
    imports = FACTS[name]["imports"]
    here = [entry for entry in imports if resolves(entry)]
    absent = [entry for entry in imports if entry not in here]
    assert [entry for entry in absent if not entry.startswith(ABSENT_MODULES)] == []
    assert [entry for entry in here if entry.startswith(ABSENT_MODULES)] == []
    title, _, version = name.partition("_")
    assert f"{title} {version}: {len(here)} of {len(imports)} imports" in PAGE.lower(), len(here)
    calls = FACTS[name]["calls"]
    bound = [call for call in calls if is_here(call)]
    assert f"{len(bound)} of {len(calls)} calls" in PAGE


def is_here(call) -> bool:
    target = call["target"]
    return target not in ABSENT_CALLS or target.startswith("worker.")


def target_of(facts, path: str):
    head, _, rest = path.partition(".") if path.startswith("ENGINE") else (path, "", "")
    if head == "ENGINE":
        made = found(facts["engine"])
        if rest.startswith("output_processor."):
            made = type(made.output_processor.func(None))
            rest = rest.partition(".")[2]
        return inspect.getattr_static(made, rest), True
    module, _, rest = path.partition(":")
    names = rest.split(".")
    made = found(f"{module}:{names[0]}")
    for name in names[1:]:
        made = getattr(made, name)
    return made, len(names) > 1 and not inspect.ismethod(made)


@pytest.mark.parametrize(("facts", "call"), CALLS)
def test_calls_fit_the_signatures(facts, call):
    path = call["target"]
    if path in ABSENT_CALLS:
        if path.startswith("ENGINE."):
            assert path in PAGE or path.removeprefix("ENGINE.") in PAGE
        return
    target, takes_self = target_of(facts, path)
    names = [name for name in call["keywords"] if name != "**"]
    if path == "vllm:SamplingParams":
        assert set(names) <= set(SamplingParams.__struct_fields__)
        return
    if path == "vllm.inputs:TokensPrompt":
        assert set(names) <= set(inspect.get_annotations(target)) | set(
            target.__optional_keys__ | target.__required_keys__
        )
        return
    arguments = [None] * (call["args"] + takes_self)
    inspect.signature(target).bind(*arguments, **dict.fromkeys(names))


@pytest.mark.parametrize("name", FACTS)
def test_arguments_of_engines_are_known(name):
    """None is unknown. Those that are refused are told."""
    facts = FACTS[name]
    AsyncEngineArgs(**dict.fromkeys(facts["engine_arguments"]))
    refused = [
        name
        for name in facts["engine_arguments"]
        if name in TABLE and TABLE[name].kind == "refused"
    ]
    assert [name for name in refused if f"`{name}`" not in PAGE] == []
    with pytest.raises(ConfigError, match="unknown option"):
        AsyncEngineArgs(no_such_argument=1)


def test_a_name_that_is_asked_for_by_a_script_is_only_absent():
    """The script's own frame is the only one."""
    code = "import toolkit_lm_vllm.v1.engine as e; print(hasattr(e, 'no_such_name'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("name", FACTS)
def test_attributes_are_there(name):
    facts = FACTS[name]
    engine = found(facts["engine"])
    for path in facts["attributes"]:
        first, _, second = path.partition(".")
        assert hasattr(engine, first)
        assert not second or hasattr(type(engine.output_processor.func(None)), second)
    assert set(facts["worker"]) <= worker_attributes()


def worker_attributes() -> set[str]:
    return {
        name for name in Worker.__init__.__code__.co_names if name not in ("parallel", "config")
    }


class Policy:
    """The worker's half of OpenRLHF, which gets a tensor from a file in place of a group."""

    def update_weight(self, name, dtype, shape, path):
        assert dtype == self.model_config.dtype
        weight = load_file(path)[name]
        assert list(weight.shape) == list(shape)
        self.model_runner.model.load_weights(weights=[(name, weight.to(dtype))])


@pytest.mark.anyio
async def test_an_iteration_of_openrlhf(tmp_path):
    """Its calls, in its order: sleep, wake up, generate, pause, update a weight, resume."""
    arguments = {
        "model": "tiny",
        "enforce_eager": True,
        "worker_extension_cls": f"{Policy.__module__}.Policy",
        "tensor_parallel_size": 1,
        "seed": 3,
        "distributed_executor_backend": "uni",
        "max_model_len": 64,
        "enable_prefix_caching": True,
        "dtype": "float32",
        "trust_remote_code": True,
        "gpu_memory_utilization": 0.1,
        "enable_sleep_mode": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
    }
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        assert not await engine.is_sleeping()
        await engine.sleep(level=1)
        for tag in ("weights", "kv_cache"):
            await engine.wake_up(tags=[tag])
        assert engine.output_processor.get_num_unfinished_requests() == 0
        before = await drawn(engine)
        await engine.pause_generation(mode="keep")
        name = "model.norm.weight"
        [path] = Path(engine.config.checkpoint.path).glob("*.safetensors")
        shape = load_file(path)[name].shape
        await engine.collective_rpc("update_weight", args=(name, torch.float32, shape, str(path)))
        await engine.reset_prefix_cache()
        await engine.resume_generation()
        after = await drawn(engine)
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        assert [span.version for span in after.outputs[0].weight_versions] == ["1"]
        with pytest.raises(ToolkitError):
            await engine.collective_rpc("update_weight", args=("no.such", torch.float32, (1,), ""))
    finally:
        engine.shutdown()


async def drawn(engine):
    params = SamplingParams(
        temperature=0,
        top_p=1.0,
        top_k=-1,
        max_tokens=6,
        min_tokens=1,
        logprobs=1,
        skip_special_tokens=False,
    )
    prompt = TokensPrompt(prompt_token_ids=[5, 6, 7, 8])
    final = None
    async for output in engine.generate(prompt, params, request_id=random_uuid()):
        assert engine.output_processor.get_num_unfinished_requests() == 1
        final = output
    assert engine.output_processor.get_num_unfinished_requests() == 0
    return final


@pytest.fixture
def anyio_backend():
    return "asyncio"
