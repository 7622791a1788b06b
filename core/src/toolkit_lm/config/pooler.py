"""PoolerConfig: how vectors and scores are computed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from toolkit_lm.config.options import option


class PoolerConfig(Struct, frozen=True, kw_only=True):
    """How a pooling model's vectors and scores are computed. Unset options follow the checkpoint,
    otherwise the model class."""

    pooling_type: Annotated[
        Literal[
            "auto", "CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN", "ALL", "STEP"
        ],
        option(
            "Pooling method: how the tokens' vectors become one. ALL and STEP, for reward models, "
            "keep one per token or step."
        ),
    ] = "auto"
    normalize: Annotated[
        bool | None, option("Scale embeddings to length 1 (L2), unless a request says otherwise.")
    ] = None
    matryoshka: Annotated[
        bool | None,
        option(
            "Requests may ask for the first dimensions of embeddings. Unset: if the checkpoint "
            "supports it."
        ),
    ] = None
    use_activation: Annotated[
        bool | None,
        option(
            "Apply sigmoid or softmax to the logits of classes and scores, unless a request says "
            "otherwise."
        ),
    ] = None
    step_tag_id: Annotated[
        int | None, option("Process reward models: token that ends a step.", ge=0)
    ] = None
    returned_token_ids: Annotated[
        list[int] | None, option("Reward models: which logits are returned.")
    ] = None
    classifier_method: Annotated[
        Literal["auto", "from_2_way_softmax", "no_post_processing"],
        option(
            "Classifier made from rows of the language-modeling head, if the checkpoint has none. "
            "from_2_way_softmax: the difference of two rows. no_post_processing: unchanged rows. "
            "auto: as the architecture's known reranker does."
        ),
    ] = "auto"
    classifier_tokens: Annotated[
        list[str] | None,
        option(
            "Words, one token each, whose rows of the head form the classifier. With two words, "
            "the first is 'no'."
        ),
    ] = None
    score_template: Annotated[
        str | None,
        option(
            "Score template, by name or file: how a reranker reads a query and a document.",
            none="the known reranker's",
        ),
    ] = None
    logit_mean: Annotated[float | None, option("Number subtracted from logits.")] = None
    logit_sigma: Annotated[
        float | None, option("Number that logits are divided by, after logit_mean.", gt=0)
    ] = None
