"""Workers' half: gives up weights, brings them back, and changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.model import CheckpointLoader, Model, load_model
from toolkit_lm.step import StepPart, worker_method
from toolkit_lm_weights.beside import networks_beside
from torch import Tensor

from toolkit_lm_rl.extension import Extension
from toolkit_lm_rl.kept import Kept
from toolkit_lm_rl.memory import collect, copy_contents, release_pages, storages, whole_pages
from toolkit_lm_rl.share import Call, CallResult, Drop, Dropped, SavedState, Staged
from toolkit_lm_rl.values import packed, unpacked


class _Changed(CheckpointLoader):
    """A checkpoint, some of whose tensors are others."""

    def __init__(self, inner: CheckpointLoader, tensors: dict[str, Tensor]) -> None:
        super().__init__(inner.source)
        self._inner = inner
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        # The later of two names of one weight counts.
        for name, tensor in self._inner:
            if name not in self._tensors:
                yield name, tensor
        yield from self._tensors.items()

    def names(self) -> Iterable[str]:
        return {*self._inner.names(), *self._tensors}

    def __str__(self) -> str:
        return f"{self._inner} with {len(self._tensors)} new tensors"


class WeightsPart(StepPart):
    """The weights of a worker's model.

    Tensors that were changed are kept on the host: with those of the checkpoint they are the
    present weights, of which a later change may replace others.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._changed: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._fresh: Model | None = None
        self._host: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._is_dropped = False
        self._kept = Kept()
        path = None if self.options is None else self.options.worker_extension_cls
        self._extension = Extension(path, self.model, self.config, self.device, self._stage_tensors)

    @worker_method
    def call_extension(self, call: Call) -> CallResult:
        """Calls a method of the extension's class."""
        before = len(self._staged)
        value = self._extension.call(call.method, unpacked(call.args), unpacked(call.kwargs))
        staged = len(self._staged) - before
        return CallResult(packed(value, f"the answer of {call.method}"), staged)

    def _stage_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes tensors of the next weights, of any device, and returns their names."""
        found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        self._staged |= found
        return set(found)

    @worker_method
    def stage(self, staged: Staged) -> int:
        """Reads tensors for the next weights. Returns how many there are by now."""
        path = Path(staged.path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise RequestError(f"{staged.path!r} has no files *.safetensors.", "path")
        for file in files:
            try:
                tensors = load_file(file)
            except (OSError, SafetensorError) as error:
                raise RequestError(f"{str(file)!r} cannot be read: {error}.", "path") from error
            # Others may change their files, which are mapped.
            self._staged |= tensors if staged.owned else {k: t.clone() for k, t in tensors.items()}
        return len(self._staged)

    @worker_method
    def discard(self) -> None:
        """Forgets the tensors that were staged."""
        self._staged = {}
        self._fresh = None

    @worker_method
    def prepare(self) -> None:
        """Makes the model anew, with the staged tensors. The present one is not changed."""
        if not self._staged:
            raise RequestError("no weights were given for the update.", "weights")
        try:
            self._fresh = self._made({**self._changed, **self._staged})
        except BaseException:
            self.discard()
            raise

    @worker_method
    def apply(self) -> None:
        """Has the model take over what `prepare` made."""
        assert self._fresh is not None, "prepare comes first"
        try:
            self._refill(self._fresh)
            self._changed |= self._staged
        finally:
            self.discard()

    @worker_method
    def drop(self, drop: Drop) -> Dropped:
        """Gives up the weights. Level 1: those of a device move to the host; on the CPU they stay.
        Level 2: their memory is free, and they are read again."""
        level = drop.level
        if level > 1:
            self._bring_back()
        collect()
        if self.device.type == "cpu":
            return self._drop_host(drop) if level > 1 else Dropped(0)
        freed = 0
        for storage in self._storages():
            if storage.device.type != "cpu":
                size = storage.nbytes()
                if level < 2:
                    host = torch.empty(size, dtype=torch.uint8).untyped_storage()
                    host.copy_(storage)
                    self._host.append((storage, host))
                storage.resize_(0)
                freed += size
        self._is_dropped = level > 1
        torch.cuda.empty_cache()
        return Dropped(freed)

    def _drop_host(self, drop: Drop) -> Dropped:
        found = self._storages()
        is_kept = drop.keep and self._kept.keep(sorted(map(whole_pages, found)))
        if not is_kept:
            self._kept.forget()
        self._is_dropped = True
        return Dropped(sum(map(release_pages, found)), is_kept)

    def _storages(self) -> list[torch.UntypedStorage]:
        """The memory of the weights, with those of networks beside the model."""
        found = storages(self.model)
        for part in networks_beside(self.model):
            found |= storages(part.network)
        return [*found.values()]

    @worker_method
    def restore(self) -> None:
        """Brings the weights back."""
        self._bring_back()
        if self._is_dropped and self._kept.restore():
            self._is_dropped = False
        elif self._is_dropped:
            self._refill(self._made(self._changed))

    def _bring_back(self) -> None:
        for storage, host in self._host:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._host = []

    def close(self) -> None:
        self._kept.forget()

    @worker_method
    def save_sharded_state(self, saved: SavedState) -> None:
        """Writes what this rank has of the present weights, as the load format sharded_state reads
        it. The model is made once more for it, with kernels that do not rearrange weights."""
        from toolkit_lm_loaders.sharded import MAX_SIZE, SavingLoader

        folder = Path(saved.path)
        size = saved.max_size or MAX_SIZE
        device = msgspec.structs.replace(self.config.device, kernels="torch")
        config = msgspec.structs.replace(self.config, device=device)
        self._made(self._changed, config, lambda inner: SavingLoader(inner, folder, size))

    def _made(
        self,
        tensors: dict[str, Tensor],
        config: VllmConfig | None = None,
        wrapped: Callable[[CheckpointLoader], CheckpointLoader] = lambda inner: inner,
    ) -> Model:
        checkpoint = self.config.checkpoint
        assert checkpoint is not None, "the config is resolved"
        inner = self.plugins.loaders.make(
            self.config.load.load_format, checkpoint.source or checkpoint.path
        )
        return load_model(
            type(self.model),
            config or self.config,
            self.device,
            self.plugins,
            loader=wrapped(_Changed(inner, tensors) if tensors else inner),
        )

    def _refill(self, fresh: Model) -> None:
        self._bring_back()
        copy_contents(self.model, fresh)
        if self._is_dropped:
            # They may have tensors of the model.
            networks = [(part.network, part.made_again()) for part in networks_beside(self.model)]
            for network, again in networks:
                copy_contents(network, again)
        self._kept.forget()
        self._is_dropped = False
