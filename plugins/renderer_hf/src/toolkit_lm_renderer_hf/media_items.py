"""Items of media in conversations and prompts, as callers give them: found, counted, and not yet
read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.prompts import Conversation
from toolkit_lm_media.data_url import beginning
from toolkit_lm_media.sniff import modality_of

from toolkit_lm_renderer_hf.pixels import is_frames, is_with_fps
from toolkit_lm_renderer_hf.samples import is_with_rate

_MOST_ITEMS = 16
"""Most items of one modality in a prompt, if the operator sets no limit."""
_MOST_UUID = 256
_SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "image": ("image", ("image", "url")),
    "image_url": ("image", ("image_url",)),
    "image_embeds": ("image", ("image_embeds",)),
    "video": ("video", ("video", "url")),
    "video_url": ("video", ("video_url",)),
    "video_embeds": ("video", ("video_embeds",)),
    "audio": ("audio", ("audio", "url")),
    "audio_url": ("audio", ("audio_url",)),
    "audio_embeds": ("audio", ("audio_embeds",)),
    "input_audio": ("audio", ("input_audio",)),
}
"""Modality of a content part, and the keys that may hold the item (only one does), by the part's
type."""

_INPUT_AUDIO = "input_audio"
_FORMATS = {
    "wav": "WAV",
    "mp3": "MP3",
    "mpeg": "MP3",
    "mpga": "MP3",
    "flac": "FLAC",
    "ogg": "OGG",
    "opus": "OGG",
    "aac": "AAC",
    "m4a": "MP4",
    "mp4": "MP4",
    "webm": "WEBM",
}
"""Audio formats: by the name a client may use, the name of the decoder's format."""
_FILE = "file"
"""A content part whose own bytes tell the modality."""
_KINDS = (*_SOURCES, _FILE)


class Item(NamedTuple):
    """One item of media, unread."""

    modality: str
    source: Any
    """Bytes of a file, a URL, pixels; or embeddings, where `is_embeds`. None: the item was given
    before with this `uuid`."""
    label: str
    """Name of the item in errors, such as "image 2"."""
    param: str
    is_embeds: bool = False
    uuid: str = ""
    """The caller's own name of it."""
    format: str = ""
    """Format of a recording, such as "WAV", if the caller states it; else empty."""


class ItemLimits:
    """How many items of each modality a prompt may have."""

    def __init__(self, entries: Sequence[str], modalities: Sequence[str]) -> None:
        """`entries`: texts such as "image=8". Raises ConfigError."""
        self._most = {}
        for entry in entries:
            modality, _, count = entry.partition("=")
            if modality not in modalities or not (count.isascii() and count.isdecimal()):
                raise ConfigError(
                    f"limit_mm_per_prompt: {entry!r} is not like image=8. The model takes: "
                    f"{', '.join(modalities)}."
                )
            self._most[modality] = int(count)

    def most(self, modality: str) -> int:
        return self._most.get(modality, _MOST_ITEMS)

    def check(self, items: Sequence[Item], modalities: Sequence[str]) -> None:
        """Raises RequestError for a modality that the model does not take, or too many items."""
        for modality, count in Counter(item.modality for item in items).items():
            first = next(item for item in items if item.modality == modality)
            if modality not in modalities:
                raise RequestError(
                    f"{first.label}: this model takes no {modality}, only "
                    f"{' and '.join(modalities)}.",
                    first.param,
                )
            most = self.most(modality)
            if count > most:
                allowed = f"a prompt may have {most} of modality {modality!r} (limit_mm_per_prompt)"
                raise RequestError(
                    f"{modality} {most + 1}: there are {count}; {allowed}.", first.param
                )


def split_items(messages: Conversation) -> tuple[list[Any], list[Item]]:
    """The messages with bare parts, such as {"type": "image"}, where items stand; and the items in
    order. Raises RequestError."""
    items: list[Item] = []
    return [_bare_message(message, items) for message in messages], items


def items_of_prompt(prompt: Mapping[str, Any]) -> list[Item]:
    """Items given with a text or token ids: `multi_modal_data` and `multi_modal_uuids`. Raises
    RequestError."""
    data = prompt.get("multi_modal_data") or {}
    uuids = prompt.get("multi_modal_uuids") or {}
    for name, mapping in (("multi_modal_data", data), ("multi_modal_uuids", uuids)):
        if not isinstance(mapping, Mapping) or not all(
            isinstance(modality, str) for modality in mapping
        ):
            raise RequestError(
                f"{name} must be a mapping such as {{'image': [...]}}, not a "
                f"{type(mapping).__name__}.",
                name,
            )
    items: list[Item] = []
    for modality in {**data, **uuids}:
        names = uuids.get(modality)
        named = list(names) if isinstance(names, list | tuple) else [names]
        value = data.get(modality)
        sources = [None] * len(named) if value is None else _sources(modality, value)
        if names is None:
            named = [None] * len(sources)
        if len(named) != len(sources):
            raise RequestError(
                f"multi_modal_uuids has {len(named)} of {modality!r} for {len(sources)} items.",
                "multi_modal_uuids",
            )
        for number, (source, uuid) in enumerate(zip(sources, named, strict=True), 1):
            label = f"{modality} {number}"
            param = "multi_modal_data"
            if source is None and uuid is None:
                raise RequestError(f"{label}: give the item, or the uuid of an earlier one.", param)
            items.append(
                Item(
                    modality,
                    source,
                    label,
                    param,
                    _is_embeds(source),
                    _uuid(uuid, label, "multi_modal_uuids"),
                )
            )
    return items


