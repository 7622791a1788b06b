"""Train the tiny chat model from scratch on generated text, save it in bfloat16 and judge it.

Usage: ``python train/train.py --out DIR --minutes 40``

The exit status is 1 when the saved model knows fewer than 95% of its facts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from corpus import BOS, CHAT_TEMPLATE, IM_END, IM_START, PAD, Corpus, tokenizer_texts
from judge import BAR, judge_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1536
CONTEXT = 512
TOKENS_PER_STEP = 4096
# Short windows are cheaper and start more chats at position 0; the long ones teach all positions of
# the context.
WINDOWS = (128, 256, 512)
WINDOW_WEIGHTS = (5, 3, 2)
# Some programs put the BOS token before every prompt: a part of the windows has it, so that it does
# no harm.
BOS_SHARE = 0.1
PEAK_RATE = 3e-3
WARMUP = 0.02
WEIGHT_DECAY = 0.01
IGNORED = -100


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that writes each digit as a token of its own and adds no
    special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(seed, 20_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and the labels of the tokens that follow them, windows of one random length
    per batch.

    Every window starts with a whole document and goes on with others until it is full, which also
    teaches the model to answer after a long history.
    """
    rng = Random(seed)
    documents = Corpus(seed).documents()
    encode = tokenizer.backend_tokenizer.encode
    bos = tokenizer.bos_token_id
    while True:
        length = rng.choices(WINDOWS, WINDOW_WEIGHTS)[0]
        rows = []
        targets = []
        for _ in range(TOKENS_PER_STEP // length):
            ids, labels = ([bos], [IGNORED]) if rng.random() < BOS_SHARE else ([], [])
            while len(ids) <= length:
                for piece in next(documents):
                    tokens = encode(piece.text, add_special_tokens=False).ids
                    ids += tokens
                    labels += tokens if piece.learned else [IGNORED] * len(tokens)
            rows.append(ids[:length])
            targets.append(labels[1 : length + 1])
        yield torch.tensor(rows), torch.tensor(targets)


def learning_rate(progress: float) -> float:
    """Warm up linearly, then follow a cosine down to nearly nothing."""
    if progress < WARMUP:
        return PEAK_RATE * max(progress / WARMUP, 0.01)
    return PEAK_RATE * (
        0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))
    )


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Build AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9)


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Give the mean loss of the learned tokens; no logits are made for the others."""
    learned = labels != IGNORED
    # The processor multiplies bfloat16 matrices faster; the weights themselves stay in float32
    # while training.
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[learned])
    return cross_entropy(logits.float(), labels[learned])


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int,
    minutes: float,
) -> None:
    """Train until the steps or the minutes run out, whichever comes first; the learning rate
    follows that clock."""
    model.train()
    optimizer = make_optimizer(model)
    source = batches(tokenizer, seed)
    start = time.monotonic()
    step = 0
    mean_loss = math.nan
    while (progress := max(step / steps, (time.monotonic() - start) / (60 * minutes))) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = loss_of(model, *next(source))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value, step = loss.item(), step + 1
        mean_loss = value if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * value
        if step % 50 == 0:
            elapsed = time.monotonic() - start
            rate = step * TOKENS_PER_STEP / elapsed
            print(
                f"step {step}  {elapsed / 60:.1f} min  loss {mean_loss:.4f}  {rate:.0f} tokens/s",
                flush=True,
            )
    print(
        f"trained {step} steps in {(time.monotonic() - start) / 60:.1f} min, loss {mean_loss:.4f}",
        flush=True,
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in bfloat16, with a generation config that says only where a reply
    ends."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> int:
    """Train, save and judge; fail under the bar."""
    parser = argparse.ArgumentParser(description="Train the tiny chat model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=4000, help="at most this many steps")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="at most this many minutes of training"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(options.seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, options.seed, options.steps, options.minutes)
    save(model, tokenizer, options.out)
    verdicts = [judge_checkpoint(options.out, dtype) for dtype in (torch.bfloat16, torch.float32)]
    return int(min(verdict.accuracy for verdict in verdicts) < BAR)


if __name__ == "__main__":
    sys.exit(main())
