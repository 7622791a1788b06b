"""Ask a checkpoint about held-out drawings, greedily, by transformers, and count the answers that
are right word for word.

Usage: ``python train/judge_vision.py CHECKPOINT [--dtype float32] [--count 1000]``
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from toolkit_lm_tiny.drawing_questions import Task, exam
from transformers import LlavaForConditionalGeneration, LlavaProcessor

BAR = 0.9
_BATCH = 50


class Verdict(NamedTuple):
    """How many questions of each kind were asked, and how many of these were answered right."""

    asked: Counter[str]
    right: Counter[str]
    wrong: list[tuple[Task, str]]

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right.total() / self.asked.total()


def messages(task: Task) -> list[dict[str, object]]:
    """The question as a chat, pictures first."""
    parts: list[dict[str, object]] = [{"type": "image"} for _ in task.drawings]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": task.question.text}]}]


@torch.inference_mode()
def answers(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, tasks: Sequence[Task]
) -> list[str]:
    """Greedy ones. Prompts of the same length go together, so that no padding can change an
    answer."""
    encoded = []
    by_length = defaultdict(list)
    for i, task in enumerate(tasks):
        images = [Image.fromarray(drawing.pixels()) for drawing in task.drawings]
        prompt = processor.apply_chat_template(messages(task), add_generation_prompt=True)
        encoded.append(processor(images=images or None, text=prompt, return_tensors="pt"))
        by_length[encoded[i].input_ids.shape[1], len(images)].append(i)
    found: dict[int, str] = {}
    for (length, _), members in by_length.items():
        for start in range(0, len(members), _BATCH):
            chosen = members[start : start + _BATCH]
            names = [
                name
                for name in ("input_ids", "attention_mask", "pixel_values")
                if name in encoded[chosen[0]]
            ]
            batch = {name: torch.cat([encoded[i][name] for i in chosen]) for name in names}
            if "pixel_values" in batch:
                batch["pixel_values"] = batch["pixel_values"].to(model.dtype)
            output = model.generate(**batch, max_new_tokens=30, do_sample=False)
            found |= zip(
                chosen,
                processor.batch_decode(output[:, length:], skip_special_tokens=True),
                strict=True,
            )
    return [found[i] for i in range(len(tasks))]


def judge(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, tasks: Sequence[Task]
) -> Verdict:
    """Ask each question in a chat of its own."""
    verdict = Verdict(Counter(), Counter(), [])
    for task, answer in zip(tasks, answers(model, processor, tasks), strict=True):
        verdict.asked[task.question.kind] += 1
        verdict.right[task.question.kind] += answer == task.question.answer
        if answer != task.question.answer:
            verdict.wrong.append((task, answer))
    return verdict


def judge_checkpoint(
    checkpoint: Path, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Verdict:
    """Load a checkpoint, judge it and print the verdict."""
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype).eval()
    verdict = judge(model, LlavaProcessor.from_pretrained(checkpoint), exam(count, seed))
    for kind, asked in sorted(verdict.asked.items()):
        print(f"{kind}: {verdict.right[kind]} of {asked} ({verdict.right[kind] / asked:.1%})")
    print(f"{dtype}: {verdict.right.total()} of {count} right ({verdict.accuracy:.2%})")
    for task, answer in verdict.wrong[:20]:
        print(
            f"  {task.question.text} {' | '.join(d.content for d in task.drawings)} -> {answer} "
            f"(not {task.question.answer})"
        )
    return verdict


def main() -> int:
    """Judge the checkpoint named on the command line; fail under the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return int(
        judge_checkpoint(
            options.checkpoint, options.count, getattr(torch, options.dtype), options.seed
        ).accuracy
        < BAR
    )


if __name__ == "__main__":
    sys.exit(main())