def _sources(modality: str, value: Any) -> list[Any]:
    """The items of a modality. A video may be a list of frames, or a pair of frames and what is
    said of them; a recording a pair, too."""
    if not isinstance(value, list | tuple) or (modality == "audio" and is_with_rate(value)):
        return [value]
    return (
        [value] if modality == "video" and (is_with_fps(value) or is_frames(value)) else list(value)
    )


def _bare_message(message: Any, items: list[Item]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(
        _type_of(part) in _KINDS for part in content
    ):
        return message
    return {**message, "content": [_bare_part(part, items) for part in content]}


def _type_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def _bare_part(part: Any, items: list[Item]) -> Any:
    kind = _type_of(part)
    if kind == _FILE:
        part = _from_file_part(part, items)
        kind = part["type"]
    if kind not in _SOURCES:
        return part
    modality, keys = _SOURCES[kind]
    label = f"{modality} {1 + sum(item.modality == modality for item in items)}"
    source = next((part[key] for key in keys if part.get(key) is not None), None)
    if kind.endswith("_url") and isinstance(source, Mapping):
        source = source.get("url")
    if source is None and part.get("uuid") is None:
        raise RequestError(
            f"{label}: a content part of type {kind!r} must have {keys[0]!r}, or the 'uuid' of an "
            "item given before.",
            "messages",
        )
    is_input = kind == _INPUT_AUDIO and source is not None
    source, format = _from_input_audio(source, label) if is_input else (source, "")
    embeds = source is not None and (kind.endswith("_embeds") or _is_embeds(source))
    items.append(
        Item(
            modality,
            source,
            label,
            "messages",
            embeds,
            _uuid(part.get("uuid"), label, "messages"),
            format,
        )
    )
    return {"type": modality}


def _from_input_audio(part: Any, label: str) -> tuple[str | bytes, str]:
    """The source of OpenAI's {"data": base64, "format": "wav"}, and the format; a data URL is
    taken, too. Raises RequestError."""
    if not isinstance(part, Mapping) or not isinstance(part.get("data"), str | bytes):
        raise RequestError(
            f"{label}: input_audio must be {{'data': base64, 'format': 'wav'}}.", "messages"
        )
    data = part["data"]
    format = part.get("format")
    if format is not None and (not isinstance(format, str) or format not in _FORMATS):
        raise RequestError(
            f"{label}: its format is {format!r:.50}; known: {', '.join(_FORMATS)}.", "messages"
        )
    if isinstance(data, str) and data[:5].lower() != "data:":
        data = f"data:;base64,{data}"
    return data, _FORMATS[format] if format else ""


def _from_file_part(part: Mapping[str, Any], items: Sequence[Item]) -> dict[str, Any]:
    """The part of the modality that its bytes have. Raises RequestError."""
    label = f"item {len(items) + 1}, file"
    file = part.get(_FILE)
    if not isinstance(file, Mapping):
        raise RequestError(f"{label}: a content part of type 'file' must have 'file'.", "messages")
    if file.get("file_id") is not None:
        raise RequestError(
            f"{label}: no files are kept here: give file_data instead of file_id.", "messages"
        )
    data = file.get("file_data")
    if not isinstance(data, str | bytes) or not data:
        raise RequestError(f"{label}: it must have file_data: a data URL, or base64.", "messages")
    if isinstance(data, str) and data[:5].lower() != "data:":
        data = f"data:;base64,{data}"
    modality = modality_of(beginning(data) if isinstance(data, str) else data)
    if modality is None:
        raise RequestError(
            f"{label}: it is of no known format: images, videos and recordings are.", "messages"
        )
    return {**part, "type": modality, modality: data}


def _is_embeds(source: Any) -> bool:
    """Whether it is an encoder's output: a mapping of arrays, or a matrix of floats."""
    if isinstance(source, Mapping):
        return True
    return len(getattr(source, "shape", ())) == 2 and "float" in str(getattr(source, "dtype", ""))


def _uuid(value: Any, label: str, param: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_UUID:
        raise RequestError(
            f"{label}: its uuid must be a text of 1 to {_MOST_UUID} characters.", param
        )
    return value
