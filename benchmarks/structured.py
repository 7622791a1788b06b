"""Measures the cost of structured output, and the gain from forced tokens: runs interleaved (A B
A B), medians. "free" is generation without a grammar.

usage: python benchmarks/structured.py [--quick] [--runs 5] [--rows 32] [--backend
llguidance,xgrammar] [--model FOLDER]

  mask   a grammar that allows nearly all tokens and forces none, against free generation: the
         goal is a ratio of at least 0.95
  json   documents of a schema, against free generation of as many tokens: the goal is a ratio
         of at least 1.2
  spaces the same documents with any white space, of which less is forced
  steps  json, each forced token in a step of its own

The model is of the 160M shape with a vocabulary of 32,000; `--quick` takes the model tiny, few rows
and one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.sampling import LogitsProcessor
from toolkit_lm_structured_output.processor import StructuredOutput

MASK = {"regex": r"(.|\n)*"}
KINDS: dict[str, dict[str, Any]] = {
    "first_name": {"type": "string", "maxLength": 8},
    "last_name": {"type": "string", "maxLength": 8},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
    "occupation": {"enum": ["software engineer", "teacher", "physician"]},
    "is_employed": {"type": "boolean"},
    "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 50},
}
SCHEMA = {
    "type": "object",
    "properties": KINDS,
    "required": list(KINDS),
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "mask": MASK,
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "spaces": {"json": SCHEMA},
    "steps": {"json": SCHEMA, "disable_any_whitespace": True},
}
MASK_TOKENS = 128


def generate(llm: LLM, params: list[SamplingParams]) -> tuple[float, list[int]]:
    """Seconds, and each row's number of tokens."""
    prompts = [f"Row {number}: tell me of a person." for number in range(len(params))]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert not any(output.error for output in outputs), outputs[0].error
    return seconds, [len(output.outputs[0].token_ids) for output in outputs]


def structured(name: str, rows: int, seed: int) -> list[SamplingParams]:
    given: dict[str, Any] = {"max_tokens": 400}
    if name == "mask":
        given = {"max_tokens": MASK_TOKENS, "min_tokens": MASK_TOKENS}
    return [
        SamplingParams(temperature=0.8, seed=seed + row, structured_outputs=ASKED[name], **given)
        for row in range(rows)
    ]


def free(lengths: list[int], seed: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.8, seed=seed + row, max_tokens=n, ignore_eos=True)
        for row, n in enumerate(lengths)
    ]


@contextmanager
def drafts(on: bool) -> Iterator[None]:
    kept = StructuredOutput.drafts
    if not on:
        StructuredOutput.drafts = LogitsProcessor.drafts  # type: ignore[method-assign]
    try:
        yield
    finally:
        StructuredOutput.drafts = kept  # type: ignore[method-assign]


def compare(llm: LLM, name: str, rows: int, runs: int) -> str:
    with drafts(name != "steps"):
        generate(llm, structured(name, rows, 0))
        rates: dict[str, list[float]] = {"structured": [], "free": []}
        for run in range(runs):
            seconds, lengths = generate(llm, structured(name, rows, 1000 * run))
            rates["structured"].append(sum(lengths) / seconds)
            seconds, again = generate(llm, free(lengths, 1000 * run))
            assert again == lengths
            rates["free"].append(sum(lengths) / seconds)
    medians = {system: statistics.median(values) for system, values in rates.items()}
    ratios = [one / other for one, other in zip(rates["structured"], rates["free"], strict=True)]
    told = ", ".join(f"{system} {rate:.0f} tokens/s" for system, rate in medians.items())
    return (
        f"{name}, {rows} rows, {sum(lengths) / rows:.0f} tokens each: {told}; ratio "
        f"{statistics.median(ratios):.3f} of {ratios}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the model tiny, 4 rows, 1 run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only", default=",".join(ASKED))
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument(
        "--model",
        type=Path,
        help="a checkpoint with a tokenizer.json; default: one of the 160M shape, made now",
    )
    args = parser.parse_args()
    if args.quick:
        args.runs = 1
        args.rows = 4
    with tempfile.TemporaryDirectory() as folder:
        model = "tiny" if args.quick else str(args.model or make_llama_160m(Path(folder)))
        for backend in args.backend.split(","):
            options: dict[str, Any] = {
                "max_num_seqs": args.rows,
                "enable_prefix_caching": False,
                "engine_process": False,
            }
            if not args.quick:
                options |= {"max_model_len": 1024, "kv_cache_memory": "1GiB"}
            with LLM(
                model, plugin_option=[f"structured_output.backend={backend}"], **options
            ) as llm:
                for name in args.only.split(","):
                    print(f"{backend}: {compare(llm, name, args.rows, args.runs)}", flush=True)


if __name__ == "__main__":
    main()
