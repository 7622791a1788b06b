"""The compile cache: what hits and what misses, and what becomes of damage, of deaths and of two
starts at once."""

from __future__ import annotations

import grp
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import toolkit_lm
import toolkit_lm_compile
import toolkit_lm_decoder
import torch
from compile_harness import PLUGINS, compiled
from toolkit_lm.errors import ConfigError
from toolkit_lm.model import ChangingMethod
from toolkit_lm_compile import compiler as compiler_module, key as key_module, store
from toolkit_lm_compile.key import ingredients, key_of
from toolkit_lm_compile.options import options_of
from toolkit_lm_compile.store import MANIFEST, Entry, FileRecord, Manifest, open_root
from toolkit_lm_devkit import load_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), folder)


@pytest.fixture
def compilations(monkeypatch):
    """Parts are not compiled, but kept as files: the number of those that were compiled, and a
    function to wait in."""
    made = []

    def compile_part(graph, folder, size, patches):
        made.append(size)
        (folder / "aotautograd").mkdir()
        (folder / "aotautograd" / "code").write_text("x" * 1000)
        return graph.forward

    monkeypatch.setattr(compiler_module, "compile_part", compile_part)
    monkeypatch.setattr(compiler_module, "instructions_here", dict)
    monkeypatch.setattr(
        compiler_module, "load_part", lambda folder, *_: (folder / "aotautograd" / "code").read_text
    )
    return made


def start(model, cache, **options):
    details = {"cache_dir": str(cache), "inductor_compile_config": {}, **options.pop("details", {})}
    return compiled(model, backend="inductor", details=details, **options)


def entry_of(cache):
    [folder] = cache.glob("*/rank_0_0")
    return folder


def test_a_second_start_compiles_nothing(model, compilations, tmp_path):
    first = start(model, tmp_path / "c")
    second = start(model, tmp_path / "c")
    assert (first.was_cached, first.num_compiled, second.was_cached, second.num_compiled) == (
        False,
        3,
        True,
        0,
    )
    assert len(compilations) == 3
    names = {path.name for path in entry_of(tmp_path / "c").iterdir()}
    assert names == {MANIFEST, "graph_0.py", "parts"}
    assert "torch.ops.toolkit_lm.attention" in (entry_of(tmp_path / "c") / "graph_0.py").read_text()


@pytest.mark.parametrize("cache", [True, False])
def test_nothing_of_what_is_not_compiled_is_asked_of_a_compiler(model, monkeypatch, cache):
    """g++ takes many seconds to say which vector instructions there are."""
    monkeypatch.setattr(compiler_module, "instructions_here", None)
    assert compiled(model, backend="eager", compile_cache=cache).num_compiled == 0


def test_a_copy_hits(model, compilations, tmp_path):
    start(model, tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "elsewhere")
    assert start(model, tmp_path / "elsewhere").was_cached
    manifest = (entry_of(tmp_path / "c") / MANIFEST).read_text()
    assert (
        str(tmp_path) not in manifest
        and str(Path(compiler_module.__file__).parents[3]) not in manifest
    )


def key(compiled_model, /, plugins=PLUGINS, **options):
    config = compiled_model.vllm_config.replace(optimization_level=2).replace(**options)
    return key_of(ingredients(compiled_model, config, options_of(config), plugins))


@pytest.mark.parametrize(
    "options",
    [
        {
            "max_num_seqs": 3,
            "seed": 4,
            "kv_cache_memory": "1GiB",
            "served_model_name": ["other"],
            "start_timeout": 3.0,
            "max_logprobs": 3,
        },
        {"data_parallel_size": 3, "executor": "mp", "nodes": 1, "master": "elsewhere:1234"},
        {
            "model": "/another/folder",
            "tokenizer": "/another/folder",
            "compilation_config": '{"cache_dir": "/another/place"}',
        },
    ],
)
def test_what_has_no_effect_hits(model, options):
    assert key(model) == key(model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 64},
        {"optimization_level": 1},
        {"compilation_config": '{"compile_sizes": [4]}'},
        {"compilation_config": '{"compile_ranges": [[4, 8]]}'},
        {"compilation_config": '{"inductor_compile_config": {"cpp.simdlen": 8}}'},
        {"kernels": "torch"},
        {"attention_backend": "sdpa"},
        {"tensor_parallel_size": 2},
    ],
)
def test_what_has_an_effect_misses(model, options):
    assert key(model) != key(model, **options)


