"""Measures speculative decoding with drafts whose acceptance is given: what verifying costs, and
whether throughput is ever lost.

usage: python benchmarks/speculation.py [--only cost,lose,coupled] [--model FOLDER] [--quick]
                                        [--batches 1,4] [--drafters scripted] [--acceptances 0,1]
                                        [--rounds 1] [--steps 100] [--out FILE] [--folder FOLDER]

- cost: the p50 of steps of R rows with 4 drafts each, over that of steps of 5 R rows without.
- lose: output tokens per second of CPU time with a drafter over those without one. Two engines take
  turns of a few steps over the same rows, and the model's tokens are replaced by a given text, so
  that acceptance is what it is by construction: a scripted drafter spoils each draft with
  probability 1 - acceptance; for ngram and suffix, the text repeats itself and each of its tokens
  is another one with that probability. `costly` is scripted, and a draft takes a fifth of a step.
  `draft_model` is a random one of two layers, whose draws are replaced by the scripted drafts.
  `none` is a second engine without drafts: what a cell errs by, once for all acceptances. Beside
  times stand what does not depend on the machine: steps that asked drafters, drafts that were
  verified, and passes of a draft model. `--out`: as JSON.
- coupled: how often a draft of tiny with noisy logits is accepted at T 0.7 and 1.0, when it is
  drawn with the target's own random number, beside standard rejection and the bound sum min(p, q).
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from toolkit_lm.runner.step_run import Run
from toolkit_lm.scheduler.draft_budget import DraftBudget
from toolkit_lm.step import Drafter

DRAFTS = 4
SCRIPT: dict[tuple[int, ...], list[int]] = {}
"""Texts that follow prompts."""
GIVEN = {"acceptance": 1.0}
PASSES = [0]
"""Passes of draft models so far."""


def wrong_drafts(seed: int, length: int) -> np.ndarray:
    """Whether the draft of each token of a text is wrong: [length]."""
    draws = np.random.default_rng(seed).random(length)
    return draws >= GIVEN["acceptance"]


def spoilt(token: int) -> int:
    return (token + 1) % 1000


class Scripted(Drafter):
    """Drafts the text that is to come. Each token is right with the given probability, by its
    position."""

    passes = 0
    """Products with a matrix of 8 MiB that stand for a draft model's pass."""

    def __init__(self, *arguments: Any, **own: Any) -> None:
        super().__init__(*arguments, **own)
        self._texts: dict[int, list[int]] = {}
        self._wrong: dict[int, np.ndarray] = {}
        self._weight = torch.zeros(2048, 2048, dtype=torch.bfloat16) if self.passes else None

    def add(self, seq: NewSequence) -> None:
        prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
        self._texts[seq.seq_id] = [*prompt, *SCRIPT.get(prompt, ())]
        self._wrong[seq.seq_id] = wrong_drafts(abs(seq.seq_id), len(self._texts[seq.seq_id]))

    def remove(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        self._wrong.pop(seq_id, None)

    def finish(self, inputs, hidden_states, result, step) -> None:
        wanted = np.minimum(inputs.max_drafts, DRAFTS)
        if self._weight is not None:
            for ahead in range(int(wanted.max(initial=0))):
                x = torch.zeros(int((wanted > ahead).sum()), 2048, dtype=torch.bfloat16)
                for _ in range(self.passes):
                    torch.mm(x, self._weight)
        for place, most in zip(inputs.sampling, wanted, strict=True):
            seq_id = inputs.plan.scheduled[place].seq_id
            size = int(inputs.histories.num_tokens[inputs.rows[place]])
            wrong = self._wrong.get(seq_id, np.zeros(0, bool))[size : size + most]
            text = self._texts.get(seq_id, [])[size : size + most]
            drafts = [
                spoilt(token) if is_wrong else token
                for token, is_wrong in zip(text, wrong.tolist(), strict=True)
            ]
            if drafts and result.token_ids[place]:
                result.drafts[seq_id] = drafts

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return []


class Costly(Scripted):
    """A scripted drafter that takes as long as a draft model."""

    passes = 8


class Plugin(SimpleNamespace):
    """Registers the drafter, and keeps the events of steps."""

    name = "scripted"

    @hookimpl
    def toolkit_register_drafters(self, drafters: DrafterRegistry) -> None:
        drafters.add("scripted", f"{__name__}:Scripted")
        drafters.add("costly", f"{__name__}:Costly")

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


PROMPT = 32
"""Tokens of each prompt."""
TURN = 8
"""Steps of a turn."""
STEPS = {1: 240, 4: 200, 16: 96, 64: 40}
"""Steps without drafts that a cell is measured over."""


def repeating(acceptance: float, length: int) -> list[int]:
    """A text that repeats 24 tokens. Each is another one with probability 1 - acceptance."""
    draws = np.random.default_rng(7)
    phrase = np.arange(100, 124)
    text = np.resize(phrase, length)
    spoilt = draws.random(length) >= acceptance
    return np.where(spoilt, draws.integers(200, 30000, length), text).tolist()


def force(llm: LLM, text: list[int]) -> None:
    """Replaces the tokens that the model finds likeliest by those of a text, by their index."""
    runner = llm.engine.client.core.executor.runner
    original = type(runner.model).likeliest

    def likeliest(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, tokens = original(runner.model, hidden)
        index = runner.step_inputs.token_index
        if len(index) != len(tokens):
            # Prompts of one length.
            index = np.full(len(tokens), PROMPT - 1)
        return best, torch.tensor([text[i + 1] for i in index], dtype=tokens.dtype)

    runner.model.likeliest = likeliest


def script(llm: LLM, text: list[int]) -> None:
    """Replaces what a draft model draws by a text. Each token of a row is right with the given
    probability, by its position."""
    runner = llm.engine.client.core.executor.runner
    run = runner._run
    draw = type(run).draw
    wrong = [wrong_drafts(row, len(text)) for row in range(runner.config.scheduler.max_num_seqs)]

    def drawn(
        logits: torch.Tensor, of: np.ndarray, ahead: int, after: np.ndarray | None = None
    ) -> np.ndarray:
        draw(run, logits, of, ahead, after)
        persistent = runner.step_inputs.rows[of]
        places = runner._batch.history.num_tokens[persistent] + ahead
        return np.array(
            [
                spoilt(text[place]) if wrong[row][place] else text[place]
                for row, place in zip(persistent, places, strict=True)
            ]
        )

    run.draw = drawn


class Runner:
    """An engine whose steps are timed in turns."""

    def __init__(self, llm: LLM, rows: int, text: list[int]) -> None:
        self.llm = llm
        self.core = llm.engine.client.core
        self.tokens = 0
        self.computing = 0.0
        self.seconds = 0.0
        self.counts = {"steps": 0, "asked": 0, "drafts": 0, "passes": -PASSES[0]}
        self.core.scheduler.schedule = self.schedule
        force(llm, text)
        params = SamplingParams(
            temperature=0, max_tokens=len(text) - PROMPT - 1, ignore_eos=True, detokenize=False
        )
        self.ids = [f"row {row}" for row in range(rows)]
        for row in self.ids:
            prompt = {"prompt_token_ids": text[:PROMPT]}
            llm.engine.add_request(row, prompt, params)
        self.turn(4, counts=False)

    def turn(self, steps: int, *, counts: bool = True) -> bool:
        """Runs some steps, to the end of those that were begun ahead. Returns whether rows are
        left."""
        before = self.length()
        # The other engine's turn is no part of a step.
        self.core.progress_time = time.monotonic()
        begun = time.perf_counter()
        computing = time.process_time()
        for _ in range(steps):
            self.llm.engine.step()
        for step in self.core._in_flight:
            step.future.result()
        if counts:
            self.seconds += time.perf_counter() - begun
            self.computing += time.process_time() - computing
            self.tokens += self.length() - before
        return self.core.has_unfinished

    def schedule(self) -> Any:
        """`Scheduler.schedule`, counted."""
        plan = type(self.core.scheduler).schedule(self.core.scheduler)
        if plan is not None and plan.scheduled:
            self.counts["steps"] += 1
            self.counts["asked"] += plan.asks_drafters
            self.counts["drafts"] += sum(row.num_drafts for row in plan.scheduled)
        return plan

    def length(self) -> int:
        return sum(len(seq.token_ids) for seq in self.core.scheduler.roster.sequences.values())

    def end(self) -> None:
        self.llm.engine.abort(self.ids)
        while self.core.has_unfinished:
            self.llm.engine.step()
        self.counts["passes"] += PASSES[0]
        del self.core.scheduler.schedule


def count_passes() -> None:
    forward = Run.forward

    def counted(*arguments: Any, **own: Any) -> torch.Tensor:
        PASSES[0] += 1
        return forward(*arguments, **own)

    Run.forward = counted  # type: ignore[method-assign]


def drafting(name: str, folder: Path) -> dict[str, Any]:
    """Options of an engine with a drafter."""
    if name == "none":
        return {}
    if name == "draft_model":
        small = make_llama_160m(folder, layers=2)
        return {"drafter": name, "plugin_option": [f"drafters.model={small}"]}
    return {"drafter": name}


def lose(
    model: str,
    batches: Sequence[int],
    drafters: Sequence[str],
    acceptances: Sequence[float],
    rounds: int,
    folder: Path,
) -> list[dict[str, Any]]:
    count_passes()
    options = {
        "max_model_len": 1024,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(2048, max(batches) * PROMPT),
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
    }
    found = []
    with contextlib.ExitStack() as engines:
        plain = engines.enter_context(LLM(model, **options))
        for name in drafters:
            own = drafting(name, folder)
            given = acceptances[:1] if name == "none" else acceptances
            with LLM(model, plugins=[Plugin(steps=[])], **own, **options) as drafted:
                for rows in batches:
                    found += [cell(name, plain, drafted, rows, a, rounds) for a in given]
    return found


def cell(
    name: str, plain: LLM, drafted: LLM, rows: int, acceptance: float, rounds: int
) -> dict[str, Any]:
    """One cell: rounds of a fresh budget each, tries and all."""
    scripted = name in ("scripted", "costly", "draft_model")
    text = repeating(1.0 if scripted else acceptance, 1000)
    SCRIPT[tuple(text[:PROMPT])] = text[PROMPT:]
    GIVEN["acceptance"] = acceptance
    ratios = []
    of_wall = []
    shares = []
    counts: dict[str, int] = {}
    for _ in range(rounds):
        scheduler = drafted.engine.client.core.scheduler
        if scheduler.draft_budget is not None:
            # Forgets what it has learned of another text.
            scheduler.draft_budget = DraftBudget(scheduler.draft_budget.facts)
        if name == "draft_model":
            script(drafted, text)
        pair = [Runner(llm, rows, text) for llm in (plain, drafted)]
        going = True
        for turn in range(max(1, STEPS.get(rows, 100) // TURN)):
            # The order alternates.
            for runner in pair if turn % 2 else pair[::-1]:
                going = runner.turn(TURN) and going
            if not going or min(800 - runner.tokens / rows for runner in pair) < 5 * TURN:
                break
        without, own = pair
        ratios.append(own.tokens / own.computing * without.computing / without.tokens)
        of_wall.append(own.tokens / own.seconds * without.seconds / without.tokens)
        shares.append(own.tokens / without.tokens)
        for runner in pair:
            runner.end()
        if drafted.engine.client.core.scheduler.draft_budget is None:
            pair[1].counts["asked"] = 0
        counts = {key: counts.get(key, 0) + value for key, value in pair[1].counts.items()}
    print(
        f"| {name} | {rows} | {acceptance} | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f}-{max(ratios):.2f} | {statistics.median(of_wall):.2f} "
        f"| {min(of_wall):.2f}-{max(of_wall):.2f} | {statistics.median(shares):.2f} "
        f"| {' | '.join(map(str, counts.values()))} |",
        flush=True,
    )
    return {
        "drafter": name,
        "batch": rows,
        "acceptance": acceptance,
        "of CPU time": ratios,
        "of wall time": of_wall,
        "tokens a step": shares,
        **counts,
    }


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
    parser.add_argument("--drafters", default="none,scripted,costly,ngram,suffix,draft_model")
    parser.add_argument("--acceptances", default="0,0.3,0.6,0.9,1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of each cell; default: by the batch, 40 to 240")
    parser.add_argument("--out", type=Path, help="a file for the cells of `lose`")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for checkpoints, which are kept; so engines know what earlier ones have measured",
    )
    parser.add_argument("--quick", action="store_true", help="tiny alone, and few of all")
    args = parser.parse_args()
    only = args.only.split(",")
    batches = [int(size) for size in args.batches.split(",")]
    if args.steps:
        STEPS.update(dict.fromkeys(batches, args.steps))
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        model = "tiny" if args.quick else str(args.model or make_llama_160m(Path(folder)))
        if "coupled" in only:
            print("| noise | T | coupled | standard | bound | independent |")
            coupled(2 if args.quick else 8)
        if "cost" in only:
            print("| model | sampling | rows | drafted, ms | as many rows, ms | ratio |")
            models = {"tiny": "tiny"} | ({} if args.quick else {"160M": model})
            cost(models, [1, 4] if args.quick else [1, 8, 32], 40)
        if "lose" in only:
            columns = "of CPU time | range | of wall time | range | tokens a step"
            columns += " | steps | asked | drafts | passes"
            print(f"| drafter | batch | acceptance | {columns} |")
            given = [float(value) for value in args.acceptances.split(",")]
            sizes = [1, 4] if args.quick else batches
            found = lose(
                model, sizes, args.drafters.split(","), given, args.rounds, Path(folder) / "draft"
            )
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
