"""MultiModal: what HfRenderer does for a model that reads items of media. It is imported for such
models only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import MultiModalFeatureSpec
from toolkit_lm.prompts import Conversation
from toolkit_lm.renderer import FeatureLookup, MultiModalRules, Rendered

from toolkit_lm_renderer_hf.audio_processor import AudioProcessor
from toolkit_lm_renderer_hf.image_processor import ImageProcessor
from toolkit_lm_renderer_hf.media import MediaReader
from toolkit_lm_renderer_hf.media_items import Item, ItemLimits, items_of_prompt, split_items
from toolkit_lm_renderer_hf.media_sizes import MediaSizes
from toolkit_lm_renderer_hf.placeholders import Placeholders, TypedPlaceholders


class MultiModal:
    """Takes items out of conversations and prompts, and puts what the model reads in the places of
    their placeholders. Thread-safe.

    Raises CheckpointError or ConfigError where it cannot be made.
    """

    def __init__(
        self,
        config: VllmConfig,
        rules: MultiModalRules,
        tokenizer: Tokenizer,
        folder: Path,
        images: ImageProcessor | None = None,
        audio: AudioProcessor | None = None,
    ) -> None:
        """`images` and `audio`: processors; None: the folder's."""
        self._rules = rules
        self._placeholders = Placeholders(tokenizer, rules)
        self._limits = ItemLimits(config.renderer.limit_mm_per_prompt, rules.modalities)
        read = [modality for modality in rules.modalities if self._limits.most(modality) > 0]
        self._reader = MediaReader(
            config,
            rules,
            folder,
            read,
            images,
            audio,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )
        longest = max(config.max_model_len, config.max_encoder_len)
        self._sizes = MediaSizes(folder, config.renderer.max_media_pixels, longest, read)
        self.tokens = self._placeholders.tokens
        """Placeholder's text, by modality."""
        self.texts = {
            modality: rules.placeholder_text(modality, token)
            for modality, token in self.tokens.items()
        }
        """The same as it is put into a conversation for a template that writes none."""

    @property
    def lookups(self) -> tuple[int, int]:
        """Numbers of items that were looked for among those that the engine holds, and found."""
        return self._reader.lookups, self._reader.found

    def split(self, messages: Conversation) -> tuple[list[Any], list[Item]]:
        """The messages with bare parts in the places of items, and the items. Raises
        RequestError."""
        bare, items = split_items(messages)
        self._limits.check(items, self._rules.modalities)
        return bare, items

    def of_prompt(self, prompt: Mapping[str, Any]) -> list[Item]:
        """Items given with a text or token ids. Raises RequestError."""
        items = items_of_prompt(prompt)
        self._limits.check(items, self._rules.modalities)
        return items

    def media_size(self, part: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, int]:
        """Implements Renderer.media_size. An item that will be refused takes (0, 0)."""
        try:
            _, items = split_items([{"content": [part]}])
        except RequestError:
            return 0, 0
        return self._sizes.bytes_of(items[0], options) if items else (0, 0)

    def typed(self) -> TypedPlaceholders:
        """For a conversation: its `hide` is applied to all that is in it."""
        return self._placeholders.typed()

    def whole_text(
        self, text: str, typed: TypedPlaceholders | None = None
    ) -> tuple[str, Tokenizer | None]:
        """A text as it is tokenized, and by which tokenizer; None: the model's own."""
        text = self._placeholders.surrounded(text)
        return (
            self._placeholders.as_typed(text, typed)
            if typed is not None and typed.used
            else (text, self._placeholders.tokenizer)
        )

    def render(
        self,
        token_ids: Sequence[int],
        items: Sequence[Item],
        options: Any,
        held: FeatureLookup | None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> Rendered:
        """Tokens with items in the places of placeholders. `encode`, if given, tokenizes the texts
        that the model puts around an item, and these are inserted too.

        Placeholders are counted before any item is read. Raises RequestError."""
        if not items:
            return Rendered(list(token_ids))
        token_ids = self._rules.complete(token_ids)
        places = self._placeholders.places(token_ids, items)
        read = {
            id(item): feature
            for item, feature in zip(items, self._reader.read(items, options, held), strict=True)
        }
        rendered: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        end = 0
        for place, item in places:
            before, after = (
                self._placeholders.around(item.modality, encode) if encode is not None else ([], [])
            )
            rendered += [*token_ids[end:place], *before]
            features.append(read[id(item)].feature(len(rendered)))
            rendered += [*read[id(item)].replacement.token_ids, *after]
            end = place + 1
        return Rendered([*rendered, *token_ids[end:]], features)
