"""The engine on a GPU that is none: a device whose work is done when the host waits for it, and not
before."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import torch
from fake_cuda import FakeCuda
from toolkit_lm import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "dtype": "float32",
    "attention_backend": "sdpa",
    "kernels": "torch",
    "max_num_seqs": 4,
    "max_model_len": 128,
    "num_kv_blocks": 32,
    "max_num_batched_tokens": 16,
    "engine_process": False,
    "overlap": False,
}
PROMPTS = [
    "Once upon a time there was a little girl who lived in a house by the sea. One day she saw a "
    "big red boat, and "
    "her mother said that it was there for all of them. So they went, and they were happy.",
    "The cat",
]
PARAMS = [
    SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=3, temperature=0.9, top_p=0.9, seed=1, ignore_eos=True),
]


def drawn(device: str, waits: list[str]) -> list[tuple[list[int], list[float]]]:
    with LLM("tiny", device=device, **OPTIONS) as llm:
        waits.clear()
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        return [
            (one.token_ids, [next(iter(entry.values())).logprob for entry in one.logprobs or []])
            for one in outputs
        ]


def test_long_prompts_and_draws_of_all_kinds() -> None:
    """A step's inputs, its kernels' and its results are its own, however late the device is."""
    expected = drawn("cpu", [])
    with (
        FakeCuda() as cuda,
        mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (2**33, 2**33)),
    ):
        found = drawn("cuda", cuda.waits)
    assert found == expected
    # For the last step's inputs, for a chunk's end, for whether the first tokens are enough for
    # top-p, and for what is drawn and told.
    assert set(cuda.waits) == {"event", "stream", "aten::nonzero", "aten::_to_copy"}


def test_memory_that_is_copied_late_is_only_where_somebody_waits() -> None:
    """Who pins memory, and writes to it again, waits for the copy before: `StepBuffers.uploaded`.
    The host's blocks are copied at once."""
    files = [
        path
        for folder in ("core", "libs", "plugins", "contrib_models", "contrib_backends")
        for path in (ROOT / folder).rglob("src/**/*.py")
    ]
    pinning = {
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"\bpin_memory|cudaHostAlloc", path.read_text())
    }
    assert pinning == {f"core/src/toolkit_lm/{name}.py" for name in ("runner/batch", "kv/cache")}
