"""The parts of the kit. A feature that brings kernels adds a row here: see "Kernels for GPUs" in
CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpu_kit import tests_of
from gpu_kit.drive import Stage
from gpu_kit.jobs import Job, module

SECONDS = 480.0
"""Seconds of all parts; `Stage.ends` is a share of it."""
WITHOUT_GRAPHS = {"flash_attn": "torch", "triton": "triton", "sdpa": "torch"}
"""Attention backends that are measured, the most promising first, with their kernels."""
WITH_GRAPHS = {"flash_attn": "piecewise", "triton": "full_and_piecewise", "sdpa": "piecewise"}
NO_CUDNN = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


class Kit:
    """Facts from which jobs are made. Part 0 sets the attributes."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.refusals: Mapping[str, str | None] = {}
        """Reasons to refuse, by attention backend."""
        self.limits: dict[str, str] = {}
        """The card's limits as environment variables: see limits.py."""
        self._device = ("--device", "cpu" if quick else "cuda")
        self._short = ("--quick",) if quick else ()

    def parts(self) -> list[Stage]:
        """In their order: what says whether anything is right comes before what says how fast it
        is."""
        ends = {
            "0": 20,
            "A": 70,
            "B": 160,
            "C": 240,
            "D": 260,
            "E1": 335,
            "E2": 415,
            "F": 465,
            "G": SECONDS,
        }
        parts = {
            "0": ("the machine", self.machine),
            "A": ("tiny against the CPU", self.smoke),
            "B": ("conformance kits", self.kits),
            "C": ("CUDA graphs", self.graphs),
            "D": ("the server", self.server),
            "E1": ("speed", self.speed),
            "E2": ("speed with graphs", self.speed_with_graphs),
            "F": ("other kernels", self.others),
            "G": ("other shapes", self.shapes),
        }
        return [
            Stage(name, title, ends[name] / SECONDS, lambda jobs=jobs: list(jobs()))
            for name, (title, jobs) in parts.items()
        ]

    def machine(self) -> Iterator[Job]:
        yield module("machine", "machine", *self._short)

    def smoke(self) -> Iterator[Job]:
        yield module("smoke", "smoke", *self._device)
        yield module("smoke of states", "smoke", *self._device, "--cases", "hybrid")

    def kits(self) -> Iterator[Job]:
        yield tests_of.job("kits", tests_of.KITS, quick=self.quick)

    def graphs(self) -> Iterator[Job]:
        yield module("smoke with graphs", "smoke", *self._device, "--cases", "graphs")
        yield tests_of.job(
            "graphs", tests_of.GRAPHS, quick=self.quick, workers=4, marks="not slow and not nightly"
        )

    def server(self) -> Iterator[Job]:
        yield module("server", "server", *self._device)

    def speed(self) -> Iterator[Job]:
        for name, kernels in WITHOUT_GRAPHS.items():
            yield self._speed(name, name, "--kernels", kernels)

    def speed_with_graphs(self) -> Iterator[Job]:
        for name, mode in WITH_GRAPHS.items():
            yield self._speed(
                f"{name}, {mode}", name, "--kernels", WITHOUT_GRAPHS[name], "--graphs", mode
            )

    def others(self) -> Iterator[Job]:
        yield tests_of.job("flex and others", tests_of.OTHERS, quick=self.quick)
        for value, name in (("0", "cuDNN where torch has it"), ("1", "cuDNN last")):
            yield module(name, "sdpa_order", *self._short, **{NO_CUDNN: value})
        yield module("quantized products", "quantized", *self._short)
        yield module("recurrent states", "states", *self._short)
        yield module("inductor", "smoke", *self._device, "--cases", "inductor")

    def shapes(self) -> Iterator[Job]:
        yield module("shapes", "shapes", *self._short)

    def _speed(self, name: str, attention: str, *arguments: str) -> Job:
        refusal = self.refusals.get(attention)
        # Kernels for cards are refused on a CPU, and have been asked in part A.
        given = tuple("torch" if self.quick and one == "triton" else one for one in arguments)
        return module(
            name,
            "speed",
            *self._short,
            "--attention",
            attention,
            *given,
            refusal=refusal,
            **self.limits,
        )
