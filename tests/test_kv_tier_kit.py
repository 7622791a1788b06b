"""The conformance kit of KV tiers finds tiers that are wrong: each of its cases a fault that no
other case finds.

Of the loads that go wrong, the tier's part is to bear it: one that hangs stands for them. Digests
are of a block size, so no tier can mistake blocks of another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import planted_tiers
import pytest
from planted_tiers import ENDS, PLACES, KnowsByLength
from toolkit_lm import LLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import KVTierConformance, kv_tier_engine
from toolkit_lm_devkit.executor import write_llama
from toolkit_lm_devkit.kv_tier import Worker
from toolkit_lm_memory_tier import Options

OTHERS = "test_others_never_read_it"
TORCH = "test_its_module_imports_no_torch"
THREADS = "test_close_ends_its_threads"


class Planted(NamedTuple):
    """Both halves of a tier, one of them with a fault, and the case that finds it."""

    store: str
    tier: str
    case: str
    damages: bool = True
    """The kit damages its blocks. Those without checksums are not to be damaged."""


FAULTS = [
    Planted("LoadsOnce", "Tier", "test_what_is_stored_comes_back"),
    Planted("CopiesLater", "Tier", "test_a_block_is_copied_when_it_is_stored"),
    Planted("KeepsTheFirst", "Tier", "test_what_is_stored_again_is_the_last"),
    Planted("ZerosOfDropped", "Tier", "test_what_is_not_there_is_a_miss", False),
    Planted("ZerosOfLost", "Tier", "test_a_store_that_is_full_keeps_nothing", False),
    Planted("OneRank", "Tier", "test_ranks_keep_bytes_of_their_own"),
    Planted("HoldsLess", "Tier", "test_both_halves_agree"),
    Planted("OtherWeights", "OtherWeightsTier", f"{OTHERS}[weights]"),
    Planted("OtherDtype", "OtherDtypeTier", f"{OTHERS}[dtype]", False),
    Planted("LeavesAThread", "Tier", THREADS),
    Planted("Unchecked", "Tier", "test_a_block_that_is_damaged_is_a_miss"),
    Planted("Store", "CountsHoles", "test_it_finds_what_it_was_given"),
    Planted("Store", "FindsLittle", "test_cold_is_warm_is_loaded"),
    Planted("Store", "FindsFailed", "test_what_has_failed_is_not_found"),
    Planted("Store", "ResetsOneGroup", "test_reset_forgets_all"),
    Planted("Store", "FindsAgain", "test_a_reset_lasts"),
    Planted("Store", "StoresLate", "test_another_engine_finds_it"),
    Planted("Store", "FailsWhenLate", "test_a_load_that_goes_wrong_is_a_miss[hangs]"),
    Planted("Store", "FailsWhenCancelled", "test_aborted_loads_free_their_blocks"),
    Planted("LoadsByLength", "KnowsByLength", "test_another_salt_never_reads_it"),
    Planted("Store", "ImportsTorch", TORCH),
]
RIGHT = Planted("Store", "Tier", "")


def name_of(planted: Planted) -> str:
    return f"{planted.store}-{planted.tier}"


class Plugin:
    """Registers a tier from code."""

    Options = Options

    def __init__(self, planted: Planted) -> None:
        self.name = "planted"
        self.planted = planted

    @hookimpl
    def toolkit_register_kv_tiers(self, kv_tiers: Any) -> None:
        store, tier = self.planted[:2]
        kv_tiers.add("planted", f"planted_tiers:{store}", scheduler=f"planted_tiers:{tier}")


class Kit(KVTierConformance):
    """The kit's cases, called one by one."""

    __test__ = False
    options = Options(capacity=150)
    name = "planted"
    outlives = True
    damages = True

    def damage(self) -> None:
        for place in PLACES.values():
            for key, data in place.items():
                place[key] = bytes([data[0] ^ 1]) + data[1:]


CASES = {
    name: function
    for name, function in inspect.getmembers(KVTierConformance, inspect.isfunction)
    if name.startswith("test_")
}


