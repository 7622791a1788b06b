"""T5's encoder as an embedder: of a checkpoint of its own, and of one that has a decoder too."""

import pytest
import torch
import transformers
from toolkit_lm import LLM
from toolkit_lm_devkit import randomize, write_tokenizer

VOCAB_SIZE = 272
FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 2,
}
PROMPTS = [
    {"prompt_token_ids": [(7 * i + length) % VOCAB_SIZE for i in range(length)]}
    for length in (5, 40, 1, 150)
]


def embeddings(folder, **options):
    with LLM(str(folder), device="cpu", dtype="float32", **options) as llm:
        return [
            torch.tensor(output.outputs.embedding) for output in llm.embed(PROMPTS, use_tqdm=False)
        ]


@pytest.mark.parametrize(
    "kind",
    [
        "T5EncoderModel",
        "MT5EncoderModel",
        "T5ForConditionalGeneration",
        "MT5ForConditionalGeneration",
    ],
)
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_means_of_hidden_states(tmp_path, kind, feed_forward):
    reference_class = getattr(transformers, kind)
    model = reference_class(
        reference_class.config_class(feed_forward_proj=feed_forward, **FIELDS)
    ).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, VOCAB_SIZE)
    options = {"convert": "embed"} if "Conditional" in kind else {}
    for prompt, found in zip(PROMPTS, embeddings(tmp_path, **options), strict=True):
        with torch.inference_mode():
            states = model.get_encoder()(
                torch.tensor([prompt["prompt_token_ids"]])
            ).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
        assert (found - expected).abs().max() < 1e-5
