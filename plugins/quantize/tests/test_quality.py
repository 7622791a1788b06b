"""`toolkit quality`: a quantized model beside its original."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from toolkit_lm_quantize.quality import _kl


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("Once upon a time there was a small dog. The capital of France is Paris. " * 8)
    return path


def measured(toolkit, *flags):
    done = toolkit("quality", *flags, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_kl_is_what_torch_computes():
    expected, found = (torch.randn(5, 30).log_softmax(-1) for _ in range(2))
    exact = torch.nn.functional.kl_div(found, expected, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(_kl(expected, found), exact)
    assert not _kl(expected, expected).any()


def test_figures_of_a_trained_model(toolkit, text):
    """int8 is indistinguishable, and int4 is farther."""
    found = {}
    for name, flags in {
        "int8": ("int8",),
        "int4": ("int4",),
        "int4 g128": ("int4", "--quantization-group-size", "128"),
    }.items():
        report = measured(
            toolkit, "tiny", "--text", str(text), "--layer-tokens", "32", "--quantization", *flags
        )
        one = found[name] = report["quality"]
        assert one["num_tokens"] > 100
        assert 0 < one["median_kl"] <= one["p99_kl"]
        layers = [layer["mean_kl"] for layer in report["layers"]]
        assert len(layers) == 6 * 4 + 2
        assert layers == sorted(layers, reverse=True)
        assert layers[0] > 0
    for name in ("int4", "int4 g128"):
        assert 5 * found["int8"]["mean_kl"] < found[name]["mean_kl"]
    int8 = found["int8"]
    assert int8["mean_kl"] < 0.001
    assert int8["perplexity"] <= 1.01 * int8["reference_perplexity"]


def test_the_reference_beside_itself_differs_in_nothing(toolkit):
    """Another checkpoint can be the reference, and it writes the text itself."""
    flags = ("--reference", "tiny", "--max-tokens", "64")
    report = measured(toolkit, "tiny", *flags)
    one = report["quality"]
    assert (one["mean_kl"], one["top1_agreement"], report["layers"]) == (0, 1, [])
    assert one["perplexity"] == one["reference_perplexity"]
    assert report["text"] == "written by tiny"


def test_the_picture_names_the_worst_layer(toolkit, text):
    done = toolkit(
        "quality",
        *("tiny", "--text", str(text), "--quantization", "int8"),
        *("--max-tokens", "32", "--quantization-override", "*.0.self_attn.qkv_proj=int4"),
    )
    assert done.code == 0, done.err
    assert "indistinguishable" in done.out
    lines = done.out.splitlines()
    first = next(i for i, line in enumerate(lines) if "one layer quantized" in line)
    assert "model.layers.0.self_attn.qkv_proj" in lines[first + 2]
    assert "█" in lines[first + 2]
    assert "and 6 more" in done.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["tiny"], "is not quantized: say how"),
        (["tiny", "--reference", "tiny", "--text", "nowhere"], "--text nowhere"),
        (["tiny", "--quantization", "int8", "--tensor-parallel-size", "2"], "on one rank"),
        (["tiny", "--reference", "tiny-dates"], "'tiny-dates' cannot be the reference"),
    ],
)
def test_what_cannot_be_compared_is_refused(toolkit, flags, words):
    done = toolkit("quality", *flags)
    assert done.code != 0
    assert words in " ".join(done.err.split())


@pytest.mark.parametrize("kind", [transformers.BertConfig, transformers.BartConfig])
def test_a_model_that_continues_no_text_is_refused(toolkit, tmp_path, kind):
    name = {"bert": "BertModel", "bart": "BartForConditionalGeneration"}[kind.model_type]
    kind(architectures=[name]).save_pretrained(tmp_path)
    done = toolkit("quality", tmp_path, "--quantization", "int8", "--renderer", "tokens")
    assert done.code != 0
    assert f"the model '{name}' of" in " ".join(done.err.split())
