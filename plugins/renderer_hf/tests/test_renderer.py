"""Prompts: tokens as transformers makes them, and a RequestError for whatever cannot be
rendered."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from toolkit_lm.config import Checkpoint, PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError, ContextLengthError, RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_renderer_hf.renderer import HfRenderer

TEXTS = ["The cat sat.", " leading and trailing ", "héllo 😀 日本語", "a\n\nb\tc", "</s> inside"]


def test_toolkit_register_renderers():
    renderers = Plugins.load(PluginsConfig(plugins=["renderer_hf"])).renderers
    assert "tokenizer.json" in renderers.get("hf").reads
    assert renderers.load("hf") is HfRenderer


def test_imports_neither_torch_nor_transformers(tmp_path, make_renderer, byte_level):
    make_renderer(byte_level, {"chat_template": "{{ messages[0]['content'] }}"})
    code = f"""
import sys, msgspec
from toolkit_lm.config import Checkpoint, PluginsConfig, VllmConfig
from toolkit_lm_renderer_hf.renderer import HfRenderer
config = VllmConfig.default()
checkpoint = Checkpoint(path={str(tmp_path)!r}, architecture="none", hf_config={{}})
renderer = HfRenderer(msgspec.structs.replace(config, checkpoint=checkpoint))
ids = renderer.render_conversation([{{"role": "user", "content": "hello"}}]).token_ids
assert renderer.decode(ids) == "hello"
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
    ],
)
def test_prompt_tokens_equal_those_of_transformers(tmp_path, tokenizer, make_renderer, flags):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **flags,
    }
    renderer = make_renderer(tokenizer, config)
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert renderer.render_prompt(text).token_ids == reference(text)["input_ids"]
        assert (
            renderer.render_prompt(text, add_special_tokens=False).token_ids
            == reference(text, add_special_tokens=False)["input_ids"]
        )


def test_tokens_pass_as_they_are(make_renderer, byte_level):
    assert make_renderer(byte_level).render_prompt({"prompt_token_ids": [5, 3, 5]}).token_ids == [
        5,
        3,
        5,
    ]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt": "\ud800"}, "lone surrogate at position 0"),
        ({"prompt": "a", "multi_modal_data": {"image": b""}}, "takes no images"),
        (3, "not a int"),
    ],
)
def test_bad_prompts(make_renderer, byte_level, prompt, message):
    with pytest.raises(RequestError, match=message):
        make_renderer(byte_level).render_prompt(prompt)


def test_token_ids_are_not_looked_at(make_renderer, byte_level):
    for token_ids in ([-1], [349], [5, 2**40]):
        assert (
            make_renderer(byte_level).render_prompt({"prompt_token_ids": token_ids}).token_ids
            == token_ids
        )


def test_what_the_model_or_the_tokenizer_knows_can_be_decoded(make_renderer, byte_level):
    assert (
        make_renderer(byte_level, hf_config={"text_config": {"vocab_size": 300}}).vocab_size == 349
    )
    assert make_renderer(byte_level, hf_config={"vocab_size": 512}).vocab_size == 512


def test_a_text_is_tokenized_whole_however_few_tokens_it_has(make_renderer):
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    renderer = make_renderer(words, {}, max_model_len=8)
    for text, expected in (
        (" " * 6000 + "hello world", [1, 2]),
        (("x" * 200 + " ") * 6 + "hello", [0] * 6 + [1]),
    ):
        assert renderer.render_prompt(text).token_ids == expected
        for most in (None, 7):
            assert renderer.render_texts([text], max_tokens=most)[0].token_ids == expected


@pytest.mark.parametrize("most", [None, 2])
def test_a_text_without_end_is_refused_before_it_is_tokenized(make_renderer, byte_level, most):
    renderer = make_renderer(byte_level, max_model_len=4)
    with pytest.raises(
        ContextLengthError, match="has 1048577 characters; no more than 1048576 are tokenized"
    ):
        renderer.render_texts(["a" * (2**20 + 1)], max_tokens=most)
    longest = max(map(len, byte_level.get_vocab()))
    with pytest.raises(ContextLengthError, match=f"no more than {2**20 * longest} are tokenized"):
        make_renderer(byte_level, max_model_len=2**20).render_prompt("a" * (2**20 * longest + 1))


