"""Completions of a shell: commands, flags, values and models."""

from __future__ import annotations

import pytest


@pytest.fixture
def complete(toolkit, monkeypatch):
    """Completer that returns bash's suggestions for the last word of a line."""

    def call(line):
        words = line.split(" ")
        monkeypatch.setenv("_TOOLKIT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        done = toolkit()
        assert done.err == ""
        return done.out.split()

    return call


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("toolkit ser", ["serve"]),
        ("toolkit plugins sh", ["show"]),
        ("toolkit serve --dtype b", ["bfloat16"]),
        ("toolkit serve --log-level w", ["warning"]),
        ("toolkit serve tiny --attention-backend sd", ["sdpa"]),
        ("toolkit serve --scheduling-policy f", ["fcfs", "fair"]),
        ("toolkit serve --load-format d", ["dummy"]),
        ("toolkit serve --disable-plugins llg", ["llguidance"]),
        ("toolkit plugins show dec", ["decoder"]),
        ("toolkit serve --max-model", ["--max-model-len"]),
        ("toolkit serve tiny-v", ["tiny-vision"]),
        ("toolkit nosuch --x", []),
        ("toolkit serve --chat-template ", []),
    ],
)
def test_completion(complete, line, offered):
    assert complete(line) == offered


def test_models_in_the_cache_of_the_hub_are_offered(complete, monkeypatch, tmp_path):
    for name in ("models--Qwen--Qwen3-0.6B", "models--gpt2", "datasets--a--b"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert complete("toolkit chat Q") == ["Qwen/Qwen3-0.6B"]
    assert {"gpt2", "tiny"} < set(complete("toolkit chat "))
    assert "a/b" not in complete("toolkit chat ")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert complete("toolkit chat Q") == []


def test_a_wrong_variable_puts_no_words_between(complete, monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_BLOCK_SISE", "16")
    assert complete("toolkit ser") == ["serve"]
    monkeypatch.setenv("TOOLKIT_LM_CONFIG", "none")
    monkeypatch.setenv("TOOLKIT_LM_PLUGINS", "nosuch")
    assert complete("toolkit ser") == []


def test_the_script_for_a_shell_is_shown(toolkit, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    assert "complete -o default -F _toolkit_completion toolkit" in toolkit("--show-completion").out
