"""Small random checkpoints of any family of transformers, and the whole engine against the model that wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.plugin import hookimpl

VOCAB_SIZE = 150
LENGTHS = [5, 17, 40, 3, 64, 33, 1, 21]
MAX_TOKENS = 16
# 26 blocks of 4 tokens hold one sequence of 104, not all eight, and a step computes at most 12 tokens: it preempts, and prefills in chunks.
TIGHT = {"num_kv_blocks": 26, "block_size": 4, "max_model_len": 104, "max_num_seqs": 8, "max_num_batched_tokens": 12}


class Preemptions:
    """A plugin that counts."""

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, **fields):
    """Writes a checkpoint of `{family}ForCausalLM`, none of whose weights is 0 or 1; returns the model of transformers."""
    torch.manual_seed(0)
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**tokens, **fields))
    for param in model.parameters():
        torch.nn.init.normal_(param, mean=float(param.ndim == 1), std=0.2)
    model.to(dtype).eval().save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(folder: Path, *, model_impl: str = "auto", num_kv_blocks: int | None = None, preempts: bool = True, **others):
    """Outputs of the whole engine for prompts of mixed lengths, in chunks and with preemption, with all log probabilities."""
    counter, options = Preemptions(), TIGHT | {"num_kv_blocks": num_kv_blocks or TIGHT["num_kv_blocks"], "model_impl": model_impl, **others}
    with LLM(str(folder), plugins=[counter], max_logprobs=VOCAB_SIZE, device="cpu", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=VOCAB_SIZE)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    assert counter.count > 0 or not preempts, "the pool was meant to be too small"
    return [output.outputs[0] for output in outputs]


def logprobs_of(output) -> torch.Tensor:
    """[output tokens, V]"""
    table = torch.full((len(output.token_ids), VOCAB_SIZE), torch.nan)
    for position, entries in enumerate(output.logprobs):
        for token, entry in entries.items():
            table[position, token] = entry.logprob
    return table


def reference_logprobs(model, prompt: list[int], output) -> torch.Tensor:
    """[output tokens, V], by transformers, teacher-forced along our output."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def check_parity(model, outputs) -> None:
    """In fp32: log probabilities within 1e-4 of transformers'; greedy tokens are the same where it is sure."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        reference = reference_logprobs(model, prompt, output)
        assert len(output.token_ids) == MAX_TOKENS
        assert (logprobs_of(output) - reference).abs().max() < 1e-4
        best = reference.topk(2, dim=-1)
        sure = best.values[:, 0] - best.values[:, 1] > 1e-3
        assert (torch.tensor(output.token_ids) == best.indices[:, 0])[sure].all()
