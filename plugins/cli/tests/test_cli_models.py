"""The commands that run a model, on a small one."""

from __future__ import annotations

import io
import json

import pytest

SMALL = ("--load-format", "dummy", "--num-kv-blocks", "64", "--temperature", "0", "--ignore-eos")


@pytest.fixture
def generate(toolkit, checkpoint, tmp_path):
    """Runs `toolkit generate` over the text of a prompts file; returns what it left, and the output
    rows."""

    def call(name, text, *arguments):
        prompts = tmp_path / name
        out = tmp_path / "out.jsonl"
        prompts.write_text(text, encoding="utf-8")
        done = toolkit(
            "generate", checkpoint, "--prompts", prompts, "--out", out, *SMALL, *arguments
        )
        return done, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    return call


def test_the_help_lists_the_commands(toolkit):
    listed = toolkit("--help").out
    assert [
        name
        for name in (
            "chat",
            "complete",
            "embed",
            "env",
            "explain",
            "generate",
            "list",
            "pull",
            "rm",
        )
        if f" {name} " not in listed
    ] == []
    assert toolkit("plugins", "show", "cli").out.count("toolkit_lm_cli.") == 12


def test_generate_completes_each_line_in_order(generate):
    done, rows = generate(
        "prompts.txt", "first\n\nzweiter Prompt, länger\n3\n", "--max-tokens", "4"
    )
    assert done.code == 0, done.err
    assert [row["prompt"] for row in rows] == ["first", "zweiter Prompt, länger", "3"]
    for row in rows:
        (output,) = row["outputs"]
        assert (output["num_tokens"], output["finish_reason"], row["error"]) == (4, "length", None)
        assert isinstance(output["text"], str)
    assert "3/3" in done.out


def test_a_bad_line_does_not_stop_the_others(generate):
    lines = [
        {"prompt": "good", "max_tokens": 2},
        {"prompt_token_ids": [1, 2, 3], "n": 2, "temperature": 1.0},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "x" * 500},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "temperatur": 1},
        {"prompt": "x", "messages": []},
        {},
        {"prompt_token_ids": [10**6]},
        {"prompt": "good again"},
    ]
    text = "\n".join([*map(json.dumps, lines), "not json", "[1]"])
    done, rows = generate("prompts.jsonl", text, "--max-tokens", "3")
    assert done.code == 1
    assert "8 of 12 prompts failed" in done.err
    assert [row["error"] is None for row in rows] == [
        True,
        True,
        True,
        *[False] * 6,
        True,
        False,
        False,
    ]
    assert [len(row["outputs"]) for row in rows[:3]] == [1, 2, 1]
    assert [rows[i]["outputs"][0]["num_tokens"] for i in (0, 1, 9)] == [2, 3, 3]
    assert rows[2]["prompt"] == lines[2]["messages"]
    assert "temperature must be between" in rows[4]["error"]
    assert "Did you mean 'temperature'" in rows[5]["error"]
    assert rows[10]["prompt"] == "not json"


@pytest.mark.parametrize(
    ("name", "error"),
    [("absent.txt", "cannot be read"), ("prompts.csv", "must end in .txt or .jsonl")],
)
def test_a_wrong_prompts_file_is_one_error(toolkit, checkpoint, tmp_path, name, error):
    done = toolkit(
        "generate", checkpoint, "--prompts", tmp_path / name, "--out", tmp_path / "out.jsonl"
    )
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --prompts: ")
    assert error in done.err


def test_complete_streams_a_text(toolkit, checkpoint):
    first = toolkit("complete", checkpoint, *SMALL, "--prompt", "Once", "--max-tokens", "8")
    assert first.code == 0, first.err
    assert first.out.endswith("\n")
    assert toolkit("complete", checkpoint, *SMALL, "--prompt", "Once", "--max-tokens", "8") == first


def test_chat_answers_one_message(toolkit, checkpoint):
    done = toolkit(
        "chat", checkpoint, *SMALL, "--message", "Hi", "--system", "Be brief.", "--max-tokens", "5"
    )
    assert done.code == 0, done.err
    assert done.out.endswith("\n")


def test_chat_reads_messages_from_standard_input(toolkit, checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd you?\n"))
    done = toolkit("chat", checkpoint, *SMALL, "--max-tokens", "1", "--stop-token-ids", "255")
    assert done.code == 0, done.err
    assert done.out.count("\n") >= 2


def test_a_request_that_cannot_be_served_is_one_error(toolkit, checkpoint):
    done = toolkit("complete", checkpoint, *SMALL, "--prompt", "x" * 500)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert (
        "Traceback"
        in toolkit("complete", checkpoint, *SMALL, "--prompt", "x" * 500, "--traceback").err
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--temperature", "-1"], "error: --temperature must be between 0"),
        (
            ["--max-tokens", "many"],
            "error: --max-tokens must be a whole number or none, not 'many'",
        ),
        (["--top-p", "0"], "error: --top-p must be above 0"),
        (["--typical-p", "0"], "error: --typical-p must be above 0"),
        (["--block-size", "0"], "error: --block-size must be between 1 and 1024"),
        (["--n", "2"], "one answer is streamed"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(toolkit, checkpoint, arguments, error):
    done = toolkit("complete", checkpoint, "--prompt", "x", *arguments)
    assert (done.code, done.out) == (2, "")
    assert error in done.err
