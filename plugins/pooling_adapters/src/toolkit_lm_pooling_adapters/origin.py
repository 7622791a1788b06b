"""Finds the weights of a classifier: trained ones of the checkpoint, or rows of the
language-modeling head."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import Tokenizer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm_poolers import num_labels_of
from toolkit_lm_poolers.details import PoolingDetails, details_of
from torch import Tensor

from toolkit_lm_pooling_adapters.weight_names import stored_weights

logger = logging.getLogger(__name__)

DIFFERENCE = "from_2_way_softmax"
ROWS = "no_post_processing"
"""score = head[true] - head[false], whose sigmoid is the softmax over these two tokens; and the
rows of some tokens as they are."""


class Reranker(NamedTuple):
    """A published reranker that is a language model, and how it scores."""

    name: str
    method: str
    words: tuple[str, ...]
    """Words whose logits are compared. If there are two, the first means "no"."""
    template: str
    """Name of the score template that it is registered with."""


RERANKERS: Mapping[str, Reranker] = MappingProxyType(
    {
        "Qwen3ForCausalLM": Reranker("Qwen3-Reranker", DIFFERENCE, ("no", "yes"), "qwen3-reranker"),
        **dict.fromkeys(
            ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
            Reranker("Qwen3-VL-Reranker", DIFFERENCE, ("no", "yes"), "qwen3-vl-reranker"),
        ),
        "Qwen2ForCausalLM": Reranker("mxbai-rerank-v2", DIFFERENCE, ("0", "1"), "mxbai-rerank-v2"),
        "GemmaForCausalLM": Reranker(
            "bge-reranker-v2-gemma", ROWS, ("Yes",), "bge-reranker-v2-gemma"
        ),
    }
)
"""Rerankers by architecture. Their prompts are in score_templates.py."""

_BENT_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "final_logits_scaling")
"""Keys of config.json that change logits after the head: a difference of rows would not be a
difference of logits."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A classifier of `num_labels` labels: trained, or made of the head's rows `token_ids`."""

    num_labels: int
    has_bias: bool = False
    """Whether the checkpoint of a trained classifier has a bias too."""
    token_ids: tuple[int, ...] = ()
    is_difference: bool = False
    """One label: the second row minus the first."""

    @property
    def is_from_head(self) -> bool:
        return bool(self.token_ids)

    def of_head(self, tensor: Tensor) -> Tensor:
        """The classifier's part of the head's weight [V, H] or bias [V]. Raises CheckpointError."""
        if max(self.token_ids) >= len(tensor):
            raise CheckpointError(
                f"the head has {len(tensor)} tokens, and no token {max(self.token_ids)} to make "
                "a classifier of."
            )
        rows = tensor[list(self.token_ids)].float()
        return rows[1:] - rows[:1] if self.is_difference else rows


def classifier_origin(vllm_config: VllmConfig) -> Origin:
    """The classifier's origin for a checkpoint and the options classifier_method and
    classifier_tokens.

    Raises UnsupportedError if there is no classifier, and ConfigError for options or
    CheckpointError for files that do not fit."""
    assert vllm_config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    folder = vllm_config.checkpoint.path
    hf_config = vllm_config.hf_config
    options = vllm_config.pooler
    name = (hf_config.get("architectures") or ["the model"])[0]
    known = RERANKERS.get(name)
    if vllm_config.load.load_format == "dummy" or not folder:
        return Origin(num_labels_of(hf_config) if known is None else 1)
    stored = stored_weights(folder)
    trained = "score.weight" in stored
    stated = {
        name: value
        for name in ("classifier_method", "classifier_tokens")
        if (value := getattr(options, name)) not in ("auto", None)
    }
    if trained and not stated:
        return Origin(num_labels_of(hf_config), has_bias="score.bias" in stored)
    if trained:
        name, value = next(iter(stated.items()))
        raise ConfigError(
            f"{name} {value!r} is for checkpoints without a classifier, and {folder!r} has a "
            "trained one."
        )
    if bent := [key for key in _BENT_LOGITS if hf_config.get(key) is not None]:
        raise UnsupportedError(
            f"no classifier can be made of the head of {name}: config.json's {bent[0]!r} changes "
            "logits after the head."
        )
    if (
        not stated
        and (found := _logit_score(details_of(vllm_config.checkpoint.pooling_profile))) is not None
    ):
        return found
    method, words = _asked(vllm_config, known, name)
    if (
        known is not None
        and options.classifier_method == "auto"
        and options.score_template is None
        and vllm_config.parallel.rank == 0
    ):
        _warn(folder, name, known, words)
    ids = tuple(_token_id(word, Path(vllm_config.renderer.tokenizer or folder)) for word in words)
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"classifier_tokens {', '.join(words)} name the same token twice: give each once."
        )
    return Origin(
        1 if method == DIFFERENCE else len(ids), token_ids=ids, is_difference=method == DIFFERENCE
    )


