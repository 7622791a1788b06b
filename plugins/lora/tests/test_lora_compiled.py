"""Adapters of compiled models: each gives what it gives uncompiled, and nothing is compiled again
when adapters come and go."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import warnings
from pathlib import Path

import deepseek_families
import hybrid_families
import pytest
from lora_adapters import FORMS, PROMPT
from peft import LoraConfig, get_peft_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError
from toolkit_lm_compile.counter import num_compiled
from toolkit_lm_compile.key import ingredients
from toolkit_lm_compile.program import Program
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_lora.front import LoRARequest
from toolkit_lm_lora.opaque import OpaqueMethod

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
REPLACING = {"norms", "biases"}
"""Forms that replace parameters of norms: the model's modules compute their steps."""
LINEAR = "q_proj kv_a_proj_with_mqa o_proj gate_proj up_proj down_proj in_proj out_proj"


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def passes(monkeypatch):
    """A list with an entry for each compiled forward pass."""
    calls = []
    call = Program.__call__

    def counted(self, *arguments):
        calls.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(Program, "__call__", counted)
    return calls


def options(**details):
    return {
        "optimization_level": 1,
        "compilation_config": json.dumps({"backend": "eager", **details}),
        "enable_prefix_caching": False,
    }


def compiler_of(llm):
    return llm.llm_engine.client.core.executor.runner.compiler


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", "cpu"),
        ("llama", "torch"),
        pytest.param("tied", "cpu", marks=pytest.mark.nightly),
        pytest.param("qwen3", "cpu", marks=pytest.mark.nightly),
        ("mixtral", "torch"),
        ("gpt2", "cpu"),
    ],
)
def test_each_form_is_what_peft_gives(make_adapters, passes, family, kernels):
    adapters = make_adapters(family)
    names = (None, *FORMS[family], None)
    with adapters.llm({"max_adapters": 16}, kernels=kernels, **options()) as llm:
        compiler = compiler_of(llm)
        programs = len(compiler._programs)
        before = num_compiled()
        for name in names:
            passes.clear()
            adapters.assert_is(adapters.ask(llm, name)[0], name)
            assert len(passes) == (0 if name in REPLACING else 8), name
        for name, found in zip(names, adapters.ask(llm, *names), strict=True):
            adapters.assert_is(found, name)
        assert (len(compiler._programs), num_compiled()) == (programs, before)
        assert compiler.num_eager_steps == 0


def test_two_ranks(make_adapters):
    adapters = make_adapters("llama")
    names = [None, *FORMS["llama"]]
    ranks = {"plugins": [THREADS], "executor": "threads", "tensor_parallel_size": 2}
    with adapters.llm({"max_adapters": 16}, **ranks, **options()) as llm:
        for name, found in zip(names, adapters.ask(llm, *names), strict=True):
            adapters.assert_is(found, name)


@pytest.mark.parametrize("architecture", ["BambaForCausalLM", "DeepseekV2ForCausalLM"])
def test_families_of_other_kinds(tmp_path, architecture):
    if architecture in hybrid_families.VARIANTS:
        variants = hybrid_families.VARIANTS[architecture]
        model = hybrid_families.make_model(architecture, next(iter(variants.values())))
    else:
        make, variants = deepseek_families.FAMILIES[architecture]
        model = make(**next(iter(variants.values())))
    randomize(model)
    make_checkpoint(tmp_path / "base", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, targets in (("adapter", LINEAR.split()), ("cached", ["kv_b_proj", "out_proj"])):
            config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
            made = get_peft_model(model, config)
            made.save_pretrained(tmp_path / name)
            model = made.unload()
    found = {}
    request, other = (LoRARequest(name, 1, str(tmp_path / name)) for name in ("adapter", "cached"))
    for level in (0, 1):
        with LLM(
            str(tmp_path / "base"),
            dtype="float32",
            renderer="tokens",
            plugin_option={"lora": {"enabled": True}},
            **(options() if level else {"enable_prefix_caching": False}),
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": PROMPT[:length]} for length in (20, 7, 13, 11)],
                SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0),
                lora_request=[request, None, request, other],
                use_tqdm=False,
            )
            error = outputs.pop().error or ""
            is_refused = architecture == "DeepseekV2ForCausalLM"
            assert ("kv_b_proj, which is multiplied by what is cached" in error) == is_refused
            assert not any(output.error for output in outputs)
            assert not level or compiler_of(llm).num_eager_steps == 0
        found[level] = outputs
    for plain, ours in zip(found[0], found[1], strict=True):
        assert plain.outputs[0].token_ids == ours.outputs[0].token_ids
        for one, other in zip(plain.prompt_logprobs[1:], ours.prompt_logprobs[1:], strict=True):
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one)


@pytest.mark.slow
def test_a_second_start_finds_the_compiled_parts(make_adapters, caplog):
    """Inductor's parts are kept, and a start without adapters does not take them."""
    adapters = make_adapters("tied")
    precompiles = shutil.which("openssl") is not None
    quickly = {"inductor_compile_config": {"cpp_cache_precompile_headers": precompiles}}
    own = options(**quickly, backend="inductor")
    for was_cached in (False, True):
        with adapters.llm(own=None, **own) as llm:
            compiler = compiler_of(llm)
            assert compiler.was_cached == was_cached
            names = (None, *FORMS["tied"])
            for name, found in zip(names, adapters.ask(llm, *names), strict=True):
                adapters.assert_is(found, name)
            assert compiler.num_eager_steps == 0
            runner = llm.llm_engine.client.core.executor.runner
            of = runner.model, runner.config, compiler._options, runner.plugins
            with_adapters = ingredients(*of)
            for layer in runner.model.modules():
                if isinstance(getattr(layer, "method", None), OpaqueMethod):
                    layer.method = layer.method.inner
            assert ingredients(*of)["layers"] != with_adapters["layers"]


def test_graphs_are_refused(make_adapters):
    config = json.dumps({"backend": "eager", "cudagraph_mode": "piecewise"})
    adapters = make_adapters("llama")
    with (
        pytest.raises(ConfigError, match="adapters do not run in CUDA graphs"),
        adapters.llm(optimization_level=1, compilation_config=config),
    ):
        pass
