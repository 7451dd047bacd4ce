"""The checkpoint of a run on several ranks: a folder, there whole or not at all.

``torch.distributed.checkpoint`` knows which rank holds which part of which tensor, writes only once
what all ranks hold, and brings the parts to any number of ranks that read them. Its description of
the parts, which it would pickle, is JSON here, and the files are those of
:mod:`bilevel.run.checkpoint.file`, with a checksum each:

- ``rank-00000.safetensors``, ...: what each rank wrote, and what it has for itself (``own``): the
  position of its data and its random generators;
- ``run.safetensors``: everything that is no tensor, and where which part of each tensor is.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bilevel.engine.ranks import Ranks
from bilevel.errors import CheckpointError, OutputError, StateError
from bilevel.run.checkpoint.file import PART, packed, read, sync_folder, unpacked, write
from bilevel.variables import empty_row_sharded, is_sharded

T = TypeVar("T")

OWN = "own"
"""The key of what differs between the ranks: their data and their random generators."""

_INDEX = "run.safetensors"


def on_every_rank(ranks: Ranks | None, action: Callable[[], T]) -> T:
    """Do something that may fail; where it fails on one rank, every rank raises."""
    return action() if ranks is None else ranks.all_or_none(action)


def write_any(path: Path, content: Mapping[str, Any], ranks: Ranks | None) -> None:
    """Put ``content`` into a file, or on several ranks into a folder.

    Raises:
        OutputError: it could not be written, on any of the ranks.
        StateError: there is something in it that could only be pickled.
    """
    if ranks is None:
        write(path, content)
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    from bilevel.run.checkpoint.storage import Writer

    tensors: dict[str, Tensor] = {}

    def description() -> str:
        shared = {name: part for name, part in content.items() if name != OWN}
        return json.dumps(packed(shared, "", tensors), allow_nan=False)

    text = ranks.all_or_none(description)
    part = path.with_name(ranks.from_first(f".{path.name}.{secrets.token_hex(4)}{PART}"))
    divided = [name for name, tensor in tensors.items() if is_sharded(tensor)]

    def finished(index: dict[str, Any]) -> None:
        write(part / _INDEX, {"content": text, "index": index, "divided": divided})
        if path.is_dir():
            remove(path)
        os.replace(part, path)
        sync_folder(path.parent)

    writer = Writer(part, content[OWN], finished)
    try:
        with ranks.reaching():
            save(
                dict(tensors),
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=ranks.group,
            )
    except CheckpointException as error:
        raise OutputError(
            f"the checkpoint {str(path)!r} could not be written: {_reason(error)}"
        ) from error
    finally:
        if ranks.rank == 0:
            with suppress(OSError):
                shutil.rmtree(part, ignore_errors=True)


def read_any(path: Path, ranks: Ranks | None) -> dict[str, Any]:
    """What :func:`write_any` put there, on any number of ranks; tensors come on the CPU.

    What each rank had for itself comes back only where there are as many ranks as then.

    Raises:
        CheckpointError: there is none, or it is damaged; on every rank.
    """
    if not (path / _INDEX).is_file():
        return on_every_rank(ranks, lambda: read(path))
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from bilevel.run.checkpoint.storage import Reader

    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def opened() -> tuple[Reader, Any, dict[str, Tensor | None]]:
        index = read(path / _INDEX)
        with _described(path):
            reader = Reader(path, index["index"])
            divided = set(index["divided"]) if ranks is not None else set()
            empty = {
                name: None if name in divided else torch.empty(shape, dtype=dtype, device="cpu")
                for name, (shape, dtype) in reader.tensors.items()
            }
            return reader, json.loads(index["content"]), empty

    reader, text, empty = on_every_rank(ranks, opened)
    tensors = {
        name: empty_row_sharded(*reader.tensors[name]) if tensor is None else tensor
        for name, tensor in empty.items()
    }
    options: dict[str, Any] = {} if ranks is None else {"process_group": ranks.group}
    if ranks is None and dist.is_available() and dist.is_initialized():
        options = {"no_dist": True}
    try:
        with warnings.catch_warnings():
            # torch warns where it is not initialised, which is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, **options)
    except CheckpointException as error:
        raise CheckpointError(path, _reason(error)) from error

    def whole() -> dict[str, Any]:
        with _described(path):
            content: dict[str, Any] = unpacked(text, tensors)
            own = reader.own(rank) if content.get("ranks") == size else {}
        return content | ({OWN: own} if own else {})

    return on_every_rank(ranks, whole)


@contextmanager
def _described(path: Path) -> Iterator[None]:
    """For taking a description apart: what a wrong one raises becomes our own error."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]  # torch adds its stack to some messages
        raise CheckpointError(
            path, f"its description is wrong: {type(error).__name__}: {reason}"
        ) from error


def remove(path: Path) -> None:
    """Remove a file, or a folder at once: it is renamed first, so that no part of it is read."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.endswith(PART):
        path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}"))
    shutil.rmtree(path)


def _reason(error: Any) -> str:
    """The first reason that a rank gave."""
    rank, (reason, _) = next(iter(sorted(error.failures.items())))
    if isinstance(reason, CheckpointError):
        return f"{Path(reason.path).name} on rank {rank}: {reason.reason}"
    if isinstance(reason, StateError | OutputError):
        return f"on rank {rank}: {reason}"
    return f"on rank {rank}: {type(reason).__name__}: {getattr(reason, 'strerror', None) or reason}"
