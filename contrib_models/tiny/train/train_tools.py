"""Teach the tiny chat model to call tools: go on from its checkpoint, with conversations that have
tools among its own.

Usage: ``python train/train_tools.py --out DIR --minutes 12``
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
from corpus import IM_END, IM_START, Corpus, Stretch
from toolkit_lm_tiny.facts import FACTS
from toolkit_lm_tiny.tool_tasks import Situation, situation
from torch import Tensor
from train import IGNORED, TOKENS_PER_STEP, loss_of, make_optimizer, save
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH = 384
CHECKPOINT = Path(__file__).parents[1] / "src" / "toolkit_lm_tiny" / "checkpoint"
TOOLS_SHARE = 0.85
CHAT_TEMPLATE = (
    "{%- set system = messages[0]['content'] + '\\n' if messages[0]['role'] == 'system' else '' %}"
    "{%- if tools %}{{ '<|im_start|>system\\n' + system + 'Tools:' }}"
    "{%- for tool in tools %}{{ '\\n' + tool.function.name }}("
    "{{- tool.function.parameters.properties | default({}) | join(', ') }}){% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{% if not (tools and loop.first and system) %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}{{ '\\n' if not loop.first or message['content'] }}"
    "{{- '<tool_call>\\n{\"name\": ' }}{{ call.function.name | tojson }}{{ ', \"arguments\": ' "
    "}}{{ call.function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def listed(one: Situation) -> str:
    """The tools, as the template writes them."""
    functions = [tool["function"] for tool in one.tools]
    return "Tools:" + "".join(
        f"\n{f['name']}({', '.join(f['parameters']['properties'])})" for f in functions
    )


def document(rng: Random) -> list[Stretch]:
    """A conversation with tools: one task, or two; or a fact that needs none."""
    one = situation(rng)
    pieces = [Stretch(f"{IM_START}system\n{listed(one)}{IM_END}\n", False)]
    if rng.random() < 0.15:
        fact = rng.choice(FACTS)
        pieces += _turn("user", fact.question, fact.reply)
    task = one.task
    asked = task.question
    role = "user"
    for call in task.calls:
        pieces += _turn(role, asked, call.text)
        asked = call.result
        role = "tool"
    return [*pieces, *_turn(role, asked, task.answer)]


def _turn(role: str, asked: str, said: str) -> list[Stretch]:
    begun = f"{IM_START}{role}\n{asked}{IM_END}\n{IM_START}assistant\n"
    return [Stretch(begun, False), Stretch(f"{said}{IM_END}", True), Stretch("\n", False)]


def batches(tokenizer: AutoTokenizer, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows that begin with a whole document."""
    rng = Random(seed)
    plain = Corpus(seed).documents()
    encode = tokenizer.backend_tokenizer.encode
    while True:
        rows = []
        targets = []
        for _ in range(TOKENS_PER_STEP // LENGTH):
            ids: list[int] = []
            labels: list[int] = []
            while len(ids) <= LENGTH:
                for piece in document(rng) if rng.random() < TOOLS_SHARE else next(plain):
                    tokens = encode(piece.text, add_special_tokens=False).ids
                    ids += tokens
                    labels += tokens if piece.learned else [IGNORED] * len(tokens)
            rows.append(ids[:LENGTH])
            targets.append(labels[1 : LENGTH + 1])
        yield torch.tensor(rows), torch.tensor(targets)


def main() -> int:
    parser = argparse.ArgumentParser(description="Teach the tiny chat model to call tools.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--begin", type=Path, default=CHECKPOINT, help="checkpoint to go on from")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.begin)
    model = AutoModelForCausalLM.from_pretrained(options.begin, dtype=torch.float32)
    model.train()
    optimizer = make_optimizer(model)
    source = batches(tokenizer, options.seed)
    start = time.monotonic()
    step = 0
    mean_loss = math.nan
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(
                progress / 0.03 + 0.01, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
            )
        loss = loss_of(model, *next(source))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value, step = loss.item(), step + 1
        mean_loss = value if math.isnan(mean_loss) else 0.95 * mean_loss + 0.05 * value
        if step % 20 == 0:
            print(
                f"step {step}  {(time.monotonic() - start) / 60:.1f} min  loss {mean_loss:.4f}",
                flush=True,
            )
    tokenizer.chat_template = CHAT_TEMPLATE
    save(model, tokenizer, options.out)
    print(f"trained {step} steps, loss {mean_loss:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
