"""Items of media in a prompt: all that a renderer says of them is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, MultiModalFeatureSpec
from toolkit_lm.renderer import MultiModalRules, Renderer, Replacement
from toolkit_lm.renderer.feature_lookup import HeldFeature


def check_features(
    features: Sequence[MultiModalFeatureSpec],
    token_ids: Sequence[int],
    renderer: Renderer,
    found: Mapping[str, HeldFeature],
) -> None:
    """Raises RequestError, naming the item, for one that is not as the model's rules have it, or
    that stands where another does.

    `found`: what the engine held, by identifier, when it was rendered.
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
    """Raises RequestError for a placeholder that stands for no item. The features are in order and
    apart."""
    ends = [0, *(one.mm_position.end for one in features)]
    starts = [*(one.mm_position.offset for one in features), len(token_ids)]
    outside = [
        token for start, end in zip(ends, starts, strict=True) for token in token_ids[start:end]
    ]
    for modality in rules.modalities:
        if count := outside.count(token := rules.placeholder_id(modality)):
            told = (
                f"{count} placeholders of modality {modality!r} (token {token}) without an item; "
                f"it has {len(features)} items"
            )
            raise RequestError(
                f"the prompt has {told}, and must have one for each.", "multi_modal_data"
            )


def cut_features(
    features: Sequence[MultiModalFeatureSpec], num_cut: int
) -> list[MultiModalFeatureSpec]:
    """As they stand where a prompt has lost tokens at its beginning. Raises RequestError where one
    would be lost with them."""
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
    """Items of other contents share no keys and values, though their tokens are the same."""
    return [
        CacheKey(one.mm_position.offset, one.mm_position.end, f"mm {one.mm_identifier}")
        for one in features
    ]
