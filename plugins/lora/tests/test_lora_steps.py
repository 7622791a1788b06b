"""Adapters through what steps may do: chunks, preemption, ranks, stages, quantized weights."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from lora_adapters import FORMS, given
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import PartConformance

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
LORA = importlib.import_module("toolkit_lm_lora")
NAMES = (None, "all", "dora", "rslora", "embedding", "saved", "norms", "tokens", "bias", "invoked")


@pytest.fixture(scope="module")
def adapters(make_adapters):
    return make_adapters("llama")


@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_ranks_and_stages_have_their_shares(adapters, parallel):
    plugins = {"plugins": [THREADS], "executor": "threads"}
    with adapters.llm({"max_adapters": 16}, **plugins, **parallel) as llm:
        for name, found in zip(NAMES, adapters.ask(llm, *NAMES), strict=True):
            adapters.assert_is(found, name)


def test_ranks_that_are_processes(adapters):
    names = (None, "all", "dora", "invoked")
    modules = [f"{name}={adapters.paths[name]}" for name in names if name]
    with adapters.llm({"modules": modules}, executor="mp", tensor_parallel_size=2) as llm:
        for name, found in zip(names, adapters.ask(llm, *names), strict=True):
            adapters.assert_is(found, name)


def test_experts_of_two_ranks(make_adapters):
    mixtral = make_adapters("mixtral")
    names = [None, *FORMS["mixtral"]]
    for expert_parallel in (False, True):
        options = {
            "plugins": [THREADS],
            "executor": "threads",
            "tensor_parallel_size": 2,
            "enable_expert_parallel": expert_parallel,
        }
        with mixtral.llm(**options) as llm:
            for name, found in zip(names, mixtral.ask(llm, *names), strict=True):
                mixtral.assert_is(found, name)


def test_an_adapter_that_one_stage_refuses(adapters, tmp_path):
    """The last stage has no part of it, and others are unharmed."""
    bad = adapters.save(tmp_path / "bad", r=32, target_modules=["q_proj"], layers_to_transform=[0])
    adapters.paths["bad"] = bad
    plugins = {"plugins": [THREADS], "executor": "threads"}
    with adapters.llm({"max_rank": 8}, **plugins, pipeline_parallel_size=2) as llm:
        found, beside = adapters.ask(llm, "bad", "all")
        assert "rank 32" in found.error
        adapters.assert_is(beside, "all")


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_quantized_bases(adapters, quantization):
    """As the base with the same quantized weights, plus B A: a merged one would be rounded."""
    with adapters.llm(quantization=quantization, enable_prefix_caching=False) as llm:
        names = (None, "all", "rslora", "norms", None)
        alone = [given(adapters.ask(llm, name)[0]) for name in names]
        together = adapters.ask(llm, *names)
        assert [given(one) for one in together] == alone
        assert len({str(one) for one in alone}) == 4


def test_more_adapters_than_memory(adapters):
    """Adapters are dropped and read again, with overlapping steps, too."""
    for overlap in (False, True):
        own = {"max_adapters": 2, "max_host_adapters": 1}
        with adapters.llm(own, overlap=overlap) as llm:
            names = ["all", "rslora", "dora", "bias", None] * 2
            for name, found in zip(names, adapters.ask(llm, *names), strict=True):
                adapters.assert_is(found, name)


def test_several_choices_beams_and_grammars(adapters):
    with adapters.llm(enable_prefix_caching=False) as llm:
        for params in (
            {"n": 3, "temperature": 1.0, "seed": 5},
            {"n": 2, "use_beam_search": True, "beam_width": 3, "logprobs": None},
        ):
            alone = [given(adapters.ask(llm, name, **params)[0]) for name in (None, "all")]
            both = adapters.ask(llm, None, "all", **params)
            assert [given(one) for one in both] == alone
            assert alone[0] != alone[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_class_that_stores_rows_in_another_order(adapters, monkeypatch, ranks):
    """Rows of gate and up, and the columns of down that go with them, turned round: the model
    computes the same, and adapters of `up_proj` are turned, too. Columns are not found."""
    load = LlamaForCausalLM.load_weights

    def turning(model, weights):
        turned = (
            (name, tensor.flip(int("down_proj" in name)) if ".mlp." in name else tensor)
            for name, tensor in weights
        )
        return load(model, turned)

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", turning)
    own = {"plugins": [THREADS], "executor": "threads"} if ranks > 1 else {}
    with adapters.llm(tensor_parallel_size=ranks, **own) as llm:
        for name, found in zip((None, "regex"), adapters.ask(llm, None, "regex"), strict=True):
            adapters.assert_is(found, name)
        [found] = adapters.ask(llm, "layers")
        assert "LlamaForCausalLM.load_weights stores its rows in another order" in found.error


class TestLora(PartConformance):
    part = "lora"
    plugins = ()
    shares = ({"adapter": "all"}, {"adapter": "dora"}, {"adapters": [{"name": "rslora"}]})

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, make_adapters):
        return str(make_adapters("llama").checkpoint)

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, make_adapters):
        paths = make_adapters("llama").paths
        modules = [f"{name}={paths[name]}" for name in ("all", "dora", "rslora")]
        own = {"modules": modules, "max_adapters": 2}
        return {"plugin_option": {"lora": own}, "renderer": "tokens"}
