"""RendererConformance finds what is wrong with a renderer. The right one is what `toolkit plugins
new` writes."""

from __future__ import annotations

import sys

import pytest
from toolkit_lm.renderer import Rendered
from toolkit_lm_devkit import RendererConformance
from toolkit_lm_devkit.cli.new import Kind, write_plugin


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The module of a renderer, with the folder that it is in."""
    source = write_plugin(Kind.RENDERER, "byte", tmp_path_factory.mktemp("written")) / "src"
    sys.path.insert(0, str(source))
    from toolkit_lm_byte import renderer

    yield renderer
    sys.path.remove(str(source))


def kit(cls, tmp_path):
    made = type("Kit", (RendererConformance,), {"renderer_class": cls})()
    from toolkit_lm_devkit.renderer import config_of

    return made, cls(config_of(tmp_path))


def test_the_right_one_passes(written, tmp_path):
    subject, renderer = kit(written.ByteRenderer, tmp_path)
    for text in subject.texts:
        subject.test_round_trip(renderer, text)
    subject.test_a_stream_gives_the_text_of_the_whole(renderer, True)


def test_half_a_character_in_a_stream_is_found(written, tmp_path):
    class Hasty(written.ByteStream):
        def push(self, token_ids):
            return bytes(token_id for token_id in token_ids if token_id < 256).decode(
                errors="replace"
            )

    class Renderer(written.ByteRenderer):
        def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
            return Hasty(skip_special_tokens)

    subject, renderer = kit(Renderer, tmp_path)
    with pytest.raises(AssertionError):
        subject.test_a_stream_gives_the_text_of_the_whole(renderer, True)
    with pytest.raises(AssertionError):
        subject.test_a_stream_of_text_holds_no_half_characters(renderer, "héllo")


def test_a_lenient_one_is_found(written, tmp_path):
    class Lenient(written.ByteRenderer):
        def render_prompt(self, prompt, *args, **kwargs):
            return Rendered(list(prompt if isinstance(prompt, str) else prompt["prompt_token_ids"]))

    subject, renderer = kit(Lenient, tmp_path)
    with pytest.raises(pytest.fail.Exception):
        subject.test_an_empty_prompt_is_refused(renderer, "")


def test_an_import_of_torch_is_found(tmp_path, monkeypatch):
    source = write_plugin(Kind.RENDERER, "heavy", tmp_path) / "src"
    module = source / "toolkit_lm_heavy" / "renderer.py"
    module.write_text("import torch\n" + module.read_text())
    monkeypatch.syspath_prepend(source)
    monkeypatch.setenv("PYTHONPATH", str(source))
    from toolkit_lm_heavy.renderer import HeavyRenderer

    subject, _ = kit(HeavyRenderer, tmp_path)
    with pytest.raises(AssertionError, match="imports torch"):
        subject.test_it_needs_no_torch(tmp_path)
