"""Which checkpoints this renderer is chosen for, beside hf and alone."""

import pytest

pytest.importorskip(
    "mistral_common",
    reason="mistral-common is not installed: see the README for an environment of its own",
)

from toolkit_lm.config import Checkpoint, PluginsConfig, VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import ModelRegistry, Plugins, hookimpl
from toolkit_lm.resolution.resolution import choose_renderer

ME = "renderer_mistral"
BOTH = ["renderer_hf", ME]


@pytest.fixture
def choose(tmp_path):
    """choose(files, plugins, **options): the renderer's name, and what was considered."""

    class Registers:
        name = "registers"

        @hookimpl
        def toolkit_register_models(self, models: ModelRegistry) -> None:
            models.add("A", "none:A")

    def choose(files, plugins, **options):
        if "renderer_hf" in plugins:
            pytest.importorskip("toolkit_lm_renderer_hf")
        for name in files:
            (tmp_path / name).write_text("{}")
        config = VllmConfig.default({}, model=str(tmp_path), **options)
        config = config.with_checkpoint(
            Checkpoint(path=str(tmp_path), architecture="A", hf_config={})
        )
        return choose_renderer(
            config, Plugins.load(PluginsConfig(plugins=plugins), extra=[Registers()])
        )

    return choose


def test_it_serves_what_only_it_can_read(choose):
    name, candidates = choose(["tekken.json"], BOTH)
    assert name == "mistral"
    assert "has none of" in dict(candidates)["hf"]


@pytest.mark.parametrize("plugins", [BOTH, BOTH[::-1]])
def test_hf_keeps_a_checkpoint_with_files_of_both(choose, plugins):
    name, candidates = choose(["tekken.json", "tokenizer.json"], plugins)
    assert name == "hf"
    assert dict(candidates)["mistral"] is None


def test_it_is_asked_for_by_name(choose):
    assert choose(["tekken.json", "tokenizer.json"], BOTH, renderer="mistral")[0] == "mistral"


def test_it_serves_files_of_both_where_hf_is_not_installed(choose):
    assert choose(["tekken.json", "tokenizer.json"], [ME])[0] == "mistral"


def test_it_reads_no_tokenizer_json(choose):
    with pytest.raises(UnsupportedError, match=r"has none of tekken\.json"):
        choose(["tokenizer.json"], [ME])


def test_a_chat_template_is_refused(choose):
    with pytest.raises(
        UnsupportedError, match="has no chat template that chat_template could replace"
    ):
        choose(["tekken.json"], BOTH, chat_template="{{ messages }}")
