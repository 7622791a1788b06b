"""One rank of an engine that a launcher starts: `python external_rank.py MODEL PROMPTS`, JSON."""

from __future__ import annotations

import json
import sys

from toolkit_lm import LLM, SamplingParams


def main() -> None:
    model, prompts, params, options = map(json.loads, sys.argv[1:])
    with LLM(model, executor="external_launcher", **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**params), use_tqdm=False
        )
        print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