def test_what_parts_add_to_a_layer_misses(model, monkeypatch):
    """Taps, and methods that wrap others: without them, code of a model that has none would be
    found."""

    class Adapting(ChangingMethod):
        def change(self, x, out, rows):
            return out

    before = key(model)
    layer = model.model.layers[0]
    tap = layer.register_forward_hook(lambda *given: None)
    tapped = key(model)
    tap.remove()
    assert key(model) == before != tapped
    layer.register_buffer("tapped", torch.zeros(4, 8), persistent=False)
    assert key(model) != before
    del layer.tapped
    linear = layer.self_attn.o_proj
    monkeypatch.setattr(linear, "method", Adapting(linear.method))
    assert key(model) != before


def test_another_checkout_hits_and_another_text_misses(model, monkeypatch, tmp_path):
    before = key(model)
    file = Path(sys.modules["toolkit_lm_decoder.llama"].__file__)
    copy = tmp_path / "llama.py"
    shutil.copy(file, copy)
    monkeypatch.setattr(sys.modules["toolkit_lm_decoder.llama"], "__file__", str(copy))
    assert key(model) == before
    copy.write_text(copy.read_text() + "# changed\n")
    assert key(model) != before


ELSEWHERE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import toolkit_lm, toolkit_lm_compile, toolkit_lm_decoder.llama
for module in (toolkit_lm, toolkit_lm_compile, toolkit_lm_decoder.llama):
    assert Path(module.__file__).is_relative_to(sys.argv[3]), module.__file__
from compile_harness import PLUGINS
from test_compile_cache import key
from toolkit_lm_devkit import load_checkpoint
print(key(load_checkpoint(PLUGINS.models.load("LlamaForCausalLM"), Path(sys.argv[2]))))
"""


def test_another_checkout_has_the_same_key(model, tmp_path, request):
    """Core, the model's plugin and this one, run from a copy of their sources by another
    process."""
    for package in (toolkit_lm, toolkit_lm_compile, toolkit_lm_decoder):
        folder = Path(package.__file__).parent
        shutil.copytree(
            folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    script = [
        sys.executable,
        "-c",
        ELSEWHERE,
        str(request.path.parent),
        model.vllm_config.checkpoint.path,
        str(tmp_path),
    ]
    found = subprocess.run(
        script,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == key(model)


def test_a_torch_option_misses(model):
    before = key(model)
    with torch._inductor.config.patch({"epilogue_fusion": False}):
        assert key(model) != before
    assert key(model) == before


def test_another_cpu_misses(model, monkeypatch, tmp_path):
    """Two of the same vector instructions, too: the code may hold others (here VAES)."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(key_module, "_CPUINFO", file, raising=False)
    file.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 vaes\n\nprocessor\t: 1\nflags\t\t: fpu avx2 vaes\n"
    )
    first = key(model)
    file.write_text("cpu MHz\t\t: 2596.152\nflags\t\t: vaes fpu avx2\n")
    assert key(model) == first
    file.write_text("flags\t\t: fpu avx2\n")
    assert key(model) != first
    file.unlink()
    monkeypatch.setattr(key_module.platform, "processor", lambda: "one")
    elsewhere = key(model)
    monkeypatch.setattr(key_module.platform, "processor", lambda: "another")
    assert key(model) != elsewhere


COUNTED = ("decoder", "compile")


@pytest.mark.parametrize("changes", [{"version": "9"}, {"content": "another"}])
def test_plugins_count_where_the_pass_is_made_of_them(model, monkeypatch, changes):
    """Other plugins do not count: an upgrade of the server causes no compilation."""
    before = key(model)
    whole = PLUGINS.fingerprint()
    counted = set()
    for one in whole.plugins:
        plugins = tuple(
            msgspec.structs.replace(other, **changes) if other is one else other
            for other in whole.plugins
        )
        monkeypatch.setattr(
            PLUGINS,
            "fingerprint",
            lambda plugins=plugins: msgspec.structs.replace(whole, plugins=plugins),
        )
        if key(model) != before:
            counted.add(one.name)
    # The kernels that were chosen count, too, and core by its rooms, below.
    assert counted - {model.vllm_config.device.kernels, "cpu"} == {*COUNTED}
    assert {"server", "cli", "sdpa", "renderer_hf"} <= {one.name for one in whole.plugins} - counted


def test_the_source_of_core_counts(model, monkeypatch):
    before = key(model)
    monkeypatch.setattr(key_module, "_core", lambda: "another")
    assert key(model) != before


def test_a_changed_source_that_the_key_does_not_see_misses(
    model, compilations, tmp_path, monkeypatch
):
    start(model, tmp_path / "c")
    monkeypatch.setattr(compiler_module, "source_digest", lambda module: "another")
    assert not start(model, tmp_path / "c").was_cached


def damage_manifest(folder):
    (folder / MANIFEST).write_text("{")


def damage_part(folder):
    part = next(folder.glob("parts/*/any/aotautograd/code"))
    part.write_text(part.read_text()[:500])


