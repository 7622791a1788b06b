"""Replays: one forward pass of a fixed size, recorded in parts or as a whole.

Arguments are copied to their addresses at the recording, and padded with zeros. The result is a
copy of the rows without padding.
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
    """The token axis of an argument. It is 1 for positions of shape [3, T], else 0."""
    return 1 if name == "positions" and value.ndim == 2 else 0


def pad(name: str, value: Tensor, num_tokens: int, size: int) -> Tensor:
    """Pads an argument of `num_tokens` tokens with zeros up to `size`. Returns other arguments
    unchanged."""
    axis = token_axis(name, value)
    if value.shape[axis] != num_tokens:
        return value
    padding = value.new_zeros([*value.shape[:axis], size - num_tokens, *value.shape[axis + 1 :]])
    return torch.cat([value, padding], axis)


class Replay(ABC):
    """A recorded forward pass of a program, for up to `size` tokens."""

    def __init__(
        self,
        program: Program,
        size: int,
        arguments: Mapping[str, Tensor],
        num_tokens: int,
        memory: Memory,
        record: Record,
    ) -> None:
        """Records the pass. Its buffers of `memory` are free again afterwards.

        `arguments`: arguments of `num_tokens` tokens for the recording.
        """
        self.size = size
        self.arguments: dict[str, Tensor] = {}
        """Tensors from which the graph reads its arguments."""
        for name, value in arguments.items():
            axis = token_axis(name, value)
            shape = [*value.shape[:axis], size, *value.shape[axis + 1 :]]
            self.arguments[name] = memory.allocate(
                shape, list(torch.empty(shape, device="meta").stride()), value.dtype
            )
        self._fill(num_tokens, arguments)
        self.result = self._record(program, memory, record)
        memory.give_all_back()

    def __call__(self, num_tokens: int, arguments: Mapping[str, Tensor]) -> Tensor:
        self._fill(num_tokens, arguments)
        self._replay(num_tokens)
        # The next replay writes there.
        return self.result[:num_tokens].clone()

    @abstractmethod
    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        """Records the pass, and returns the tensor [size, ...] where each replay leaves its
        result."""

    @abstractmethod
    def _replay(self, num_tokens: int) -> None: ...

    def _fill(self, num_tokens: int, arguments: Mapping[str, Tensor]) -> None:
        for name, value in arguments.items():
            axis = token_axis(name, value)
            target = self.arguments[name]
            target.narrow(axis, 0, num_tokens).copy_(value)
            if num_tokens < self.size:
                target.narrow(axis, num_tokens, self.size - num_tokens).zero_()


class Whole(Replay):
    """A replay of the whole pass as one graph. Attention reads the step's metadata at the addresses
    of the recording."""

    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        outputs = _Outputs(lambda: program(self.size, self.arguments), memory)
        self._graph = record(outputs)
        [result] = outputs.found
        return result  # type: ignore[no-any-return]

    def _replay(self, num_tokens: int) -> None:
        self._graph()


class Passes(Replay):
    """A replay of one graph per part between attention. Attention runs eagerly, without padding."""

    def _record(self, program: Program, memory: Memory, record: Record) -> Tensor:
        self._actions: list[Callable[[int], object]] = []
        """Graphs and ops of the pass in order. Each takes the number of tokens."""
        registers = program.filled(self.arguments)
        shared: set[int] = set()
        """Registers whose tensors shared memory with others."""
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
        """Runs an op for the tokens without padding. Outputs of the padding are set to 0, so that
        no old data remains."""
        if num_tokens < self.size:
            for place in written:
                operands[place][num_tokens:].zero_()
            operands = [
                operand[:num_tokens]
                if isinstance(operand, Tensor) and len(operand) == self.size
                else operand
                for operand in operands
            ]
        call(*operands)


def _replay(graph: Callable[[], object], num_tokens: int) -> None:
    graph()


def _written(op: Any) -> list[int]:
    """Indices of the operands that an op writes to."""
    return [
        place
        for place, argument in enumerate(op.default._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


class _Outputs:
    """A function whose output tensors are copied to the same addresses at each call."""

    def __init__(self, call: Callable[[], Any], memory: Memory) -> None:
        self.found: list[Any] = []
        """Outputs of the function, as tensors of `memory`."""
        self.shared: list[int] = []
        """Indices of the outputs that are views of the same memory in the function's own result."""
        self._call = call
        self._memory = memory

    def __call__(self) -> None:
        returned = self._call()
        values = list(returned) if isinstance(returned, tuple | list) else [returned]
        if not self.found:
            places = [
                value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
                for value in values
            ]
            self.shared = [
                index
                for index, place in enumerate(places)
                if place is not None and places.count(place) > 1
            ]
            self.found = [
                self._memory.like(value) if isinstance(value, Tensor) else value for value in values
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
