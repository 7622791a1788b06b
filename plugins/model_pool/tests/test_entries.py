"""The file of models: what it may hold, and where a fault in it is."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_model_pool.durations import parse_seconds
from toolkit_lm_model_pool.entries import made_entry, read_entries, read_folder
from toolkit_lm_model_pool.model import settings_of
from toolkit_lm_server.options import ServerOptions

GOOD = """
models:
  - name: chat
    checkpoint: tiny
    aliases: [gpt-4o]
    options: {max-model-len: 128, tool_call_parser: none}
    keep_alive: 5m
  - name: words
"""


@pytest.fixture
def entries(tmp_path):
    def read(text: str):
        path = tmp_path / "models.yaml"
        path.write_text(text)
        return read_entries(str(path))

    return read


def settings(entry):
    return settings_of(entry, VllmConfig.make(max_num_seqs=3), ServerOptions(), 7.0)


def test_an_entry_overrides_what_the_command_line_says(entries):
    chat, words = entries(GOOD)
    made = settings(chat)
    assert made.config.model.model == "tiny"
    assert made.config.served_model_names == ["chat", "gpt-4o"]
    assert made.config.model.max_model_len == 128
    assert made.config.scheduler.max_num_seqs == 3
    assert made.server.tool_call_parser == "none"
    assert made.keep_alive == 300
    other = settings(words)
    assert other.config.model.model == "words"
    assert other.config.model.max_model_len is None
    assert other.keep_alive == 7


def test_a_group_lists_its_members(entries):
    chat, words = entries(GOOD + "groups:\n  big: {members: [words], exclusive: false}\n")
    assert chat.group is None
    assert words.group.swap and not words.group.exclusive and not words.group.persistent


FAULTS = {
    "models: [": (r":1:1\d?: this is not YAML", ),
    "models:\n  - name: a\n   pin: true\n": (r":3:4: this is not YAML", ),
    "modles: []": (":1:1: ", ),
    "[1]": (":1:1: ", ),
    "models: []": (":1:1: ", ),
    "models:\n  - 3\n": (":2:5: ", ),
    "models:\n  - checkpoint: tiny\n": (":2:5: ", "name"),
    "models:\n  - name: a\n    pinn: true\n": (":3:11: unknown field 'pinn'", "'pin'"),
    "models:\n  - name: a\n    pin: maybe\n": (":3:10: the entry pin must be", ),
    "models:\n  - name: a\n    aliases: [b, 3]\n": (":3:18: the entry aliases", ),
    "models:\n  - name: a b\n": (":2:11: the entry name must be", ),
    "models:\n  - name: a\n    keep_alive: soon\n": (":2:5: ", "'soon' is not a duration"),
    "models:\n  - name: a\n  - name: b\n    aliases: [a]\n": ("'a'", ":2:5 and ", ":3:5"),
    "models:\n  - {name: a, aliases: [b]}\n  - {name: b, aliases: [a]}\n": ("'[ab]'", ":2:5 and "),
    "models:\n  - name: a\n    aliases: [x, x]\n": ("'x'", ":2:5: twice"),
    "models:\n  - name: a\n    aliases: [a]\n": ("'a'", ":2:5: twice"),
    "models:\n  - name: a\n    adapters: {a: b}\n": ("'a'", ":2:5: twice"),
    "models:\n  - {name: a, adapters: {x: b}}\n  - {name: b, adapters: {x: b}}\n": ("'x'", ":2:5"),
    "models:\n  - name: a\n    adapters: [b]\n": (":3:15: the entry adapters", ),
    "models:\n  - name: a\n    adapters: {b=c: d}\n":
        (":2:5: ", "'b=c' cannot be the name of an adapter"),
    "models:\n  - name: a\n    adapters: {b: ''}\n": (":3:", "the entry adapters"),
    "models:\n  - {name: a, idle: nap}\n": (":2:5: ", "idle must be 'unload' or 'sleep'"),
    "models:\n  - {name: a, idle: sleep, sleep_level: 3}\n": (":2:41: the entry sleep_level", ),
    "models:\n  - {name: a, idle: sleep, pin: true}\n": (":2:5: ", "cannot have idle: sleep"),
    "models:\n  - {name: a, group: g}\n": (":2:22: unknown field 'group'", ),
    "models:\n  - name: a\ngroups: [3]\n": ("the file groups must be", ),
    "models:\n  - name: a\ngroups:\n  g: {members: []}\n": (":4:6: the group 'g' members", ),
    "models:\n  - name: a\ngroups:\n  g: {swop: true}\n": (":4:6: unknown field 'swop'", "'swap'"),
    "models:\n  - name: a\ngroups:\n  g: {members: [b]}\n": (":4:17: no entry has", "Known: a"),
    "models:\n  - name: a\ngroups:\n  g: {members: [a, a]}\n": (":4:20: 'a' is in the group 'g'", ),
    "models:\n  - {name: a, pin: true}\n  - name: b\ngroups:\n  g: {members: [b, a]}\n":
        (":5:20: 'a' has pin", "swap: false"),
    "models:\n  - name: a\n  - name: a\n": ("'a'", ":2:5 and ", ":3:5"),
}  # fmt: skip


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_told_with_its_line_and_column(entries, text):
    with pytest.raises(ConfigError) as caught:
        entries(text)
    for words in FAULTS[text]:
        assert caught.match(words), words
    assert "models.yaml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        read_entries(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_lenn": 3}, "unknown option 'max_model_lenn'.*'max_model_len'"),
        ({"max_model_len": "many"}, "max_model_len"),
        ({"model": "tiny"}, "unknown option 'model'"),
        ({"served_model_name": "a"}, "unknown option 'served_model_name'"),
        ({"engine_process": False}, "engine_process must be on"),
        ({"port": 3}, "unknown option 'port'"),
    ],
)
def test_a_wrong_option_names_its_model(options, words):
    entry = made_entry("a")
    entry.options.update(options)
    with pytest.raises(ConfigError, match=f"model 'a': {words}"):
        settings(entry)


def test_adapters_are_loaded_with_their_entry(entries):
    """Whichever way the other options of the plugin lora are written."""
    for written in ("{lora: {max_rank: 8}}", "[lora.max_rank=8]", "lora.max_rank=8"):
        text = GOOD + f"    adapters: {{sql: /a/sql}}\n    options: {{plugin_option: {written}}}\n"
        try:
            made = settings(entries(text)[1])
        except ConfigError as error:
            assert written[0] != "{" and "plugin_option" in str(error)
            continue
        lora = made.config.plugins.plugin_option["lora"]
        assert lora["enabled"] is True and lora["modules"] == ["sql=/a/sql"]
        assert str(lora["max_rank"]) == "8"
    twice = "    adapters: {sql: a}\n    options: {plugin_option: {lora: {modules: [b=c]}}}\n"
    with pytest.raises(ConfigError, match=r"model 'words': .* both list adapters"):
        settings(entries(GOOD + twice)[1])


def test_a_folder_gives_its_checkpoints(tmp_path):
    for name in ("b", "a", "empty"):
        (tmp_path / name).mkdir()
    for name in ("b", "a"):
        (tmp_path / name / "config.json").write_text("{}")
    assert [(entry.name, entry.checkpoint) for entry in read_folder(str(tmp_path))] == [
        ("a", str(tmp_path / "a")),
        ("b", str(tmp_path / "b")),
    ]
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_folder(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_folder(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(5, 5), ("5", 5), ("1h30m", 5400), ("250ms", 0.25), (0, 0), (-1, None), ("-1", None),
     ("-5m", None), (0.5, 0.5)],
)  # fmt: skip
def test_durations(value, seconds):
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5 m 3", "1d", True, None, [], "9" * 99, float("nan")])
def test_no_durations(value):
    if value != value:
        assert parse_seconds(value) is None
        return
    with pytest.raises(ValueError, match="is not a duration"):
        parse_seconds(value)
