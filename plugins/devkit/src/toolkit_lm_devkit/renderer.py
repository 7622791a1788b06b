"""RendererConformance: what every renderer must do."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import Renderer

from toolkit_lm_devkit.conformance import Conformance

_IMPORTS = """
import importlib, json, sys
from toolkit_lm_devkit.renderer import config_of
module, name, folder, text = json.loads(sys.argv[1])
renderer = getattr(importlib.import_module(module), name)(config_of(folder))
renderer.decode(renderer.render_prompt(text).token_ids)
sys.exit("torch" in sys.modules)
"""


def config_of(folder: str | Path) -> VllmConfig:
    """A resolved config for a folder that a renderer reads; config.json and generation_config.json
    may be missing there."""
    hf_config, generation = (
        _read(Path(folder, name)) for name in ("config.json", "generation_config.json")
    )
    architecture = (hf_config.get("architectures") or ["none"])[0]
    checkpoint = Checkpoint(
        path=str(folder),
        architecture=architecture,
        hf_config=hf_config,
        generation_config=generation,
    )
    return VllmConfig.default(hf_config).with_checkpoint(checkpoint)


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


class RendererConformance(Conformance):
    """Subclass it as `class TestMine(RendererConformance)`, name the class, and write its files in
    `write_files`."""

    renderer_class: ClassVar[type[Renderer]]
    texts: ClassVar[Sequence[str]] = (
        "The cat sat.",
        " leading and trailing ",
        "héllo 😀 日本語",
        "a\n\nb\tc",
        "</s> inside",
    )
    """Texts that come back as they are from encoding, without special tokens, and decoding."""
    has_chat_template: ClassVar[bool] = True
    """Whether the checkpoint of `write_files` can render conversations. Without, they must be
    refused by RequestError."""
    imports_torch: ClassVar[bool] = False
    """False: the renderer can be imported and used in a process that never imports torch, such as
    an HTTP front."""

    def write_files(self, folder: Path) -> None:
        """Writes what the renderer reads of a checkpoint, such as `write_tokenizer` does."""
        raise NotImplementedError(f"{type(self).__name__} must define write_files(folder)")

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            "text": {repr(text): text for text in cls.texts},
            "skip": {"without special": True, "with special": False},
        }

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("renderer")
        cls().write_files(folder)
        return folder

    @pytest.fixture
    def renderer(self, folder: Path) -> Renderer:
        return self.renderer_class(config_of(folder))

    # Prompts

    def test_round_trip(self, renderer: Renderer, text: str) -> None:
        token_ids = renderer.render_prompt(text, add_special_tokens=False).token_ids
        assert all(0 <= token_id < renderer.vocab_size for token_id in token_ids)
        assert renderer.decode(token_ids) == text
        assert (
            renderer.render_prompt({"prompt": text}, add_special_tokens=False).token_ids
            == token_ids
        )

    def test_token_ids_pass_as_they_are(self, renderer: Renderer) -> None:
        assert renderer.render_prompt({"prompt_token_ids": [2, 0, 2]}).token_ids == [2, 0, 2]

    @pytest.mark.parametrize("prompt", ["", {"prompt": ""}, {"prompt_token_ids": []}], ids=repr)
    def test_an_empty_prompt_is_refused(self, renderer: Renderer, prompt: Any) -> None:
        with pytest.raises(RequestError):
            renderer.render_prompt(prompt)

    @pytest.mark.parametrize("prompt", [3, None, {"text": "a"}, {"prompt": "\ud800"}], ids=repr)
    def test_what_is_no_prompt_is_refused(self, renderer: Renderer, prompt: Any) -> None:
        with pytest.raises(RequestError):
            renderer.render_prompt(prompt)

    def test_a_conversation(self, renderer: Renderer) -> None:
        if not self.has_chat_template:
            with pytest.raises(RequestError):
                renderer.render_conversation([{"role": "user", "content": "Hello"}])
            return
        short = renderer.render_conversation([{"role": "user", "content": "Hello"}]).token_ids
        assert "Hello" in renderer.decode(short)
        assert all(0 <= token_id < renderer.vocab_size for token_id in short)
        more = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": "Bye"},
        ]
        assert "Bye" in renderer.decode(renderer.render_conversation(more).token_ids)
        with pytest.raises(RequestError):
            renderer.render_conversation([])

    @pytest.mark.parametrize(
        "prompt", [{"prompt": "Hello"}, {"prompt_token_ids": [2, 0, 2]}], ids=repr
    )
    def test_media_beside_a_prompt_are_refused(self, renderer: Renderer, prompt: Any) -> None:
        """A renderer that takes media refuses data that is not media."""
        prompt_with_media: Any = {**prompt, "multi_modal_data": {"image": b"no image"}}
        with pytest.raises(RequestError):
            renderer.render_prompt(prompt_with_media)

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
            {"type": "image"},
            {"type": "none"},
        ],
        ids=repr,
    )
    def test_media_in_a_conversation_are_refused(self, renderer: Renderer, part: Any) -> None:
        """Media in a conversation are refused as well: no host is allowed."""
        with pytest.raises(RequestError):
            renderer.render_conversation(
                [{"role": "user", "content": [{"type": "text", "text": "Hello"}, part]}]
            )

    def test_awaited_it_gives_the_same(self, renderer: Renderer, text: str) -> None:
        """From several event loops, too."""
        for _ in range(2):
            assert asyncio.run(
                renderer.render_prompt_async(text, add_special_tokens=False)
            ) == renderer.render_prompt(text, add_special_tokens=False)
        with pytest.raises(RequestError):
            asyncio.run(renderer.render_prompt_async(""))
        if self.has_chat_template:
            messages = [{"role": "user", "content": text}]
            assert asyncio.run(
                renderer.render_conversation_async(messages)
            ) == renderer.render_conversation(messages)

    # Decoding

    def test_a_stream_gives_the_text_of_the_whole(self, renderer: Renderer, skip: bool) -> None:
        for seed in range(50):
            draw = random.Random(seed)  # nosec B311 # it keeps no secret
            token_ids = [draw.randrange(renderer.vocab_size) for _ in range(draw.randrange(1, 40))]
            assert self.stream(renderer, token_ids, skip, draw) == renderer.decode(
                token_ids, skip_special_tokens=skip
            )

    def test_a_stream_of_text_holds_no_half_characters(self, renderer: Renderer, text: str) -> None:
        token_ids = renderer.render_prompt(text, add_special_tokens=False).token_ids
        stream = renderer.decode_stream(skip_special_tokens=False)
        pieces = [stream.push([token_id]) for token_id in token_ids]
        assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == text

    def stream(
        self, renderer: Renderer, token_ids: Sequence[int], skip: bool, draw: random.Random
    ) -> str:
        """The text of a stream that is given the tokens in pieces of random sizes, none
        included."""
        stream = renderer.decode_stream(skip_special_tokens=skip)
        rest = list(token_ids)
        pieces = []
        while rest:
            count = draw.randrange(4)
            pieces.append(stream.push(rest[:count]))
            rest = rest[count:]
        return "".join(pieces) + stream.flush()

    def test_each_token_has_a_text(self, renderer: Renderer) -> None:
        token_ids = list(range(min(renderer.vocab_size, 500)))
        texts = renderer.token_texts(token_ids)
        assert len(texts) == len(token_ids)
        assert all(isinstance(text, str) for text in texts)
        assert [
            token_byte.decode("utf-8", "replace") for token_byte in renderer.token_bytes(token_ids)
        ] == texts

    def test_eos_token_ids_are_in_the_vocabulary(self, renderer: Renderer) -> None:
        eos = renderer.eos_token_ids
        assert len(set(eos)) == len(eos)
        assert all(0 <= token_id < renderer.vocab_size for token_id in eos)

    # Processes and threads

    def test_threads_share_it(self, renderer: Renderer) -> None:
        def work(seed: int) -> tuple[list[int], str]:
            draw = random.Random(seed)  # nosec B311 # it keeps no secret
            token_ids = [draw.randrange(renderer.vocab_size) for _ in range(30)]
            rendered = renderer.render_prompt(
                self.texts[seed % len(self.texts)], add_special_tokens=False
            ).token_ids
            return rendered, self.stream(renderer, token_ids, True, draw)

        alone = [work(seed) for seed in range(40)]
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(40))) == alone

    def test_it_needs_no_torch(self, folder: Path) -> None:
        if self.imports_torch:
            return
        argument = json.dumps(
            [
                self.renderer_class.__module__,
                self.renderer_class.__name__,
                str(folder),
                self.texts[0],
            ]
        )
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS, argument], capture_output=True, text=True, timeout=120
        )  # nosec B603 # our own words
        assert done.returncode == 0, done.stderr or f"{self.renderer_class.__name__} imports torch"
