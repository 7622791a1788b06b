"""Prompts: tokens as transformers makes them, and a RequestError for whatever cannot be rendered."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from llm_toolkit.config import Checkpoint, PluginsConfig, VllmConfig
from llm_toolkit.errors import CheckpointError, ContextLengthError, RequestError
from llm_toolkit.plugin import Plugins
from llm_toolkit_renderer_hf.renderer import HfRenderer
from tokenizers import decoders, processors

TEXTS = ["The cat sat.", " leading and trailing ", "héllo 😀 日本語", "a\n\nb\tc", "</s> inside"]


def test_toolkit_register_renderers():
    renderers = Plugins.load(PluginsConfig(plugins=["renderer_hf"])).renderers
    assert "tokenizer.json" in renderers.get("hf").reads
    assert renderers.load("hf") is HfRenderer


def test_imports_neither_torch_nor_transformers(tmp_path, make_renderer, byte_level):
    make_renderer(byte_level, {"chat_template": "{{ messages[0]['content'] }}"})
    code = f"""
import sys, msgspec
from llm_toolkit.config import Checkpoint, PluginsConfig, VllmConfig
from llm_toolkit_renderer_hf.renderer import HfRenderer
config = VllmConfig.default()
renderer = HfRenderer(msgspec.structs.replace(config, checkpoint=Checkpoint(path={str(tmp_path)!r}, architecture="none", hf_config={{}})))
ids, _ = renderer.render_conversation([{{"role": "user", "content": "hello"}}])
assert renderer.decode(ids) == "hello"
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_prompt_tokens_equal_those_of_transformers(tmp_path, tokenizer, make_renderer, flags):
    from transformers import PreTrainedTokenizerFast

    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    renderer = make_renderer(tokenizer, config)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **config)
    for text in TEXTS:
        assert renderer.render_prompt(text)[0] == reference(text)["input_ids"]
        assert renderer.render_prompt(text, add_special_tokens=False)[0] == reference(text, add_special_tokens=False)["input_ids"]


def test_tokens_pass_as_they_are(make_renderer, byte_level):
    assert make_renderer(byte_level).render_prompt({"prompt_token_ids": [5, 3, 5]}) == ([5, 3, 5], None)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, 500]}, "token id 500 is not in the vocabulary, which has 349 tokens"),
        ({"prompt_token_ids": [-1]}, "token id -1"),
        ({"prompt": "\ud800"}, "lone surrogate at position 0"),
        ({"prompt": "a", "image": "b"}, "no key 'image'"),
        (3, "not a int"),
    ],
)
def test_bad_prompts(make_renderer, byte_level, prompt, message):
    with pytest.raises(RequestError, match=message):
        make_renderer(byte_level).render_prompt(prompt)


def test_ids_are_bounded_by_the_models_embedding(make_renderer, byte_level):
    renderer = make_renderer(byte_level, hf_config={"text_config": {"vocab_size": 300}})
    assert renderer.render_prompt({"prompt_token_ids": [299]})[0] == [299]
    with pytest.raises(RequestError, match="which has 300 tokens"):
        renderer.render_prompt({"prompt_token_ids": [300]})
    assert renderer.vocab_size == 349
    assert make_renderer(byte_level, hf_config={"vocab_size": 512}).vocab_size == 512


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(make_renderer, byte_level):
    longest = max(map(len, byte_level.get_vocab()))
    renderer = make_renderer(byte_level, max_model_len=4)
    assert renderer.render_prompt("a" * 4 * longest)[0]
    with pytest.raises(ContextLengthError, match="max_model_len"):
        renderer.render_prompt("a" * (4 * longest + 1))


def test_other_modalities_are_refused(make_renderer, byte_level):
    with pytest.raises(RequestError, match="text only"):
        make_renderer(byte_level).render_prompt("a", multi_modal_data={"image": b""})


def test_truncation_and_padding_of_the_file_are_off(make_renderer, byte_level):
    byte_level.enable_truncation(2)
    byte_level.enable_padding(length=64)
    try:
        renderer = make_renderer(byte_level)
    finally:
        byte_level.no_truncation()
        byte_level.no_padding()
    text = "The cat sat on the mat"
    assert renderer.decode(renderer.render_prompt(text)[0]) == text


def test_eos_token_ids_are_those_of_all_files(make_renderer, byte_level):
    renderer = make_renderer(byte_level, hf_config={"eos_token_id": 2}, generation_config={"eos_token_id": [4, 2]})
    assert renderer.eos_token_ids == [4, 2]
    assert make_renderer(byte_level, {"eos_token": {"content": "<|im_end|>"}}).eos_token_ids == [4]
    assert make_renderer(byte_level, {}).eos_token_ids == []


def test_transformers_converts_a_checkpoint_without_tokenizer_json(tmp_path, make_renderer, byte_level):
    byte_level.model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    renderer = make_renderer(None, config)
    assert renderer.render_prompt("The cat sat on the mat.")[0] == byte_level.encode("The cat sat on the mat.").ids
    assert renderer.eos_token_ids == [2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is no tokenizer"),
        ({"tokenizer.json": "{}", "special_tokens_map.json": "["}, "special_tokens_map.json cannot be read as JSON"),
        ({"tokenizer_config.json": "[]"}, "must hold a mapping, not a list"),
        ({}, "has no tokenizer.json, and transformers finds no tokenizer"),
    ],
)
def test_broken_files(make_renderer, files, message):
    with pytest.raises(CheckpointError, match=message):
        make_renderer(files=files)


def test_missing_folder(tmp_path):
    checkpoint = Checkpoint(path=str(tmp_path / "none"), architecture="none", hf_config={})
    with pytest.raises(CheckpointError, match="does not exist"):
        HfRenderer(msgspec.structs.replace(VllmConfig.default(), checkpoint=checkpoint))


def test_the_tokenizer_option_names_another_folder(tmp_path, make_renderer, byte_level):
    make_renderer(byte_level)
    checkpoint = Checkpoint(path=str(tmp_path / "none"), architecture="none", hf_config={})
    config = msgspec.structs.replace(VllmConfig.default(tokenizer=str(tmp_path)), checkpoint=checkpoint)
    assert HfRenderer(config).render_prompt("The cat")[0] == byte_level.encode("The cat").ids


def test_a_decoder_that_needs_whole_texts_is_refused(make_renderer, byte_level):
    byte_level.decoder = decoders.CTC()
    try:
        with pytest.raises(CheckpointError, match="decoder 'CTC' is not supported"):
            make_renderer(byte_level)
    finally:
        byte_level.decoder = decoders.ByteLevel()
