"""docs/clients.md, from the versions in requirements-clients.txt, requirements-clients-nightly.txt and
requirements-benchmarks.txt, and what the tests say of themselves.

Run this file to write it.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "clients.md"
CLIENTS = ROOT / "requirements-clients.txt"
NIGHTLY = ROOT / "requirements-clients-nightly.txt"
BENCHMARKS = ROOT / "requirements-benchmarks.txt"
NODE = HERE / "nightly" / "node" / "package.json"
TINY = str(ROOT / "contrib_models" / "tiny" / "src" / "toolkit_lm_tiny" / "checkpoint")
"""The checkpoint of the model that is served."""

_HEAD = """# Clients

<!-- summary: Other projects' programs that work with the server unchanged -->

Clients of other people's, unchanged but for the base URL, that were tried with `toolkit serve`, each with the version that passed.
`make test-clients` tries them again, and `python tests/clients/page.py` writes this page.

| client | version | what was tried |
| --- | --- | --- |
"""
_AGENTS = """
```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")  # any word, where the server has no key
```

```python
import litellm  # LITELLM_LOCAL_MODEL_COST_MAP=True keeps it from asking another host for prices

litellm.completion(model="openai/MODEL", api_base="http://127.0.0.1:8000/v1", api_key="none", messages=messages)
litellm.completion(model="ollama_chat/MODEL", api_base="http://127.0.0.1:8000", messages=messages)
```

## Agents, and evalscope

A loop is two calls of a tool and an answer, by `tiny-tools`, at `/v1/chat/completions`, or at `/v1/responses` where that is named.
`make test-clients-nightly`, which `make test-nightly` runs, tries these again.

| client | version | what was tried |
| --- | --- | --- |
"""
_EVALUATION = """
## Evaluation and benchmarks

| client | version | what was tried |
| --- | --- | --- |
"""
_TAIL = """
`make test-clients` runs all of these. mteb asks `/v1/models` without its key, so that its server has none; `modalities=["text"]` says what is embedded.
Not tried: promptfoo, which takes 1.9 GB.

They need the model's tokenizer: `FOLDER` has its files. lm-eval does without where the server has `--tokenizer-info`.

```sh
export OPENAI_API_KEY=KEY   # any word, where the server has no key
lm-eval run --model local-completions --tasks TASK \\
    --model_args model=MODEL,base_url=http://127.0.0.1:8000/v1/completions,tokenizer_backend=remote,auth_token=KEY,max_length=4096
guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=MODEL,api_key=KEY --profile kind=concurrent,streams=8 \\
    --constraint kind=max_requests,count=100 --tokenizer kind=hf_auto,model=FOLDER \\
    --data kind=synthetic_text,prompt_tokens=256,output_tokens=128
aiperf profile --model MODEL --url http://127.0.0.1:8000 --api-key KEY --endpoint-type chat --streaming --tokenizer FOLDER \\
    --concurrency 8 --request-count 100 --prompt-input-tokens-mean 256 --prompt-output-tokens-mean 128 --extra-inputs ignore_eos:true
```

[Server](server.md) has the routes, and [Other vendors' APIs](vendor_apis.md) what is taken of Anthropic's, Cohere's and Ollama's.
"""


def versions(requirements: Path = CLIENTS) -> dict[str, str]:
    """Versions under test by client, which the first paragraph of a file of requirements pins."""
    return dict(
        re.findall(
            r"^([\w-]+)(?:\[\w+\])?==([\w.]+)$",
            requirements.read_text().split("\n\n")[0],
            re.MULTILINE,
        )
    )


def environ() -> dict[str, str]:
    """The variables of this process, for clients that ask no other host and tell nobody what they
    do."""
    quiet = {
        "NO_COLOR": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    return {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    } | quiet


def page() -> str:
    """The page as it should be."""
    return (
        _HEAD
        + _rows(HERE, CLIENTS)
        + _AGENTS
        + _rows(HERE / "nightly", NIGHTLY)
        + _EVALUATION
        + _rows(HERE / "benchmarks", BENCHMARKS)
        + _TAIL
    )


def _rows(folder: Path, requirements: Path) -> str:
    tried = {}
    for path in sorted(folder.glob("test_*.py")):
        head = ast.get_docstring(ast.parse(path.read_text())) or ""
        name, _, what = " ".join(head.split()).partition(": ")
        tried[name] = what.removesuffix(".")
    pinned = versions(requirements)
    links = {name: f"[{name}](https://pypi.org/project/{name}/)" for name in pinned}
    if requirements == NIGHTLY:
        of_node = json.loads(NODE.read_text())["dependencies"]
        pinned |= {f"{name} (npm)": of_node[name] for name in ("ai", "openai")}
    if tried.keys() != pinned.keys():
        raise ValueError(
            "clients without tests, or tests without clients: "
            f"{sorted(tried.keys() ^ pinned.keys())}"
        )
    return "".join(
        f"| {links.get(name, name)} | {pinned[name]} | {what} |\n" for name, what in tried.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
