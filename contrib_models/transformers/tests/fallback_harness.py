"""Small random checkpoints of any family of transformers, and the whole engine against the model
that wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens, randomize
from toolkit_lm_devkit.generation import Generated, generate as generate_by_engine

VOCAB_SIZE = 150
LENGTHS = [5, 17, 40, 3, 64, 33, 1, 21]
MAX_TOKENS = 16
# 26 blocks of 4 tokens hold one sequence of 104, not all eight, and a step computes at most 12
# tokens: it preempts, and prefills in chunks.
TIGHT = {
    "num_kv_blocks": 26,
    "block_size": 4,
    "max_model_len": 104,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
}


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, **fields):
    """Writes a checkpoint of `{family}ForCausalLM`, none of whose weights is 0 or 1; returns the
    model of transformers."""
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**tokens, **fields)
    )
    randomize(model)
    model.to(dtype).eval().save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def generate(
    folder: Path,
    *,
    model_impl: str = "auto",
    num_kv_blocks: int | None = None,
    preempts: bool = True,
    **others,
) -> Generated:
    """Outputs of the whole engine for prompts of mixed lengths, in chunks and with preemption."""
    options = TIGHT | {
        "num_kv_blocks": num_kv_blocks or TIGHT["num_kv_blocks"],
        "model_impl": model_impl,
        **others,
    }
    generated = generate_by_engine(
        folder, prompts(), vocab_size=VOCAB_SIZE, max_tokens=MAX_TOKENS, device="cpu", **options
    )
    assert generated.preemptions > 0 or not preempts, "the pool was meant to be too small"
    return generated


def reference_logprobs(model, generated: Generated) -> list[torch.Tensor]:
    """Per prompt: [output tokens, V], by transformers, teacher-forced along our output."""
    found = []
    for prompt, token_ids in zip(prompts(), generated.token_ids, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0].float()
        found.append(torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1))
    return found


def check_parity(model, generated: Generated) -> None:
    """In fp32: log probabilities are transformers', and so are greedy tokens, where it is sure."""
    for reference, token_ids, logprobs in zip(
        reference_logprobs(model, generated), generated.token_ids, generated.logprobs, strict=True
    ):
        assert len(token_ids) == MAX_TOKENS
        assert_same_logits(logprobs, reference)
        assert_same_tokens(token_ids, reference)
