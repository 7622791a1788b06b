"""The renderer passes the conformance kit, with a chat template and without."""

import json

from toolkit_lm_devkit import RendererConformance, write_tokenizer
from toolkit_lm_renderer_hf.renderer import HfRenderer


class TestByteLevel(RendererConformance):
    renderer_class = HfRenderer

    def write_files(self, folder):
        write_tokenizer(folder, 300)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 1}))


class TestWithoutChatTemplate(TestByteLevel):
    has_chat_template = False

    def write_files(self, folder):
        super().write_files(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
