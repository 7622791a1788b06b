"""MediaReader: items of media become features of a prompt. It is imported for multimodal models
only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.renderer import FeatureLookup, MultiModalRules, Replacement
from toolkit_lm_media.audio import Resampler, open_audio
from toolkit_lm_media.image import image_size, open_image
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.sniff import modality_of
from toolkit_lm_media.sound_formats import container_of, format_of
from toolkit_lm_media.source import load_bytes
from toolkit_lm_media.video import Video, open_video

from toolkit_lm_renderer_hf.audio_processor import AudioProcessor
from toolkit_lm_renderer_hf.embeds import read_embeds
from toolkit_lm_renderer_hf.image_processor import SIZES, ImageProcessor, check_options
from toolkit_lm_renderer_hf.media_items import Item
from toolkit_lm_renderer_hf.named_media import NamedMedia
from toolkit_lm_renderer_hf.pixels import Frames, read_pixels, repeated
from toolkit_lm_renderer_hf.samples import read_samples
from toolkit_lm_renderer_hf.sampling import OPTIONS
from toolkit_lm_renderer_hf.video_kinds import video_processor_of
from toolkit_lm_renderer_hf.video_processor import VideoProcessor

_Check = Callable[[int], None]
"""Raises ContextLengthError if this number of tokens does not fit."""
_FETCHES = 4
"""At a time, for one prompt."""


class ReadItem(NamedTuple):
    """An item, and what stands for it in a prompt."""

    modality: str
    identifier: str
    replacement: Replacement
    data: dict[str, Array] | None
    """None: the engine holds it."""

    def feature(self, offset: int) -> MultiModalFeatureSpec:
        """The feature of the item whose placeholder starts at `offset` in a prompt."""
        at = PlaceholderRange(offset, len(self.replacement.token_ids), self.replacement.mask)
        return MultiModalFeatureSpec(
            modality=self.modality,
            mm_identifier=self.identifier,
            mm_position=at,
            data=self.data,
            layout=self.replacement.layout,
        )


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of an item, in exactly one of five forms."""

    kind: str
    file: bytes = b""
    pixels: np.ndarray | None = None
    frames: Frames | None = None
    samples: tuple[int, np.ndarray] | None = None
    """How many there are in a second, and float32 [N]."""
    arrays: Mapping[str, np.ndarray] | None = None

    def digest(self) -> bytes:
        if self.frames is not None:
            return self.frames.digest()
        digest = hashlib.sha256(self.file)
        whole = self.pixels if self.samples is None else self.samples[1]
        arrays = {"": whole} if whole is not None else dict(self.arrays or {})
        for name in sorted(arrays):
            digest.update(repr((name, str(arrays[name].dtype), arrays[name].shape)).encode())
            digest.update(arrays[name].data)
        return digest.digest()


