"""Rebuilds the parts of a tokenizer that transformers 5 derives from the tokenizer class and
tokenizer_config.json. These override tokenizer.json."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from toolkit_lm.errors import CheckpointError

logger = logging.getLogger(__name__)

PROBE = (
    "The cat's 12 dogs said:\n\n\t\u00c9tude, e\u0301 \u5317\u4eac \U0001f600 it's   DON'T x=3.14;"
)
"""Text on which different tokenizers give different tokens."""


def _names(words: str, ending: str = "") -> tuple[str, ...]:
    return tuple(word + ending for word in words.split())


def _classes(words: str) -> tuple[str, ...]:
    return _names(words, "Tokenizer")


_BERT = frozenset(
    _classes("Bert DistilBert Electra Funnel LayoutLM Lxmert MPNet MobileBert Splinter SqueezeBert")
)
"""Classes that make their normalizer of do_lower_case, strip_accents and tokenize_chinese_chars."""

_BYTE_LEVEL: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(
        _classes(
            "Bart CodeGen Cohere Deberta GPT2 GPTNeoX LED Longformer Luke Mvp Qwen2 Qwen3_5 "
            "Roberta Whisper"
        ),
        False,
    )
    | dict.fromkeys(_classes("Blenderbot"), True)
)
"""Classes that build a byte-level BPE anew, and their add_prefix_space where the config does not
say."""

_COMPOSED = frozenset(_classes("Cohere GPTNeoX Qwen2 Qwen3_5"))
"""Byte-level BPE classes that normalize by NFC. The rest do not normalize."""

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "Qwen2Tokenizer": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        "Qwen3_5Tokenizer": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""The words of those that do not split as GPT-2 does."""

_LLAMA = frozenset(_classes("CodeLlama Llama"))
"""Classes that build a BPE over whole texts anew, unless tokenizer.json has a byte-level one."""


class _Around(NamedTuple):
    """The special tokens of a class, where no config names others as cls_token and sep_token."""

    opening: str
    closing: str
    is_doubled: bool
    """Two closing tokens stand between the texts of a pair, and token types do not tell them
    apart."""

    def processor(self, tokenizer: Tokenizer) -> processors.PostProcessor | None:
        """None where the vocabulary has no such tokens."""
        tokens = [
            (token, tokenizer.token_to_id(token))
            for token in dict.fromkeys((self.opening, self.closing))
        ]
        if any(number is None for _, number in tokens):
            return None
        single = f"{self.opening} $A {self.closing}"
        pair = (
            f"{single} {self.closing} $B {self.closing}"
            if self.is_doubled
            else f"{single} $B:1 {self.closing}:1"
        )
        return processors.TemplateProcessing(
            single=single.split(), pair=pair.split(), special_tokens=tokens
        )


_AROUND: Mapping[str, _Around] = MappingProxyType(
    dict.fromkeys(
        _classes(
            "Bert ConvBert DebertaV2 DistilBert Electra LayoutLM Lxmert MobileBert SqueezeBert"
        ),
        _Around("[CLS]", "[SEP]", False),
    )
    | dict.fromkeys(
        _classes("Bart Camembert LED Longformer MPNet Mvp Roberta XLMRoberta"),
        _Around("<s>", "</s>", True),
    )
    | dict.fromkeys(_classes("Deberta"), _Around("[CLS]", "[SEP]", True))
)
"""Classes that put special tokens around texts whatever tokenizer.json says."""

_CHECKED = frozenset(
    _classes(
        "Albert Barthez BigBird Camembert CodeLlama DPRContextEncoder DPRQuestionEncoder "
        "DPRReader DebertaV2 FNet LayoutLMv2 Llama RemBert "
        "RoFormer XGLM XLMRoberta XLNet"
    )
)
"""Classes that build all of a tokenizer anew of such options."""

