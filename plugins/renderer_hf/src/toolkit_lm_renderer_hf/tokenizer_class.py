"""What transformers 5 sets in a tokenizer by its class and tokenizer_config.json, over what tokenizer.json says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from toolkit_lm.errors import CheckpointError


def _names(words: str, ending: str = "") -> tuple[str, ...]:
    return tuple(word + ending for word in words.split())


def _classes(words: str) -> tuple[str, ...]:
    return _names(words, "Tokenizer")


_BERT = frozenset(_classes("Bert DistilBert Electra Funnel LayoutLM Lxmert MPNet MobileBert Splinter SqueezeBert"))
"""Classes that make their normalizer of do_lower_case, strip_accents and tokenize_chinese_chars."""

_BYTE_LEVEL: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(_classes("Bart CodeGen Cohere Deberta GPT2 GPTNeoX LED Longformer Luke Mvp Qwen2 Roberta Whisper"), False)
    | dict.fromkeys(_classes("Blenderbot"), True)
)
"""Classes that set add_prefix_space, and what it is where the config does not say."""


class _Around(NamedTuple):
    """The special tokens of a class, where no config names others as cls_token and sep_token."""

    opening: str
    closing: str
    is_doubled: bool
    """Two closing tokens stand between the texts of a pair, and token types do not tell them apart."""

    def processor(self, tokenizer: Tokenizer) -> processors.PostProcessor | None:
        """None where the vocabulary has no such tokens."""
        tokens = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((self.opening, self.closing))]
        if any(number is None for _, number in tokens):
            return None
        single = f"{self.opening} $A {self.closing}"
        pair = f"{single} {self.closing} $B {self.closing}" if self.is_doubled else f"{single} $B:1 {self.closing}:1"
        return processors.TemplateProcessing(single=single.split(), pair=pair.split(), special_tokens=tokens)


_AROUND: Mapping[str, _Around] = MappingProxyType(
    dict.fromkeys(
        _classes("Bert ConvBert DebertaV2 DistilBert Electra LayoutLM Lxmert MobileBert SqueezeBert"), _Around("[CLS]", "[SEP]", False)
    )
    | dict.fromkeys(_classes("Bart Camembert LED Longformer MPNet Mvp Roberta XLMRoberta"), _Around("<s>", "</s>", True))
    | dict.fromkeys(_classes("Deberta"), _Around("[CLS]", "[SEP]", True))
)
"""Classes that put special tokens around texts whatever tokenizer.json says."""

_CHECKED = frozenset(
    _classes(
        "Albert Barthez BigBird Camembert CodeLlama DPRContextEncoder DPRQuestionEncoder DPRReader DebertaV2 FNet LayoutLMv2 Llama RemBert "
        "RoFormer XGLM XLMRoberta XLNet"
    )
)
"""Classes that build all of a tokenizer anew of such options."""

_OF_MODEL_TYPE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(_names("bert convbert distilbert electra ernie layoutlm megatron-bert nomic_bert squeezebert"), "BertTokenizer")
    | dict.fromkeys(_names("bart longformer roberta"), "RobertaTokenizer")
    | dict.fromkeys(_names("gpt2 opt phi starcoder2"), "GPT2Tokenizer")
    | dict.fromkeys(_names("qwen2 qwen3"), "Qwen2Tokenizer")
    | {"mobilebert": "MobileBertTokenizer", "mpnet": "MPNetTokenizer"}
)
"""The class of a checkpoint that names none, by config.json's model_type."""

_AS_IN_THE_FILE = frozenset(
    _names(
        "camembertv2-base ernie4_5 ernie4_5_moe glm glm4 glm4_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared jamba "
        "mistral modernbert modernbert-decoder nemotron nystromformer olmo2 olmo3 phi3 phimoe stablelm umt5 xlm-roberta-xl"
    )
)
"""Model types for which transformers takes tokenizer.json as it is, whatever class is named."""


def apply_class_options(
    tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], hf_config: Mapping[str, Any]
) -> None:
    """`config`: of tokenizer_config.json; `special_tokens`: by name ("cls_token"); `hf_config`: of config.json.

    Raises CheckpointError for a broken option, and where one contradicts tokenizer.json and the class makes of it what is not known here.
    """
    model_type = str(hf_config.get("model_type"))
    named = config.get("tokenizer_class") or hf_config.get("tokenizer_class") or _OF_MODEL_TYPE.get(model_type)
    if not isinstance(named, str) or model_type in _AS_IN_THE_FILE:
        return
    name = named.removesuffix("Fast")
    byte_levels = _byte_levels(tokenizer.pre_tokenizer)
    if name in _BERT and isinstance(tokenizer.model, models.WordPiece):
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=_flag(config, "tokenize_chinese_chars") is not False,
            strip_accents=_flag(config, "strip_accents"),
            lowercase=_flag(config, "do_lower_case") is not False,
        )
    elif name in _BYTE_LEVEL:
        given = _flag(config, "add_prefix_space")
        for part in byte_levels:
            part.add_prefix_space = _BYTE_LEVEL[name] if given is None else given
    elif name in _CHECKED and not byte_levels:
        _check(tokenizer, config, name)
    around = _AROUND.get(name)
    # A byte-level tokenizer in a checkpoint of BERT's model type is none of BERT's.
    if around is not None and bool(byte_levels) == (name in _BYTE_LEVEL):
        opening, closing = special_tokens.get("cls_token", around.opening), special_tokens.get("sep_token", around.closing)
        tokenizer.post_processor = around._replace(opening=opening, closing=closing).processor(tokenizer) or tokenizer.post_processor


def _flag(config: Mapping[str, Any], option: str) -> bool | None:
    value = config.get(option)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{option} of tokenizer_config.json must be true or false, not {value!r}.")
    return value


def _byte_levels(part: pre_tokenizers.PreTokenizer | None) -> list[pre_tokenizers.ByteLevel]:
    if isinstance(part, pre_tokenizers.Sequence):
        parts = cast("Iterable[pre_tokenizers.PreTokenizer]", part)  # which it is, though the stubs do not say so
        return [found for one in parts for found in _byte_levels(one)]
    return [part] if isinstance(part, pre_tokenizers.ByteLevel) else []


def _check(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> None:
    text = "A" if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str("A")
    pieces = [(text, (0, 1))] if tokenizer.pre_tokenizer is None else tokenizer.pre_tokenizer.pre_tokenize_str(text)
    first = pieces[0][0] if pieces else text
    for option, in_file in (("do_lower_case", "a" in first), ("add_prefix_space", first.startswith("▁"))):
        given = _flag(config, option)
        if given is not None and given != in_file:
            raise CheckpointError(
                f"tokenizer_config.json and tokenizer.json of {name} disagree: only the first has {option}={given!r}. "
                "Save the tokenizer again with transformers, or edit one of the two."
            )