class MediaReader:
    """Reads items within the operator's bounds, and makes of them what the model's rules say.
    Thread-safe.

    Raises CheckpointError where the checkpoint does not say how, ConfigError for bounds that make
    no sense.
    """

    def __init__(
        self,
        config: VllmConfig,
        rules: MultiModalRules,
        folder: Path,
        modalities: Container[str],
        images: ImageProcessor | None = None,
        audio: AudioProcessor | None = None,
        *,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`folder`: of the checkpoint's processors. `modalities`: those of which items are read,
        and not their embeddings alone. `images` and `audio`: processors; None: the folder's.
        `encode`: tokenizes texts among an item's tokens."""
        self._encode = encode
        self.lookups = 0
        """Number of items that were looked for among those that the engine holds."""
        self.found = 0
        """Of these, items that it held."""
        self._counting = Lock()
        self._named = NamedMedia()
        self._rules = rules
        self._longest = max(
            (config.max_model_len, "max_model_len"), (config.max_encoder_len, "max_encoder_len")
        )
        """Most tokens of a prompt that may have media, and the option that bounds them. Which side
        of an encoder-decoder reads media is its rules' business, so that the longer one counts."""
        bounds = config.renderer
        self._limits = MediaLimits(
            max_bytes=bounds.max_media_bytes,
            max_pixels=bounds.max_media_pixels,
            max_frames=bounds.max_media_frames,
            max_audio_seconds=bounds.max_audio_seconds,
            allowed_hosts=tuple(bounds.allowed_media_hosts),
        )
        sees = "image" in modalities or "video" in modalities
        self._images: ImageProcessor | None = None
        if sees:
            self._images = images or ImageProcessor(folder, bounds.max_media_pixels)
        self._videos: VideoProcessor | None = None
        if self._images is not None and "video" in rules.modalities:
            timed = "tokens_per_second" in (config.hf_config.get("vision_config") or {})
            self._videos = video_processor_of(
                folder, self._images, bounds.max_media_pixels, timed=timed
            )
        self._audio: AudioProcessor | None = None
        if "audio" in modalities:
            self._audio = audio or AudioProcessor(folder)

    def read(
        self, items: Sequence[Item], options: Any, held: FeatureLookup | None
    ) -> list[ReadItem]:
        """Reads all items; an item that occurs several times in a prompt is read once. `options`:
        mm_processor_kwargs.

        An item is not processed if it does not fit after those before it: media is never truncated.
        Raises RequestError."""
        chosen = self._options(items, options)
        made: dict[str, ReadItem] = {}
        found = []
        total = 0
        for item, content in zip(items, self._contents(items), strict=True):
            own = chosen.get(item.modality, {})
            identifier = self._identifier(item, content, own)
            check = partial(self._check_room, total)
            if identifier not in made:
                made[identifier] = self._read(item, content, identifier, own, held, check)
            if item.uuid and content is not None:
                self._named.add(item, own, identifier)
            found.append(made[identifier])
            num_tokens = len(made[identifier].replacement.token_ids)
            with _naming(item):
                check(num_tokens)
            total += num_tokens
        return found

    def _check_room(self, total: int, num_tokens: int) -> None:
        """Raises ContextLengthError if an item does not fit after the items before it, which have
        `total` tokens."""
        most, option = self._longest
        if total + num_tokens >= most:
            before = f", {total + num_tokens} with the items before it" if total else ""
            longest = f"this model's maximum context length is {most} tokens ({option})"
            raise ContextLengthError(f"it has {num_tokens} tokens{before}; {longest}.")

    def _options(self, items: Sequence[Item], options: Any) -> dict[str, dict[str, Any]]:
        """Processor options by modality. Video sampling options do not apply to images; audio has
        none."""
        if options is None:
            return {}
        known = check_options(
            options,
            [
                *(SIZES if self._images is not None else ()),
                *(OPTIONS if self._videos is not None else ()),
            ],
        )
        chosen = {}
        for item in items:
            if (
                item.modality == "image"
                and self._images is not None
                and item.modality not in chosen
            ):
                chosen["image"] = self._images.options(known)
            elif (
                item.modality == "video"
                and item.modality not in chosen
                and self._videos is not None
            ):
                with _naming(item, param="mm_processor_kwargs"):
                    chosen["video"] = self._videos.options(known)
        return chosen

    def _read(
        self,
        item: Item,
        content: _Content | None,
        identifier: str,
        options: Mapping[str, Any],
        held: FeatureLookup | None,
        check: _Check,
    ) -> ReadItem:
        known = held.get(identifier) if held is not None else None
        with self._counting:
            self.lookups += held is not None
            self.found += known is not None
        if known is not None:
            return ReadItem(
                item.modality,
                identifier,
                Replacement(known.token_ids, known.mask, known.layout),
                None,
            )
        if content is None:
            raise _not_held(item)
        if content.arrays is not None:
            arrays = content.arrays
        elif item.modality == "image":
            arrays = self._image(item, content, options, check)
        elif item.modality == "audio":
            arrays = self._recording(item, content)
        else:
            arrays = self._video(item, content, options, check)
        with _naming(item):
            arrays = {**arrays, **self._tokenized(self._rules.texts(item.modality, arrays))}
            replacement = self._rules.replacement(item.modality, arrays)
        return ReadItem(
            item.modality,
            identifier,
            replacement,
            {name: Array.of(array) for name, array in arrays.items()},
        )

    def _tokenized(self, texts: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
        """Token ids [texts, longest] of each name's texts, padded with -1."""
        found = {}
        for name, some in texts.items():
            rows = [self._encode(text) for text in some]
            found[name] = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
            for place, row in zip(found[name], rows, strict=True):
                place[: len(row)] = row
        return found

    def _image(
        self, item: Item, content: _Content, options: Mapping[str, Any], check: _Check
    ) -> dict[str, np.ndarray]:
        assert self._images is not None, "no image is read"
        pixels = content.pixels
        width, height = (
            (image_size(content.file) or (0, 0))
            if pixels is None
            else (pixels.shape[1], pixels.shape[0])
        )
        with _naming(item):
            if (
                width
                and height
                and (num_tokens := self._images.num_tokens(width, height, options)) is not None
            ):
                check(num_tokens)
        if pixels is None:
            pixels = open_image(content.file, self._limits, label=item.label, param=item.param)
        with _naming(item):
            return self._images.process(pixels, options)

    def _video(
        self, item: Item, content: _Content, options: Mapping[str, Any], check: _Check
    ) -> dict[str, np.ndarray]:
        if content.frames is not None:
            with _naming(item):
                return self._arrays(content.frames, options, check, is_file=False)
        with (
            open_video(content.file, self._limits, label=item.label, param=item.param) as video,
            _naming(item),
        ):
            return self._arrays(video, options, check, is_file=True)

    def _recording(self, item: Item, content: _Content) -> dict[str, np.ndarray]:
        assert self._audio is not None, "no recording is read"
        audio = self._audio
        rate = self._audio.window.sampling_rate
        if content.samples is not None:
            source_rate, samples = content.samples
            with _naming(item):
                audio.require_room(len(samples) / source_rate)
                stream = Resampler(source_rate, rate)
                stream.push(samples)
                return audio.process(stream.finish())
        with (
            open_audio(content.file, self._limits, label=item.label, param=item.param) as file,
            _naming(item),
        ):
            audio.require_room(file.seconds)
            return audio.process(file.read(rate))

    def _arrays(
        self, video: Video | Frames, options: Mapping[str, Any], check: _Check, *, is_file: bool
    ) -> dict[str, np.ndarray]:
        assert self._videos is not None, "no video is read"
        sampling = self._videos.sampling
        indices = sampling.indices(video.num_frames, video.fps, options, is_file=is_file)
        if len(indices) > self._limits.max_frames:
            taken = (
                f"{len(indices)} of its {video.num_frames} frames would be read, more than the "
                f"{self._limits.max_frames} that are taken"
            )
            raise RequestError(
                f"{taken} (max_media_frames). mm_processor_kwargs may ask for fewer: fps, "
                "num_frames."
            )
        frames = repeated(video.frames(list(dict.fromkeys(indices))), indices)
        made = self._videos.process(frames, len(indices), options, check)
        return made | self._videos.clock(indices, video.num_frames, video.fps)

    def _identifier(self, item: Item, content: _Content | None, options: Mapping[str, Any]) -> str:
        """Hash of an item: its content, everything that decides how it is processed, and the
        caller's uuid. An item without content has the hash of the one that was last given with its
        uuid."""
        if content is None:
            if (known := self._named.get(item, options)) is None:
                raise _not_held(item)
            return known
        identity = json.dumps([item.modality, content.kind, item.uuid, options], sort_keys=True)
        processor = self._audio if item.modality == "audio" else self._images
        fingerprint = processor.fingerprint if processor is not None else b""
        with _naming(item):
            digest = content.digest()
        return hashlib.sha256(fingerprint + digest + identity.encode()).hexdigest()

    def _contents(self, items: Sequence[Item]) -> list[_Content | None]:
        """Contents of the items; None for those given by uuid alone. Several URLs are fetched at
        the same time."""
        if sum(isinstance(item.source, str) for item in items) < 2:
            return [self._content(item) for item in items]
        with ThreadPoolExecutor(_FETCHES, "media-fetch") as threads:
            return list(threads.map(self._content, items))

    def _content(self, item: Item) -> _Content | None:
        if item.source is None:
            return None
        if item.is_embeds:
            with _naming(item):
                return _Content(
                    "embeds", arrays=read_embeds(item.modality, item.source, self._limits.max_bytes)
                )
        if {"image": self._images, "video": self._videos, "audio": self._audio}.get(
            item.modality
        ) is None:
            known = "images, videos and recordings"
            raise RequestError(
                f"{item.label}: this renderer processes {known} only. Give {item.modality}_embeds.",
                item.param,
            )
        if self._audio is not None and item.modality == "audio":
            return self._sound(item, self._audio)
        source = (
            bytes(item.source) if isinstance(item.source, bytearray | memoryview) else item.source
        )
        if isinstance(source, str | bytes):
            return _Content(
                "file", file=load_bytes(source, self._limits, label=item.label, param=item.param)
            )
        with _naming(item):
            if item.modality == "video":
                frames = Frames(source, self._limits.max_pixels)
                return _Content(f"frames {frames.fps}", frames=frames)
            mode, pixels = read_pixels(source, self._limits.max_pixels)
            return _Content(f"pixels {mode}", pixels=pixels)

    def _sound(self, item: Item, audio: AudioProcessor) -> _Content:
        with _naming(item):
            audio.require_known()
        if isinstance(item.source, str | bytes | bytearray | memoryview):
            source = item.source if isinstance(item.source, str) else bytes(item.source)
            file = load_bytes(source, self._limits, label=item.label, param=item.param)
            is_known = modality_of(file) == "audio" or container_of(file) is not None
            if item.format and is_known and item.format != (format := format_of(file)):
                raise RequestError(
                    f"{item.label}: it is said to be of the format {item.format}, and is of the "
                    f"format {format}.",
                    item.param,
                )
            return _Content("file", file=file)
        with _naming(item):
            rate, samples = read_samples(
                item.source, audio.window.sampling_rate, self._limits.max_audio_seconds
            )
            return _Content(f"samples {rate}", samples=(rate, samples))


def _not_held(item: Item) -> RequestError:
    """Error for an item that was given by uuid alone and cannot be found."""
    return RequestError(
        f"{item.label}: no item of uuid {item.uuid!r:.80} is in the cache of media "
        "(feature_cache_memory). Send the item itself, with its uuid.",
        item.param,
    )


@contextmanager
def _naming(item: Item, param: str | None = None) -> Iterator[None]:
    """Has what is refused begin with the item's name."""
    try:
        yield
    except RequestError as error:
        kind = ContextLengthError if isinstance(error, ContextLengthError) else RequestError
        raise kind(f"{item.label}: {error}", param or item.param) from error
