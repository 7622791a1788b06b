"""Helpers of vLLM's scripts: platforms, profiles, samples, and options that go together."""

from __future__ import annotations

import argparse
from importlib.resources import files

import pytest
import torch
import transformers
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm_vllm import LLM
from toolkit_lm_vllm.benchmarks.datasets import add_dataset_parser, get_samples
from toolkit_lm_vllm.platforms import current_platform
from toolkit_lm_vllm.utils.print_utils import print_embeddings
from toolkit_lm_vllm_names.pairs import pair_prompts
from toolkit_lm_vllm_names.profiling import Profiler
from toolkit_lm_vllm_names.table import engine_options, translate

CHECKPOINT = str(files("toolkit_lm_tiny") / "checkpoint")


def test_the_platform_is_the_one_of_torch():
    has_gpu = torch.cuda.is_available()
    assert current_platform.is_cuda_alike() == has_gpu
    assert current_platform.is_cpu() == (current_platform.device_type == "cpu") == (not has_gpu)
    assert not (current_platform.is_tpu() or current_platform.is_xpu())
    assert current_platform.get_device_name()
    assert current_platform.is_rocm() == (current_platform.device_name == "rocm")


def test_print_embeddings(capsys):
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0])
    print_embeddings([1.0], prefix="Reward")
    assert capsys.readouterr().out.splitlines() == [
        "Embeddings: [1.0, 2.0, 3.0, 4.0, ...] (size=5)",
        "Reward: [1.0] (size=1)",
    ]


def test_samples_are_random_and_no_longer_than_asked():
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    parser = argparse.ArgumentParser()
    add_dataset_parser(parser)
    args = parser.parse_args(["--num-prompts", "3", "--random-input-len", "20"])
    samples = get_samples(args, tokenizer)
    assert len({sample.prompt for sample in samples}) == 3
    for sample in samples:
        ids = tokenizer.encode(sample.prompt, add_special_tokens=False)
        assert sample.prompt_len == len(ids) <= 20
    assert get_samples(args, tokenizer) == samples
    args.dataset_name = "sharegpt"
    with pytest.raises(ToolkitError, match="toolkit bench"):
        get_samples(args, tokenizer)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"profiler": "cuda"}, "must be 'torch'"),
        ({"delay_iterations": -1}, "delay_iterations must be an integer"),
        ({"max_iterations": "2"}, "max_iterations must be an integer"),
    ],
)
def test_settings_of_a_profile(config, told):
    with pytest.raises(ToolkitError, match=told):
        Profiler(config)


def test_a_profile_that_never_begins_is_an_error(tmp_path):
    profiler = Profiler({"torch_profiler_dir": str(tmp_path), "delay_iterations": 2})
    profiler.start(None)
    profiler.after_step()
    with pytest.raises(ToolkitError, match="1 steps were computed, and delay_iterations"):
        profiler.stop()
    with pytest.raises(ToolkitError, match="begin by start_profile"):
        profiler.stop()


def test_a_classifier_of_the_head_is_options():
    fields = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    assert translate({"hf_overrides": fields}) == {
        "convert": "classify",
        "classifier_tokens": ["no", "yes"],
        "classifier_method": "from_2_way_softmax",
        "score_template": "pair",
    }
    rest = {
        "classifier_from_token": ["Yes"],
        "architectures": ["Mine"],
        "method": "no_post_processing",
    }
    made = translate({"hf_overrides": rest})
    assert made["hf_overrides"] == '{"architectures": ["Mine"]}'
    assert made["classifier_method"] == "no_post_processing"
    with pytest.raises(ToolkitError, match="need classifier_from_token"):
        translate({"hf_overrides": {"method": "from_2_way_softmax"}})


def test_experts_of_one_rank_are_not_divided(caplog):
    assert "enable_expert_parallel" not in engine_options({"enable_expert_parallel": True})
    assert "no effect here without tensor_parallel_size" in caplog.text
    made = engine_options({"enable_expert_parallel": True, "tensor_parallel_size": 2})
    assert made["enable_expert_parallel"] is True


def test_a_chat_template_of_pairs_is_for_cross_encoders():
    with (
        LLM("tiny", runner="pooling") as llm,
        pytest.raises(RequestError, match="does not classify"),
    ):
        llm.score("a", ["b"], chat_template="{{ messages }}")


class _Engine:
    """The parts of an engine that prompts of pairs are made of."""

    tasks = ("classify",)

    @property
    def renderer(self):
        return self

    def get_tokenizer(self):
        return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize(
    ("texts", "template", "param"),
    [
        ((["a", "b"], ["c", "d", "e"]), "{{ messages }}", "data_1"),
        (("a", "b"), "{{ messages[7].content.upper() }}", "chat_template"),
        (("a", "b"), "{% for %}", "chat_template"),
    ],
)
def test_errors_of_prompts_of_pairs(texts, template, param):
    with pytest.raises(RequestError) as told:
        pair_prompts(*texts, template, _Engine())
    assert told.value.param == param
