"""lm-eval: `local-completions` with likelihoods, texts and the server's tokenizer;
`local-chat-completions`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import page
import pytest
import torch
import transformers

FACTS = [
    {
        "question": "What is the capital of France?",
        "choices": [" Paris", " The capital of France is Paris."],
        "answer": 1,
    },
    {
        "question": "What is the capital of Italy?",
        "choices": [" Paris", " The capital of Italy is Rome."],
        "answer": 1,
    },
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "say": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer].strip()}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_they_are_the_versions_that_the_page_tells():
    pinned = page.versions(page.BENCHMARKS)
    assert {name: version(name) for name in pinned} == pinned


@pytest.fixture
def evaluate(key, tmp_path):
    """evaluate(model, tasks, arguments of the model, flags): by task, its results and its samples,
    from files that the command writes."""
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in FACTS))
    for name, task in TASKS.items():
        files = {"test": str(tmp_path / "facts.jsonl")}
        head = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "test_split": "test",
        }
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(
            json.dumps({**head, "doc_to_text": "{{question}}", "target_delimiter": "", **task})
        )

    def evaluate(
        model: str, tasks: str, arguments: dict[str, Any], *flags: str
    ) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        told = ",".join(f"{name}={value}" for name, value in arguments.items())
        command = [
            Path(sys.executable).with_name("lm-eval"),
            "run",
            "--model",
            model,
            "--model_args",
            told,
            "--tasks",
            tasks,
        ]
        command += [
            "--include_path",
            tmp_path,
            "--output_path",
            tmp_path / "out",
            "--log_samples",
            *flags,
        ]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            command,
            env=page.environ() | offline | {"OPENAI_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        [results] = (tmp_path / "out").rglob("results_*.json")
        samples = {
            name: next((tmp_path / "out").rglob(f"samples_{name}_*.jsonl"))
            for name in tasks.split(",")
        }
        return json.loads(results.read_text())["results"], {
            name: [json.loads(line) for line in path.read_text().splitlines()]
            for name, path in samples.items()
        }

    return evaluate


def test_likelihoods_are_those_of_the_model(evaluate, url, key):
    """Each choice's log likelihood is the one that transformers computes, by a tokenizer of the
    server's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(page.TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(page.TINY, dtype=torch.float32)
    # The key for the tokenizer is told apart from that of the environment.
    arguments = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "remote",
        "auth_token": key,
        "max_length": 512,
    }
    results, samples = evaluate("local-completions", "choose,say", arguments)
    found = [[float(likelihood) for [[likelihood, _]] in one["resps"]] for one in samples["choose"]]
    for fact, likelihoods in zip(FACTS, found, strict=True):
        context = tokenizer(fact["question"], add_special_tokens=False).input_ids
        for choice, likelihood in zip(fact["choices"], likelihoods, strict=True):
            ids = torch.tensor(
                [tokenizer(fact["question"] + choice, add_special_tokens=False).input_ids]
            )
            logprobs = (
                model(ids).logits[0, :-1].log_softmax(-1)[range(ids.shape[1] - 1), ids[0, 1:]]
            )
            assert likelihood == pytest.approx(logprobs[len(context) - 1 :].sum().item(), abs=1e-3)
    assert results["choose"]["acc,none"] == sum(max(one) == one[1] for one in found) / len(FACTS)
    assert all(isinstance(text, str) for one in samples["say"] for [text] in one["resps"])


def test_chats(evaluate, url):
    """The tiny model knows these capitals."""
    arguments = {"model": "tiny", "base_url": f"{url}/v1/chat/completions", "num_concurrent": 2}
    results, _ = evaluate("local-chat-completions", "say", arguments, "--apply_chat_template")
    assert results["say"]["exact_match,none"] == 1
