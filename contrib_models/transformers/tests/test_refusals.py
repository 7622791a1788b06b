"""Models that the fallback refuses, and its reasons."""

import json
import re
import warnings

import pytest
import torch
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.plugin import PluginWarning
from toolkit_lm_cli.app import run
from toolkit_lm_cli.explanation import explain
from toolkit_lm_transformers.attention import attend, calls_of
from toolkit_lm_transformers.examine import examine
from toolkit_lm_transformers.model import TransformersForCausalLM

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
MOE = SHAPE | {"intermediate_size": 48, "num_local_experts": 4}
LLAMA = SHAPE | {"intermediate_size": 48}


def config_of(architecture: str, config: transformers.PreTrainedConfig, **changes):
    return json.loads(config.to_json_string()) | {"architectures": [architecture]} | changes


def refusal(hf_config, **options):
    return TransformersForCausalLM.refuses(VllmConfig.default(hf_config, **options))


def llama(**changes):
    return config_of("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA), **changes)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        (
            "BertLMHeadModel",
            transformers.BertConfig(**SHAPE),
            r"not causal \(bert\.encoder\.layer\.0\.attention\.self\)",
        ),
        (
            "BertModel",
            transformers.BertConfig(**SHAPE),
            "BertModel of transformers is not a causal language model",
        ),
        ("T5ForConditionalGeneration", transformers.T5Config(), "is not a causal language model"),
        (
            "MistralForCausalLM",
            transformers.LlamaConfig(**LLAMA),
            "model_type 'llama' does not belong to MistralForCausalLM",
        ),
        (
            "NoSuchForCausalLM",
            transformers.LlamaConfig(**LLAMA),
            r"transformers \d.* has no class NoSuchForCausalLM",
        ),
    ],
)
def test_a_model_that_cannot_run_is_refused(architecture, config, reason):
    assert re.search(reason, refusal(config_of(architecture, config)))


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        # These have attention classes of their own: the first two for ALiBi.
        (
            "BloomForCausalLM",
            transformers.BloomConfig(**SHAPE),
            "does not go through transformers' attention interface",
        ),
        (
            "FalconForCausalLM",
            transformers.FalconConfig(**SHAPE),
            "does not go through transformers' attention interface",
        ),
        (
            "GPTJForCausalLM",
            transformers.GPTJConfig(vocab_size=50),
            "does not go through transformers' attention interface",
        ),
        (
            "MambaForCausalLM",
            transformers.MambaConfig(num_hidden_layers=1),
            "layers of type linear_attention",
        ),
        (
            "GptOssForCausalLM",
            transformers.GptOssConfig(**MOE),
            r"takes s_aux, which is not supported \(model\.layers\.0\.self_attn\)",
        ),
        (
            "DeepseekV3ForCausalLM",
            transformers.DeepseekV3Config(**MOE),
            "queries, keys and values differ in size: 192, 192 and 128",
        ),
    ],
)
def test_a_model_that_attends_by_its_own_code_is_not_refused(architecture, config, reason):
    hf_config = config_of(architecture, config)
    assert refusal(hf_config) is None
    examined = examine(VllmConfig.default(hf_config))
    assert not examined.calls
    assert examined.layout is not None
    assert re.search(reason, examined.reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            r"rotary angles (dynamic) depend on the longest",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
        ({"hidden_size": "32"}, "transformers cannot read its config.json"),
        ({"hidden_act": "silo"}, "transformers cannot make the model: KeyError"),
    ],
)
def test_a_config_that_cannot_run_is_refused(changes, reason):
    assert reason in refusal(llama(**changes))


def test_what_can_run_is_not_refused():
    assert refusal(llama()) is None
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert refusal(llama(), **sizes) == "models of transformers run on one rank"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"position_ids": torch.zeros(1, 3), "use_cache": False, "s_aux": None}, None),
        ({"is_causal": False}, "its attention is not causal"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "it makes an attention mask of its own"),
        (
            {"value": torch.zeros(1, 2, 3, 4)},
            "its queries, keys and values differ in size: 8, 8 and 4",
        ),
        ({"s_aux": torch.zeros(4)}, "its attention takes s_aux, which is not supported"),
    ],
)
def test_attention_that_cannot_be_had_is_noted(given, reason):
    module = torch.nn.Module()
    keys = torch.zeros(1, 2, 3, 8)
    arguments = {
        "query": torch.zeros(1, 4, 3, 8),
        "key": keys,
        "value": keys,
        "attention_mask": None,
    } | given
    out, _ = attend(module, **arguments, scaling=0.5, sliding_window=7)
    (call,) = calls_of(module)
    assert (call.num_heads, call.num_kv_heads, call.head_size, call.scale, call.window) == (
        4,
        2,
        8,
        0.5,
        7,
    )
    assert call.refusal == reason
    assert out.shape == (1, 3, 4, arguments["value"].shape[-1])


def write(folder, hf_config):
    (folder / "config.json").write_text(json.dumps(hf_config))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_the_error_names_both_the_nearest_class_and_the_reason(tmp_path):
    model = write(tmp_path, config_of("BertLMHeadModel", transformers.BertConfig(**SHAPE)))
    with pytest.raises(
        CheckpointError,
        match=r"has the architecture 'BertLMHeadModel'.*'transformers' cannot run it: its "
        r"attention is not causal",
    ):
        explain(VllmConfig.make(model=model, max_model_len=64))
    with pytest.raises(
        UnsupportedError,
        match=r"'transformers' cannot run 'BertLMHeadModel' of .*: its attention is not causal",
    ):
        explain(VllmConfig.make(model=model, max_model_len=64, model_impl="transformers"))


def test_explain_says_that_a_fallback_was_chosen_and_why(tmp_path, capsys):
    model = write(tmp_path, config_of("GPTNeoXForCausalLM", transformers.GPTNeoXConfig(**LLAMA)))
    with pytest.warns(PluginWarning, match="the fallback 'transformers' runs it"):
        found = explain(VllmConfig.make(model=model))
    assert found.models == [
        ("GPTNeoXForCausalLM", "no installed plugin registers it"),
        (
            "transformers_image_text",
            "GPTNeoXForCausalLM of transformers is not a model of pictures and text",
        ),
        (
            "transformers_audio_text",
            "GPTNeoXForCausalLM of transformers is not a model of recordings and text",
        ),
        ("transformers", None),
    ]
    assert (found.architecture, found.plugin, len(found.layers)) == (
        "transformers",
        "transformers",
        2,
    )
    assert found.layers[1].layer == "gpt_neox.layers.1.attention"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run(["explain", model]) == 0
    captured = capsys.readouterr()
    shown = " ".join(captured.out.split())
    assert "warning: no installed plugin has the architecture 'GPTNeoXForCausalLM'" in captured.err
    assert "transformers: toolkit_lm_transformers.model:TransformersForCausalLM" in shown
    assert "not GPTNeoXForCausalLM: no installed plugin registers it" in shown
