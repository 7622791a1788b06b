"""The documentation is true: its examples run, its links lead somewhere, and its tables and lists
say what the code says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.config import options_of
from toolkit_lm.errors import page as page_address
from toolkit_lm.plugin import API_VERSION, Plugins
from toolkit_lm_bench.options import (
    DatasetOptions,
    FigureOptions,
    LoadOptions,
    SamplingOptions as BenchSamplingOptions,
    TargetOptions,
)
from toolkit_lm_cli.converse import ClientOptions
from toolkit_lm_cli.explanation import explain
from toolkit_lm_cli.sampling import sampling_flags
from toolkit_lm_commands import CommandRegistry
from toolkit_lm_model_pool.options import PoolOptions
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_server.batch.command import BatchOptions
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_vllm_names.table import TABLE

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "toolkit_lm"
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
OF_CLIENTS = DOCS / "clients.md"
"""Its examples are for other people's packages, with flags of theirs: tests/clients runs those."""
EXECUTED = [
    *(page for page in GUIDES if page != OF_CLIENTS),
    ROOT / "core" / "README.md",
    ROOT / "contrib_models" / "decoder" / "README.md",
]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("downstream/*.md"),
    *DOCS.rglob("*.md"),
    ROOT / "core" / "README.md",
    *ROOT.glob("libs/*/*.md"),
    *ROOT.glob("plugins/*/*.md"),
    *ROOT.glob("contrib_*/*/*.md"),
]
ADDRESS = "http://127.0.0.1:8000"


class Block(NamedTuple):
    """A fenced block. `file` is the name on the line above it: the block is that file's content."""

    file: str | None
    language: str
    text: str


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    found = re.findall(
        r"(?:^`([\w/.-]+)`:\n\n)?^```(\w*)\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL
    )
    return [Block(file or None, language, text) for file, language, text in found]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_examples(page: Path, language: str, word: str = "") -> bool:
    return any(
        block.language == language and block.file is None and word in block.text
        for block in blocks(page)
    )


@pytest.fixture(scope="module")
def url():
    """The address of `toolkit serve tiny`."""
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "serve",
        "tiny",
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        found = next(
            (at for line in process.stdout if (at := re.search(r"Serving tiny at (\S+)", line))),
            None,
        )
        assert found, f"the server ended with exit code {process.wait()}"
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


# Examples


@pytest.mark.parametrize("page", [p for p in EXECUTED if has_examples(p, "python")], ids=name)
def test_python_examples_run(page, request, monkeypatch, capsys, tmp_path):
    """Examples of a page run one after the other in one module. "# → text" states the output."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"examples_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.language == "python" and block.file is None:
            code = block.text
            if ADDRESS in code:
                code = code.replace(ADDRESS, request.getfixturevalue("url"))
            exec(compile(code, name(page), "exec"), module.__dict__)
            printed = capsys.readouterr().out
            for expected in re.findall(r"# → (.+)$", code, re.MULTILINE):
                assert expected in printed


@pytest.mark.parametrize("page", [p for p in GUIDES if has_examples(p, "sh", "curl ")], ids=name)
def test_curl_examples_run(page, url):
    for block in blocks(page):
        if block.language == "sh" and block.text.startswith("curl "):
            script = block.text.replace(ADDRESS, url).replace(
                "curl ", "curl --silent --show-error --fail "
            )
            done = subprocess.run(
                ["bash", "-ec", script], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout


@pytest.mark.parametrize(
    "block",
    [b for b in blocks(DOCS / "benchmarks.md") if b.text.startswith("toolkit bench ")],
    ids=lambda b: b.text[:22],
)
def test_bench_examples_run(block, request, tmp_path):
    for line in block.text.replace(ADDRESS, request.getfixturevalue("url")).splitlines():
        words = [
            sys.executable,
            "-c",
            "from toolkit_lm_cli import main; main()",
            *shlex.split(line)[1:],
        ]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_yaml_examples_are_config_files(tmp_path):
    from toolkit_lm_commands.config_file import merge_options

    options = [*VllmConfig.options(), *options_of(ServerOptions)]
    examples = [block.text for page in GUIDES for block in blocks(page) if block.language == "yaml"]
    assert examples
    for example in examples:
        (tmp_path / "options.yaml").write_text(example)
        assert merge_options(options, {}, environ={}, file=tmp_path / "options.yaml")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the plugins that README.md and docs/plugins.md write down, installed by pip."""
    folder = tmp_path_factory.mktemp("plugins")
    sources = []
    for page in (ROOT / "README.md", DOCS / "plugins.md"):
        sources.append(folder / page.stem)
        for block in blocks(page):
            if block.file is not None:
                path = sources[-1] / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", folder / "site", *sources], check=True)
    return folder / "site"