def test_truncation_counts_the_special_tokens_of_what_is_cut(make_renderer, byte_level):
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    special = [("<s>", first), ("</s>", last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=special
    )
    renderer = make_renderer(tokenizer)
    [text] = renderer.render_texts(["Hello world"], max_tokens=3)
    assert (text.token_ids[0], len(text.token_ids), text.token_ids[-1]) == (first, 3, last)
    for texts, most in (
        (["Hello world"], 2),
        ([("Hello", "world")], 3),
        (["Hello", ("Hello", "world")], 3),
    ):
        with pytest.raises(
            RequestError,
            match=f"{most} tokens leave no room for a text beside {most} special tokens",
        ) as raised:
            renderer.render_texts(texts, max_tokens=most)
        assert raised.value.param == "truncate_prompt_tokens"


def test_texts_are_cut_where_their_tokens_end(make_renderer, byte_level):
    words = Tokenizer(
        models.WordPiece(
            {"[UNK]": 0, "hello": 1, "wor": 2, "##ld": 3, "[SEP]": 4}, unk_token="[UNK]"
        )
    )
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 4)]
    )
    renderer = make_renderer(words, {})
    text = "\U0001f4a5 hello  world \u00e9"
    cuts = [
        "\U0001f4a5",
        "\U0001f4a5 hello",
        "\U0001f4a5 hello  wor",
        "\U0001f4a5 hello  world",
        text,
        text,
    ]
    assert [renderer.cut_texts([text], most)[0] for most in range(2, 8)] == cuts
    for most in range(2, 8):
        assert renderer.render_texts(renderer.cut_texts([text], most)) == renderer.render_texts(
            [text], max_tokens=most
        )
    with pytest.raises(
        RequestError, match="1 tokens leave no room for a text beside 1 special tokens"
    ) as caught:
        renderer.cut_texts([text], 1)
    assert caught.value.param == "max_tokens"
    # Characters of several tokens.
    renderer = make_renderer(byte_level)
    assert renderer.cut_texts(["a\u65e5\u672c", "a\u65e5"], 5) == ["a\u65e5", "a\u65e5"]
    assert renderer.cut_texts(["\u65e5\u672c"], 2) == ["\u65e5"]


def test_truncation_and_padding_of_the_file_are_off(make_renderer, byte_level):
    byte_level.enable_truncation(2)
    byte_level.enable_padding(length=64)
    try:
        renderer = make_renderer(byte_level)
    finally:
        byte_level.no_truncation()
        byte_level.no_padding()
    text = "The cat sat on the mat"
    assert renderer.decode(renderer.render_prompt(text).token_ids) == text


def test_eos_token_ids_are_those_of_all_files(make_renderer, byte_level):
    renderer = make_renderer(
        byte_level, hf_config={"eos_token_id": 2}, generation_config={"eos_token_id": [4, 2]}
    )
    assert renderer.eos_token_ids == [4, 2]
    assert make_renderer(byte_level, {"eos_token": {"content": "<|im_end|>"}}).eos_token_ids == [4]
    assert make_renderer(byte_level, {}).eos_token_ids == []


@pytest.mark.parametrize("file", ["hf_config", "generation_config"])
@pytest.mark.parametrize("value", ["2", True, 2.0, [2, None], {"id": 2}, [[2]]])
def test_eos_token_ids_of_a_wrong_type_are_named(make_renderer, byte_level, file, value):
    name = "config.json" if file == "hf_config" else "generation_config.json"
    with pytest.raises(
        CheckpointError, match=rf"/{name}: eos_token_id must be a token id or a list of them"
    ):
        make_renderer(byte_level, **{file: {"eos_token_id": value}})


@pytest.mark.parametrize("value", [-1, 50, 10**30])
def test_eos_token_ids_out_of_the_vocabulary_are_left_out(make_renderer, byte_level, caplog, value):
    renderer = make_renderer(
        byte_level,
        {},
        hf_config={"vocab_size": 50, "eos_token_id": 3},
        generation_config={"eos_token_id": [value, 2]},
    )
    assert renderer.eos_token_ids == [2, 3]
    assert (
        f"generation_config.json: eos_token_id {value} is not in the vocabulary of 50 tokens"
        in caplog.text
    )
    assert (
        make_renderer(byte_level, {"eos_token": "</s>"}, hf_config={"vocab_size": 2}).eos_token_ids
        == []
    )


