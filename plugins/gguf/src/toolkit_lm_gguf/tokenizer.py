"""The tokenizer in a GGUF file, as the files tokenizer.json, tokenizer_config.json and
generation_config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from toolkit_lm.errors import UnsupportedError, nearest

from toolkit_lm_gguf.file import GGUFFile

_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    _ENDINGS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    + _REST
)
_CASED_WORDS = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{endings}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{endings}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _REST
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS.format(digits="{1,3}")
_QWEN2 = _WORDS.format(digits="")
_OF_DIGITS = (r"\p{N}", GPT2)
_OF_PUNCTUATION = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _OF_DIGITS),
    "tekken": (_CASED_WORDS.format(digits="", endings=""),),
    "gpt-4o": (_CASED_WORDS.format(digits="{1,3}", endings=f"{_ENDINGS}?"),),
    "default": _OF_PUNCTUATION,
}
"""Patterns that cut text into words, one after the other, by `tokenizer.ggml.pre`."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Values of `tokenizer.ggml.pre` for which a word that is a token is never merged from others, and
texts begin with `bos` by default."""
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
    }
)
"""Control tokens that end an answer, whichever of them the file names as its `eos`."""


def tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises UnsupportedError for a tokenizer of an unknown kind, and CheckpointError for a broken
    one."""
    kind = file.require("tokenizer.ggml.model", str)
    tokens, types = _tokens(file)
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{file.path} has a tokenizer of the kind {kind!r}. {nearest(kind, _KINDS)}"
        )
    # The unused fill the vocabulary up, and have no text.
    vocab = {
        token: index
        for index, (token, of_type) in enumerate(zip(tokens, types, strict=True))
        if of_type != _UNUSED
    }
    try:
        made = _KINDS[kind](file, vocab)
    except UnsupportedError:
        raise
    except Exception as error:  # the Rust library has no class of its own for them
        file.fail(f"has a tokenizer that cannot be built: {error}")
    for token, of_type in zip(tokens, types, strict=True):
        # Runs of spaces are merged from spaces.
        is_added = of_type == _CONTROL or (of_type == _USER_DEFINED and token.strip(" "))
        if is_added:
            made.add_tokens([AddedToken(token, special=of_type == _CONTROL, normalized=False)])
    begins = kind == "llama" or file.find("tokenizer.ggml.pre", str) in WHOLE_WORDS
    bos = (
        _id(file, "bos", tokens) if file.get("tokenizer.ggml.add_bos_token", bool, begins) else None
    )
    eos = (
        _id(file, "eos", tokens) if file.get("tokenizer.ggml.add_eos_token", bool, False) else None
    )
    if bos is not None or eos is not None:
        made.post_processor = _around(tokens, bos, eos)
    return made


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The special tokens and the chat template."""
    tokens, _ = _tokens(file)
    ids = {
        f"{name}_token": _id(file, key, tokens)
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
    }
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    if template := file.find("tokenizer.chat_template", str):
        config["chat_template"] = template
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """All tokens that end an answer. Of some models the file names only one."""
    tokens, types = _tokens(file)
    ends = {
        index
        for index, (token, of_type) in enumerate(zip(tokens, types, strict=True))
        if of_type == _CONTROL and token in _ENDS
    }
    ends |= {i for key in ("eos", "eot") if (i := _id(file, key, tokens)) is not None}
    return {"eos_token_id": sorted(ends)} if ends else {}


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Tokens, and their types."""
    tokens = file.require("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        file.fail(
            f"has {len(tokens)} tokens in tokenizer.ggml.tokens, and {len(types)} in "
            "tokenizer.ggml.token_type"
        )
    if not all(isinstance(token, str) for token in tokens):
        file.fail("has numbers in tokenizer.ggml.tokens, not texts")
    return tokens, types


def _id(file: GGUFFile, key: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{key}_token_id"
    index = file.find(key, int)
    if index is not None and not 0 <= index < len(tokens):
        file.fail(f"states {key} {index}, and has {len(tokens)} tokens")
    return index


def _around(tokens: list[str], bos: int | None, eos: int | None) -> processors.TemplateProcessing:
    """Has each text begin with `bos` and end with `eos`, if they are given."""
    begin = [] if bos is None else [tokens[bos]]
    end = [] if eos is None else [tokens[eos]]
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[
            *begin,
            "$A",
            *end,
            *(f"{token}:1" for token in begin),
            "$B:1",
            *(f"{token}:1" for token in end),
        ],
        special_tokens=[(tokens[i], i) for i in (bos, eos) if i is not None],
    )


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in SPLITS:
        raise UnsupportedError(
            f"{file.path} cuts text into words as {pre!r} does, which is unknown. "
            f"{nearest(pre, SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list, [])]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    """SentencePiece's BPE, which merges the pair whose token has the highest score."""
    # Files have runs of spaces as they are.
    vocab = {
        token if token.strip(" ") else SPACE * len(token): index for token, index in vocab.items()
    }
    scores = file.require("tokenizer.ggml.scores", list)
    if len(scores) <= max(vocab.values(), default=0):
        file.fail(f"has {len(scores)} scores in tokenizer.ggml.scores, fewer than tokens")
    # Gemma's scores do not follow the order of its merges; that of its tokens does.
    by_rank = file.architecture.startswith("gemma")
    pairs = []
    for token, index in vocab.items():
        rank = float(index) if by_rank else -scores[index]
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs += [(rank, index, vocab[a], a, b) for a, b in cuts if a in vocab and b in vocab]
    merges = [(a, b) for *_, a, b in sorted(pairs)]
    unknown = "<unk>" if "<unk>" in vocab else None
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = (
        [normalizers.Prepend(SPACE)]
        if file.get("tokenizer.ggml.add_space_prefix", bool, True)
        else []
    )
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


_KINDS: Mapping[str, Callable[[GGUFFile, dict[str, int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""Builders of tokenizers by `tokenizer.ggml.model`."""
