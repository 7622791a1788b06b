"""Counts the classes of transformers that toolkit-lm runs: a tiny random checkpoint of each, and
the engine's results against those of transformers, in float32.

usage: python benchmarks/coverage.py [--mappings causal ...] [--classes NAME ...] [--jobs 1]
       [--write | --check]

Each class has a process of its own, with 120 seconds of CPU time. `--write` replaces the results of
the classes that ran in benchmarks/coverage.json, of which docs/generate_options.py writes
docs/models.md. `--check` fails where a class is worse than its committed result. Results:

native    equal, by a class of this repository
fallback  equal, by the class of transformers
refused   refused when it is loaded, with a reason
differs   other tokens or vectors than those of transformers
fails     another error than a refusal
hangs     120 seconds of CPU time did not do
unbuilt   the recipes make no model of it, or transformers alone cannot run it

A generating class is compared by log probabilities along the engine's tokens, of prompts in chunks;
a pooling one by all hidden states, or by logits.
"""

from __future__ import annotations

import os

# A process is forked for each class: threads do not survive that.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import fcntl
import importlib
import json
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from toolkit_lm import LLM, PoolingParams, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.generation import logprobs_of
from transformers.models.auto import modeling_auto as auto

sys.path.append(str(Path(__file__).with_name("recipes")))
import image_text as images
import tiny_models as recipes
from given_pictures import FIRST_SPECIAL, Given

RESULTS = Path(__file__).with_name("coverage.json")
CPU_SECONDS = 120
EQUAL = ("native", "fallback")
MAPPINGS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": {
        model_type: name
        for model_type, name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()
        if name not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    },
    "embedding": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "CTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    # Tokens that a checkpoint forces are not the model's.
    "encoder-decoder": {
        "decoder_start_token_id": 3,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
    },
    "classification": {
        "num_labels": 3,
        "decoder_start_token_id": 3,
        # MPNet takes token 1 for padding, whatever its config says.
        "bos_token_id": 1,
        "eos_token_id": 0,
    },
}
"""Fields of config.json, by mapping."""
LENGTHS = (5, 17, 33, 3, 1)
MAX_TOKENS = 8
OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "renderer": "tokens",
    "max_model_len": 64,
    "max_num_seqs": 8,
}
STEPS: Mapping[str, Any] = {"max_num_batched_tokens": 12, "block_size": 4, "num_kv_blocks": 200}
"""Options of engines that generate: prompts come in chunks."""
TOLERANCE = 1e-4
"""Most difference of a hidden state, as a share of the largest one where that is above 1."""


class Case(NamedTuple):
    """A class of transformers, by the mapping that names it."""

    mapping: str
    model_type: str
    architecture: str

    @property
    def key(self) -> str:
        return f"{self.mapping}/{self.model_type}/{self.architecture}"


class Outcome(NamedTuple):
    """One of the results above, and the reason for it."""

    result: str
    reason: str = ""


def cases(mappings: Iterable[str] = MAPPINGS, only: Sequence[str] = ()) -> list[Case]:
    """All classes of these mappings, or those whose name, `model_type` or key is in `only`."""
    found = [
        Case(mapping, model_type, name)
        for mapping in mappings
        for model_type, names in MAPPINGS[mapping].items()
        for name in ([names] if isinstance(names, str) else names)
    ]
    return [case for case in found if not only or {*case[1:], case.key} & set(only)]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, recipes.VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


def check(case: Case, folder: Path) -> Outcome:
    """Builds the checkpoint, runs it both ways and compares. For a process of its own."""
    try:
        run = RUNS[case.mapping]
        model = run.save(case, folder)
        run.plain(model)
    except Exception as error:
        return Outcome("unbuilt", brief(error))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            ours = run.engine(folder)
        except ToolkitError as error:
            return Outcome("refused", reason_of(error))
    by_fallback = any("the fallback " in str(warning.message) for warning in said)
    try:
        run.compare(model, ours)
    except AssertionError as error:
        return Outcome("differs", brief(error))
    return Outcome("fallback" if by_fallback else "native", run.note)