SLOW = "(x+x+)+y"
"""A regular expression that takes too many steps on many x: the package tokenizers panics."""


def panicking(text="x" * 40) -> Tokenizer:
    """Panics on the tokens of this text, as one or as several."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "ok": 1, text: 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(SLOW), "isolated")]
    )
    tokenizer.decoder = decoders.Replace(Regex(SLOW), "")
    return tokenizer


def test_a_tokenizer_that_panics_is_one_requests_error(make_renderer):
    renderer = make_renderer(panicking())
    bad = "x" * 40
    for call in (
        lambda: renderer.render_prompt(bad),
        lambda: renderer.render_texts(["ok", bad]),
        lambda: renderer.render_texts([("ok", bad)]),
        lambda: renderer.cut_texts([bad], 3),
    ):
        with pytest.raises(
            RequestError, match=r"tokenizer cannot tokenize this text: .*retry-limit"
        ):
            call()
    assert renderer.render_prompt("ok").token_ids == [1]


def test_a_decoder_that_panics_gives_the_tokens_as_they_are(make_renderer):
    renderer = make_renderer(panicking())
    assert renderer.decode([1, 2]) == "ok" + "x" * 40
    stream = renderer.decode_stream()
    assert stream.push([2]) + stream.push([1]) + stream.flush() == "x" * 40 + "ok"


def test_a_tokenizer_that_panics_while_it_is_loaded(make_renderer, tmp_path):
    # The class "Llama" is tried on a text when it is loaded.
    tokenizer = panicking()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("A", "x" * 40), normalizers.Replace(Regex(SLOW), "")]
    )
    with pytest.raises(
        CheckpointError, match=rf"panics on the tokenizer in {tmp_path}: .*retry-limit"
    ):
        make_renderer(tokenizer, {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True})


def test_transformers_converts_a_checkpoint_without_tokenizer_json(
    tmp_path, make_renderer, byte_level
):
    byte_level.model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
    }
    renderer = make_renderer(None, config)
    assert (
        renderer.render_prompt("The cat sat on the mat.").token_ids
        == byte_level.encode("The cat sat on the mat.").ids
    )
    assert renderer.eos_token_ids == [2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is not a tokenizer"),
        (
            {"tokenizer.json": "{}", "special_tokens_map.json": "["},
            "special_tokens_map.json cannot be read as JSON",
        ),
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
    config = msgspec.structs.replace(
        VllmConfig.default(tokenizer=str(tmp_path)), checkpoint=checkpoint
    )
    assert HfRenderer(config).render_prompt("The cat").token_ids == byte_level.encode("The cat").ids


def test_a_decoder_that_needs_whole_texts_is_refused(make_renderer, byte_level):
    byte_level.decoder = decoders.CTC()
    try:
        with pytest.raises(CheckpointError, match="decoder 'CTC' is not supported"):
            make_renderer(byte_level)
    finally:
        byte_level.decoder = decoders.ByteLevel()


CODE = """
import sys
from transformers import PreTrainedTokenizerFast

sys.remote_code_ran = True

class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("converts", [False, True])
def test_code_of_the_checkpoint_does_not_run(
    make_renderer, byte_level, monkeypatch, tmp_path, converts
):
    monkeypatch.setattr(sys, "remote_code_ran", False, raising=False)
    auto_map = {"AutoTokenizer": [None, "mine.MineTokenizer"], "AutoConfig": "mine.MineConfig"}
    files = {
        "mine.py": CODE,
        "config.json": json.dumps({"model_type": "mine", "auto_map": auto_map}),
    }
    config = {"tokenizer_class": "MineTokenizer", "auto_map": auto_map}
    if converts:
        # Without tokenizer.json, transformers looks for a tokenizer.
        with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
            make_renderer(None, config, files=files)
    else:
        assert make_renderer(byte_level, config, files=files).render_prompt("cat").token_ids
    assert not sys.remote_code_ran
