"""Facts that checkpoints state twice: each row of the table has a contradiction, and statements
that agree."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.checkpoint import read_checkpoint
from toolkit_lm.resolution.twice import TWICE, check_end_tokens, settled, with_quantization

YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
CASES = {
    "`rope_scaling` and `rope_parameters`": (
        {"rope_scaling": YARN, "rope_parameters": LINEAR},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "rope_parameters": {**YARN, "rope_theta": 5.0},
            "rope_theta": 5.0,
        },
        {"rope_parameters": YARN},
    ),
    "`type` and `rope_type`": (
        {"rope_scaling": {"type": "linear", **YARN}},
        {"rope_scaling": {"type": "mrope", "rope_type": "default"}},
        {"rope_scaling": YARN},
    ),
    "`rope_theta` or `partial_rotary_factor` next to `rope_parameters`, and in it": (
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 1.0}},
        {"rope_theta": 2.0, "rope_parameters": {"rope_theta": 2.0}},
    ),
    "`torch_dtype` and `dtype`": (
        {"torch_dtype": "float16", "dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16", "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
    ),
    "`dtype` of config.json and of its `text_config`": (
        {"dtype": "bfloat16", "text_config": {"torch_dtype": "float16"}},
        {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}},
        {"dtype": "bfloat16", "text_config": {}},
    ),
    "`quantization_config` of config.json and of its `text_config`": (
        {
            "quantization_config": {"quant_method": "awq"},
            "text_config": {"quantization_config": {"quant_method": "gptq"}},
        },
        {
            "quantization_config": {"quant_method": "awq"},
            "text_config": {"quantization_config": {"quant_method": "awq"}},
        },
        CheckpointError,
    ),
    "`hidden_size` and `n_embd`, and three other pairs of names": (
        {"hidden_size": 32, "n_embd": 64},
        {"hidden_size": 32, "n_embd": 32},
        CheckpointError,
    ),
}
"""A contradiction, statements that agree, and the result of the contradiction, by places."""
ELSEWHERE = {
    "`tie_word_embeddings` and the file's own `lm_head.weight`": "tests/test_tied_heads.py",
    "`tie_word_embeddings` of config.json and of its `text_config`": "tests/test_tied_heads.py",
    "`architectures` and `model_type`": "core/tests/resolution/test_twice.py",
    "config.json and a file such as hf_quant_config.json": "core/tests/resolution/test_twice.py",
    "`eos_token_id` of config.json and of generation_config.json": (
        "core/tests/resolution/test_twice.py"
    ),
    "`eos_token` of the tokenizer and `eos_token_id` of these files": (
        "plugins/renderer_hf/tests/test_end_tokens_told.py"
    ),
    "config.json and `hf_overrides`": "plugins/vllm_names/tests/test_table.py",
}
"""Rows that have no rule of their own, and the tests that show them."""
ROOT = Path(__file__).parents[3]


def test_each_row_is_shown():
    assert {rule.places for rule in TWICE if rule.settle is not None} == CASES.keys()
    assert {rule.places for rule in TWICE if rule.settle is None} == ELSEWHERE.keys()
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(f"| {rule.subject} | {rule.places} | {rule.wins} |" in page for rule in TWICE)


@pytest.mark.parametrize(
    ("places", "nested"),
    [
        (places, nested)
        for places, (said, *_) in CASES.items()
        for nested in {False, "text_config" not in said}
    ],
)
def test_a_contradiction_is_told_or_refused(places, nested, caplog):
    contradicts, _, result = CASES[places]
    given = {"text_config": contradicts} if nested else contradicts
    before = json.dumps(given)
    with caplog.at_level(logging.WARNING):
        if result is CheckpointError:
            with pytest.raises(CheckpointError, match="leave one of them"):
                settled(given)
            return
        found = settled(given)
    assert found == ({"text_config": result} if nested else result)
    [message] = caplog.messages
    assert message.startswith("config.json says ") and "counts" in message
    assert json.dumps(given) == before, "what was read is not changed"


@pytest.mark.parametrize("places", CASES)
def test_what_agrees_is_no_reason_to_complain(places, caplog):
    settled(CASES[places][1])
    assert not caplog.messages


def test_it_is_as_transformers_has_it():
    transformers = pytest.importorskip("transformers")
    given = {
        "rope_theta": 7.0,
        "rope_scaling": {**YARN, "type": "yarn"},
        "rope_parameters": LINEAR,
        "max_position_embeddings": 64,
    }
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps(given))).rope_parameters
    ours = settled(given)
    assert (theirs["rope_type"], theirs["factor"], theirs["rope_theta"]) == ("yarn", 4.0, 7.0)
    assert (
        ours["rope_parameters"]["rope_type"],
        ours["rope_parameters"]["factor"],
        ours["rope_theta"],
    ) == ("yarn", 4.0, 7.0)
    both = {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    assert (
        transformers.LlamaConfig.from_dict(json.loads(json.dumps(both))).rope_parameters[
            "rope_theta"
        ]
        == 9.0
    )
    assert settled(both)["rope_parameters"]["rope_theta"] == settled(both)["rope_theta"] == 9.0
    assert (
        str(
            transformers.LlamaConfig.from_dict(
                {"torch_dtype": "float16", "dtype": "bfloat16"}
            ).dtype
        )
        == "torch.bfloat16"
    )


OF_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default"},
}


@pytest.mark.parametrize(
    ("scaling", "is_told"),
    [
        ({"rope_type": "linear", "factor": 8.0}, False),
        ({"type": "linear", "factor": 8.0}, False),
        ({"type": "linear", "factor": 4.0}, True),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}, True),
        (YARN, True),
    ],
)
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Gemma3TextConfig", "toolkit_lm_decoder.gemma3"),
        ("ModernBertConfig", "toolkit_lm_encoder.modernbert"),
        ("LlamaConfig", "toolkit_lm_rotary"),
    ],
)
def test_beside_parameters_of_kinds_of_layers_the_models_do_as_transformers(
    name, module, scaling, is_told, caplog
):
    transformers = pytest.importorskip("transformers")
    model = importlib.import_module(module)
    given = {"rope_scaling": scaling, "rope_parameters": OF_KINDS, "max_position_embeddings": 64}
    given |= {"num_attention_heads": 2, "hidden_size": 32, "head_dim": 16}
    with caplog.at_level(logging.WARNING, "toolkit_lm"):
        config = HFConfig(settled(json.loads(json.dumps(given))))
    theirs = getattr(transformers, name).from_dict(json.loads(json.dumps(given))).rope_parameters
    for kind in OF_KINDS:
        # A model whose layers are all alike takes the scaling for all of them.
        ours = (
            model.RopeParameters.read(config, 16)
            if name == "LlamaConfig"
            else model.rope_parameters(config, kind)
        )
        expected = theirs.get(kind, theirs)
        assert ours.rope_type == expected["rope_type"]
        assert ours.theta == expected["rope_theta"]
        assert ours.values.get("factor", float) == expected.get("factor")
    assert (
        bool(
            [
                text
                for text in caplog.messages
                if "counts for the layers that the model scales" in text
            ]
        )
        is is_told
    )


def test_another_quantization_in_a_file_beside_is_told(tmp_path, caplog):
    def read(path):
        return json.loads(path.read_text())

    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    stated = {"quantization_config": {"quant_method": "modelopt"}}
    assert with_quantization(tmp_path, stated, read) == stated
    assert not caplog.messages
    with_quantization(tmp_path, {"quantization_config": {"quant_method": "awq"}}, read)
    assert "'modelopt', and config.json 'awq', which counts" in caplog.text


@pytest.mark.parametrize(
    ("config", "file", "text", "method"),
    [
        ({}, "hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}', "modelopt"),
        ({}, "quantize_config.json", '{"bits": 4}', "gptq"),
        ({}, "quantize_config.json", '{"bits": 4, "quant_method": "awq"}', "awq"),
        ({}, "quant_config.json", '{"w_bit": 4}', "awq"),
        ({"compression_config": {"quant_method": "x"}}, "none", "", "x"),
        ({"text_config": {"quantization_config": {"quant_method": "x"}}}, "none", "", "x"),
        ({}, "none", "", None),
    ],
)
def test_what_config_json_leaves_out_is_found_elsewhere(tmp_path, config, file, text, method):
    (tmp_path / file).write_text(text)
    found = with_quantization(tmp_path, config, lambda path: json.loads(path.read_text()))
    assert found.get("quantization_config", {}).get("quant_method") == method


def test_end_tokens_that_generation_config_leaves_out_are_told(caplog):
    check_end_tokens({"eos_token_id": 2}, {"eos_token_id": [2, 3]})
    check_end_tokens({"eos_token_id": 2}, {})
    check_end_tokens({"text_config": {"eos_token_id": 3}, "eos_token_id": 5}, {"eos_token_id": 3})
    assert not caplog.messages
    check_end_tokens({"eos_token_id": [2, 4]}, {"eos_token_id": [2, 3]})
    assert caplog.messages == [
        (
            "config.json says eos_token_id [4], and generation_config.json [2, 3]: all of them "
            "end a text."
        )
    ]


PLUGINS = Plugins.load(
    PluginsConfig(
        plugins=[
            "decoder",
            "encdec",
            "encoder",
            "moe",
            "vision",
            "audio",
            "whisper",
            "transformers",
            "reward",
        ]
    )
)


def read(folder, **hf_config):
    (folder / "config.json").write_text(json.dumps(hf_config))
    found = read_checkpoint(VllmConfig.make(model=str(folder)), PLUGINS)
    return found.hf_config["architectures"]


@pytest.mark.parametrize("entry", [one for one in PLUGINS.models.entries() if one.model_type])
def test_the_class_follows_from_model_type_where_that_is_unique(entry, tmp_path):
    alike = [one.key for one in PLUGINS.models.entries() if one.model_type == entry.model_type]
    if len(alike) == 1:
        assert read(tmp_path, model_type=entry.model_type) == [entry.key]
    else:
        with pytest.raises(
            CheckpointError, match=f"model_type '{entry.model_type}' has several: add .*{entry.key}"
        ):
            read(tmp_path, model_type=entry.model_type)


def test_a_fallback_knows_more_of_them_and_nobody_knows_all(tmp_path):
    with pytest.warns(UserWarning, match="the fallback 'transformers' runs it"):
        assert read(tmp_path, model_type="stablelm", num_hidden_layers=1) == ["StableLmForCausalLM"]
    for hf_config in ({"model_type": "nobodys"}, {}, {"model_type": 3}):
        with pytest.raises(CheckpointError, match="names no model class: 'architectures' is None"):
            read(tmp_path, **hf_config)


def test_model_type_counts_where_it_is_that_of_another_class(tmp_path, caplog):
    assert read(tmp_path, architectures=["LlamaForCausalLM"], model_type="mistral") == [
        "MistralForCausalLM"
    ]
    [message] = caplog.messages
    assert message == (
        "config.json says architectures ['LlamaForCausalLM'], and model_type 'mistral', "
        "which is that of MistralForCausalLM: it counts."
    )
    for architecture, model_type in (
        ("LlamaForCausalLM", "llama"),
        ("LlamaForCausalLM", "mine"),
        ("BartModel", "bart"),
    ):
        assert read(tmp_path, architectures=[architecture], model_type=model_type) == [architecture]