def calls(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each call of a case, with its own parameters."""
    wanted = inspect.signature(CASES[name]).parameters
    parameters = {key: values for key, values in Kit.parameters().items() if key in wanted}
    for mark in getattr(CASES[name], "pytestmark", ()):
        key, values = mark.args
        parameters[key] = {value: value for value in values}
    if not parameters:
        yield name, {}
    for key, values in parameters.items():
        yield from ((f"{name}[{ident}]", {key: value}) for ident, value in values.items())


CALLS = [(name, *call) for name in CASES for call in calls(name)]


class Runs:
    """Runs cases for a tier."""

    def __init__(self, planted: Planted, fixtures: Mapping[str, Any], tmp_path: Any) -> None:
        halves = {
            "store": getattr(planted_tiers, planted.store),
            "tier": getattr(planted_tiers, planted.tier),
            "plugins": (Plugin(planted),),
            "damages": planted.damages,
        }
        self.kit: Any = type("Kit", (Kit,), halves)()
        self.fixtures = fixtures
        self.tmp_path = tmp_path

    def finds(self, name: str, ident: str, given: Mapping[str, Any]) -> bool:
        """Whether the case fails."""
        PLACES.clear()
        KnowsByLength.aliases.clear()
        folder = self.tmp_path / ident
        folder.mkdir()
        arguments = {**self.fixtures, "tmp_path": folder, "engine_options": {}, **given}
        wanted = inspect.signature(CASES[name]).parameters
        worker = None
        if "worker" in wanted:
            worker = Worker(self.kit.kv_cache(), self.kit.store, self.kit.options)
            arguments["worker"] = worker
        if "scheduler" in wanted:
            config = VllmConfig.default()
            arguments["scheduler"] = self.kit.tier(
                config, self.kit.kv_cache(), options=self.kit.options
            )
        try:
            getattr(self.kit, name)(**{key: arguments[key] for key in wanted if key != "self"})
        except pytest.skip.Exception:
            # Such as that blocks without checksums are not to be damaged.
            return False
        except Exception:
            return True
        finally:
            ENDS.set()
            ENDS.clear()
            if worker is not None:
                worker.transfers.close()
        return False


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory) -> Mapping[str, Any]:
    """The kit's own, made once."""
    checkpoint = write_llama(tmp_path_factory.mktemp("llama"))
    options = {**kv_tier_engine._SMALL, "num_kv_blocks": kv_tier_engine._ROOM}
    with LLM(str(checkpoint), **options) as llm:
        asked = [kv_tier_engine.Answers(kv_tier_engine._ask(llm)) for _ in range(2)]
    return {"checkpoint": checkpoint, "without": tuple(asked)}


@pytest.fixture
def found(fixtures, tmp_path, monkeypatch):
    """Which calls of cases find a fault, of those that a function names."""

    def find(planted: Planted, asks: Callable[[str], bool]) -> set[str]:
        runs = Runs(planted, fixtures, tmp_path)
        idents = set()
        for name, ident, given in CALLS:
            if not asks(ident):
                continue
            with monkeypatch.context() as patch:
                if name == planted.case == THREADS:
                    # The thread never ends: the case need not wait long to say so.
                    patch.setattr(kv_tier_engine, "_WAIT", 1.0)
                if runs.finds(name, ident, given):
                    idents.add(ident)
        return idents

    return find


def own(planted: Planted) -> set[str]:
    """The calls of the fault's case that are to find it."""
    return {ident for name, ident, _ in CALLS if planted.case in (ident, name)}


def is_of(planted: Planted, ident: str) -> bool:
    """Whether a call is of the fault's case."""
    return planted.case.partition("[")[0] == ident.partition("[")[0]


def of_engines(name: str) -> bool:
    """Whether a case runs engines."""
    return "without" in inspect.signature(CASES[name]).parameters


@pytest.mark.parametrize("planted", FAULTS, ids=name_of)
def test_a_fault_is_found_by_its_case(planted, found):
    assert found(planted, own(planted).__contains__) == own(planted) != set()


def is_quick(ident: str) -> bool:
    """Whether a call takes milliseconds."""
    return ident != TORCH and not of_engines(ident.partition("[")[0])


@pytest.mark.parametrize("planted", [*FAULTS, RIGHT], ids=name_of)
def test_no_other_case_of_the_halves_finds_it(planted, found):
    assert not found(planted, lambda ident: is_quick(ident) and not is_of(planted, ident))


@pytest.mark.nightly
@pytest.mark.parametrize("planted", [*FAULTS, RIGHT], ids=name_of)
def test_no_other_case_finds_it(planted, found):
    assert not found(planted, lambda ident: not is_of(planted, ident))


def test_each_case_finds_a_fault():
    assert {planted.case.partition("[")[0] for planted in FAULTS} == set(CASES)
