"""Scripts as vLLM's users write them, in tests/vllm_examples: only their imports and their models
were changed."""

from __future__ import annotations

import gc
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toolkit_lm_devkit import randomize

FOLDER = Path(__file__).parent / "vllm_examples"
WORDS = [
    "a",
    "the",
    "cat",
    "on",
    "roof",
    "weather",
    "is",
    "fine",
    "seven",
    "apples",
    "which",
    "animal",
]
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a script in this process, and returns what it printed."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        capfd.readouterr()
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        gc.collect()
        return capfd.readouterr().out

    return script


def write_tokenizer(folder: Path) -> None:
    vocab = {
        word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A function (number of labels) -> the folder of a random BERT classifier."""

    def make(num_labels: int) -> str:
        folder = tmp_path_factory.mktemp(f"bert{num_labels}")
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**SHAPE, num_labels=num_labels)
        ).eval()
        randomize(model)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The folder of a random reward model of Qwen2's kind."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, max_position_embeddings=1024)
    weights = {
        f"model.{name}": tensor
        for name, tensor in transformers.Qwen2Model(config).state_dict().items()
    }
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    save_file(
        weights | {f"score.{name}": tensor for name, tensor in head.state_dict().items()},
        folder / "model.safetensors",
    )
    fields = {**config.to_dict(), "architectures": ["Qwen2ForRewardModel"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    write_tokenizer(folder)
    return str(folder)


def test_every_script_has_a_test():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(scripts) == 11
    called = set(re.findall(r'run\(\s*"(\w+)"', text))
    assert scripts - called == set()


def test_basic(run):
    texts = re.findall("^Output: (.*)$", run("basic"), re.MULTILINE)
    # They are drawn: one of them may be empty.
    assert len(texts) == 4 and max(map(len, texts)) > 5


def test_generate(run):
    printed = run(
        "generate",
        "--max-model-len",
        "64",
        "--max_tokens",
        "4",
        "--temperature",
        "0",
        "--top-k",
        "3",
    )
    assert printed.count("generated text: ") == 3


def test_chat(run, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    printed = run(
        "chat", "--max-tokens", "12", "--temperature", "0", "--chat-template-path", str(template)
    )
    answers = re.findall("^Generated text: (.+)$", printed, re.MULTILINE)
    assert len(answers) == 21 and "Paris" in answers[0]
    assert len(set(answers[:11])) == 1 and answers[11] != answers[0]


def test_embed(run):
    assert run("embed").count("(size=128)") == 3


def test_classify(run, classifier):
    printed = run("classify", "--model", classifier(3))
    found = [
        json.loads(text)
        for text in re.findall(r"Class Probabilities: (\[.+\]) \(size=3\)", printed)
    ]
    assert [sum(probs) for probs in found] == pytest.approx([1, 1, 1])


def test_score(run, classifier):
    scores = [
        float(text)
        for text in re.findall(
            r"^Score: (\S+)$", run("score", "--model", classifier(1)), re.MULTILINE
        )
    ]
    assert len(scores) == 2 and all(0 < score < 1 for score in scores) and scores[0] != scores[1]


def test_reward(run, reward_model):
    assert re.findall(r"\(size=(\d+)\)", run("reward", "--model", reward_model)) == ["7", "6", "4"]


def test_prefix_caching(run):
    printed = run("prefix_caching")
    assert "Generated answers are the same: True" in printed
    assert int(re.search(r"Cached tokens: (\d+)", printed)[1]) > 100


def test_structured_outputs(run):
    printed = dict(
        line.split(": ", 1) for line in run("structured_outputs").splitlines() if ": " in line
    )
    assert printed["choice"] in ("Good", "Bad")
    assert re.fullmatch(r"\w*(@(\w*(\.com?)?)?)?", printed["regex"])
    # A document may be longer than 50 tokens: then it is a beginning of one.
    assert re.match(r"\s*\{", printed["json"])
    assert printed["grammar"] in [
        f"SELECT {column} FROM {table}"
        for column in ("name", "age")
        for table in ("pets", "people")
    ]


def test_llm_engine_example(run):
    printed = run("llm_engine_example", "--model", "tiny", "--max-num-seqs", "4")
    lines = [line for line in printed.splitlines() if line.startswith("RequestOutput(")]
    assert len(lines) == 3
    assert sum("prompt_logprobs=[None, {" in line for line in lines) == 1
    assert sum(line.count("CompletionOutput(") for line in lines) == 4


def test_async_llm_streaming(run):
    printed = run("async_llm_streaming")
    assert printed.count("Generation complete!") == 3
    assert all(answer for answer in re.findall(r"Response: (.*)", printed))
