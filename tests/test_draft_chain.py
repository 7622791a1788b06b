"""Several drafters: each row takes the best drafts, and the others may extend them."""

from __future__ import annotations

import importlib
import re
import warnings
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, PluginError
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import DrafterRegistry, PluginWarning, hookimpl
from toolkit_lm.step import Drafter

PROMPTS = [[3 + (i * k) % 11 for i in range(length)] for k, length in ((1, 24), (3, 9), (5, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, detokenize=False)


class Oracle(Drafter):
    """Knows the texts, and drafts a few of their tokens."""

    known: ClassVar[list[list[int]]] = []
    count = 4

    def propose(self, token_ids: np.ndarray) -> list[int]:
        tokens = token_ids.tolist()
        for text in importlib.import_module(__name__).Oracle.known:
            if text[: len(tokens)] == tokens:
                return text[len(tokens) : len(tokens) + self.count]
        return []

    def extend(self, seq_id: int, token_ids: np.ndarray, num_drafts: int) -> list[int]:
        return []


class Short(Oracle):
    """Leaves the rest to others."""

    count = 1


class Extending(Oracle):
    """Drafts only after others."""

    def extend(self, seq_id, token_ids, num_drafts):
        assert num_drafts and not token_ids.flags.writeable
        return super().propose(token_ids)[: self.count - num_drafts]

    def propose(self, token_ids):
        return []


class Long(Oracle):
    """Drafts more than any step may verify, and than the sequence may become."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return (super().propose(token_ids) + [98] * 600)[:600]


class Boastful(Drafter):
    """Drafts what never comes, and says that it is certain."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return [99] * 6

    def acceptance(self, seq_id, drafts):
        return [1.0] * len(drafts)


class Late(Oracle):
    """Fails after a while."""

    def propose(self, token_ids):
        if len(token_ids) > 50:
            raise ValueError("too long for me")
        return super().propose(token_ids)


class Misstated(Oracle):
    """States a probability too few."""

    def acceptance(self, seq_id, drafts):
        return [0.5] * (len(drafts) - 1)


class Foreign(Extending):
    """Extends by what is no token."""

    def extend(self, seq_id, token_ids, num_drafts):
        return [10**6]


class Buffered(Drafter):
    """Has a buffer."""

    buffers: ClassVar = {"mine": ("row", None)}

    def propose(self, token_ids):
        return []


class Second(Buffered):
    """Has a buffer of the same name."""


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    kinds = (Oracle, Short, Extending, Long, Boastful, Late, Misstated, Foreign, Buffered, Second)
    for kind in kinds:
        drafters.add(kind.__name__, f"{__name__}:{kind.__name__}")


CHAINED = SimpleNamespace(name="chained", toolkit_register_drafters=toolkit_register_drafters)


class Steps:
    """A plugin that counts steps."""

    name = "steps"

    def __init__(self) -> None:
        self.count = 0
        self.drafts: list[tuple[int, int]] = []

    @hookimpl
    def toolkit_event(self, event) -> None:
        if isinstance(event, StepEvent):
            self.count += 1
            self.drafts += event.drafts


def run(folder, drafter, params=GREEDY, **options):
    """The texts with their prompts, the plugin that counts, and the outputs."""
    steps = Steps()
    with LLM(
        str(folder),
        plugins=[CHAINED, steps],
        drafter=drafter,
        dtype="float32",
        max_model_len=128,
        block_size=4,
        **({"draft_budget": "all"} if drafter else {}) | options,
    ) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(given, params, use_tqdm=False)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    return texts, steps, outputs


@pytest.fixture(scope="module")
def folder(make_llama):
    return make_llama("chain")[0]


@pytest.fixture(scope="module")
def plain(folder):
    texts, steps, _ = run(folder, None)
    importlib.import_module(__name__).Oracle.known = texts
    return texts, steps.count


def test_who_boasts_is_found_out(folder, plain):
    """After some wrong drafts of the one, the other's are taken."""
    texts, steps, _ = run(folder, "Boastful,Oracle")
    assert texts == plain[0]
    assert steps.count < 0.6 * plain[1]
    _, alone, _ = run(folder, "Boastful")
    assert alone.count == plain[1]


def test_a_short_draft_is_extended(folder, plain):
    texts, steps, _ = run(folder, ["Short", "Extending"])
    assert texts == plain[0]
    # 1 token of the prompt's step, and then 1 draft, 3 of the extension, and one more token.
    assert steps.count == 1 + -(-32 // 5)
    assert all(accepted == drafted for drafted, accepted in steps.drafts)
    _, short, _ = run(folder, "Short")
    assert short.count == 1 + 32 // 2


def test_drafts_that_are_too_long_are_cut(folder, plain):
    """To the step's budget, to what the request may still get, and to what it asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        texts, steps, _ = run(folder, "Long", max_num_batched_tokens=16, max_num_seqs=3)
        assert texts == plain[0]
        assert all(accepted >= min(4, drafted) for drafted, accepted in steps.drafts)
        assert 4 < max(drafted for drafted, _ in steps.drafts) <= 15
        two = GREEDY.replace(extra_args={"max_draft_tokens": 2})
        texts, steps, _ = run(folder, "Long", two)
        assert texts == plain[0]
        assert {drafted for drafted, _ in steps.drafts} <= {1, 2}


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("Late", "too long for me"),
        ("Misstated", "no probability for each of 4 drafts"),
        ("Foreign", r"Foreign has proposed \[1000000\]"),
    ],
)
def test_a_drafter_that_fails_is_dropped_alone(folder, plain, drafter, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PluginWarning)
        texts, steps, _ = run(folder, f"{drafter},Short")
    assert texts == plain[0]
    assert steps.count <= 1 + 32 // 2, "the other one goes on"
    [told] = [str(one.message) for one in caught if issubclass(one.category, PluginWarning)]
    assert f"drafter '{drafter}'" in told and "from now on Short goes on" in told
    assert re.search(message, told), told


def test_vllms_names():
    config = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with LLM("tiny", speculative_config=config) as llm:
        part = llm.engine.client.core.executor.runner.parts.by_name["drafter"]
        options = part._drafters["ngram"].options
    assert (options.num_speculative_tokens, options.lookup) == (2, (2, 3))
    with pytest.raises(ConfigError, match="method 'medusa': its heads are not built"):
        LLM("tiny", speculative_config={"method": "medusa"})
    with pytest.raises(ConfigError, match=r"option num_speculative_tokens must be .*>= 1"):
        LLM("tiny", speculative_config=config | {"num_speculative_tokens": 0})


def test_the_names_of_a_chain(folder):
    with pytest.raises(ConfigError, match="drafter names 'Oracle' twice"):
        run(folder, "Oracle,Oracle")
    with pytest.raises(ConfigError, match=r"no drafter 'Oracel' is registered.*Oracle"):
        run(folder, "Short,Oracel")
    with pytest.raises(PluginError, match="drafter 'Second' has a buffer 'mine', and another has"):
        run(folder, "Buffered,Second")


def test_drafts_are_counted(folder, plain):
    """In steps, and over all sequences of a request."""
    _, steps, outputs = run(folder, "Oracle")
    metrics = [output.metrics for output in outputs]
    assert sum(one.num_draft_tokens for one in metrics) == sum(d for d, _ in steps.drafts) > 0
    assert sum(one.num_accepted_tokens for one in metrics) == sum(a for _, a in steps.drafts)
    assert [one.num_accepted_tokens for one in metrics] == [
        one.num_generation_tokens - steps.count for one in metrics
    ]
