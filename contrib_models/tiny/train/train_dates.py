"""Train the tiny encoder-decoder from scratch on generated dates, save it in bfloat16 and judge it.

Usage: ``python train/train_dates.py --out DIR --minutes 8``

The exit status is 1 when the saved model has fewer than 95% of the held-out dates right.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toolkit_lm_tiny.dates import FIRST, LAST, forms, held_out, is_held_out
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

BEGIN = "<s>"
END = "</s>"
PAD = "<pad>"
CONTEXT = 64
BATCH = 128
PEAK_RATE = 2e-3
WARMUP = 0.03
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; a text stands between BEGIN and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([BEGIN, END, PAD, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([BEGIN, END, PAD])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        special_tokens=[(BEGIN, vocabulary[BEGIN]), (END, vocabulary[END])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> BartForConditionalGeneration:
    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=272,
            d_model=128,
            max_position_embeddings=CONTEXT,
            dropout=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            decoder_start_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None,
            **{
                f"{side}_{name}": value
                for side in ("encoder", "decoder")
                for name, value in sides.items()
            },
        )
    )


def draw(random: Random, tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """A batch of dates that are not held out, each in one of its forms, some in lower case."""
    texts = []
    answers = []
    while len(texts) < BATCH:
        day = FIRST + timedelta(random.randrange((LAST - FIRST).days + 1))
        if not is_held_out(day):
            text = random.choice(forms(day))
            texts.append(text.lower() if random.random() < 0.2 else text)
            answers.append(day.isoformat())
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = tokenizer(answers, padding=True, return_tensors="pt").input_ids
    labels[labels == tokenizer.pad_token_id] = IGNORED
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": labels}


def train(
    model: BartForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    seed: int,
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, weight_decay=0.01, betas=(0.9, 0.98)
    )
    random = Random(seed)
    start = time.monotonic()
    step = 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = PEAK_RATE * min(done / WARMUP, 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(**draw(random, tokenizer)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}, {done:.0%}: loss {loss.item():.4f}", flush=True)
        step += 1


@torch.inference_mode()
def judge(folder: Path, count: int) -> float:
    """The share of held-out dates that a saved model has right, by transformers."""
    model = BartForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = [(text, day.isoformat()) for day in held_out() for text in forms(day)]
    chosen = Random(1).sample(asked, count)
    right = 0
    for i in range(0, count, BATCH):
        part = chosen[i : i + BATCH]
        batch = tokenizer([text for text, _ in part], padding=True, return_tensors="pt")
        found = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=14,
            do_sample=False,
        )
        answers = tokenizer.batch_decode(found, skip_special_tokens=True)
        right += sum(answer == wanted for answer, (_, wanted) in zip(answers, part, strict=True))
    return right / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, arguments.minutes, arguments.seed)
    ids = {
        key: getattr(model.config, key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    }
    # Answers begin with it in training, after the start token.
    model.generation_config = GenerationConfig(**ids, forced_bos_token_id=model.config.bos_token_id)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    share = judge(arguments.out, 2000)
    print(f"{share:.1%} of 2,000 held-out dates are right")
    return share < 0.95


if __name__ == "__main__":
    sys.exit(main())
