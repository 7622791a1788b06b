"""A third party's renderer: a token per byte of text, and netpbm pictures (P6, in data URLs) of a
model that sees. By numpy alone."""

import hashlib
import re
from base64 import b64decode

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.plugin import hookimpl
from toolkit_lm.prompts import parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer

FIRST = 30  # The token of byte 0: those before are the model's own.


@hookimpl
def toolkit_register_renderers(renderers):
    renderers.add("letters", "letters_renderer:Letters", reads=())


class Stream(DecodeStream):
    def push(self, token_ids):
        return bytes(token - FIRST for token in token_ids if FIRST <= token < FIRST + 256).decode(
            "latin-1"
        )

    def flush(self):
        return ""


class Letters(Renderer):
    vocab_size = FIRST + 256
    eos_token_ids = [1]

    def render_conversation(self, messages, **kwargs):
        token_ids = []
        features = []
        for part in [
            part for message in messages for part in message["content"]
        ]:  # of a text: its letters
            if isinstance(part, dict) and part["type"] == "image_url":
                features.append(
                    self.feature(part["image_url"]["url"], token_ids, len(features) + 1)
                )
            else:
                token_ids += self.render_prompt(
                    part if isinstance(part, str) else part["text"]
                ).token_ids
        return Rendered(token_ids, features)

    def feature(self, url, token_ids, number):
        found = re.fullmatch(
            rb"P6 (\d{1,3}) (\d{1,3}) 255\n(.*)", b64decode(url.partition(",")[2]), re.DOTALL
        )
        if found is None or len(found[3]) != int(found[1]) * int(found[2]) * 3:
            raise RequestError(f"image {number}: it is no netpbm file.", "messages")
        pixels = (
            np.frombuffer(found[3], np.uint8)
            .reshape(1, int(found[2]), int(found[1]), 3)
            .transpose(0, 3, 1, 2)
        )
        data = {"pixel_values": np.ascontiguousarray(pixels / np.float32(255))}
        tokens, mask, layout = self.rules.replacement("image", data)
        at = PlaceholderRange(len(token_ids), len(tokens), mask)
        name = hashlib.sha256(found[0]).hexdigest()
        token_ids += tokens
        arrays = {key: Array.of(array) for key, array in data.items()}
        return MultiModalFeatureSpec(
            modality="image", mm_identifier=name, mm_position=at, data=arrays, layout=layout
        )

    def render_prompt(self, prompt, *, add_special_tokens=True):
        parsed = parse_prompt(prompt)
        if not (
            token_ids := parsed.get("prompt_token_ids")
            or [FIRST + byte for byte in parsed["prompt"].encode("latin-1", "replace")]
        ):
            raise RequestError("the prompt is empty.", "prompt")
        return Rendered(token_ids)

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        return Stream()

    def decode(self, token_ids, *, skip_special_tokens=False):
        return Stream().push(token_ids)

    def token_texts(self, token_ids):
        return [self.decode([token]) for token in token_ids]
