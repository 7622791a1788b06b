"""The tokenizer in a GGUF file, as the files tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

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
from toolkit_lm.errors import UnsupportedError

from toolkit_lm_gguf.file import GGUFFile

_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| "
    r"?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _WORDS.format(digits="{1,3}"),
    "qwen2": _WORDS.format(digits=""),
}
"""By tokenizer.ggml.pre: how text is cut into words; None: as GPT-2 does."""
_UNKNOWN = "<unk>"


def tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises UnsupportedError for a kind of tokenizer that is not known."""
    kind = file.require("tokenizer.ggml.model")
    tokens = file.require("tokenizer.ggml.tokens")
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{file.path} has a tokenizer of the kind {kind!r}. Able: {', '.join(_KINDS)}."
        )
    types = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    # The unused fill the vocabulary up, and have no text.
    vocab = {
        token: index
        for index, (token, of_type) in enumerate(zip(tokens, types, strict=True))
        if of_type != _UNUSED
    }
    made = _KINDS[kind](file, vocab)
    for token, of_type in zip(tokens, types, strict=True):
        if of_type in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(token, special=of_type == _CONTROL, normalized=False)])
    bos = file.get("tokenizer.ggml.bos_token_id")
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        pieces = f"{tokens[bos]}:0 $A:0", f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1"
        begin = processors.TemplateProcessing(
            single=pieces[0], pair=pieces[1], special_tokens=[(tokens[bos], bos)]
        )
        last = made.post_processor
        made.post_processor = begin if last is None else processors.Sequence([last, begin])
    return made


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The special tokens and the chat template."""
    tokens = file.require("tokenizer.ggml.tokens")
    ids = {
        name: file.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    template = file.get("tokenizer.chat_template")
    return (
        config
        | ({} if template is None else {"chat_template": template})
        | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedError(
            f"{file.path} cuts text into words as {pre!r} does. Able: {', '.join(_SPLITS)}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    split = _SPLITS[pre]
    if split is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    """SentencePiece's BPE, which merges the pair whose token has the highest score."""
    scores = file.require("tokenizer.ggml.scores")
    pairs = []
    for token, index in vocab.items():
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs += [
            (-scores[index], index, vocab[a], a, b) for a, b in cuts if a in vocab and b in vocab
        ]
    merges = [(a, b) for *_, a, b in sorted(pairs)]
    unknown = _UNKNOWN if _UNKNOWN in vocab else None
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if file.get("tokenizer.ggml.add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By tokenizer.ggml.model."""
