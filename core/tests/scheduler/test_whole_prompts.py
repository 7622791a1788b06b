"""Prompts whose tokens see later ones: each item has all of the prompt for its place."""

from __future__ import annotations

from toolkit_lm.messages import EngineRequest, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.multimodal import prompt_key
from toolkit_lm.scheduler.encoder import over_prompt


def item(name, offset, length, mask=None):
    place = PlaceholderRange(offset, length, mask)
    return MultiModalFeatureSpec(modality="image", mm_identifier=name, mm_position=place)


def request(**fields):
    return EngineRequest(
        request_id="a", prompt_token_ids=list(range(6)), params=SamplingParams(), **fields
    )


def test_places_are_the_whole_prompt():
    items = [item("a", 1, 2), item("b", 3, 2, [False, True])]
    found = [
        feature.mm_position for feature in over_prompt(request(features=items, whole_prompt=True))
    ]
    assert [(place.offset, place.end, place.num_embeds) for place in found] == [
        (0, 6, 2),
        (0, 6, 1),
    ]
    assert found[0].mask == [False, True, True, False, False, False]
    assert found[1].mask == [False, False, False, False, True, False]


def test_keys_are_of_all_tokens_and_items():
    pictures = [item("a", 1, 2), item("b", 3, 2)]
    keys = {
        prompt_key(tokens, features)
        for tokens in ([1, 2, 3], [1, 2, 4])
        for features in (pictures, pictures[:1], pictures[::-1])
    }
    assert len(keys) == 6 and all((key.start, key.end) == (0, 3) for key in keys)
    assert prompt_key([1, 2, 3], pictures) in keys
