"""Encoders and classifiers without a class of ours give transformers' vectors and logits."""

import pytest
import torch
import transformers
from tiny_models import save
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.errors import CheckpointError

PROMPTS = [[5, 9, 11, 1], [7, 8, 3, 1], [4] * 17 + [1], [6, 1]]
"""The first two are computed together."""
VECTORS = PoolingParams(task="token_embed", normalize=False)
LOGITS = PoolingParams(task="classify", use_activation=False)


def pooled(folder, params, prompts=PROMPTS):
    options = {"model_impl": "transformers_pooling", "dtype": "float32", "max_model_len": 64}
    with LLM(str(folder), renderer="tokens", **options) as llm:
        outputs = llm.encode([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [torch.tensor(output.outputs.data) for output in outputs]


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("data2vec-text", "Data2VecTextModel"), ("fnet", "FNetForMaskedLM")],
)
def test_vectors_of_tokens(model_type, architecture, tmp_path):
    model = save(model_type, tmp_path, architecture=architecture)
    for prompt, found in zip(PROMPTS, pooled(tmp_path, VECTORS), strict=True):
        with torch.inference_mode():
            expected = model.base_model(torch.tensor([prompt]))[0][0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gpt_neox", "GPTNeoXForSequenceClassification"),
        ("bart", "BartForSequenceClassification"),
        # It has a pooler between the hidden states and the classifier.
        ("deberta", "DebertaForSequenceClassification"),
    ],
)
def test_logits_of_a_classifier(model_type, architecture, tmp_path):
    model = save(model_type, tmp_path, architecture=architecture, num_labels=3)
    for prompt, found in zip(PROMPTS, pooled(tmp_path, LOGITS), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_classifier_of_sequences_has_no_classes_of_tokens(tmp_path):
    save("gpt_neox", tmp_path, architecture="GPTNeoXForSequenceClassification", num_labels=3)
    with pytest.raises(Exception, match="token_classify"):
        pooled(tmp_path, PoolingParams(task="token_classify"))


@pytest.mark.parametrize("architecture", ["FunnelModel", "FunnelForMaskedLM"])
def test_prompts_that_the_code_of_transformers_cannot_run(architecture, tmp_path):
    """Funnel pools its tokens twice, and needs five. Shorter prompts fail alone."""
    save("funnel", tmp_path, architecture=architecture, block_sizes=[1, 1, 1])
    model = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    prompts = [*PROMPTS, [7] * 5, [9] * 12]
    options = {"model_impl": "transformers_pooling", "dtype": "float32", "max_model_len": 64}
    with LLM(str(tmp_path), renderer="tokens", **options) as llm:
        for _ in range(2):
            outputs = llm.encode(
                [{"prompt_token_ids": p} for p in prompts], VECTORS, use_tqdm=False
            )
            for prompt, output in zip(prompts, outputs, strict=True):
                if len(prompt) < 5:
                    assert "not finite" in output.error
                    continue
                with torch.inference_mode():
                    expected = model.base_model(torch.tensor([prompt]))[0][0]
                found = torch.tensor(output.outputs.data)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_pictures_is_refused(tmp_path):
    save("bert", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("BertLMHeadModel", "ViTModel"))
    with pytest.raises(CheckpointError, match="ViTModel"):
        LLM(str(tmp_path), renderer="tokens")
