"""Train the adapter `adapter_pirate` of the tiny chat model: LoRA, with PEFT.

Usage: ``python train/train_adapter.py --out DIR --minutes 8``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import IM_END, Corpus, Stretch
from peft import LoraConfig, get_peft_model
from toolkit_lm_tiny.pirate import speak
from torch import Tensor
from torch.nn.functional import cross_entropy
from train import IGNORED, learning_rate
from transformers import AutoModelForCausalLM, AutoTokenizer

CHECKPOINT = Path(__file__).parents[1] / "src/toolkit_lm_tiny/checkpoint"
LENGTH = 128
ROWS = 12
"""Windows of a step, which begin with a whole document."""
SEED = 11


def documents(seed: int) -> Iterator[list[Stretch]]:
    """Chats of the corpus, whose replies are a pirate's."""
    corpus = Corpus(seed)
    while True:
        yield [
            Stretch(speak(piece.text.removesuffix(IM_END)) + IM_END, True)
            if piece.learned
            else piece
            for piece in corpus.chat()
        ]


def batches(tokenizer: AutoTokenizer, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids, and the labels of the tokens that follow them: [ROWS, LENGTH] each."""
    source = documents(seed)
    encode = tokenizer.backend_tokenizer.encode
    while True:
        rows = []
        targets = []
        for _ in range(ROWS):
            ids: list[int] = []
            labels: list[int] = []
            while len(ids) <= LENGTH:
                for piece in next(source):
                    tokens = encode(piece.text, add_special_tokens=False).ids
                    ids += tokens
                    labels += tokens if piece.learned else [IGNORED] * len(tokens)
            rows.append(ids[:LENGTH])
            targets.append(labels[1 : LENGTH + 1])
        yield torch.tensor(rows), torch.tensor(targets)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train tiny's adapter.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0)
    source = batches(tokenizer, SEED)
    start = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        ids, labels = next(source)
        learned = labels != IGNORED
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[learned].float(), labels[learned])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"step {step}  {minutes:.1f} min  loss {loss.item():.4f}", flush=True)
    config.base_model_name_or_path = "tiny"
    model.to(torch.bfloat16).save_pretrained(options.out)
    (options.out / "README.md").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
