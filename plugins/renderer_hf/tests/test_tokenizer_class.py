"""Options of tokenizer_config.json: ids as transformers' AutoTokenizer gives them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from toolkit_lm.errors import CheckpointError
from toolkit_lm_renderer_hf import tokenizer_class
from toolkit_lm_renderer_hf.tokenizer import load_tokenizer

TEXT = "Hello \u00dcn\u00ef \u4e2d\u6587 he"
PIECES = sorted({*TEXT, *"hinu"} - {" "})


def bert(*, lowercase: bool) -> Tokenizer:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "<s>",
        "</s>",
        "<pad>",
        "<mask>",
        *PIECES,
        *(f"##{piece}" for piece in PIECES),
    ]
    tokenizer = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:9])
    return tokenizer


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    words = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        "<|endoftext|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:6])
    return tokenizer


@pytest.fixture
def both(tmp_path):
    """Saves a tokenizer and loads it with transformers, and here."""

    def load(tokenizer, config, model_type=None):
        from transformers import AutoTokenizer

        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(
            json.dumps({} if model_type is None else {"model_type": model_type})
        )
        return AutoTokenizer.from_pretrained(str(tmp_path)), load_tokenizer(tmp_path).tokenizer

    return load


OPTIONS = [
    {},
    {"do_lower_case": True},
    {"do_lower_case": False},
    {"strip_accents": False},
    {"tokenize_chinese_chars": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "name",
    [
        "BertTokenizer",
        "BertTokenizerFast",
        "DistilBertTokenizer",
        "MPNetTokenizer",
        "ConvBertTokenizer",
    ],
)
def test_the_normalizer_of_bert(both, name, options):
    for lowercase in (True, False):
        theirs, ours = both(bert(lowercase=lowercase), {"tokenizer_class": name, **options})
        assert (
            ours.encode(TEXT, add_special_tokens=False).ids
            == theirs(TEXT, add_special_tokens=False)["input_ids"]
        )


@pytest.mark.parametrize("options", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize(
    "name",
    [
        "RobertaTokenizer",
        "GPT2Tokenizer",
        "BlenderbotTokenizer",
        "Qwen2Tokenizer",
        "PreTrainedTokenizerFast",
    ],
)
def test_the_prefix_space_of_bytes(both, name, options):
    for prefix in (True, False):
        theirs, ours = both(
            byte_level(add_prefix_space=prefix), {"tokenizer_class": name, **options}
        )
        assert (
            ours.encode("Hi you", add_special_tokens=False).ids
            == theirs("Hi you", add_special_tokens=False)["input_ids"]
        )


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_bytes_behind_another_split(both, name):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    theirs, ours = both(tokenizer, {"tokenizer_class": name})
    assert (
        ours.encode("Hi 12you", add_special_tokens=False).ids
        == theirs("Hi 12you", add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(
    "model_type", ["bert", "electra", "nomic_bert", "modernbert", "mobilebert"]
)
@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"tokenizer_class": "BertTokenizer"}]
)
def test_the_model_type_decides_where_no_class_is_named(both, model_type, config):
    for lowercase in (True, False):
        theirs, ours = both(bert(lowercase=lowercase), config, model_type)
        assert (
            ours.encode(TEXT, add_special_tokens=False).ids
            == theirs(TEXT, add_special_tokens=False)["input_ids"]
        )


FLAGS = [
    {},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_eos_token": True},
]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "name", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"]
)
def test_special_tokens_are_those_of_the_file(both, name, flags):
    """Qwen3-Embedding pools the end of text that tokenizer.json adds, and its config says
    add_bos_token=false."""
    tokenizer = byte_level()
    template = processors.TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A <|endoftext|> $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", 5)],
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    theirs, ours = both(
        tokenizer, {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", **flags}
    )
    assert ours.encode("hi").ids == theirs("hi")["input_ids"]
    assert ours.encode("hi", "yo").ids == theirs("hi", "yo")["input_ids"]
    assert ours.encode("hi", "yo").ids.count(5) == 2


@pytest.mark.parametrize(
    "name",
    [
        "BertTokenizer",
        "ConvBertTokenizer",
        "MPNetTokenizer",
        "BartTokenizer",
        "RobertaTokenizer",
        "DebertaTokenizer",
    ],
)
@pytest.mark.parametrize("named", [{}, {"cls_token": "<mask>", "sep_token": "<pad>"}])
@pytest.mark.parametrize("in_file", [False, True])
def test_some_classes_have_special_tokens_of_their_own(both, name, named, in_file):
    tokenizer = (
        bert(lowercase=True)
        if name in ("BertTokenizer", "ConvBertTokenizer", "MPNetTokenizer")
        else byte_level()
    )
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    if in_file:
        end = tokenizer.token_to_id("</s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", end)]
        )
    theirs, ours = both(tokenizer, {"tokenizer_class": name, **named})
    assert ours.encode("h").ids == theirs("h")["input_ids"]
    pair = ours.encode("h", "h")
    expected = theirs("h", "h")
    assert pair.ids == expected["input_ids"]
    assert pair.type_ids == expected.get("token_type_ids", pair.type_ids)


def test_a_config_without_added_tokens_gives_way_to_the_older_file(both, tmp_path):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"cls_token": "[MASK]"}))
    for config in ({"cls_token": "[SEP]"}, {"cls_token": "[SEP]", "added_tokens_decoder": {}}):
        theirs, ours = both(bert(lowercase=True), {"tokenizer_class": "BertTokenizer", **config})
        assert ours.encode("h").ids == theirs("h")["input_ids"]


def test_what_is_built_anew_must_agree_with_the_file(tmp_path):
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("A", -2.0)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for option, agrees, differs in (
        ("add_prefix_space", True, False),
        ("do_lower_case", False, True),
    ):
        for value in (agrees, differs):
            (tmp_path / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "AlbertTokenizer", option: value})
            )
            if value is agrees:
                load_tokenizer(tmp_path)
                continue
            with pytest.raises(
                CheckpointError,
                match=f"of AlbertTokenizer disagree: only the first has {option}={value}",
            ):
                load_tokenizer(tmp_path)


def test_an_option_that_is_no_flag_is_refused(tmp_path):
    bert(lowercase=True).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": "no"})
    )
    with pytest.raises(
        CheckpointError, match=r"do_lower_case of .* must be true or false, not 'no'"
    ):
        load_tokenizer(tmp_path)


OTHER_PARTS = {
    "normalizer": lambda one: setattr(one, "normalizer", normalizers.Lowercase()),
    "words": lambda one: setattr(
        one, "pre_tokenizer", pre_tokenizers.Digits(individual_digits=True)
    ),
    "both": lambda one: (OTHER_PARTS["normalizer"](one), OTHER_PARTS["words"](one)),
    "model": lambda one: (
        setattr(one.model, "ignore_merges", True),
        setattr(one.model, "unk_token", "<unk>"),
    ),
}
BUILT = ["Bart", "Blenderbot", "CodeGen", "Cohere", "Deberta", "GPT2", "GPTNeoX", "LED"]
BUILT += ["Longformer", "Luke", "Mvp", "Qwen2", "Qwen3_5", "Roberta", "Whisper"]
LONGER = [
    "Hello You 12345 there, don't",
    "\u00dcBER  e\u0301 \u0e01\u0e34\n\n x=3.14;</s> \u5317\u4eac\U0001f600",
    "  a A</s>b <s> c\t!",
]


def merging() -> Tokenizer:
    """Tokenizer of bytes, with tokens of several digits, and one that no merges make."""
    words = [*byte_level().get_vocab(), "12", "34", "He", "Hello", "\u0120Y", "\u0120a"]
    merges = [("1", "2"), ("3", "4"), ("H", "e"), ("\u0120", "Y"), ("\u0120", "a")]
    tokenizer = byte_level()
    tokenizer.model = models.BPE(
        vocab={word: number for number, word in enumerate(dict.fromkeys(words))}, merges=merges
    )
    return tokenizer


@pytest.mark.parametrize("part", OTHER_PARTS)
@pytest.mark.parametrize("name", [f"{name}Tokenizer" for name in BUILT])
def test_a_class_that_builds_a_tokenizer_anew(both, caplog, name, part):
    """transformers builds some classes anew, whatever the file says. Where that makes other ids, it
    is told."""
    tokenizer = merging()
    OTHER_PARTS[part](tokenizer)
    for config in ({}, {"add_prefix_space": True}):
        theirs, ours = both(tokenizer, {"tokenizer_class": name, **config})
        for text in LONGER:
            assert (
                ours.encode(text, add_special_tokens=False).ids
                == theirs(text, add_special_tokens=False)["input_ids"]
            ), text
    if part == "both":
        assert f"{name} splits texts in another way than tokenizer.json, and counts" in caplog.text


def test_all_classes_of_bytes_are_tried():
    assert {f"{name}Tokenizer" for name in BUILT} == tokenizer_class._BYTE_LEVEL.keys()


def pieces(**parts) -> Tokenizer:
    """Tokenizer like Llama 2's: no words, spaces are a character, and bytes stand for unknown
    characters."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{number:02X}>" for number in range(256)),
        "\u2581",
        *"abcHelotuYyn,123d'AbcA!x",
        "He",
        "\u2581H",
        "\u2581a",
    ]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    merges = [("\u2581", "H"), ("H", "e"), ("\u2581", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(words[:3])
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    return tokenizer


AS_LLAMA_2 = {
    "normalizer": normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
}
AS_IT_SAVES = {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)}


@pytest.mark.parametrize(
    "parts",
    [AS_LLAMA_2, AS_IT_SAVES, {"normalizer": normalizers.Lowercase()}],
    ids=["llama 2", "saved", "other"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"legacy": True},
        {"legacy": False},
        {"legacy": None},
        {"add_prefix_space": False},
        {"add_prefix_space": True},
    ],
)
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"])
def test_the_spaces_of_llama(both, name, options, parts):
    """Before a text, and in the older behaviour after each special token."""
    theirs, ours = both(pieces(**parts), {"tokenizer_class": name, **options})
    for text in LONGER:
        assert (
            ours.encode(text, add_special_tokens=False).ids
            == theirs(text, add_special_tokens=False)["input_ids"]
        ), text


