"""Shared harness: a compiled model that `hidden_states` can run, and the passes that are
compared."""

from __future__ import annotations

import json
import shutil

import torch
from toolkit_lm import LLM
from toolkit_lm.plugin import Plugins
from toolkit_lm_compile.compiler import InductorCompiler
from toolkit_lm_devkit import hidden_states

PLUGINS = Plugins.load()
BATCHES = ([1], [2], [5, 9, 2], [1, 1, 1, 1], [37], [24])
"""Lengths of the sequences of a step. One token, the traced 16 and 24, and others."""
QUICKLY = {
    "inductor_compile_config": {"cpp_cache_precompile_headers": shutil.which("openssl") is not None}
}
"""g++ reads torch's headers once, and not for each part: a third of the time. torch asks openssl
whether they have changed."""


class Stage:
    """The compiler in the place of its model."""

    def __init__(self, compiler):
        self.compiler = compiler

    def modules(self):
        return self.compiler.model.modules()

    def __call__(self, *args, **kwargs):
        names = ("input_ids", "positions")
        return self.compiler(**dict(zip(names, args, strict=False)), **kwargs)


def compiled(model, level=1, backend="eager", **options):
    details = {
        "backend": backend,
        **(QUICKLY if backend == "inductor" else {}),
        **options.pop("details", {}),
    }
    config = model.vllm_config.replace(
        **{"optimization_level": level, "compilation_config": json.dumps(details), **options}
    )
    return InductorCompiler(model, config, PLUGINS)


def check(compiler, vocab_size=90, batches=BATCHES, *, whole=True, **inputs):
    """Compiled and eager hidden states are alike, over batches of all kinds, and every pass was a
    compiled one. `whole`: with all parts."""
    model = compiler.model
    if whole and compiler._options.backend == "inductor" and not compiler.was_cached:
        parts = {part for program in compiler._programs.values() for part in program.plan.parts}
        assert compiler.num_compiled >= len(parts), "a part is computed as it was traced"
    for lengths in batches:
        generator = torch.Generator().manual_seed(sum(lengths))
        sequences = [
            torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths
        ]
        made = {name: make(sum(lengths)) for name, make in inputs.items()}
        expected = torch.cat(hidden_states([model], sequences, **made))
        ours = torch.cat(hidden_states([Stage(compiler)], sequences, **made))
        assert expected.std() > 0.01
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    assert compiler.num_eager_steps == 0


def answers(folder, prompts, params, level, **options):
    """Tokens of the answers of an engine at an optimization level: at 1 its parts are as they were
    traced, and every step is a compiled one."""
    if level:
        options["compilation_config"] = json.dumps({"backend": "eager"})
    with LLM(
        str(folder),
        dtype="float32",
        kernels="torch",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_model_len=64,
        optimization_level=level,
        **options,
    ) as llm:
        compiler = llm.engine.client.core.executor.runner.compiler
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert (compiler is not None) == bool(level)
        assert not level or compiler.num_eager_steps == 0
    return [list(output.outputs[0].token_ids) for output in outputs]
