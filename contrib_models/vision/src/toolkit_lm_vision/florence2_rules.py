"""Prompt rules of Florence-2: a task and a picture, for the encoder. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.model import HFConfig
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import Conversation, Prompt, parse_prompt
from toolkit_lm.renderer import MultiModalRules, Rendered, RenderedPair, Renderer, Replacement
from toolkit_lm_encdec.rules import MBartRules, last_turn

from toolkit_lm_vision.florence2_shape import DaViTShape
from toolkit_lm_vision.shape import text_size

if TYPE_CHECKING:
    import numpy as np

_INFINITE = 3e38
"""Values of float32 are smaller."""
_TASKS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
"""Sentences that the model was trained on, by the task's name in prompts."""
_TASKS_WITH_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}
"""The same for tasks that a text or a region follows."""


_TEXT: dict[str, Any] = {
    "vocab_size": 50_265,
    "max_position_embeddings": 1024,
    "d_model": 1024,
    **{f"{side}_layers": 12 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 16 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")},
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
"""Defaults of transformers' BART, which configs may leave out."""


def florence2_text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language part, BART's."""
    return {**_TEXT, **HFConfig(hf_config).require("text_config", dict)}


def image_token_id(hf_config: Mapping[str, Any]) -> int:
    """The token that stands for a picture's embeddings. Raises CheckpointError."""
    token = HFConfig(hf_config).get("image_token_id", int, 51_289)
    size = HFConfig(florence2_text_config(hf_config)).require("vocab_size", int)
    if not 0 <= token < size:
        raise CheckpointError(f"config.json: the image token {token} is not in the vocabulary.")
    return token


def sentence_of(text: str, param: str) -> str:
    """The sentence of the task that a text names, such as "<CAPTION>"; other texts are unchanged.
    `param` is the request's parameter that has it. Raises RequestError for a text beside a task
    that takes none."""
    for task, sentence in _TASKS.items():
        if task in text:
            if text != task:
                raise RequestError(
                    f"the task {task} must be the only text of the prompt. Tasks that a text "
                    f"follows: {', '.join(_TASKS_WITH_INPUT)}.",
                    param,
                )
            return sentence
    for task, sentence in _TASKS_WITH_INPUT.items():
        if task in text:
            return sentence.replace("{}", text.replace(task, "").strip())
    return text


class Florence2PictureRules(MultiModalRules):
    """A picture is as many image tokens as states of the tower, and one of all. It stands first in
    a prompt, of which it is the only one; a text's begin and end surround the task after it."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = DaViTShape.read(config.hf_config)
        text = HFConfig(florence2_text_config(config.hf_config))
        self.hidden_size = text_size(text.values)
        self.begin = text.get("bos_token_id", int, 0)
        self.end = text.get("eos_token_id", int, 2)

    def placeholder_id(self, modality: str) -> int:
        return image_token_id(self.config.hf_config)

    def complete(self, token_ids: Sequence[int]) -> Sequence[int]:
        image = self.placeholder_id("image")
        tokens = list(token_ids)
        if tokens.count(image) > 1:
            raise RequestError(
                f"Florence-2 reads one picture in a prompt, not {tokens.count(image)}.",
                "multi_modal_data",
            )
        if image in tokens and tokens[0] != image:
            raise RequestError(
                "Florence-2 reads the picture first: its placeholder must begin the prompt.",
                "prompt",
            )
        tokens = [token for token in tokens if token != image]
        if tokens[:1] != [self.begin]:
            tokens.insert(0, self.begin)
        if tokens[-1] != self.end:
            tokens.append(self.end)
        return [image, *tokens]

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if len(data) != 1 or next(iter(data)) not in ("pixel_values", "embeds"):
            raise RequestError(
                f"an image must have pixel_values, or embeds, and nothing else, not {sorted(data)}."
            )
        ((name, array),) = data.items()
        if array.dtype.kind != "f":
            raise RequestError(f"{name} of an image must be floats, not {array.dtype}.")
        count = self._num_tokens(name, array.shape)
        if not float(abs(array).max()) < _INFINITE:
            raise RequestError(f"{name} of an image must be finite.")
        return Replacement([self.placeholder_id(modality)] * count)

    def _num_tokens(self, name: str, shape: tuple[int, ...]) -> int:
        """Number of tokens of an array. Raises RequestError for one that is not a picture."""
        most = self.shape.max_side
        if name == "embeds":
            if len(shape) != 2 or not 0 < shape[0] <= most**2 + 1 or shape[1] != self.hidden_size:
                raise RequestError(
                    f"embeds of an image must have the shape [1 to {most**2 + 1}, "
                    f"{self.hidden_size}], not {list(shape)}."
                )
            return shape[0]
        channels = self.shape.num_channels
        if len(shape) != 4 or shape[:2] != (1, channels):
            raise RequestError(
                f"pixel_values of an image must have the shape [1, {channels}, height, width], "
                f"not {list(shape)}."
            )
        count = self.shape.num_tokens(*shape[2:])
        if not count:
            sides = " x ".join(map(str, self.shape.sides(*shape[2:])))
            raise RequestError(
                f"an image of {shape[2]} x {shape[3]} pixels has {sides} states; the model has "
                f"positions of 1 to {most} rows and columns."
            )
        return count


class Florence2Rules(MBartRules):
    """The encoder's prompt is a text, or the name of a task, with a picture or without. All of it
    is what transformers' processor makes."""

    encoder_length_keys = ("text_config.max_position_embeddings",)

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        super().__init__(config, renderer)
        assert config.checkpoint is not None
        text = florence2_text_config(config.hf_config)
        stated = config.checkpoint.generation_config
        kept = {
            key: value for key, value in text.items() if not (stated and key.startswith("forced_"))
        }
        own = {key: value for key, value in self.generation.items() if value is not None}
        self.generation = {**kept, **own}
        self.image_token_id = image_token_id(config.hf_config)

    def read(self, prompt: Prompt, params: SamplingParams) -> RenderedPair:
        value: Any = prompt
        decoder = value.get("decoder_prompt") if isinstance(value, Mapping) else None
        if isinstance(decoder, Mapping) and decoder.get("multi_modal_data"):
            raise RequestError(
                "Florence-2's encoder reads the picture: give multi_modal_data in encoder_prompt.",
                "multi_modal_data",
            )
        return super().read(prompt, params)

    def encoder_input(self, prompt: Any, max_tokens: int | None) -> EncoderInput:
        parsed: Any = parse_prompt(prompt, media=True)
        _refuse_uuids(parsed.get("multi_modal_uuids"), "multi_modal_uuids")
        count = _num_items(parsed.get("multi_modal_data"))
        _check_count(count, "multi_modal_data")
        if "prompt_token_ids" not in parsed:
            mark = self._mark
            text = parsed["prompt"]
            is_marked = text.startswith(mark)
            sentence = sentence_of(text.removeprefix(mark), "prompt")
            before = mark if is_marked or (count and mark not in text) else ""
            parsed = {**parsed, "prompt": before + sentence}
        rendered = self.renderer.render_prompt(parsed, add_special_tokens=False)
        return self._input(rendered, max_tokens)

    def read_conversation(
        self, messages: Conversation, params: SamplingParams, **options: Any
    ) -> RenderedPair:
        """Through the chat template. Without one the encoder reads the text of the system message
        and the last message, and the conversation's last picture."""
        if not self.renderer.has_chat_template and not options.get("chat_template"):
            messages = _as_task(messages)
            options["chat_template"] = _TEMPLATE.format(mark=json.dumps(self._mark))
        rendered = self.renderer.render_conversation(messages, **options)
        encoder = self._input(rendered, self.most_tokens(params))
        return RenderedPair(self.default_decoder_prompt(), None, encoder, None)

    @property
    def _mark(self) -> str:
        """The text of a picture's placeholder."""
        return self.renderer.decode([self.image_token_id])

    def _input(self, rendered: Rendered, max_tokens: int | None) -> EncoderInput:
        """The encoder's input for a rendered prompt. The picture and the last token stay where the
        prompt is truncated."""
        tokens = list(rendered.token_ids)
        features = rendered.features or []
        if not features and self.image_token_id in tokens:
            raise RequestError(
                f"the prompt has {tokens.count(self.image_token_id)} placeholders {self._mark!r} "
                "for 0 items of modality 'image'; it must have one for each.",
                "prompt",
            )
        if not features:
            return EncoderInput.of_tokens(tokens[:max_tokens])
        picture = features[0].mm_position.end
        if max_tokens is not None and len(tokens) > max_tokens:
            if max_tokens <= picture:
                raise RequestError(
                    f"{max_tokens} tokens leave no room for a text beside the {picture} of the "
                    "picture: ask for more.",
                    "truncate_prompt_tokens",
                )
            tokens = [*tokens[: max_tokens - 1], tokens[-1]]
        data = features[0].data
        assert data is not None, "no engine holds the encoder's pictures"
        (array,) = data.values()
        return EncoderInput(num_tokens=len(tokens), token_ids=tokens, features=array)


_TEMPLATE = (
    "{{% for message in messages %}}{{% if message['content'] is string %}}"
    "{{{{ message['content'] }}}}{{% else %}}{{% for part in message['content'] %}}"
    "{{{{ {mark} if part['type'] == 'image' else part['text'] }}}}"
    "{{% endfor %}}{{% endif %}}{{% endfor %}}"
)
"""Chat template of one message: a picture, and the text of a task."""


def _as_task(messages: Conversation) -> list[dict[str, Any]]:
    """A conversation as one message: its last picture, and the sentence of the text. Raises
    RequestError."""
    chat: list[Any] = list(messages) if isinstance(messages, Sequence) else []
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in chat):
        chat = []
    seen = [[part for part in _parts(message) if _is_media(part)] for message in chat]
    pictures: list[Any] = next((parts for parts in reversed(seen) if parts), [])
    _check_count(len(pictures), "messages")
    for part in pictures:
        _refuse_uuids(part.get("uuid"), "messages")
    texts = [
        {**message, "content": [part for part in _parts(message) if not _is_media(part)]}
        if parts
        else message
        for message, parts in zip(chat, seen, strict=True)
    ]
    text = sentence_of(last_turn(texts), "messages")
    named = [{"type": "text", "text": text}] if text or not pictures else []
    return [{"role": "user", "content": [*pictures, *named]}]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") != "text"


def _num_items(data: Any) -> int:
    """Number of items in `multi_modal_data`."""
    values = data.values() if isinstance(data, Mapping) else ()
    return sum(len(value) if isinstance(value, list | tuple) else 1 for value in values)


def _check_count(count: int, param: str) -> None:
    if count > 1:
        raise RequestError(f"Florence-2 reads one picture in a prompt, not {count}.", param)


def _refuse_uuids(uuids: Any, param: str) -> None:
    """Raises RequestError for names of items: the encoder's cache goes by their contents."""
    if uuids:
        raise RequestError(
            "Florence-2 knows pictures by their contents, not by a uuid: leave it out.", param
        )
