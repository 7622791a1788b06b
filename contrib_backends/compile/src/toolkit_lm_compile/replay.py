"""Replays: one forward pass at one size, recorded in parts or as a whole.

Its arguments are copied to where they were when it was recorded, and padded with zeros. Its result
is a copy of the rows that count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from toolkit_lm.errors import UnsupportedError
from torch import Tensor

from toolkit_lm_compile.memory import Memory
from toolkit_lm_compile.program import Program

Record = Callable[[Callable[[], object]], Callable[[], object]]


def token_axis(name: str, value: Tensor) -> int:
    """The axis of an argument that counts tokens: positions may be [3, T]."""
    return 1 if name == "positions" and value.ndim == 2 else 0


def pad(name: str, value: Tensor, num_tokens: int, size: int) -> Tensor:
    """An argument of `num_tokens` tokens with zeros for the others; another one as it is."""
    axis = token_axis(name, value)
    if value.shape[axis] != num_tokens:
        return value
    padding = value.new_zeros([*value.shape[:axis], size - num_tokens, *value.shape[axis + 1 :]])
    return torch.cat([value, padding], axis)


class Replay(ABC):
    """A pass of `size` tokens of a program, recorded."""

    def __init__(
        self,
        program: Program,
        size: int,
        given: Mapping[str, Tensor],
        num_tokens: int,
        memory: Memory,
        record: Record,
    ) -> None:
        """`given`: arguments of `num_tokens` tokens, for the first pass. Buffers of `memory` are
        free again when it is recorded."""
        self.size = size
        self.arguments: dict[str, Tensor] = {}
        """Where the graph reads them."""
        for name, value in given.items():
            axis = token_axis(name, value)
            shape = [*value.shape[:axis], size, *value.shape[axis + 1 :]]
            self.arguments[name] = memory.take(
                shape, list(torch.empty(shape, device="meta").stride()), value.dtype
            )
        self._fill(num_tokens, given)
        self.result = self._record(program, memory, record)
        memory.give_all_back()

    def __call__(self, num_tokens: int, given: Mapping[str, Tensor]) -> Tensor:
        self._fill(num_tokens, given)
        self._replay(num_tokens)
        # The next replay writes there.
        return self.result[:num_tokens].clone()

    @abstractmethod
    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        """Returns where each replay leaves its result [size, ...]."""

    @abstractmethod
    def _replay(self, num_tokens: int) -> None: ...

    def _fill(self, num_tokens: int, given: Mapping[str, Tensor]) -> None:
        for name, value in given.items():
            axis = token_axis(name, value)
            target = self.arguments[name]
            target.narrow(axis, 0, num_tokens).copy_(value)
            if num_tokens < self.size:
                target.narrow(axis, num_tokens, self.size - num_tokens).zero_()


class Whole(Replay):
    """The whole pass as one graph. Its attention reads the metadata of the step, which lie where
    they lay."""

    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        outputs = _Outputs(lambda: program(self.size, self.arguments), memory)
        self._graph = record(outputs)
        [result] = outputs.found
        return result  # type: ignore[no-any-return]

    def _replay(self, num_tokens: int) -> None:
        self._graph()


class Passes(Replay):
    """A graph of each part between attention. Attention itself runs as it is, and sees no
    padding."""

    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        self._actions: list[Callable[[int], object]] = []
        """Take the number of tokens."""
        registers = program.filled(self.arguments)
        shared: set[int] = set()
        """Registers whose tensors lay in the same memory as others."""
        for call, operands, outputs, gives, last in program.steps_of(self.size):
            values = [registers[value] if is_register else value for is_register, value in operands]
            if gives:
                made = _Outputs(partial(call, *values), memory)
                self._actions.append(partial(_replay, record(made)))
                for register, value in zip(outputs, made.found, strict=True):
                    registers[register] = value
                shared |= {outputs[index] for index in made.shared}
            else:
                written = _written(call)
                if any(operands[place][1] in shared for place in written):
                    raise UnsupportedError(
                        f"{call} writes to a view of another tensor, which cannot have a place "
                        "of its own."
                    )
                self._actions.append(partial(self._run_op, call, values, written))
            for register in last:
                if isinstance(registers[register], Tensor):
                    memory.give_back(registers[register])
                registers[register] = None
        result: Tensor = registers[program.plan.result]
        return result

    def _replay(self, num_tokens: int) -> None:
        for action in self._actions:
            action(num_tokens)

    def _run_op(
        self, call: Callable[..., object], operands: list[Any], written: list[int], num_tokens: int
    ) -> None:
        """Of the tokens that count. The others give 0, so that nothing depends on what was
        there."""
        if num_tokens < self.size:
            for place in written:
                operands[place][num_tokens:].zero_()
            operands = [
                one[:num_tokens] if isinstance(one, Tensor) and len(one) == self.size else one
                for one in operands
            ]
        call(*operands)


def _replay(graph: Callable[[], object], num_tokens: int) -> None:
    graph()


def _written(op: Any) -> list[int]:
    """Which operands an op writes to."""
    return [
        place
        for place, one in enumerate(op.default._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


class _Outputs:
    """Calls a function, and copies the tensors that it gives to where they are at each call."""

    def __init__(self, call: Callable[[], Any], memory: Memory) -> None:
        self.found: list[Any] = []
        """What it gives; the tensors are the memory's."""
        self.shared: list[int] = []
        """Which of them are views of the same memory, as the function gives them."""
        self._call = call
        self._memory = memory

    def __call__(self) -> None:
        given = self._call()
        values = list(given) if isinstance(given, tuple | list) else [given]
        if not self.found:
            places = [
                one.untyped_storage().data_ptr() if isinstance(one, Tensor) else None
                for one in values
            ]
            self.shared = [
                index
                for index, place in enumerate(places)
                if place is not None and places.count(place) > 1
            ]
            self.found = [
                self._memory.like(one) if isinstance(one, Tensor) else one for one in values
            ]
        pairs = [
            (target, value)
            for target, value in zip(self.found, values, strict=True)
            if isinstance(value, Tensor)
        ]
        dense = [(target, value) for target, value in pairs if value.is_contiguous()]
        if dense:
            # One kernel for all of them.
            torch._foreach_copy_([target for target, _ in dense], [value for _, value in dense])
        for target, value in pairs:
            if not value.is_contiguous():
                target.copy_(value)
