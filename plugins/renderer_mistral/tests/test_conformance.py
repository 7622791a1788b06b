"""The renderer passes the conformance kit, with the vocabulary that mistral-common ships and with
small ones of each later version."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip(
    "mistral_common",
    reason="mistral-common is not installed: see the README for an environment of its own",
)

from toolkit_lm_devkit import RendererConformance
from toolkit_lm_renderer_mistral.renderer import MistralRenderer

USES_IT = """
import sys
from toolkit_lm_devkit.renderer import config_of
from toolkit_lm_renderer_mistral.renderer import MistralRenderer
renderer = MistralRenderer(config_of(sys.argv[1]))
renderer.decode(renderer.render_conversation([{"role": "user", "content": "Hello"}]).token_ids)
print(*sys.modules)
"""


def test_it_uses_no_library_of_hugging_face(tmp_path, write_tekken):
    write_tekken(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", USES_IT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "mistral_common" in done.stdout.split()
    assert not {"tokenizers", "transformers", "torch"} & set(done.stdout.split())


class TestBundled(RendererConformance):
    renderer_class = MistralRenderer

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory, bundled_tekken):
        folder = tmp_path_factory.mktemp("renderer")
        shutil.copy(bundled_tekken, folder / "tekken.json")
        (folder / "config.json").write_text(json.dumps({"vocab_size": 131072, "eos_token_id": 2}))
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, folder):
        from toolkit_lm_devkit.renderer import config_of

        return MistralRenderer(config_of(folder))

    @pytest.fixture
    def renderer(self, loaded):
        # The kit makes one for each test; this vocabulary takes a second to read.
        return loaded


class TestV7(RendererConformance):
    renderer_class = MistralRenderer
    version = "v7"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory, write_tekken):
        folder = tmp_path_factory.mktemp("renderer")
        write_tekken(folder, cls.version)
        return folder


class TestV11(TestV7):
    version = "v11"


class TestV13(TestV7):
    version = "v13"
