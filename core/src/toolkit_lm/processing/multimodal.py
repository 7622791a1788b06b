"""Checks of the multimodal items in a prompt, as a renderer describes them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

from msgspec import structs

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest, MultiModalFeatureSpec
from toolkit_lm.renderer import MultiModalRules, Renderer, Replacement
from toolkit_lm.renderer.feature_lookup import HeldFeature


def check_features(
    features: Sequence[MultiModalFeatureSpec],
    token_ids: Sequence[int],
    renderer: Renderer,
    found: Mapping[str, HeldFeature],
) -> None:
    """Raises RequestError, which names the item, for an item that violates the model's rules, or
    overlaps another one.

    `found`: items that the engine held during rendering, by identifier.
    """
    rules = renderer.rules
    end = 0
    if rules is None:
        raise RequestError(
            f"{renderer.config.served_model_name} takes no images or other media.",
            "multi_modal_data",
        )
    for number, feature in enumerate(features, 1):
        at = feature.mm_position
        try:
            if (
                not end <= at.offset < at.end <= len(token_ids)
                or len(at.mask or [True] * at.length) != at.length
            ):
                raise RequestError("it stands where the prompt has no place for it.")
            held = found.get(feature.mm_identifier)
            rules.check(feature, token_ids, None if held is None else Replacement(*held[:3]))
        except RequestError as error:
            raise RequestError(
                f"{feature.modality} {number}: {error}", "multi_modal_data"
            ) from None
        end = at.end
    check_placeholders(features, token_ids, rules)


def check_placeholders(
    features: Sequence[MultiModalFeatureSpec], token_ids: Sequence[int], rules: MultiModalRules
) -> None:
    """Raises RequestError for a placeholder without an item. The features are sorted and do not
    overlap."""
    ends = [0, *(feature.mm_position.end for feature in features)]
    starts = [*(feature.mm_position.offset for feature in features), len(token_ids)]
    outside = [
        token for start, end in zip(ends, starts, strict=True) for token in token_ids[start:end]
    ]
    for modality in rules.modalities:
        if count := outside.count(token := rules.placeholder_id(modality)):
            problem = (
                f"{count} placeholders of modality {modality!r} (token {token}) without an item; "
                f"it has {len(features)} items"
            )
            raise RequestError(
                f"the prompt has {problem}, and must have one for each.", "multi_modal_data"
            )


def cut_features(
    features: Sequence[MultiModalFeatureSpec], num_cut: int
) -> list[MultiModalFeatureSpec]:
    """Shifts the features of a prompt that has lost `num_cut` tokens at its beginning. Raises
    RequestError if an item would be lost with them."""
    if num_cut and features and features[0].mm_position.offset < num_cut:
        raise RequestError(
            "it would cut off an image or another item of media.", "truncate_prompt_tokens"
        )
    moved = (
        (feature, structs.replace(feature.mm_position, offset=feature.mm_position.offset - num_cut))
        for feature in features
    )
    return [structs.replace(feature, mm_position=at) for feature, at in moved]


def cache_keys(features: Sequence[MultiModalFeatureSpec]) -> list[CacheKey]:
    """Cache keys of the items: items with different contents share no keys and values, although
    their tokens are equal."""
    return [
        CacheKey(feature.mm_position.offset, feature.mm_position.end, f"mm {feature.mm_identifier}")
        for feature in features
    ]


def add_features(
    message: EngineRequest,
    features: list[MultiModalFeatureSpec],
    token_ids: Sequence[int],
    rules: MultiModalRules | None,
) -> None:
    """Adds the items of a prompt, which are checked, to its request."""
    message.features = features
    message.cache_keys += cache_keys(features)
    if features and rules is not None and rules.whole_prompts:
        message.whole_prompt = True
        message.cache_keys.append(prompt_key(token_ids, features))


def prompt_key(token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]) -> CacheKey:
    """Cache key of a prompt whose keys and values depend on all of its tokens and items."""
    names = repr([feature.mm_identifier for feature in features])
    digest = sha256(array("q", token_ids).tobytes() + names.encode()).hexdigest()
    return CacheKey(0, len(token_ids), f"prompt {digest}")
