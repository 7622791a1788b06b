"""Datasets: what is sent, and what is said of a bad file."""

from __future__ import annotations

import json

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_bench.datasets import Prompt, make_works
from toolkit_lm_bench.options import DatasetOptions


def make(seed=0, **options):
    return make_works(DatasetOptions(**options), seed)


def test_random_prompts_have_exact_lengths():
    prompts = make(num_prompts=5, input_len=7, output_len=3, vocab_size=50)
    assert [(len(one.content), one.max_tokens) for one in prompts] == [(7, 3)] * 5
    assert {token_id for one in prompts for token_id in one.content} <= set(range(5, 50))
    assert make(num_prompts=5) == make(num_prompts=5) != make(1, num_prompts=5)


def test_a_shared_prefix():
    first, second = make(dataset="shared-prefix", num_prompts=2, input_len=4, prefix_len=6)
    assert first.content[:6] == second.content[:6] and first.content[6:] != second.content[6:]
    assert [len(one.content) for one in (first, second)] == [10, 10]


def test_token_ids_as_text_are_a_word_each():
    assert len(Prompt([5, 6, 7], 1).text.split()) == 3
    assert Prompt("as it is", 1).text == "as it is"


def test_conversations(tmp_path):
    file = tmp_path / "talks.jsonl"
    said = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "and?"},
    ]
    answer = {"role": "assistant", "content": "hello"}
    file.write_text(
        json.dumps({"messages": [*said[:2], answer, said[2]]})
        + "\n\n"
        + json.dumps([said[1], answer])
        + "\n"
    )
    found = make(dataset="conversation", dataset_path=str(file), num_prompts=2, output_len=4)
    assert sorted((len(one.messages), one.max_tokens) for one in found) == [(1, 4), (3, 4)]
    assert said in [one.messages for one in found]


def test_sharegpt(tmp_path):
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "What is new?"}, {"from": "gpt", "value": "x" * 41}]
    file.write_text(json.dumps([{"id": "1", "conversations": turns}, {"conversations": turns[:1]}]))
    options = {"dataset": "sharegpt", "dataset_path": str(file), "num_prompts": 1}
    assert make(**options) == [Prompt("What is new?", 11)]
    assert make(**options, output_len=5) == [Prompt("What is new?", 5)]
    with pytest.raises(ConfigError, match=r"share.json' has 1 prompts, and 2 are asked for"):
        make(**options | {"num_prompts": 2})


@pytest.mark.parametrize(
    ("dataset", "text", "message"),
    [
        ("conversation", "{", "line 1 of .* is not JSON"),
        ("conversation", "\n[3]", "line 2 of .* is not a conversation"),
        ("conversation", "{}", "line 1 of .* is not a conversation"),
        ("conversation", '[{"role": "system", "content": "x"}]', "without a user's message"),
        ("sharegpt", "{}", "holds no list of conversations"),
        (
            "sharegpt",
            '[{"conversations": [{"from": "human"}]}]',
            "item 0 of .* is not in ShareGPT's format",
        ),
        ("sharegpt", "[3]", "item 0"),
    ],
)
def test_a_bad_file_is_told_with_its_place(tmp_path, dataset, text, message):
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"'dataset_path': .*{message}"):
        make(dataset=dataset, dataset_path=str(file), num_prompts=1)


def test_a_missing_file():
    with pytest.raises(ConfigError, match="'conversation' needs a file"):
        make(dataset="conversation")
    with pytest.raises(ConfigError, match="'/nowhere/x' cannot be read"):
        make(dataset="sharegpt", dataset_path="/nowhere/x")