class Run:
    """How the classes of a mapping are compared."""

    note = ""
    """What an equal class was not compared by."""

    def save(self, case: Case, folder: Path) -> Any:
        """Writes a checkpoint, and returns the model of transformers."""
        return recipes.save(
            case.model_type,
            folder,
            architecture=case.architecture,
            decodes=case.mapping == "causal",
            **CHANGES.get(case.mapping, {}),
        )


class Generation(Run):
    """Classes that continue prompts."""

    options: Mapping[str, Any] = STEPS
    allowed: list[int] | None = None
    """Tokens that an output may have; None: all."""

    def plain(self, model: Any) -> None:
        """Raises what transformers raises where it cannot run it."""
        self.logits(model, 1, [5, 6, 7])

    @torch.inference_mode()
    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        """[T, V] of the prompt `index` and what follows it, by transformers alone."""
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return found

    def request(self, prompt: list[int]) -> Any:
        return {"prompt_token_ids": prompt}

    def engine(self, folder: Path) -> list[Any]:
        params = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=recipes.VOCAB_SIZE,
            allowed_token_ids=self.allowed,
        )
        # Tokens that a checkpoint forces or forbids are not the model's.
        options = {"max_logprobs": recipes.VOCAB_SIZE, "generation_config": "none"}
        with LLM(str(folder), **{**options, **OPTIONS, **self.options}) as llm:
            outputs = llm.generate(
                [self.request(prompt) for prompt in prompts()], params, use_tqdm=False
            )
        return list(outputs)

    def compare(self, model: Any, ours: list[Any]) -> None:
        for index, (prompt, output) in enumerate(zip(prompts(), ours, strict=True)):
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            start = self.start(prompt, output)
            logits = self.logits(model, index, start + tokens)
            reference = torch.log_softmax(logits[len(start) - 1 : -1], dim=-1)
            assert_same_logits(logprobs_of(completion, recipes.VOCAB_SIZE), reference)
            if self.allowed is not None:
                reference = reference[:, self.allowed]
            assert_same_tokens(tokens, reference)

    def start(self, prompt: list[int], output: Any) -> list[int]:
        """The decoder's tokens before its first output."""
        return list(output.prompt_token_ids)


class ImageText(Generation):
    """Classes that read pictures: each prompt has one, two of them two, and the first none."""

    options = {
        **STEPS,
        "max_num_batched_tokens": 96,
        "max_model_len": 256,
        "renderer": "given_pictures",
        "plugins": [Given()],
    }
    """A step takes a picture whole."""
    allowed = list(range(FIRST_SPECIAL))
    """No tokens of pictures, for which there would be none."""

    def save(self, case: Case, folder: Path) -> Any:
        config = images.tiny_config(case.model_type)
        model = recipes.save(case.model_type, folder, architecture=case.architecture, config=config)
        self.pictures = []
        self.token = FIRST_SPECIAL
        self.note = ""
        try:
            images.logits(model, torch.tensor([5, 6, 7]), [])
            self.token = images.image_token(model.config.to_dict())
            self.pictures = [images.picture(model, seed) for seed in range(2)]
        except ValueError:
            # Some are listed as models of text, too.
            if case.architecture not in MAPPINGS["causal"].values():
                raise
            self.note = "text alone"
        else:
            (folder / "preprocessor_config.json").write_text("{}", encoding="utf-8")
        return model

    def plain(self, model: Any) -> None:
        """Was done when it was saved."""

    def given(self, index: int) -> list[dict[str, torch.Tensor]]:
        return self.pictures[: index % 3]

    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        return images.logits(model, torch.tensor(tokens), self.given(index))

    def request(self, prompt: list[int]) -> Any:
        index = prompts().index(prompt)
        arrays = [
            {name: array.numpy() for name, array in picture.items()}
            for picture in self.given(index)
        ]
        tokens = [3 + token % (FIRST_SPECIAL - 3) for token in prompt]
        # Some code takes pictures without a token between them for one.
        places = [token for number in range(len(arrays)) for token in (self.token, 4 + number)]
        return {
            "prompt_token_ids": [*tokens[:1], *places, *tokens[1:]],
            "multi_modal_data": {"image": arrays},
        }