_TYPES_OF_CLASS: Mapping[str, str] = MappingProxyType(
    {
        "BartTokenizer": "florence2",
        "BertTokenizer": "align bark bert blip bros chinese_clip convbert distilbert electra "
        "ernie flava git grounding-dino layoutlm megatron-bert "
        "mm-grounding-dino nomic_bert squeezebert tvp vilt visual_bert",
        "BlenderbotTokenizer": "blenderbot",
        "CamembertTokenizer": "camembert",
        "CohereTokenizer": "aya_vision cohere cohere2",
        "DebertaTokenizer": "deberta",
        "DebertaV2Tokenizer": "deberta-v2",
        "FunnelTokenizer": "funnel",
        "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt-sw3 gpt2 gpt_neo gptj hyperclovax_vision_v2 "
        "instructblip instructblipvideo jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "LEDTokenizer": "led",
        "LlamaTokenizer": "idefics idefics2",
        "LukeTokenizer": "luke",
        "LxmertTokenizer": "lxmert",
        "MPNetTokenizer": "mpnet",
        "MobileBertTokenizer": "mobilebert",
        "MvpTokenizer": "mvp",
        "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano "
        "hunyuan_vl internvl lighton_ocr moss_transcribe_diarize ovis2 "
        "qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe "
        "qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe "
        "qwen3_vl qwen3_vl_moe vibevoice",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        "RobertaTokenizer": (
            "bart bridgetower clap data2vec-text ibert lilt longformer mra roberta "
            "roberta-prelayernorm"
        ),
        "Siglip2Tokenizer": "siglip2",
        "SplinterTokenizer": "splinter",
        "WhisperTokenizer": "whisper",
        "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    }
)
"""Model types whose checkpoints have a class when they name none."""

_OF_MODEL_TYPE = {
    model_type: name for name, types in _TYPES_OF_CLASS.items() for model_type in _names(types)
}

_ONLY_ITS_OWN = frozenset(
    _names("hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2")
)
"""Model types whose own tokenizer class is used, whatever class the checkpoint names."""

_AS_IN_THE_FILE = frozenset(
    _names(
        "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr "
        "ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
        "glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe "
        "granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 "
        "internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next "
        "mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 "
        "ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert "
        "modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
        "olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe "
        "pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral "
        "voxtral_realtime xlm-roberta-xl"
    )
)
"""Model types for which transformers takes tokenizer.json as it is, whatever class is named."""


def apply_class_options(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    hf_config: Mapping[str, Any],
) -> None:
    """`config`: of tokenizer_config.json; `special_tokens`: by name ("cls_token"); `hf_config`: of
    config.json.

    Raises CheckpointError for a broken option, and where one contradicts tokenizer.json and the
    class makes of it what is not known here.
    """
    name = tokenizer_class(config, hf_config)
    if name is None:
        return
    before = tokenizer.encode(PROBE, add_special_tokens=False).ids
    byte_levels = _byte_levels(tokenizer.pre_tokenizer)
    is_bpe = isinstance(tokenizer.model, models.BPE)
    if name in _BERT and isinstance(tokenizer.model, models.WordPiece):
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=_flag(config, "tokenize_chinese_chars") is not False,
            strip_accents=_flag(config, "strip_accents"),
            lowercase=_flag(config, "do_lower_case") is not False,
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif name in _BYTE_LEVEL and is_bpe:
        _build_byte_level(tokenizer, config, name)
    elif name in _LLAMA and is_bpe and not byte_levels:
        _build_llama(tokenizer, config, name)
    elif name in _CHECKED and not byte_levels:
        _check(tokenizer, config, name)
    if tokenizer.encode(PROBE, add_special_tokens=False).ids != before:
        file = "name PreTrainedTokenizerFast in tokenizer_config.json to go by the file"
        logger.warning(
            "%s splits texts in another way than tokenizer.json, and counts, as in transformers: "
            "%s.",
            name,
            file,
        )
    around = _AROUND.get(name)
    # A byte-level tokenizer in a checkpoint of BERT's model type is none of BERT's.
    if around is not None and bool(_byte_levels(tokenizer.pre_tokenizer)) == (name in _BYTE_LEVEL):
        opening = special_tokens.get("cls_token", around.opening)
        closing = special_tokens.get("sep_token", around.closing)
        tokenizer.post_processor = (
            around._replace(opening=opening, closing=closing).processor(tokenizer)
            or tokenizer.post_processor
        )


def tokenizer_class(config: Mapping[str, Any], hf_config: Mapping[str, Any]) -> str | None:
    """The class that transformers takes for a checkpoint, without "Fast" at its end. None:
    tokenizer.json is taken as it is."""
    model_type = str(hf_config.get("model_type"))
    of_type = _OF_MODEL_TYPE.get(model_type)
    named = config.get("tokenizer_class") or hf_config.get("tokenizer_class") or of_type
    if not isinstance(named, str) or model_type in _AS_IN_THE_FILE:
        return None
    return of_type if model_type in _ONLY_ITS_OWN else named.removesuffix("Fast")


def _build_byte_level(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> None:
    stated = _flag(config, "add_prefix_space")
    words = _WORDS.get(name)
    bytes_of = pre_tokenizers.ByteLevel(
        add_prefix_space=_BYTE_LEVEL[name] if stated is None else stated, use_regex=words is None
    )
    before: list[pre_tokenizers.PreTokenizer] = (
        [] if words is None else [pre_tokenizers.Split(Regex(words), "isolated")]
    )
    if name == "CohereTokenizer":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.normalizer = normalizers.NFC() if name in _COMPOSED else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_of]) if before else bytes_of
    _set_model(
        tokenizer,
        unk_token=None,
        fuse_unk=False,
        byte_fallback=False,
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )


def _build_llama(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> None:
    """A space before a text, and, in the older behaviour, after each special token."""
    is_first = name == "CodeLlamaTokenizer" or not config.get("legacy", False)
    scheme = "first" if is_first else "always"
    if _flag(config, "add_prefix_space") is False:
        scheme = "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    _set_model(tokenizer, fuse_unk=True, byte_fallback=True)


def _set_model(tokenizer: Tokenizer, **options: Any) -> None:
    for option, value in {"dropout": None, "ignore_merges": False, **options}.items():
        setattr(tokenizer.model, option, value)


def _flag(config: Mapping[str, Any], option: str) -> bool | None:
    value = config.get(option)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"{option} of tokenizer_config.json must be true or false, not {value!r}."
        )
    return value


def _byte_levels(part: pre_tokenizers.PreTokenizer | None) -> list[pre_tokenizers.ByteLevel]:
    if isinstance(part, pre_tokenizers.Sequence):
        parts = cast(
            "Iterable[pre_tokenizers.PreTokenizer]", part
        )  # which it is, though the stubs do not say so
        return [found for part in parts for found in _byte_levels(part)]
    return [part] if isinstance(part, pre_tokenizers.ByteLevel) else []


def _check(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> None:
    text = "A" if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str("A")
    pieces = (
        [(text, (0, 1))]
        if tokenizer.pre_tokenizer is None
        else tokenizer.pre_tokenizer.pre_tokenize_str(text)
    )
    first = pieces[0][0] if pieces else text
    for option, in_file in (
        ("do_lower_case", "a" in first),
        ("add_prefix_space", first.startswith("▁")),
    ):
        stated = _flag(config, option)
        if stated is not None and stated != in_file:
            raise CheckpointError(
                f"tokenizer_config.json and tokenizer.json of {name} disagree: only the first "
                f"has {option}={stated!r}. "
                "Save the tokenizer again with transformers, or edit one of the two."
            )
