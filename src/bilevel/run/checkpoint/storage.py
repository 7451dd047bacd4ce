"""The storage that ``torch.distributed.checkpoint`` writes its tensors to and reads them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from bilevel.errors import CheckpointError, StateError
from bilevel.run.checkpoint.file import dtype_of, read, write


class Writer(StorageWriter):
    """Writes one file for each rank.

    Args:
        folder: the folder of the checkpoint.
        own: what this rank has for itself.
        finished: called on the first rank when all have written, with the place of each part.
    """

    def __init__(
        self, folder: Path, own: dict[str, Any], finished: Callable[[dict[str, Any]], None]
    ) -> None:
        self._folder = folder
        self._own = own
        self._finished = finished

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = _file(plan.storage_data)
        tensors: dict[str, Tensor] = {}
        results = []
        for number, item in enumerate(plan.items):
            if item.type == WriteItemType.BYTE_IO:
                raise StateError(f"{item.index.fqn} is no tensor, and would have to be pickled")
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[str(number)] = tensor.detach()
            size = tensor.numel() * tensor.element_size()
            results.append(WriteResult(item.index, size, (name, str(number))))
        write(self._folder / name, {"tensors": tensors, "own": self._own})
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        index = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            chunks = []
            for chunk in about.chunks:
                file, key = places[MetadataIndex(name, chunk.offsets)]
                chunks.append([list(chunk.offsets), list(chunk.sizes), file, key])
            dtype = str(about.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(about.size), "chunks": chunks}
        self._finished(index)


class Reader(StorageReader):
    """Reads what :class:`Writer` wrote.

    Args:
        folder: the folder of the checkpoint.
        index: the place of each part, as the writer gave it.

    Attributes:
        tensors: the shape and the type of each tensor.
    """

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, Any]] = {}
        self.tensors = {
            name: (torch.Size(about["shape"]), dtype_of(about["dtype"]))
            for name, about in index.items()
        }
        self._places: dict[MetadataIndex, tuple[str, str]] = {}
        self._metadata: dict[str, Any] = {}
        for name, about in index.items():
            chunks = []
            for offsets, sizes, file, key in about["chunks"]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks.append(chunk)
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is not the name of a file in the folder")
                self._places[MetadataIndex(name, chunk.offsets)] = file, key
            shape, dtype = self.tensors[name]
            self._metadata[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape, chunks
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(self._metadata, storage_data=self._places)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, key = self._places[item.storage_index]
            piece = self._file(file)["tensors"][key]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def own(self, rank: int) -> Any:
        """What that rank had for itself."""
        return self._file(_file(rank))["own"]

    def _file(self, name: str) -> dict[str, Any]:
        if name not in self._files:
            content = read(self._folder / name)
            if sorted(content) != ["own", "tensors"]:
                raise CheckpointError(self._folder / name, f"it holds {sorted(content)}")
            self._files[name] = content
        return self._files[name]


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