class EncoderDecoder(Generation):
    """Classes whose encoder reads the prompt."""

    @torch.inference_mode()
    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(
            input_ids=torch.tensor([prompts()[index]]),
            decoder_input_ids=torch.tensor([tokens]),
            use_cache=False,
        ).logits
        return found[0].float()

    def request(self, prompt: list[int]) -> Any:
        return {
            "encoder_prompt": {"prompt_token_ids": prompt},
            "decoder_prompt": {"prompt_token_ids": [3]},
        }

    def start(self, prompt: list[int], output: Any) -> list[int]:
        return [3]


class Pooling(Run):
    """Classes that give hidden states or logits of a prompt."""

    params = PoolingParams(task="token_embed", normalize=False)
    end: tuple[int, ...] = ()
    """Tokens after each prompt."""

    def plain(self, model: Any) -> None:
        self.vectors(model, [5, 6, 7, *self.end])

    @torch.inference_mode()
    def vectors(self, model: Any, tokens: list[int]) -> torch.Tensor:
        """[T, H], or [labels], of a prompt by transformers alone."""
        found: torch.Tensor = model.base_model(torch.tensor([tokens]))[0]
        return found[0].float()

    def engine(self, folder: Path) -> list[torch.Tensor]:
        with LLM(str(folder), **OPTIONS) as llm:
            outputs = llm.encode(
                [{"prompt_token_ids": [*prompt, *self.end]} for prompt in prompts()],
                self.params,
                use_tqdm=False,
            )
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [torch.tensor(output.outputs.data) for output in outputs]

    def compare(self, model: Any, ours: list[torch.Tensor]) -> None:
        for prompt, found in zip(prompts(), ours, strict=True):
            reference = self.vectors(model, [*prompt, *self.end])
            assert found.shape == reference.shape, (
                f"shape {list(found.shape)}, not {list(reference.shape)}"
            )
            difference = (found - reference).abs().max().item()
            allowed = TOLERANCE * max(1.0, reference.abs().max().item())
            assert difference <= allowed, f"vectors differ by {difference:.3g}"