def alter_part(folder):
    """Changes a byte and keeps the size."""
    part = next(folder.glob("parts/*/any/aotautograd/code"))
    part.write_text("y" + part.read_text()[1:])


def lose_file(folder):
    next(folder.glob("parts/*/any/aotautograd/code")).unlink()


def link_file(folder):
    part = next(folder.glob("parts/*/any/aotautograd/code"))
    part.rename(folder / "elsewhere")
    part.symlink_to(folder / "elsewhere")


def make_older(folder):
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text().replace("compile cache 2", "compile cache 1"))


def lose_part(folder):
    shutil.rmtree(next(folder.glob("parts/*")))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage",
    [damage_manifest, damage_part, alter_part, lose_file, link_file, lose_part, make_older, empty],
)
def test_damage_is_mended_with_a_warning(model, compilations, tmp_path, caplog, damage):
    start(model, tmp_path / "c")
    damage(entry_of(tmp_path / "c"))
    with caplog.at_level(logging.WARNING, "toolkit_lm_compile"):
        assert not start(model, tmp_path / "c").was_cached
    assert "is damaged" in caplog.text
    assert start(model, tmp_path / "c").was_cached


def test_a_wrong_size_is_seen_without_reading(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    record = FileRecord.of(file)
    assert record.differs(file) is None
    file.write_bytes(b"x" * 9)
    assert record.differs(file) == "it has 9 bytes, not 10"
    file.write_bytes(b"x" * 9 + b"y")
    assert record.differs(file) == "its content has changed"


def test_what_the_manifest_does_not_name_is_not_loaded(model, compilations, tmp_path, monkeypatch):
    start(model, tmp_path / "c")
    loaded = []
    monkeypatch.setattr(
        compiler_module, "load_part", lambda folder, *_: loaded.append(folder.parent.name) or str
    )
    shutil.copytree(
        next(entry_of(tmp_path / "c").glob("parts/*")),
        entry_of(tmp_path / "c") / "parts" / "planted",
    )
    assert start(model, tmp_path / "c").was_cached
    assert len(loaded) == 3 and "planted" not in loaded


def test_code_is_loaded_with_the_options_of_its_compilation(
    model, compilations, tmp_path, monkeypatch
):
    """Code is found by the command line of g++, which options may change."""
    patches = {"cpp.simdlen": 8}
    seen = []
    start(model, tmp_path / "c", details={"inductor_compile_config": patches})
    monkeypatch.setattr(
        compiler_module,
        "load_part",
        lambda folder, instructions, patches: seen.append(patches) or str,
    )
    assert start(model, tmp_path / "c", details={"inductor_compile_config": patches}).was_cached
    assert seen == [patches] * 3


def test_code_that_cannot_be_loaded_is_made_anew(
    model, compilations, tmp_path, monkeypatch, caplog
):
    start(model, tmp_path / "c")

    def fail(*_):
        raise RuntimeError("poisoned")

    monkeypatch.setattr(compiler_module, "load_part", fail)
    assert start(model, tmp_path / "c").num_compiled == 3
    assert "poisoned" in caplog.text


def test_two_starts_at_once_compile_once(model, compilations, tmp_path):
    """The second waits for the first, and finds what it has made: as do two processes, whose locks
    are of open files, too."""
    root = open_root(tmp_path / "c")
    config = model.vllm_config.replace(
        optimization_level=1, compilation_config=json.dumps({"cache_dir": str(root)})
    )
    entry = Entry(root, key_of(ingredients(model, config, options_of(config), PLUGINS)), "rank_0_0")
    made = []
    with entry.locked():
        thread = threading.Thread(target=lambda: made.append(start(model, root)))
        thread.start()
        time.sleep(0.3)
        assert not made
        with entry.staged() as folder:
            manifest = Manifest(model="", ingredients={}, sources={}, plans=[])
            entry.publish(folder, manifest)
    thread.join()
    assert made[0].was_cached and not compilations


CHILD = """
import sys, time
from pathlib import Path
from toolkit_lm_compile.store import Entry, open_root
entry = Entry(open_root(Path(sys.argv[1])), "key", "rank_0_0")
with entry.locked(), entry.staged() as folder:
    (folder / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_start_that_is_killed_while_it_writes_leaves_nothing_in_the_way(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "writing\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    entry = Entry(open_root(tmp_path / "c"), "key", "rank_0_0")
    assert entry.read() is None and len(list(entry.parent.glob(".staged-*"))) == 1
    with entry.locked(), entry.staged() as folder:
        entry.publish(folder, Manifest(model="m", ingredients={}, sources={}, plans=[]))
    assert entry.read().model == "m" and not list(entry.parent.glob(".staged-*"))


def test_the_folder_is_its_users_alone(tmp_path):
    root = open_root(tmp_path / "c")
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o770)
    with pytest.raises(ConfigError, match=r"can be written by others.*compile_cache=False"):
        open_root(root)
    root.chmod(0o700)
    (root / "key").mkdir()
    (root / "key").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        open_root(root)


@pytest.mark.parametrize(
    ("owner", "group", "mode", "who"),
    [
        (4321, 0, 0o700, "its owner, user 4321,"),
        (4321, 0, 0o1777, "its owner, user 4321,"),
        (0, 4321, 0o770, "its group (4321)"),
        (0, 4321, 0o1770, None),
        (0, 4321, 0o757, "everybody"),
        (0, 0, 0o755, None),
    ],
)
def test_whoever_else_may_rename_a_parent_is_named(tmp_path, monkeypatch, owner, group, mode, who):
    """Each folder above it, links followed: who may rename one may put another cache there."""
    parent = tmp_path / "parent"
    (parent / "within").mkdir(parents=True)
    status = os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, owner, group, 0, 0, 0, 0))
    found = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda self, **options: status if self == parent else found(self, **options)
    )
    if who is None:
        open_root(parent / "within" / "root")
    else:
        with pytest.raises(
            ConfigError, match=rf"lies in '.*parent', where {re.escape(who)} may put another"
        ):
            open_root(parent / "within" / "root")


@pytest.mark.parametrize(
    ("group", "user", "is_trusted"),
    [
        # `umask 002` leaves ~/.cache like this: the user's private group, whatever group the
        # service runs with.
        (1000, "alice", True),
        # The same group after somebody was put into it.
        (1001, "carol", False),
        # The group of the process, which many are in.
        (44, "alice", False),
        # The login group of many, whom no list names.
        (100, "alice", False),
        # A container: the process has an fsGroup in addition to runAsGroup, and another group.
        (2000, None, True),
        (3000, None, True),
        (2001, None, False),
        (0, None, True),
    ],
)
def test_groups_that_are_the_users_own(tmp_path, monkeypatch, group, user, is_trusted):
    """A parent that its group may write is fine where nobody else is in the group."""
    groups = {0: "root", 44: "video", 100: "users", 1000: "alice", 1001: "carol"}
    members = {44: ["alice", "bob"], 1001: ["dave"]}

    def of(number):
        return grp.struct_group((groups[number], "x", number, members.get(number, [])))

    monkeypatch.setattr(store.grp, "getgrgid", of)
    monkeypatch.setattr(store, "_user_name", lambda number: user or f"user {number}")
    monkeypatch.setattr(os, "getgid", lambda: 3000 if user is None else 44)
    monkeypatch.setattr(os, "getgroups", lambda: [2000] if user is None else [44, 100])
    parent = tmp_path / "parent"
    parent.mkdir()
    status = os.stat_result((stat.S_IFDIR | 0o2775, 0, 0, 0, 0, group, 0, 0, 0, 0))
    found = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda self, **options: status if self == parent else found(self, **options)
    )
    if is_trusted:
        open_root(parent / "root")
    else:
        name = groups.get(group, group)
        with pytest.raises(
            ConfigError,
            match=rf"where its group \({name}\) may put another.*`chmod g-w .*parent` takes",
        ):
            open_root(parent / "root")


def test_the_folder_cannot_be_replaced_by_others(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ConfigError, match=r"lies in '.*shared', where everybody may put another"):
        open_root(tmp_path / "shared" / "c")
    (tmp_path / "shared").chmod(0o1777)
    open_root(tmp_path / "shared" / "c")


def test_without_a_cache_nothing_is_kept(model, compilations, tmp_path):
    start(model, tmp_path / "c", compile_cache=False)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "compilation_config"),
        ('{"sizes": [1]}', "unknown field .sizes..*Keys: backend"),
        ('{"compile_sizes": [0]}', "compile_sizes"),
        (json.dumps({"compile_sizes": list(range(1, 80))}), "compile_sizes"),
        ('{"compile_ranges": [[4, 2]]}', r"compile_ranges: \[4, 2\] ends before it begins"),
        ('{"compile_ranges": [[8, 16], [2, 8]]}', r"compile_ranges: \[8, 16\] .*meets another"),
        ('{"compile_ranges": [[0, 2]]}', "compile_ranges"),
        ('{"splitting_ops": ["toolkit_lm::nothing"]}', "there is no op 'toolkit_lm::nothing'"),
        ('{"inductor_compile_config": {"nothing": 1}}', "no option 'nothing'"),
    ],
)
def test_wrong_details_are_named(model, text, reason):
    with pytest.raises(ConfigError, match=reason):
        compiler_module.InductorCompiler(
            model, model.vllm_config.replace(optimization_level=1, compilation_config=text), PLUGINS
        )