@pytest.mark.parametrize("name", sorted(tokenizer_class._BERT))
def test_the_words_of_bert(both, name):
    tokenizer = bert(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs, ours = both(tokenizer, {"tokenizer_class": name, "unk_token": "[UNK]"})
    for text in ("he,hi he", *LONGER):
        assert (
            ours.encode(text, add_special_tokens=False).ids
            == theirs(text, add_special_tokens=False)["input_ids"]
        )


def test_what_stays_another_class_is_told(make_renderer, caplog):
    tokenizer = Tokenizer(
        models.Unigram(
            [("<unk>", 0.0), ("\u2581", -1.0), *((one, -2.0) for one in "Thecat")], unk_id=0
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.normalizer = normalizers.Lowercase()
    make_renderer(tokenizer, {"tokenizer_class": "T5Tokenizer"}).get_tokenizer()
    assert "makes other token ids than its tokenizer.json" in caplog.text


NAMED = [None, "GPT2Tokenizer", "LlamaTokenizerFast"]


@pytest.mark.slow
@pytest.mark.parametrize("named", NAMED)
def test_each_model_type_has_the_class_that_transformers_takes(tmp_path, monkeypatch, named):
    """A model type that a later version brings, or takes otherwise, fails here."""
    import transformers
    from transformers import AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    monkeypatch.setattr(
        PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda cls, *_, **__: cls.__name__)
    )
    built = {
        *tokenizer_class._BYTE_LEVEL,
        *tokenizer_class._LLAMA,
        *tokenizer_class._BERT,
        *tokenizer_class._AROUND,
    }
    pieces(**AS_LLAMA_2).save(str(tmp_path / "tokenizer.json"))
    config = {} if named is None else {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    wrong = {}
    for model_type in sorted(TOKENIZER_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys()):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            theirs = AutoTokenizer.from_pretrained(str(tmp_path))
        except (
            ImportError,
            ValueError,
        ):  # of another library, or a configuration of several models
            continue
        theirs = theirs.removesuffix("Fast") if isinstance(theirs, str) else type(theirs).__name__
        ours = tokenizer_class.tokenizer_class(config, {"model_type": model_type})
        if ours in built:  # several names of one class
            ours = getattr(transformers, ours).__name__
        if (theirs if theirs in built else None) != (ours if ours in built else None):
            wrong[model_type] = (theirs, ours)
    assert not wrong


def test_tokens_that_only_the_config_names(both):
    """With their flags, after the vocabulary, as transformers adds them."""
    listed = {
        "400": {"content": "<x>", "special": True},
        "300": {"content": "<y>", "lstrip": True, "special": False},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": listed,
        "pad_token": "<|pad|>",
    }
    theirs, ours = both(byte_level(), config | {"additional_special_tokens": ["<z>", "<w>"]})
    text = "a <y>b<x><|pad|> <z> c<w> d"
    assert (
        ours.encode(text, add_special_tokens=False).ids
        == theirs(text, add_special_tokens=False)["input_ids"]
    )
    assert ours.token_to_id("<w>") == theirs.convert_tokens_to_ids("<w>") == len(theirs) - 1


@pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"5": 7}, {"5": {}}, [1]])
def test_broken_tokens_of_the_config_are_refused(both, tmp_path, listed):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match="has a token that cannot be read"):
        load_tokenizer(tmp_path)
