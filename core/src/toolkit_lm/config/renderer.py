"""RendererConfig: conversion of input to tokens, and of tokens to text."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from toolkit_lm.config.options import option


class RendererConfig(Struct, frozen=True, kw_only=True):
    """Conversion of input to tokens, and of tokens to text."""

    renderer: Annotated[
        str,
        option(
            "Renderer, by name. auto: the model's, else the first that can read the checkpoint."
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None, option("Folder or hub id of the tokenizer.", none="the model's")
    ] = None
    chat_template: Annotated[
        str | None, option("Jinja chat template, or a file with one.", none="the checkpoint's")
    ] = None
    renderer_url: Annotated[
        list[str],
        option(
            "Render servers (toolkit render), such as http://127.0.0.1:8001, that render in "
            "place of this process."
        ),
    ] = field(default_factory=list)
    limit_mm_per_prompt: Annotated[
        list[str],
        option("Maximum number of items in a prompt, by modality: image=8. Other modalities: 16."),
    ] = field(default_factory=list)
    allowed_media_hosts: Annotated[
        list[str], option("Hosts that media is fetched from: NAME or NAME:PORT.")
    ] = field(default_factory=list)
    max_media_bytes: Annotated[
        int, option("Maximum size of an image or other item of media, as a file.", ge=1)
    ] = 25 * 2**20
    max_media_pixels: Annotated[
        int, option("Maximum number of pixels of an image, or of a video's frames.", ge=1)
    ] = 36_000_000
    max_media_frames: Annotated[
        int, option("Maximum number of frames sampled from a video.", ge=1)
    ] = 768
    max_audio_seconds: Annotated[
        float, option("Maximum length of a recording, in seconds.", gt=0)
    ] = 600.0
