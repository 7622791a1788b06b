"""Encoder-decoder models against transformers' `generate`, in turns: the encoder alone, the
decoder, a beam search, shared inputs.

    python benchmarks/encoder_decoder.py [--dtype bfloat16] [--rounds 3] [--shape bart-base]
    [--mixed] [--ctranslate2]

Weights are random: both compute all tokens. Prints a table of medians and their ratios, larger is
better for us. `--mixed`: encoder prompts of 64 to 448 tokens, which transformers pads.
`--ctranslate2`: Whisper also by CTranslate2, in float32, its only float type on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import write_tokenizer

BATCH = 16
ENCODER_TOKENS = 256
OUTPUT_TOKENS = 128
LONG = 1000
BART_BASE = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
BART_HEADS = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-base": (
        "Bart",
        {"vocab_size": 50265, "max_position_embeddings": 1024, **BART_BASE, **BART_HEADS},
    ),
    "whisper-small": (
        "Whisper",
        {
            "vocab_size": 51865,
            **{key: value for key, value in BART_BASE.items() if "layers" not in key},
            **BART_HEADS,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "t5-base": (
        "T5",
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
        },
    ),
}
IDS = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def make(shape: str, folder: Path) -> Any:
    """Writes a checkpoint; returns the model of transformers."""
    family, fields = SHAPES[shape]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(
        getattr(transformers, f"{family}Config")(**fields, **IDS)
    ).eval()
    model.generation_config = transformers.GenerationConfig(**IDS)
    model.save_pretrained(folder)
    write_tokenizer(folder, fields["vocab_size"])
    return model


def prompts(
    count: int,
    length: int,
    vocab_size: int,
    seed: int,
    *,
    speech: bool = False,
    mixed: bool = False,
) -> list[Any]:
    """Token ids, or where the encoder hears, features of a window [80, 3000]. `mixed`: of a quarter
    to seven quarters of `length`."""
    generator = torch.Generator().manual_seed(seed)
    if speech:
        return list(torch.randn(count, 80, 3000, generator=generator))
    if mixed:
        lengths = torch.linspace(length // 4, length * 7 // 4, count).int().tolist()
        return [
            torch.randint(5, vocab_size, (one,), generator=generator).tolist() for one in lengths
        ]
    found: list[Any] = torch.randint(5, vocab_size, (count, length), generator=generator).tolist()
    return found


def as_prompt(one: Any) -> Any:
    return {"prompt_token_ids": one} if isinstance(one, list) else {"features": one.numpy()}


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Ours:
    def __init__(self, folder: Path, dtype: str) -> None:
        options = {"device": "cpu", "dtype": dtype, "max_num_seqs": 64, "max_model_len": 448}
        self.llm = LLM(str(folder), kv_cache_memory="3GiB", **options)

    def generate(self, given: list[Any], count: int, beams: int = 1) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        if beams > 1:
            params = SamplingParams(
                use_beam_search=True, beam_width=beams, n=1, max_tokens=count, ignore_eos=True
            )
        asked: list[Any] = [{"encoder_prompt": as_prompt(one)} for one in given]
        self.llm.reset_prefix_cache()
        return timed(lambda: self.llm.generate(asked, params, use_tqdm=False))

    def first_token(self, one: Any, decoder: list[int]) -> float:
        asked: Any = {
            "encoder_prompt": as_prompt(one),
            "decoder_prompt": {"prompt_token_ids": decoder},
        }
        return timed(
            lambda: self.llm.generate(
                [asked], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
            )
        )


class Theirs:
    def __init__(self, model: Any, dtype: str) -> None:
        self.model = model.to(getattr(torch, dtype))

    @torch.inference_mode()
    def generate(self, given: list[Any], count: int, beams: int = 1) -> float:
        options: dict[str, Any] = {
            "max_new_tokens": count,
            "min_new_tokens": count,
            "num_beams": beams,
            "do_sample": False,
        }
        if isinstance(given[0], list):
            longest = max(map(len, given))
            ids = torch.tensor(
                [one + [IDS["pad_token_id"]] * (longest - len(one)) for one in given]
            )
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in given])
            return timed(lambda: self.model.generate(input_ids=ids, attention_mask=mask, **options))
        # Whisper's own `generate` would do more than the same work.
        generate = transformers.GenerationMixin.generate
        heard = torch.stack(given).to(self.model.dtype)
        start = torch.full((len(given), 1), IDS["decoder_start_token_id"])
        return timed(
            lambda: generate(self.model, input_features=heard, decoder_input_ids=start, **options)
        )


class Peer:
    """CTranslate2, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        from ctranslate2_whisper import convert

        convert(folder, folder / "ctranslate2")
        script = Path(__file__).with_name("ctranslate2_whisper.py")
        command = [
            sys.executable,
            str(script),
            str(folder / "ctranslate2"),
            str(torch.get_num_threads()),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def generate(self, batch: int, count: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([batch, count]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def measure_peer(
    ours: Ours, peer: Peer, vocab_size: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """The same measurements as in `measure`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for index in range(rounds + 1):
        given = prompts(BATCH, 0, vocab_size, index, speech=True)
        first = ours.generate(given, 1), peer.generate(BATCH, 1)
        second = ours.generate(given, OUTPUT_TOKENS), peer.generate(BATCH, OUTPUT_TOKENS)
        decode = second[0] - first[0], second[1] - first[1]
        if index:
            for name, pair in {
                "encoder and one token": first,
                "greedy": second,
                "decode": decode,
            }.items():
                found.setdefault(name, []).append(pair)
    return found


def measure(
    ours: Ours, theirs: Theirs, vocab_size: int, rounds: int, *, speech: bool, mixed: bool
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of ours and of theirs by row of the table, one pair per round."""
    found: dict[str, list[tuple[float, float]]] = {}
    for index in range(rounds + 1):
        given = prompts(BATCH, ENCODER_TOKENS, vocab_size, index, speech=speech, mixed=mixed)
        pairs = {
            "encoder and one token": (ours.generate(given, 1), theirs.generate(given, 1)),
            "greedy": (ours.generate(given, OUTPUT_TOKENS), theirs.generate(given, OUTPUT_TOKENS)),
            "beams": (
                ours.generate(given[:4], OUTPUT_TOKENS, beams=4),
                theirs.generate(given[:4], OUTPUT_TOKENS, beams=4),
            ),
            "greedy of the same four": (
                ours.generate(given[:4], OUTPUT_TOKENS),
                theirs.generate(given[:4], OUTPUT_TOKENS),
            ),
        }
        first = pairs["encoder and one token"]
        second = pairs["greedy"]
        decode = []
        decode = [whole - begin for whole, begin in zip(second, first, strict=True)]
        pairs["decode"] = (decode[0], decode[1])
        [long] = prompts(1, LONG, vocab_size, 100 + index, speech=speech)
        ours.llm.reset_prefix_cache()
        # Other decoder prompts each time: what is shared is the encoder's.
        pairs["first token, repeated and new"] = (
            ours.first_token(long, [2, 0, 9]),
            ours.first_token(long, [2, 0, 8]),
        )[::-1]
        if index:
            for name, pair in pairs.items():
                found.setdefault(name, []).append(pair)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="bart-base")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--ctranslate2", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make(arguments.shape, Path(folder))
        family, fields = SHAPES[arguments.shape]
        speech = arguments.shape.startswith("whisper")
        ours = Ours(Path(folder), arguments.dtype)
        theirs = Theirs(model, arguments.dtype)
        found = measure(
            ours,
            theirs,
            fields["vocab_size"],
            arguments.rounds,
            speech=speech,
            mixed=arguments.mixed,
        )
        compared = {}
        if arguments.ctranslate2:
            del theirs, model
            peer = Peer(Path(folder))
            compared = measure_peer(ours, peer, fields["vocab_size"], arguments.rounds)
            peer.close()
    what = f"{ENCODER_TOKENS} tokens"
    if speech:
        what = "a window"
    elif arguments.mixed:
        what += " on average"
    print(
        f"{family} ({arguments.shape}), {arguments.dtype}, {torch.get_num_threads()} threads, "
        f"batch {BATCH}, {what} in"
    )
    for other, rows in (("transformers", found), ("CTranslate2 (float32)", compared)):
        print(f"\n| | ours, s | {other}, s | ratio |\n| --- | --- | --- | --- |" if rows else "")
        for name, pairs in rows.items():
            mine, its = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"| {name} | {mine:.3f} | {its:.3f} | {its / mine:.2f} |")
    beams, greedy = (
        statistics.median(ours for ours, _ in found[name])
        for name in ("beams", "greedy of the same four")
    )
    print(f"\nBeams of width 4 take {beams / greedy:.2f} times as long as greedy.")


if __name__ == "__main__":
    main()
