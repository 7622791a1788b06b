"""`--help`, `--help=SECTION`: names whole at 80 columns, few words where nobody asked for more."""

from __future__ import annotations

import re

import pytest
from toolkit_lm.config import VllmConfig, options_of
from toolkit_lm_server.options import ServerOptions


@pytest.fixture
def narrow(toolkit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return toolkit


def test_the_help_shows_every_option(narrow):
    shown = narrow("serve", "--help=all").out
    flags = set(re.findall(r"--[a-z][\w-]*", shown))
    for o in [*VllmConfig.options(), *options_of(ServerOptions)]:
        assert o.name == "model" or o.flag in flags
        assert o.is_flag is (f"--no-{o.flag[2:]}" in flags)
    for part in (
        "MODEL",
        "Default: 16.",
        "--no-trust-remote-code",
        "auto|float32|bfloat16|float16",
    ):
        assert part in shown


@pytest.mark.parametrize("arguments", [["serve"], ["chat"], ["explain"], []])
@pytest.mark.parametrize("page", ["--help", "--help=all"])
def test_no_name_is_cut_and_no_line_too_long(narrow, arguments, page):
    shown = narrow(*arguments, page).out
    assert shown.startswith(f"Usage: {' '.join(['toolkit', *arguments])} ")
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_help_explains_the_commands_own_options_and_names_the_others(narrow):
    whole = narrow("serve", "--help=all").out
    short = narrow("serve", "--help").out
    assert len(short.splitlines()) < len(whole.splitlines()) * 2 / 3
    assert "Address to listen on." in short
    assert "Seconds that running requests get" not in short and "--shutdown-timeout" in short
    for o in VllmConfig.options():
        assert o.name == "model" or o.flag in short
    assert ("Tokens per block" in short, "Tokens per block" in whole) == (False, True)
    assert "toolkit serve --help=SECTION" in short


def test_the_help_of_a_server_begins_with_what_is_used_most(narrow):
    shown = narrow("serve", "--help").out
    [_, first] = shown.split("\nMost used:\n")
    explained = re.findall(r"(?m)^  (--[a-z-]+)", first.partition("\n\n")[0])
    assert explained[:3] == ["--host", "--port", "--api-key"] and len(explained) == 12
    flags = re.findall(r"(?<![\w-])--[a-z][a-z-]*(?=[ ,\n])", first.partition("More options:")[2])
    assert not set(explained) & set(flags), "each is there once"
    assert shown.index("Most used:") < shown.index("\nOptions:") < shown.index("More options:")
    assert "Most used:" not in narrow("serve", "--help=all").out + narrow("render", "--help").out


def test_a_section_is_shown_by_its_name(narrow):
    shown = narrow("serve", "tiny", "--help=cache", "--port", "1")
    assert (shown.code, shown.err) == (0, "")
    assert "--block-size" in shown.out and "--port" not in shown.out
    assert narrow("serve", "--help=Cache").out == shown.out
    assert "--temperature" in narrow("chat", "--help=sampling").out


def test_options_are_found_by_a_part_of_their_name(narrow):
    shown = narrow("serve", "--help=max_model").out
    assert "--max-model-len" in shown and "--max-num-seqs" not in shown
    assert narrow("serve", "--help=--max-model-len").out == shown


def test_an_unknown_section_names_the_nearest(narrow):
    for asked in ("schedular", ""):
        done = narrow("serve", f"--help={asked}")
        assert (done.code, done.out) == (2, "")
        assert "scheduler" in done.err


def test_a_text_after_two_dashes_asks_for_no_help(narrow):
    assert "got unexpected extra argument" in narrow("env", "--", "--help=all").err


def test_choices_that_do_not_fit_go_on_in_the_next_line(toolkit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "52")
    shown = toolkit("serve", "--help=pooler").out
    assert "  --pooling-type auto|CLS|LAST|MEAN|MAX\n    |WEIGHTED_MEAN" in shown


def test_minus_v_prints_the_version(toolkit):
    assert toolkit("-V") == toolkit("--version")