def _warn(folder: str, name: str, known: Reranker, words: tuple[str, ...]) -> None:
    """Nobody has said that this is a reranker: only its architecture is that of one."""
    logger.warning(
        "%s: this %s has no trained classifier. It is run as a reranker like %s. If it is not "
        "one, its scores mean nothing. Options "
        "that were assumed: classifier_method=%r classifier_tokens=%r score_template=%r",
        folder,
        name,
        known.name,
        known.method,
        list(words),
        known.template,
    )


def _asked(
    vllm_config: VllmConfig, known: Reranker | None, name: str
) -> tuple[str, tuple[str, ...]]:
    """The method and words of the options, else of the architecture."""
    method: str = vllm_config.pooler.classifier_method
    words = vllm_config.pooler.classifier_tokens
    if method == "auto":
        if known is None:
            raise UnsupportedError(
                f"the checkpoint has no trained classifier (score.weight), and {name} is not "
                "known as a reranker "
                f"({', '.join(RERANKERS)}). Use classifier_method={DIFFERENCE!r} "
                "classifier_tokens=['FALSE', 'TRUE'], or "
                f"classifier_method={ROWS!r} classifier_tokens=['WORD']."
            )
        method = known.method
    if words is None:
        if known is None or known.method != method:
            raise ConfigError(
                f"classifier_method {method!r} needs classifier_tokens: the words whose rows of "
                "the head it takes."
            )
        words = list(known.words)
    if not words or (method == DIFFERENCE and len(words) != 2):
        wanted = "two: FALSE,TRUE" if method == DIFFERENCE else "one or more"
        raise ConfigError(
            f"classifier_method {method!r} takes {wanted}, but classifier_tokens has {len(words)}."
        )
    return method, tuple(words)


def _logit_score(found: PoolingDetails | None) -> Origin | None:
    """The origin that a reranker's own files state, if any."""
    if found is None or found.logit_score is None:
        return None
    score = found.logit_score
    if score.false_token_id is None:
        return Origin(1, token_ids=(score.true_token_id,))
    return Origin(1, token_ids=(score.false_token_id, score.true_token_id), is_difference=True)


def _token_id(word: str, folder: Path) -> int:
    """Raises CheckpointError unless the word is one token."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
        # The file's settings for batches do not apply to a single word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids: list[int] = tokenizer.encode(word, add_special_tokens=False).ids
    except BaseException as error:
        # tokenizers raises bare Exception for any missing or broken file. A panic of its Rust code,
        # such as that of a regular expression which takes too many steps, is a BaseException that
        # cannot be imported.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise CheckpointError(
            f"the token {word!r} of the classifier cannot be looked up in {str(path)!r}: {error}"
        ) from error
    if len(ids) != 1:
        raise CheckpointError(
            f"{word!r} is {len(ids)} tokens of {str(path)!r}: a classifier can be made of single "
            "tokens only."
        )
    return ids[0]
