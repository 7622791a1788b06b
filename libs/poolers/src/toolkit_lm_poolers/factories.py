"""Makes the poolers of a model: options override what the checkpoint says, which overrides what the
model class says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError, nearest
from torch import Tensor, nn
from torch.nn import functional

from toolkit_lm_poolers.details import (
    Dense,
    Head,
    Lexical,
    Normalize,
    PoolingDetails,
    details_of,
)
from toolkit_lm_poolers.heads import ClassifierHead, EmbeddingHead
from toolkit_lm_poolers.limits import hidden_size
from toolkit_lm_poolers.methods import METHODS, Concatenated, PoolingMethod, SpladeWeights
from toolkit_lm_poolers.modules import ACTIVATIONS, Activation, make_heads
from toolkit_lm_poolers.options import PoolingKind, check_pooler_options
from toolkit_lm_poolers.poolers import (
    AllPooler,
    ClassifierPooler,
    DispatchPooler,
    LexicalPooler,
    SimplePooler,
    StepPooler,
)
from toolkit_lm_poolers.rows import RowPooler

Classifier = Callable[[Tensor], Tensor]
TOKEN_METHODS = ("ALL", "STEP")
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def embedding_pooler(
    vllm_config: VllmConfig, default: str | PoolingMethod = "MEAN", *, normalize: bool = True
) -> RowPooler:
    """Embeddings of a prompt (embed) and of its tokens (token_embed).

    Of the checkpoint's pooling profile it takes the pooling methods and the heads; those that
    follow pooling are not for token_embed. `default` and `normalize` hold where the profile is not
    complete, or where there is none. A late-interaction checkpoint, which pools nothing, has
    token_embed only, unless the option `pooling_type` says how to pool. One with weights of tokens
    (BGE-M3) gives them for token_classify.

    Raises CheckpointError for files that are not understood or do not fit, ConfigError for an
    option that does not, and UnsupportedError for a checkpoint that `splade_pooler` is for.
    """
    check_pooler_options(vllm_config.pooler, PoolingKind.EMBEDDER)
    found = _details(vllm_config) or PoolingDetails(folder="")
    if found.splade is not None:
        raise UnsupportedError(
            f"modules.json of {found.folder!r} pools the logits of a masked language model "
            "(SPLADE), which this model class does not give."
        )
    ends_normalized = None if found.is_complete else normalize
    size = found.pooling.size if found.pooling is not None else hidden_size(vllm_config.hf_config)
    token_layers, token_head = _embedding_head(
        vllm_config, found.token_heads, size, ends_normalized
    )
    poolers: list[RowPooler] = [_token_pooler(vllm_config, found, size, token_head)]
    if found.lexical is not None:
        poolers.append(_lexical_pooler(vllm_config, found.lexical))
    method = _embedding_method(vllm_config, found, default)
    if method is not None:
        _, head = _embedding_head(
            vllm_config,
            found.heads,
            token_head.size * method.width,
            ends_normalized,
            found.truncate_dim,
        )
        poolers.append(
            SimplePooler({"embed"}, method, head, token_layers if found.token_heads else None)
        )
    return DispatchPooler(poolers)


def _token_pooler(
    vllm_config: VllmConfig, found: PoolingDetails, size: int, head: EmbeddingHead
) -> RowPooler:
    """Vectors of tokens, by `head` unless the checkpoint has a head for them alone."""
    if found.multi_vector is not None:
        _, head = _embedding_head(vllm_config, (found.multi_vector, Normalize()), size, None)
    return AllPooler({"token_embed"}, head)


def _lexical_pooler(vllm_config: VllmConfig, lexical: Lexical) -> RowPooler:
    _out_size((lexical.head,), hidden_size(vllm_config.hf_config))
    weigh = make_heads((lexical.head,), dummy=vllm_config.load.load_format == "dummy")
    head = ClassifierHead(weigh, 1, functional.relu)
    return LexicalPooler(head, lexical.left_out)


def pools_splade(vllm_config: VllmConfig) -> bool:
    """Whether the checkpoint asks for `splade_pooler`."""
    found = _details(vllm_config)
    return found is not None and found.splade is not None


def splade_pooler(vllm_config: VllmConfig, head: Callable[[Tensor], Tensor]) -> RowPooler:
    """Embeddings with a weight for each token of the vocabulary, most of them 0 (embed): [V].

    `head` gives a masked language model's logits [N, V] of hidden states [N, H]. Raises ConfigError
    for an option that means nothing here.
    """
    check_pooler_options(vllm_config.pooler, PoolingKind.EMBEDDER)
    found = _details(vllm_config)
    assert found is not None and found.splade is not None, "pools_splade was not asked"
    if (option := vllm_config.pooler.pooling_type) != "auto":
        raise ConfigError(
            f"pooling_type {option!r} does not apply: modules.json of {found.folder!r} pools the "
            "logits of a masked language model (SPLADE)."
        )
    _, made = _embedding_head(
        vllm_config, found.heads, vllm_config.hf_config["vocab_size"], None, found.truncate_dim
    )
    return DispatchPooler([SimplePooler({"embed"}, SpladeWeights(head, found.splade), made)])


def classification_pooler(
    vllm_config: VllmConfig,
    classifier: Classifier,
    default: str | PoolingMethod = "LAST",
    *,
    token_classifier: Classifier | None = None,
    num_labels: int | None = None,
    activation: str | None = None,
    temperature: float = 1.0,
) -> RowPooler:
    """Classes of a prompt (classify; with one label also score) and of its tokens (token_classify).

    `classifier` takes pooled vectors [R, H] float32 and gives logits [R, labels]; a module's
    parameters become float32. `token_classifier` [T, H] -> [T, labels] is that of tokens, by
    default the same. `num_labels` is by default config.json's; `activation` ("sigmoid", "softmax",
    "identity") holds where the checkpoint names none. Logits are divided by `temperature`.

    Raises CheckpointError and ConfigError as `embedding_pooler` does.
    """
    check_pooler_options(
        vllm_config.pooler,
        PoolingKind.CLASSIFIER if vllm_config.model.convert == "none" else PoolingKind.CONVERTED,
    )
    head = _classifier_head(vllm_config, classifier, num_labels, activation, temperature)
    token_head = head
    if token_classifier is not None:
        token_head = _classifier_head(
            vllm_config, token_classifier, num_labels, activation, temperature
        )
    option = vllm_config.pooler.pooling_type
    method = _sequence_method(default if option == "auto" else option)
    return DispatchPooler([ClassifierPooler(method, head), StepPooler(token_head)])


def token_classification_pooler(
    vllm_config: VllmConfig,
    classifier: Classifier,
    default: str = "ALL",
    *,
    num_labels: int | None = None,
    activation: str | None = None,
    step_tag_id: int | None = None,
    returned_token_ids: list[int] | None = None,
) -> RowPooler:
    """Classes or rewards of a prompt's tokens (token_classify): of ALL, or of those that end a
    STEP.

    `classifier` takes hidden states [T, H] float32 and gives logits [T, labels]; a module's
    parameters become float32. `num_labels` and `activation` are as in `classification_pooler`;
    `step_tag_id` (of STEP; None: each token) and `returned_token_ids` hold where neither options
    nor the request say.
    """
    options = vllm_config.pooler
    check_pooler_options(options, PoolingKind.TOKENS)
    method = default if options.pooling_type == "auto" else options.pooling_type
    if method not in TOKEN_METHODS:
        raise ConfigError(
            f"pooling_type {method!r} gives one vector for a prompt; this model scores tokens. "
            f"Supported: {', '.join(TOKEN_METHODS)}."
        )
    returned = (
        returned_token_ids if options.returned_token_ids is None else options.returned_token_ids
    )
    head = _classifier_head(vllm_config, classifier, num_labels, activation, returned_ids=returned)
    if wrong := [i for i in returned or () if not 0 <= i < head.size]:
        raise ConfigError(
            f"option 'returned_token_ids' has {wrong[0]}, but the model gives {head.size} logits."
        )
    if len(set(returned or ())) < len(returned or ()):
        raise ConfigError("option 'returned_token_ids' must name each token id once.")
    of_model = step_tag_id if default == "STEP" else None
    tag = of_model if options.step_tag_id is None else options.step_tag_id
    vocab_size = vllm_config.hf_config.get("vocab_size")
    if tag is not None and vocab_size is not None and tag >= vocab_size:
        raise ConfigError(
            f"option 'step_tag_id' is {tag}, but the model's vocabulary has {vocab_size} tokens: "
            "no step would ever end."
        )
    return StepPooler(head, None if options.pooling_type == "ALL" else tag)


def num_labels_of(hf_config: dict[str, Any]) -> int:
    """How many labels a checkpoint's config.json says its classifier has; 2 where it does not, as
    in transformers."""
    for count in (hf_config.get("num_labels"), len(hf_config.get("id2label") or {})):
        if count is not None and count > 0:
            return int(count)
    return 2


def _details(vllm_config: VllmConfig) -> PoolingDetails | None:
    assert vllm_config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    return details_of(vllm_config.checkpoint.pooling_profile)


def _sequence_method(method: str | PoolingMethod) -> PoolingMethod:
    """Raises ConfigError for one that gives no vector of a prompt."""
    if isinstance(method, PoolingMethod):
        return method
    if method not in METHODS:
        raise ConfigError(
            f"pooling_type {method!r} gives no single vector of a prompt. "
            f"{nearest(method, METHODS)}"
        )
    return METHODS[method]


def _embedding_method(
    vllm_config: VllmConfig, found: PoolingDetails, default: str | PoolingMethod
) -> PoolingMethod | None:
    """How prompts are pooled; None where the checkpoint pools nothing."""
    option = vllm_config.pooler.pooling_type
    if option != "auto":
        return _sequence_method(option)
    if found.pooling is None:
        return None if found.is_complete else _sequence_method(default)
    methods = [METHODS[name] for name in found.pooling.methods]
    return methods[0] if len(methods) == 1 else Concatenated(methods)


def _embedding_head(
    vllm_config: VllmConfig,
    configs: Sequence[Head],
    size: int,
    normalize: bool | None,
    truncate_dim: int | None = None,
) -> tuple[nn.Module, EmbeddingHead]:
    """The modules `configs`, and the head of them for vectors of `size`. `normalize` None: where
    the last module does it.

    That last Normalize is the head's own, because it follows the cut to `dimensions`, and because a
    request may switch it off.
    """
    layers = make_heads(configs, dummy=vllm_config.load.load_format == "dummy")
    out = _out_size(configs, size)
    last = bool(configs) and isinstance(configs[-1], Normalize)
    option = vllm_config.pooler.normalize
    unit = last if normalize is None else normalize
    if option is not None:
        unit = option
    if truncate_dim is not None and truncate_dim > out:
        raise CheckpointError(
            f"config_sentence_transformers.json cuts embeddings to {truncate_dim} dimensions, "
            f"but they have {out}."
        )
    return layers, EmbeddingHead(
        out, layers[:-1] if last else layers, normalize=unit, truncate_dim=truncate_dim
    )


def _out_size(configs: Sequence[Head], size: int) -> int:
    """Size of the heads' output for vectors of `size`. Raises CheckpointError if a head takes
    another size."""
    for config in configs:
        if isinstance(config, Normalize):
            continue
        takes = config.in_features if isinstance(config, Dense) else config.size
        if takes != size:
            raise CheckpointError(
                f"the module in {config.folder!r} takes vectors of {takes}, but is given vectors "
                f"of {size}."
            )
        size = config.out_features if isinstance(config, Dense) else size
    return size


def _classifier_head(
    vllm_config: VllmConfig,
    classifier: Classifier,
    num_labels: int | None,
    activation: str | None,
    temperature: float = 1.0,
    returned_ids: list[int] | None = None,
) -> ClassifierHead:
    if isinstance(classifier, nn.Module):
        classifier.float()
    options = vllm_config.pooler
    labels = num_labels or num_labels_of(vllm_config.hf_config)
    function, used = _activation(vllm_config, labels, activation)
    return ClassifierHead(
        classifier,
        labels,
        function,
        use_activation=used if options.use_activation is None else options.use_activation,
        mean=options.logit_mean or 0.0,
        sigma=1.0 if options.logit_sigma is None else options.logit_sigma,
        temperature=temperature,
        returned_ids=returned_ids,
    )


def _activation(
    vllm_config: VllmConfig, num_labels: int, default: str | None
) -> tuple[Activation, bool]:
    """The activation, and whether it is used by default.

    A checkpoint without one ("identity", regression) still has one for a request that asks for it:
    sigmoid or softmax."""
    problem = vllm_config.hf_config.get("problem_type")
    if problem is not None and problem not in _PROBLEM_TYPES:
        raise CheckpointError(
            f"config.json: 'problem_type' is {problem!r}, which is not understood. "
            f"{nearest(str(problem), _PROBLEM_TYPES)}"
        )
    several = num_labels > 1 and problem != "multi_label_classification"
    usual = ACTIVATIONS["softmax" if several else "sigmoid"]
    found = _details(vllm_config)
    if found is not None and found.activation is not None:
        named = (
            ACTIVATIONS["sigmoid"]
            if found.activation == "Sigmoid"
            else getattr(nn, found.activation)()
        )
        return (usual, False) if found.activation == "Identity" else (named, True)
    if problem is not None:
        # sentence-transformers gives the sigmoid of one label whatever the problem is, and
        # transformers a regression's plain value.
        return usual, problem != "regression" or (found is not None and num_labels == 1)
    if default is not None:
        return (usual, False) if default == "identity" else (ACTIVATIONS[default], True)
    return usual, True
