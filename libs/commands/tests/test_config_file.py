"""The file of options: what it may hold, and what wins over it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from toolkit_lm.config import VllmConfig, option, options_of
from toolkit_lm.errors import ConfigError
from toolkit_lm_commands.config_file import merge_options, read_file


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    count: Annotated[int, option("A count.", ge=1, le=8)] = 2
    ratio: Annotated[float, option("A ratio.", ge=0, le=1)] = 0.5
    color: Annotated[Literal["red", "green"], option("A color.")] = "red"


OPTIONS = options_of(Sample)


def test_a_flag_wins_over_environment_over_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("count: 3\nratio: 0.1\ncolor: green\n")
    environ = {"TOOLKIT_LM_COUNT": "4", "TOOLKIT_LM_RATIO": "0.2", "HOME": "x"}
    assert merge_options(OPTIONS, {"count": "5"}, environ=environ, file=file) == {
        "count": 5,
        "ratio": 0.2,
        "color": "green",
    }
    assert merge_options(OPTIONS, {}, environ={}, file=None) == {}


def test_an_unknown_key_names_the_nearest(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("coumt: 3\n")
    with pytest.raises(
        ConfigError, match=r"options.yaml'?: unknown option 'coumt'. Did you mean 'count'"
    ):
        merge_options(OPTIONS, {}, environ={}, file=file)


def test_options_of_other_commands_are_let_pass(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("port: 80\ncount: 3\n")
    assert merge_options(
        OPTIONS, {}, environ={"TOOLKIT_LM_PORT": "81"}, file=file, foreign=["port"]
    ) == {"count": 3}


def test_a_wrong_value_names_the_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("count: many\n")
    with pytest.raises(ConfigError, match=r"config file .*options.yaml"):
        merge_options(OPTIONS, {}, environ={}, file=file)


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\x00", "just words"])
def test_a_broken_file_is_one_error(tmp_path, text):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"options\.yaml"):
        read_file(file)


def test_a_file_may_be_empty_and_its_keys_may_have_dashes(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("")
    assert read_file(file) == {}
    file.write_text("max-num-seqs: 3\n")
    assert read_file(file) == {"max_num_seqs": 3}
    with pytest.raises(ConfigError, match=r"absent"):
        read_file(tmp_path / "absent.yaml")


def test_names_of_the_model_are_one_or_several(tmp_path):
    """Names are given as a text or a list in the file, in an environment variable, and as repeated
    flags."""
    file = tmp_path / "options.yaml"
    names = "served_model_name"
    for text, expected in (
        ("one", ["one"]),
        ("[one, two/2]", ["one", "two/2"]),
        ("\n- one\n", ["one"]),
    ):
        file.write_text(f"{names}: {text}")
        assert merge_options(VllmConfig.options(), {}, environ={}, file=file) == {names: expected}
    assert merge_options(
        VllmConfig.options(), {}, environ={"TOOLKIT_LM_SERVED_MODEL_NAME": "a,b"}, file=None
    ) == {names: ["a", "b"]}
    config = VllmConfig.make(
        **merge_options(VllmConfig.options(), {names: ["c", "d"]}, environ={}, file=None)
    )
    assert (config.served_model_name, config.served_model_names) == ("c", ["c", "d"])
