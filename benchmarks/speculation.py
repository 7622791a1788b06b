"""Measures speculative decoding with drafts whose acceptance is given: what verifying costs, and
whether throughput is ever lost.

usage: python benchmarks/speculation.py [--only cost,lose,coupled] [--model FOLDER] [--quick]

- cost: the p50 of steps of R rows with 4 drafts each, over that of steps of 5 R rows without.
- lose: output tokens per second with a drafter over those without one, medians of alternating
  rounds, and the same by CPU time, which neighbours disturb less. Drafts are the model's own text,
  known from a run before, of which each token is replaced with probability 1 - acceptance.
- coupled: how often a draft of tiny with noisy logits is accepted at T 0.7 and 1.0, when it is
  drawn with the target's own random number, beside standard rejection and the bound sum min(p, q).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from checkpoints import make_llama_160m
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import StepEvent
from toolkit_lm.messages import NewSequence
from toolkit_lm.plugin import DrafterRegistry, hookimpl
from toolkit_lm.scheduler.draft_budget import DraftBudget
from toolkit_lm.step import Drafter

DRAFTS = 4
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9, 1.0)
SCRIPT: dict[tuple[int, ...], list[int]] = {}
"""Texts that follow prompts."""
GIVEN = {"acceptance": 1.0}


class Scripted(Drafter):
    """Drafts the text that is to come. Each token is right with the given probability, by its
    position."""

    def __init__(self, *arguments: Any, **own: Any) -> None:
        super().__init__(*arguments, **own)
        self._texts: dict[int, list[int]] = {}
        self._wrong: dict[int, np.ndarray] = {}

    def add(self, seq: NewSequence) -> None:
        prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
        self._texts[seq.seq_id] = [*prompt, *SCRIPT.get(prompt, ())]
        draws = np.random.default_rng(abs(seq.seq_id)).random(len(self._texts[seq.seq_id]))
        self._wrong[seq.seq_id] = draws >= GIVEN["acceptance"]

    def remove(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        self._wrong.pop(seq_id, None)

    def finish(self, inputs, hidden_states, result, step) -> None:
        for place in inputs.sampling:
            seq_id = inputs.plan.scheduled[place].seq_id
            size = int(inputs.histories.num_tokens[inputs.rows[place]])
            wrong = self._wrong.get(seq_id, np.zeros(0, bool))[size : size + DRAFTS]
            text = self._texts.get(seq_id, [])[size : size + DRAFTS]
            drafts = [
                (token + 1) % 1000 if is_wrong else token
                for token, is_wrong in zip(text, wrong.tolist(), strict=True)
            ]
            if drafts and result.token_ids[place]:
                result.drafts[seq_id] = drafts

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return []


class Plugin(SimpleNamespace):
    """Registers the drafter, and keeps the events of steps."""

    name = "scripted"

    @hookimpl
    def toolkit_register_drafters(self, drafters: DrafterRegistry) -> None:
        drafters.add("scripted", f"{__name__}:Scripted")

    @hookimpl
    def toolkit_event(self, event: Any) -> None:
        if isinstance(event, StepEvent):
            self.steps.append(event)


def prompts(count: int, length: int = 32) -> list[list[int]]:
    draws = np.random.default_rng(5)
    return [draws.integers(100, 900, length).tolist() for _ in range(count)]


def generate(
    llm: LLM, given: Sequence[list[int]], params: SamplingParams
) -> tuple[float, float, list[list[int]]]:
    """Seconds, seconds of computing, and the texts."""
    asked = [{"prompt_token_ids": prompt} for prompt in given]
    begun = time.perf_counter()
    computing = time.process_time()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    computing = time.process_time() - computing
    assert not any(output.error for output in outputs), outputs[0].error
    return seconds, computing, [list(output.outputs[0].token_ids) for output in outputs]


def learn(llm: LLM, given: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    _, _, texts = generate(llm, given, params)
    SCRIPT.update({tuple(prompt): text for prompt, text in zip(given, texts, strict=True)})
    return texts


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T 1": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "grammar": {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-z ]{400}"}},
}


def cost(models: dict[str, str], batches: Sequence[int], tokens: int) -> None:
    for label, model in models.items():
        most = max(batches) * (1 + DRAFTS)
        plugin = Plugin(steps=[])
        options = {
            "max_model_len": 512,
            "max_num_seqs": most,
            "kv_cache_memory": "1GiB",
            "overlap": False,
        }
        drafting = {"drafter": "scripted", "draft_budget": "all"}
        with (
            LLM(model, plugins=[plugin], **options) as plain,
            LLM(model, plugins=[plugin], **drafting, **options) as drafted,
        ):
            for case, fields in CASES.items():
                params = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True} | fields)
                for rows in batches:
                    given = prompts(rows)
                    learn(plain, given, params)
                    times: dict[str, list[float]] = {"drafted": [], "rows": []}
                    for _ in range(3):
                        for kind, llm, asked in (
                            ("drafted", drafted, given),
                            ("rows", plain, prompts(rows * (1 + DRAFTS))),
                        ):
                            plugin.steps.clear()
                            generate(llm, asked, params)
                            times[kind] += [
                                step.duration
                                for step in plugin.steps
                                if step.num_tokens == rows * (1 + DRAFTS)
                                and step.num_output_tokens == step.num_tokens
                            ]
                    show_cost(label, case, rows, times)


def show_cost(label: str, case: str, rows: int, times: dict[str, list[float]]) -> None:
    if not all(times.values()):
        print(f"| {label} | {case} | {rows} | no such steps |", flush=True)
        return
    drafted, plain = (statistics.median(times[kind]) * 1e3 for kind in ("drafted", "rows"))
    print(
        f"| {label} | {case} | {rows} | {drafted:.2f} | {plain:.2f} | {drafted / plain:.2f} |",
        flush=True,
    )


def lose(model: str, batches: Sequence[int], tokens: int, rounds: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    options = {"max_model_len": 512, "max_num_seqs": max(batches), "kv_cache_memory": "1GiB"}
    with (
        LLM(model, **options) as plain,
        LLM(model, plugins=[Plugin(steps=[])], drafter="scripted", **options) as scripted,
        LLM(model, drafter="ngram,suffix", **options) as found,
    ):
        for rows in batches:
            given = prompts(rows)
            texts = learn(plain, given, params)
            for name, llm, acceptances in (
                ("scripted", scripted, ACCEPTANCES),
                ("ngram,suffix", found, (None,)),
            ):
                for acceptance in acceptances:
                    # Forgets what it has learned of another text.
                    scheduler = llm.engine.client.core.scheduler
                    scheduler.draft_budget = DraftBudget(scheduler.draft_budget.facts)
                    GIVEN["acceptance"] = 1.0 if acceptance is None else acceptance
                    compare(name, acceptance, plain, llm, given, params, texts, rounds)


def compare(name, acceptance, plain, llm, given, params, texts, rounds) -> None:
    seconds = []
    ratios = []
    of_computing = []
    same = 0.0
    # The first round warms up: acceptance is known from then on, as in a server that runs.
    for number in range(rounds + 1):
        without, computing, _ = generate(plain, given, params)
        drafted, own, got = generate(llm, given, params)
        same = float(np.mean([one == other for one, other in zip(got, texts, strict=True)]))
        if number:
            seconds.append(without)
            ratios.append(without / drafted)
            of_computing.append(computing / own)
    rate = len(given) * params.max_tokens / statistics.median(seconds)
    print(
        f"| {name} | {len(given)} | {'-' if acceptance is None else acceptance} | {rate:.0f} "
        f"| {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} "
        f"| {statistics.median(of_computing):.2f} | {same:.0%} |",
        flush=True,
    )


@contextlib.contextmanager
def tiny_logits(num_prompts: int) -> Iterator[torch.Tensor]:
    """Logits [N, V] of tiny over its own text."""
    seen: list[torch.Tensor] = []
    with LLM("tiny", dtype="float32") as llm:
        model = llm.engine.client.core.executor.runner.model
        original = model.compute_logits

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            logits = original(hidden)
            seen.append(logits.clone())
            return logits

        model.compute_logits = kept
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
        llm.generate(["Once upon a time"] * num_prompts, params, use_tqdm=False)
        model.compute_logits = original
    yield torch.cat(seen).double()


def coupled(num_prompts: int) -> None:
    torch.manual_seed(0)
    with tiny_logits(num_prompts) as target:
        for noise in (0.3, 1.0, 2.0):
            draft = target + noise * torch.randn_like(target)
            for temperature in (0.7, 1.0):
                p = torch.softmax(target / temperature, dim=-1)
                q = torch.softmax(draft / temperature, dim=-1)
                bound = torch.minimum(p, q).sum(dim=-1).mean().item()
                drawn = rejected = 0
                repeats = 20
                for _ in range(repeats):
                    u = torch.rand(len(p), 1, dtype=torch.float64)
                    mine = torch.searchsorted(p.cumsum(-1), u).clamp_(max=p.shape[-1] - 1)
                    guess = torch.searchsorted(q.cumsum(-1), u).clamp_(max=p.shape[-1] - 1)
                    drawn += (mine == guess).double().mean().item()
                    free = torch.searchsorted(q.cumsum(-1), torch.rand_like(u))
                    free = free.clamp_(max=p.shape[-1] - 1)
                    keep = (p.gather(-1, free) / q.gather(-1, free)).clamp(max=1)
                    rejected += (torch.rand_like(u) < keep).double().mean().item()
                print(
                    f"| {noise} | {temperature} | {drawn / repeats:.3f} | {rejected / repeats:.3f} "
                    f"| {bound:.3f} | {(p * q).sum(dim=-1).mean().item():.3f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="cost,lose,coupled")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: one of 160M is made")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--quick", action="store_true", help="tiny alone, and few of all")
    args = parser.parse_args()
    only = args.only.split(",")
    batches = [int(size) for size in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = "tiny" if args.quick else str(args.model or make_llama_160m(Path(folder)))
        if "coupled" in only:
            print("| noise | T | coupled | standard | bound | independent |")
            coupled(2 if args.quick else 8)
        if "cost" in only:
            print("| model | sampling | rows | drafted, ms | as many rows, ms | ratio |")
            models = {"tiny": "tiny"} | ({} if args.quick else {"160M": model})
            cost(models, [1, 4] if args.quick else [1, 8, 32], 40)
        if "lose" in only:
            columns = "tokens/s without | ratio | range | of CPU time | same"
            print(f"| drafter | batch | acceptance | {columns} |")
            lose(model, [1, 4] if args.quick else batches, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