def test_the_plugins_install_and_are_listed(installed):
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "plugins",
        "list",
        "--json",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    states = {row["name"]: (row["distribution"], row["status"]) for row in json.loads(done.stdout)}
    assert states["stopwatch"] == ("toolkit-lm-stopwatch", "ok")
    assert states["biased"] == ("toolkit-lm-biased", "ok")


def test_the_readmes_plugin_has_20_lines_and_works(installed, monkeypatch, capsys):
    assert (
        sum(len(block.text.splitlines()) for block in blocks(ROOT / "README.md") if block.file)
        <= 20
    )
    monkeypatch.syspath_prepend(installed)
    with LLM(model="tiny") as llm:
        llm.generate("Once upon a time", SamplingParams(max_tokens=2), use_tqdm=False)
    assert re.search(
        r"^llm-0: first token after \d+\.\d{3} s$", capsys.readouterr().out, re.MULTILINE
    )


def test_the_model_plugin_runs_its_architecture(installed, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(installed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    config = {"architectures": ["BiasedForCausalLM"], "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    found = explain(VllmConfig.make(model=str(tmp_path)))
    assert (found.model_class, found.plugin) == (
        "toolkit_lm_biased.model:BiasedForCausalLM",
        "biased",
    )
    assert [layer.backend for layer in found.layers] == ["sdpa"]


def test_the_example_of_routes_passes_its_test(monkeypatch):
    page = DOCS / "hooks" / "toolkit_register_routes.md"
    _, plugin, test = [block.text for block in blocks(page) if block.language == "python"]
    module = types.ModuleType("toolkit_lm_hello")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(plugin, module.__dict__)
    names: dict = {}
    exec(test, names)
    check = names["test_hello"]
    check()


# Links, names, tables


def anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.is_file() or (path.is_dir() and not anchor), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(path), f"{link}: there is no such heading"
        assert DOCS not in page.parents or path.is_relative_to(DOCS), (
            f"{link}: pages in docs/ link to each other only"
        )


def test_architecture_names_every_room():
    text = read(DOCS / "architecture.md")
    rooms = [f"{path.name}/" for path in CORE.iterdir() if (path / "__init__.py").exists()]
    modules = [path.name for path in CORE.glob("*.py") if not path.name.startswith("_")]
    assert len(rooms) > 10
    assert [room for room in rooms + modules if f"`{room}`" not in text] == []


def test_architecture_has_one_row_for_each_distribution():
    rows = re.findall(r"^\| (`.+?`) \|", read(DOCS / "architecture.md"), re.MULTILINE)
    named = [
        name for row in rows for name in re.findall(r"`((?:libs|plugins|contrib_\w+)/\w+)`", row)
    ]
    folders = [
        path.parent.relative_to(ROOT).as_posix()
        for place in ("libs", "plugins", "contrib_*")
        for path in ROOT.glob(f"{place}/*/pyproject.toml")
    ]
    assert len(folders) > 40
    assert sorted(named) == sorted(folders)


def test_architecture_names_files_that_exist():
    files = re.findall(r"`([\w/]+\.py)`", read(DOCS / "architecture.md"))
    assert len(files) > 20
    assert [file for file in files if not ((CORE / file).exists() or (ROOT / file).exists())] == []


def test_every_page_is_in_the_index_and_in_the_navigation():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    listed = set(re.findall(r"\(([\w/]+\.md)\)", read(DOCS / "index.md")))
    # The page of an overview lists the others of its folder.
    assert listed == {
        page
        for page in pages
        if "/" not in page or page.startswith("tutorials/") or page.endswith("README.md")
    }
    navigation = set(re.findall(r": ([\w/]+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE))
    assert pages - navigation == set()
    overview = set(re.findall(r"\((\w+\.md)", read(DOCS / "hooks" / "README.md")))
    assert {f"hooks/{name}" for name in overview} >= {
        page for page in pages if page.startswith("hooks/toolkit_")
    }


def test_the_index_is_what_its_generator_writes():
    module = load_generator("generate_index")
    assert module.text() == read(DOCS / "index.md"), "run python docs/generate_index.py"


def load_generator(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NUMBER = (
    r"\d+|[a-z]*(?:two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|teen|twenty|thirty)(?:-\w+)?"
)


def test_no_page_counts_hooks():
    """There are more of them each month: hooks/README.md lists them, and a test compares that list
    with the code."""
    found = [
        (page.name, one)
        for page in PAGES
        for one in re.findall(rf"\b((?:{NUMBER})\s+hooks)\b", read(page), re.IGNORECASE)
    ]
    assert found == []


def test_the_tables_of_options_are_current():
    spec = importlib.util.spec_from_file_location("generate_options", DOCS / "generate_options.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    for page, text in generator.pages().items():
        assert read(page) == text, (
            f"{name(page)} is out of date: run python docs/generate_options.py"
        )
    page = read(DOCS / "configuration.md")
    options = [
        o
        for section in (ServerOptions, PoolOptions, RouterOptions, ClientOptions, BatchOptions)
        for o in options_of(section)
    ] + VllmConfig.options()
    assert [o.name for o in options if f"| `{o.name}` |" not in page] == []


def test_the_flags_in_the_guides_exist():
    options = [
        o
        for section in (ServerOptions, PoolOptions, RouterOptions, ClientOptions, BatchOptions)
        for o in options_of(section)
    ] + VllmConfig.options()
    known = (
        {o.flag for o in options}
        | {f"--no-{o.flag[2:]}" for o in options if o.is_flag}
        | {o.flag for o in sampling_flags(Plugins.load().logits_processors).values()}
    )
    known |= {
        "--config",
        "--json",
        "--traceback",
        "--help",
        "--prompts",
        "--in",
        "--out",
        "--image",
        "--audio",
        "--message",
    }
    known |= {"--field", "--task", "--prompt-name", "--truncate-prompt-tokens", "--dimensions"}
    known |= {
        "--resume",
        "--overwrite",
        "--install-completion",
        "--version",
        "--no-markdown",
        "--no-reasoning",
        "--no-history",
        # Those of deploy/distributions.py and of docker.
        "--to",
        "--build-arg",
        "--target",
        # Those of plugins, which are names of their options.
        "--kv-cache-dir",
        "--kv-cache-disk",
        "--kv-cache-host",
        "--kv-cache-key-file",
        "--kv-cache-redis",
        "--kv-cache-redis-password-file",
        "--kv-cache-redis-ttl",
        "--kv-cache-write",
        *(f"--kv-transfer-{name}" for name in ("listen", "advertise", "peers", "secret-file")),
        *(f"--kv-transfer-{name}" for name in ("memory", "lease", "timeout")),
        "--prompt",
        # Those of `toolkit quality` and `toolkit quantize`.
        "--format",
        "--reference",
        "--shard-gib",
        "--text",
        "--window",
        # Those of adapters.
        "--lora-dir",
        "--lora-merge",
        "--lora-pin",
        # That of `toolkit engine`.
        "--listen",
    }
    # Those of `toolkit bench`, and of the scripts in benchmarks/.
    sections = (DatasetOptions, FigureOptions, LoadOptions, BenchSamplingOptions, TargetOptions)
    known |= {
        flag
        for section in sections
        for o in options_of(section)
        for flag in (o.flag, f"--no-{o.flag[2:]}")
    }
    known |= {
        "--runs",
        "--ways",
        "--states",
        "--repeats",
        "--batch-size",
        "--request-rate",
        "--concurrency",
        "--output",
        "--plot",
    }
    known |= {
        "--concurrencies",
        "--request-rates",
        "--minutes",
        "--attackers",
        "--python",
        "--instructions",
    }
    known |= {
        "--folder",
        "--peer",
        "--preload",
        "--prepare",
        "--precisions",
        "--shapes",
        "--only",
        "--seconds",
        "--steps",
        "--turns",
        "--quick",
        "--wake",
        "--requests",
        "--against",
    }
    known |= {row.flag for row in TABLE.values()} | {"--ctx-size", "--models-max", "--mine-folder"}
    # Flags of `toolkit kv`.
    known |= {"--file", "--messages", "--tier"}
    # Flags of docker, of `ray start`, and of `optimum-cli export`.
    known |= {"--target", "--profile", "--address", "--head"}
    known |= {"--weight-format", "--sym", "--group-size", "--ratio"}
    for page in [*(page for page in GUIDES if page != OF_CLIENTS), *DOCS.glob("hooks/*.md")]:
        lines = [
            line
            for line in read(page).splitlines()
            if not line.lstrip().startswith(("pip ", "curl "))
        ]
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "\n".join(lines))) <= known, name(page)


def test_the_readme_names_every_command():
    text = read(ROOT / "README.md")
    assert [
        command
        for command in Plugins.load().brought_registry(CommandRegistry)
        if f"`toolkit {command}" not in text
    ] == []


def test_the_readme_compares_with_what_was_measured():
    """Each row of its table is a row of the page of the last race, peer by peer."""
    measured = [
        [cell.split()[0] for cell in line.split("|")[1:-1] if cell.strip()]
        for line in read(DOCS / "performance.md").splitlines()
        if line.startswith("|")
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in read(ROOT / "README.md").splitlines()
        if line.startswith("|") and line.count("|") == 7
    ][2:]
    assert len(rows) > 6
    for work, *figures in rows:
        found = {figure for figure in figures if figure not in ("–", "1")}
        assert any(found <= {*row} for row in measured), work


def test_sampling_names_every_parameter_and_its_default():
    text = read(DOCS / "sampling.md")
    defaults = {
        field: getattr(SamplingParams(), field)
        for field in SamplingParams.__struct_fields__
        if field != "output_kind"
    }
    assert "`output_kind`" in text
    assert [
        field for field, value in defaults.items() if f"| `{field}` | `{value!r}`" not in text
    ] == []


def test_the_server_page_names_every_route_and_metric(url):
    text = read(DOCS / "server.md")
    routes = [
        f"{method.upper()} {path}"
        for path, methods in httpx.get(f"{url}/openapi.json").json()["paths"].items()
        for method in methods
    ]
    assert len(routes) > 8
    of_vendors = read(DOCS / "vendor_apis.md")
    assert [route for route in routes if f"`{route}`" not in text + of_vendors] == []
    metrics = re.findall(r"^# TYPE (\w+) (\w+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    names = [metric for metric, _ in metrics if not metric.endswith("_created")]
    assert len(names) > 10
    assert [metric for metric in names if f"`{metric}`" not in text] == []


def test_the_pinned_contract_is_the_one_there_is():
    for page in PAGES:
        assert set(re.findall(r"toolkit-lm-core>=([\d.]+)", read(page))) <= {API_VERSION}, name(
            page
        )


def test_errors_name_pages_that_can_be_opened():
    """Pages are named by their address, which a user without this repository can open; each of them
    exists."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for pattern in ("core/src", "*/*/src")
        for path in ROOT.glob(f"{pattern}/**/*.py")
    }
    named = {
        name
        for text in sources.values()
        for name in re.findall(r"""page\(["']([\w/.-]+)["']\)""", text)
    }
    assert "hooks/toolkit_register_models.md" in named
    assert [name for name in named if not (ROOT / "docs" / name).is_file()] == []
    assert [
        path for path, text in sources.items() if re.search(r"[^/\w]docs/[\w/]+\.md", text)
    ] == []
    metadata = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text(encoding="utf-8"))
    assert page_address("index.md") == f"{metadata['project']['urls']['Documentation']}/index.md"