class Classification(Pooling):
    """Classes with a classifier of sequences."""

    params = PoolingParams(task="classify", use_activation=False)
    end = (0,)
    """Encoder-decoder classifiers read the end of the text."""

    @torch.inference_mode()
    def vectors(self, model: Any, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits
        return found[0].float()


RUNS = {
    "causal": Generation(),
    "image-text": ImageText(),
    "encoder-decoder": EncoderDecoder(),
    "masked": Pooling(),
    "embedding": Pooling(),
    "classification": Classification(),
    "speech": Generation(),
    "CTC": Generation(),
}


def brief(error: BaseException) -> str:
    """One line of an error."""
    text = " ".join(str(error).split())
    text = without_folders(text)
    return f"{type(error).__name__}: {text}"[:160] if text else type(error).__name__


def reason_of(error: ToolkitError) -> str:
    """Why the engine, or its fallback, refuses a checkpoint."""
    text = whole = " ".join(str(error).split())
    if found := re.search(r"The fallback 'transformers' cannot run it: (.*?)\. [A-Z`]", text):
        text = found[1]
    if found := re.search(r"'transformers_image_text' cannot run it: (.*?)\. [A-Z`]", whole):
        text = text if "is not a model of pictures" in found[1] else found[1]
    if found := re.search(r"'transformers_pooling' cannot run it: (.*?)\. [A-Z`]", whole):
        text = found[1] if "is not a" in text else text
    return without_folders(text)[:160]


def without_folders(text: str) -> str:
    return re.sub(r"(?<=\s)/\S+/", "", re.sub(r"'/[^']*'", "...", text))


def _child(case: Case, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with tempfile.TemporaryDirectory() as name:
            outcome = check(case, Path(name))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome("fails", f"{brief(error)} ({Path(place.filename).name}:{place.lineno})")
    sender.send(outcome)


def run(case: Case) -> Outcome:
    """The outcome of a class, in a process of its own."""
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    process = forked.Process(target=_child, args=(case, sender))
    process.start()
    sender.close()
    try:
        outcome: Outcome = receiver.recv()
    except EOFError:
        process.join()
        hung = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        outcome = Outcome("hangs") if hung else Outcome("fails", f"exit code {process.exitcode}")
    process.join()
    return outcome


def import_ahead() -> None:
    """Imports here what a class imports, so that no process does it again."""
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    process = forked.Process(target=_scout, args=(sender,))
    process.start()
    for name in receiver.recv():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    process.join()


def _scout(sender: Any) -> None:
    """Tells which modules two classes need."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as name:
        for case in cases(["causal", "masked"], ["gpt_neox", "bert"]):
            check(case, Path(name) / case.architecture)
    sender.send([name for name in sys.modules if not name.startswith("__")])


def stored() -> dict[str, list[str]]:
    """The committed results: [result, reason] by key."""
    if not RESULTS.exists():
        return {}
    found: dict[str, list[str]] = json.loads(RESULTS.read_text(encoding="utf-8"))["classes"]
    return found


def write(results: Mapping[str, Outcome]) -> None:
    """Replaces these classes' committed results, and drops those that transformers lacks. Several
    processes may do so at a time."""
    with (Path(tempfile.gettempdir()) / "toolkit-lm-coverage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(results)


def _write(results: Mapping[str, Outcome]) -> None:
    known = {case.key for case in cases()}
    merged = {**stored(), **{key: list(outcome) for key, outcome in results.items()}}
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(merged[key])}" for key in sorted(known & merged.keys())
    )
    made = RESULTS.with_suffix(".new")
    made.write_text(
        f'{{"transformers": "{transformers.__version__}",\n"classes": {{\n{lines}\n}}}}\n',
        encoding="utf-8",
    )
    made.replace(RESULTS)


def spread(chosen: list[Case], count: int) -> list[Case]:
    """`count` of the classes that can be built, at even distances."""
    known = stored()
    built = [case for case in chosen if known.get(case.key, ["unbuilt"])[0] != "unbuilt"]
    return [built[i * len(built) // count] for i in range(min(count, len(built)))]


def worse(before: Mapping[str, Sequence[str]], now: Mapping[str, Outcome]) -> list[str]:
    """Lines about classes that were equal and are not, or that are wrong."""
    lines = []
    for key, outcome in now.items():
        was = before.get(key, ["new"])[0]
        is_equal = outcome.result in EQUAL
        is_wrong = outcome.result in ("differs", "fails", "hangs") and was != outcome.result
        if is_wrong or (was in EQUAL and not is_equal) or (was == "native" != outcome.result):
            lines.append(f"{key}: was {was}, is {outcome.result} {outcome.reason}")
    return lines


def summary(results: Mapping[str, Sequence[str]]) -> str:
    """Counts of each mapping, as a table."""
    kinds = ("native", "fallback", "refused", "differs", "fails", "hangs", "unbuilt")
    rows = [f"| mapping | {' | '.join(kinds)} | equal of built |", f"| {'--- | ' * 9}".rstrip()]
    for mapping in MAPPINGS:
        counts = Counter(
            value[0] for key, value in results.items() if key.startswith(f"{mapping}/")
        )
        built = counts.total() - counts["unbuilt"]
        equal = sum(counts[kind] for kind in EQUAL)
        if built:
            cells = " | ".join(str(counts[kind]) for kind in kinds)
            rows.append(f"| {mapping} | {cells} | {equal / built:.0%} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mappings", nargs="+", choices=MAPPINGS, default=list(MAPPINGS))
    parser.add_argument("--classes", nargs="+", default=[])
    parser.add_argument("--results", nargs="+", default=[], help="classes with these results only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="after them no class begins")
    parser.add_argument("--sample", type=int, help="so many classes, spread over the mappings")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    before = stored()
    chosen = [
        case
        for case in cases(args.mappings, args.classes)
        if not args.results or before.get(case.key, ["new"])[0] in args.results
    ]
    if args.sample:
        chosen = spread(chosen, args.sample)
    results: dict[str, Outcome] = {}
    import_ahead()
    begun = time.monotonic()

    def measure(case: Case) -> None:
        if time.monotonic() - begun > args.seconds:
            return
        outcome = run(case)
        results[case.key] = outcome
        print(f"{time.monotonic() - begun:6.0f} s {outcome.result:9} {case.key} {outcome.reason}")
        sys.stdout.flush()
        if args.write:
            write(results)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(measure, chosen))
    print(summary(stored() if args.write else results))
    if args.check and (found := worse(before, results)):
        sys.exit("worse than benchmarks/coverage.json:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
