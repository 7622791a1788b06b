"""Long texts are tokenized in pieces: the tokens are those of the whole text, whatever the
tokenizer is made of."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import groupby

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from toolkit_lm_renderer_hf import pieces
from toolkit_lm_renderer_hf.joining import Joiner
from toolkit_lm_renderer_hf.pieces import Cutter, stays_in_words

PARTS = [
    "the",
    "Paris",
    "don't",
    "DON'T",
    "123456",
    "1",
    "3.14",
    "São",
    "e\u0301",
    "москва",
    "北京",
    "서울",
    "😀",
    "\u200d",
    "ΣΑΣ",
    "İ",
]
PARTS += [
    "<x>",
    "<y>",
    "<z>",
    "x=y;",
    "_",
    "▁",
    "Ġ",
    "\u0600",
    "ﷺ",
    "½",
    "²",
    "\u0e01\u0e34",
    "\ufc5e",
    "\u0301",
    "()",
    "'",
    ".",
]
GAPS = [" "] * 12 + [
    "",
    "",
    "  ",
    "   ",
    "\n",
    "\r\n",
    " \n ",
    "\t",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\x00",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n"
    r"]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n"
    r"]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n"
    r"\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n"
    r"\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n"
    "\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
CLIP = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
PATTERNS = [
    GPT2,
    CL100K,
    QWEN2,
    O200K,
    DEEPSEEK,
    CLIP,
    r"\p{N}{1,3}",
    "[一-龥]+",
    r"\s?[A-Za-zÀ-ÖØ-öø-ƺ]+",
    r"\s+$",
    "[0-9][0-9][0-9]",
]
BEYOND_WORDS = [
    ".+",
    r"\p{L}+ ",
    r"\w+\s?",
    r"(?<=a) b",
    r"\bx",
    r"(\w+ )+",
    "[^x]+",
    r"\p{L}+(?!\S)",
    r"\S+|[a-z ]+",
    "^a",
    r"\p{L}+$",
]
BEYOND_WORDS += [
    "(?:a+)+",
    r"a(?=.*b)",
    "[\t-a]+",
    r"\X",
    r"[^.]+\.",
    r"(a)\1",
    r"\Ga",
    "(?:a|b c)",
    "a|(?: ?b)",
    "(?:x",
]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
NORMALIZERS = {
    "BertNormalizer": normalizers.BertNormalizer(),
    "Lowercase": normalizers.Lowercase(),
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "NFKD": normalizers.NFKD(),
    "Nmt": normalizers.Nmt(),
    "Replace": normalizers.Replace(Regex(" {2,}"), " "),
    "Sequence": normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace(Regex(r"\s+"), " ")]
    ),
    "StripAccents": normalizers.StripAccents(),
}
SPLITTERS = {
    "BertPreTokenizer": pre_tokenizers.BertPreTokenizer(),
    "ByteLevel": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "Metaspace": pre_tokenizers.Metaspace(),
    "Metaspace of the first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "Punctuation": pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel()]
    ),
    "Sequence": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    ),
    "Whitespace": pre_tokenizers.Whitespace(),
    "WhitespaceSplit": pre_tokenizers.WhitespaceSplit(),
    "Split": pre_tokenizers.Sequence(
        [pre_tokenizers.Split("t", "isolated"), split(GPT2, "removed", invert=True)]
    ),
    "Falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            split("[0-9][0-9][0-9]"),
        ]
    ),
    **{pattern: pre_tokenizers.Sequence([split(pattern), BYTES]) for pattern in PATTERNS[:6]},
    "DeepSeek": pre_tokenizers.Sequence(
        [split(r"\p{N}{1,3}"), split("[一-龥]+"), split(DEEPSEEK), BYTES]
    ),
}
NOT_CUT_FOR = {
    "CharDelimiterSplit",
    "FixedLength",
    "UnicodeScripts",
    "ByteLevel",
    "Prepend",
    "Strip",
}
"""Parts over which words may go on, or that few tokenizers have."""
PRECOMPILED = {"Precompiled"}
"""Its table is that of a sentencepiece model."""


def made_of(normalizer=None, splitter=None):
    characters = {
        *"".join([*PARTS, *GAPS]),
        *map(chr, range(33, 127)),
        *pre_tokenizers.ByteLevel.alphabet(),
        "▁",
        " ",
    }
    characters |= {
        one for text in list(characters) for one in unicodedata.normalize("NFKD", text.lower())
    }
    words = ["<unk>", *sorted(characters)]
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>")
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    tokenizer.add_special_tokens(
        [
            AddedToken("<x>", lstrip=True, rstrip=True),
            AddedToken("<y>", single_word=True),
            AddedToken("<z>"),
        ]
    )
    return tokenizer


def words(tokenizer, text):
    """Token ids of each word: what the model sees at a time."""
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=False)
    return [
        [ids for ids, _ in found]
        for _, found in groupby(
            zip(encoding.ids, encoding.word_ids, strict=True), lambda one: one[1]
        )
    ]


def texts(seed, many=6, parts=150):
    chosen = random.Random(seed)
    for _ in range(many):
        yield "".join(chosen.choice(PARTS) + chosen.choice(GAPS) for _ in range(parts))
    plain = ["the", "cat", "sat", "on", "a", "Mat", "über", "alles", "<x>", "hers,"]
    yield " ".join(chosen.choice(plain) for _ in range(3 * parts))


def equal_in_pieces(tokenizer, given, size=48):
    """Into how many pieces it is cut."""
    cut = list(Cutter(tokenizer, size).pieces(given))
    assert "".join(cut) == given
    assert [word for piece in cut for word in words(tokenizer, piece)] == words(tokenizer, given), (
        cut
    )
    return len(cut)


@pytest.mark.parametrize("name", SPLITTERS)
def test_words_are_those_of_the_whole_text(name):
    for normalizer in (None, normalizers.NFKC()):
        tokenizer = made_of(normalizer, SPLITTERS[name])
        counts = [equal_in_pieces(tokenizer, text) for text in texts(name)]
        assert counts[-1] > 15, "words with spaces between are cut"


@pytest.mark.parametrize("name", NORMALIZERS)
def test_what_normalizers_change_is_changed_alike(name):
    for splitter in (
        split(QWEN2),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
    ):
        tokenizer = made_of(NORMALIZERS[name], splitter)
        counts = [equal_in_pieces(tokenizer, text) for text in texts(name)]
        assert counts[-1] > 15


def test_each_part_that_the_package_has_is_known():
    """A part that a later version brings is cut for when it is shown to be safe, and not before."""
    for module, base, shown in (
        (normalizers, normalizers.Normalizer, NORMALIZERS),
        (pre_tokenizers, pre_tokenizers.PreTokenizer, SPLITTERS),
    ):
        found = {
            name
            for name, one in vars(module).items()
            if isinstance(one, type) and issubclass(one, base) and one is not base
        }
        assert found - NOT_CUT_FOR - PRECOMPILED <= shown.keys()
    assert NORMALIZERS.keys() | PRECOMPILED >= pieces._NORMALIZERS
    assert SPLITTERS.keys() >= pieces._PRE_TOKENIZERS


UNSAFE = {
    "no words": made_of(),
    "words over spaces": made_of(splitter=pre_tokenizers.Metaspace(split=False)),
    "bytes without words": made_of(splitter=BYTES),
    "a beginning": made_of(normalizers.Prepend("▁"), pre_tokenizers.Metaspace()),
    "no spaces at the ends": made_of(normalizers.Strip(), pre_tokenizers.Metaspace()),
    "other spaces": made_of(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "spaces before": made_of(splitter=pre_tokenizers.Split(" ", "merged_with_previous")),
    "hundreds": made_of(splitter=pre_tokenizers.FixedLength(100)),
    "scripts": made_of(splitter=pre_tokenizers.UnicodeScripts()),
    **{pattern: made_of(splitter=split(pattern)) for pattern in BEYOND_WORDS if pattern != "(?:x"},
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_may_go_over_spaces_is_not_cut(name):
    for text in texts(name, many=2):
        assert equal_in_pieces(UNSAFE[name], text) == 1


def test_added_tokens_stay_whole():
    tokenizer = made_of(splitter=pre_tokenizers.ByteLevel())
    tokenizer.add_tokens(
        [
            AddedToken("cat", lstrip=True),
            AddedToken("Mat", rstrip=True),
            AddedToken("SAT ON", normalized=False),
        ]
    )
    assert [equal_in_pieces(tokenizer, text) for text in texts(1)] == [1] * 7, (
        "one has a space after a letter"
    )
    tokenizer = made_of(normalizers.Lowercase(), pre_tokenizers.ByteLevel())
    tokenizer.add_tokens(
        [
            AddedToken("cat", lstrip=True),
            AddedToken("Mat", rstrip=True, normalized=True),
            AddedToken("ve", single_word=True),
        ]
    )
    assert sum(equal_in_pieces(tokenizer, text) for text in texts(2)) > 15
    # Where it is written otherwise than it is stated, it is found after normalization.
    chosen = random.Random(3)
    for _ in range(10):
        equal_in_pieces(
            tokenizer,
            " ".join(chosen.choice(["mat", "MAT", "the", "sat", "on"]) for _ in range(300)),
        )


def test_letters_that_spaces_have_become_are_not_counted_across_a_cut():
    counted = pre_tokenizers.Split(Regex(r"\p{L}{1,4}"), "isolated")
    tokenizer = made_of(splitter=pre_tokenizers.Sequence([BYTES, counted]))
    assert [equal_in_pieces(tokenizer, text) for text in texts(1, many=3)] == [1] * 4


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_words(pattern):
    assert stays_in_words(pattern)


@pytest.mark.parametrize("pattern", BEYOND_WORDS)
def test_patterns_that_may_go_on_after_a_word(pattern):
    assert not stays_in_words(pattern)


def test_random_merges_are_not_cut_for():
    tokenizer = made_of(splitter=pre_tokenizers.ByteLevel())
    state = json.loads(tokenizer.to_str())
    state["model"]["dropout"] = 0.5
    assert len(list(Cutter(Tokenizer.from_str(json.dumps(state)), 16).pieces("a b " * 50))) == 1


def test_a_joiner_gives_the_ids_and_the_ends_of_the_whole_text():
    tokenizer = made_of(normalizers.NFC(), pre_tokenizers.ByteLevel())
    around = [("<x>", tokenizer.token_to_id("<x>")), ("<z>", tokenizer.token_to_id("<z>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<x> $A <z>", pair="<x> $A <z> $B", special_tokens=around
    )
    long = next(texts(3, many=1, parts=25_000))
    joiner = Joiner(tokenizer)
    whole = tokenizer.encode(long, add_special_tokens=False)
    offsets = whole.offsets
    assert joiner.at_once(long) < len(long.encode()) * 0.9
    assert (
        joiner.encode(long, add_special_tokens=False)
        == joiner.token_ids([long, "a b"])[long]
        == whole.ids
    )
    assert joiner.encode(long, add_special_tokens=True) == tokenizer.encode(long).ids
    for room in (1, 5, 60_000, 70_001, len(whole) - 1):
        end = offsets[room - 1][1]
        after = offsets[room][0]
        assert joiner.cut(long, room) == long[: min(end, after) or end]
    assert joiner.cut(long, len(whole)) == long


def test_what_cannot_be_encoded_is_no_reason_to_fail():
    joiner = Joiner(made_of(splitter=pre_tokenizers.ByteLevel()))
    assert joiner.at_once("a \ud800 b " * 20_000)
    assert joiner.at_once("") == 0
    spaceless = "😀" * 100_000
    assert joiner.at_once(spaceless) == 400_000
