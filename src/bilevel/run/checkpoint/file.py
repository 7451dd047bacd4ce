"""One checkpoint: a safetensors file that is there whole or not at all.

Tensors are named by where they are in the state, such as ``solver/state/x/leaves/0``; everything
else is JSON in the metadata of the file, where ``{"tensor": name}`` stands for a tensor. The last
tensor, ``sha256``, is the SHA-256 of all bytes before it, so that a file that was cut short or
changed in any place is recognised. Nothing is ever unpickled: a file from a stranger may hold wrong
numbers, but cannot run code.

The file is written here, piece by piece, and not by the safetensors package, which would hold a
second copy of everything and leave files of unknown names behind when the program is killed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import CheckpointError, OutputError, StateError
from bilevel.errors.extras import needed
from bilevel.variables import is_sharded

FORMAT = "bilevel checkpoint"
VERSION = "1"
PART = ".part"
"""The ending of the name of a file that is still being written."""

_CHECKSUM = "sha256"
_DIGEST = hashlib.sha256().digest_size
_CHUNK = 1 << 20

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that every version of the format has; tensors of other types are saved as bytes."""

Json: TypeAlias = Any


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Put ``content``, trees of tensors, numbers and text, into a file.

    It is written beside ``path`` and renamed when it is safely on the disk, so that ``path`` is at
    every moment either the old file or the new one.

    Raises:
        OutputError: it could not be written; what was there before is there still.
        StateError: ``content`` holds something that could only be pickled.
    """
    with needed("checkpoint", "safetensors"):
        import safetensors  # noqa: F401  (without it, the file could not be read again)
    tensors: dict[str, Tensor] = {}
    metadata = {
        name: json.dumps(packed(part, name, tensors), allow_nan=False)
        for name, part in content.items()
    }
    metadata |= {"format": FORMAT, "version": VERSION}
    # The widest types first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    ordered.append((_CHECKSUM, torch.empty(_DIGEST, dtype=torch.uint8)))
    header: dict[str, Json] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with _replacing(path) as file:
        for piece in _pieces(text, [tensor for _, tensor in ordered[:-1]]):
            checksum.update(piece)
            file.write(piece)
        file.write(checksum.digest())


def _pieces(header: bytes, tensors: list[Tensor]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        if tensor.numel():
            yield bytes_of(tensor)


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a tensor, in the order of its entries."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` once it is whole and on the disk."""
    if not path.name:
        raise OutputError(f"the checkpoint {str(path)!r} could not be written: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        # To rename a file to /dev/null, which root may, would take /dev/null from everybody.
        raise OutputError(
            f"the checkpoint {str(path)!r} could not be written: it is a pipe or a device"
        )
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise OutputError(
            f"the checkpoint {str(path)!r} could not be written: {error.strerror or error}"
        ) from error
    finally:
        with suppress(OSError):  # on a disk that fails, the part may not be removable either
            part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make sure that a new name in the folder is on the disk too."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """What :func:`write` put into a file; tensors come on the CPU.

    Raises:
        CheckpointError: there is no such file, it is not a checkpoint, or it is damaged.
    """
    with needed("checkpoint", "safetensors"):
        from safetensors import SafetensorError, safe_open
    try:
        _check_sum(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(path, f"it cannot be read: {reason}") from error
    if metadata.pop("format", None) != FORMAT:
        raise CheckpointError(path, "it is a safetensors file, but not a checkpoint of a run")
    version = metadata.pop("version", None)
    if version != VERSION:
        raise CheckpointError(
            path, f"it is of version {version!r}, and only version {VERSION!r} is known here"
        )
    try:
        return {name: unpacked(json.loads(text), tensors) for name, text in metadata.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            path, f"its description is wrong: {type(error).__name__}: {error}"
        ) from error


def _check_sum(path: Path) -> None:
    """Raise unless the file ends with the checksum of the rest of it."""
    if path.is_dir():
        raise CheckpointError(path, "it is a folder, not a file")
    if path.exists() and not path.is_file():  # to open a pipe would wait for somebody to write
        raise CheckpointError(path, "it is a pipe or a device, not a file")
    size = path.stat().st_size
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + _DIGEST or not 0 < length <= size - 8 - _DIGEST or file.read(1) != b"{":
            raise CheckpointError(path, "it is not a checkpoint, or it was cut short")
        file.seek(0)
        left = size - _DIGEST
        while left and (chunk := file.read(min(left, _CHUNK))):
            checksum.update(chunk)
            left -= len(chunk)
        if file.read() != checksum.digest():
            raise CheckpointError(
                path, "its checksum is wrong: it was cut short or changed after it was written"
            )


def packed(node: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """A tree as JSON, with its tensors put aside under the paths to them."""
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, np.generic):
        return packed(node.item(), path, tensors)
    if isinstance(node, float):
        return node if math.isfinite(node) else {"float": repr(float(node))}
    if isinstance(node, Tensor):
        return _packed_tensor(node, path, tensors)
    if isinstance(node, torch.dtype):
        return {"dtype": str(node).removeprefix("torch.")}
    if isinstance(node, Mapping) and all(isinstance(key, str | int) for key in node):
        pairs = [[key, packed(part, f"{path}/{key}", tensors)] for key, part in node.items()]
        return {"dict": pairs}
    if isinstance(node, list | tuple):
        parts = [packed(part, f"{path}/{i}", tensors) for i, part in enumerate(node)]
        return parts if isinstance(node, list) else {"tuple": parts}
    raise StateError(
        f"{path} is {type(node).__name__} {node!r}, which cannot go into a checkpoint; what can "
        f"are tensors, numbers, text, and dicts, lists and tuples of these"
    )


def _packed_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Json:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(
            f"{path} is a tensor of the layout {tensor.layout} and the type {tensor.dtype}; only "
            f"dense ones that are not quantized can be put into a checkpoint"
        )
    while path in tensors:  # keys such as 1 and "1" have the same path
        path += "'"
    if is_sharded(tensor):
        tensors[path] = tensor.detach()
        return {"tensor": path}
    found: dict[str, Json] = {"tensor": path}
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.clone()  # a dense copy of a view
        if not tensor.is_contiguous():
            # Sums are taken in the order of memory, and their last bits depend on it.
            found["stride"] = list(tensor.stride())
            tensor = tensor.contiguous()
    if tensor.dtype not in _NAMES:
        found |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tensor = tensor.reshape(-1).view(torch.uint8)
    tensors[path] = tensor
    return found


def unpacked(node: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that :func:`packed` took apart."""
    if isinstance(node, list):
        return [unpacked(part, tensors) for part in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return _unpacked_tensor(node, tensors)
    [(kind, value)] = node.items()
    if kind == "float":
        return float(value)
    if kind == "dtype":
        return dtype_of(value)
    if kind == "tuple":
        return tuple(unpacked(part, tensors) for part in value)
    if kind == "dict":
        return {key: unpacked(part, tensors) for key, part in value}
    raise ValueError(f"{kind!r} is not known")


def _unpacked_tensor(node: dict[str, Json], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[node["tensor"]]
    if "dtype" in node:
        tensor = tensor.view(dtype_of(node["dtype"])).reshape(node["shape"])
    if "stride" in node:
        tensor = torch.empty_strided(tensor.shape, node["stride"], dtype=tensor.dtype).copy_(tensor)
    return tensor


def dtype_of(name: str) -> torch.dtype:
    """The tensor type with that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a type of tensors")
    return dtype
