"""One file: everything comes back, and nothing that was damaged or is not a checkpoint is taken."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import bilevel
from benchmarks.kill_resume import DAMAGES, damage
from bilevel.errors import BilevelError, CheckpointError, OutputError, StateError
from bilevel.run.checkpoint import read, write

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.uint16),
]


def back(content: dict[str, Any], path: Path) -> dict[str, Any]:
    write(path, content)
    return read(path)


def same(a: Any, b: Any) -> bool:
    """Alike in structure, types and bits."""
    if isinstance(a, Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and torch.equal(*bits)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
def test_tensors_of_every_type_come_back(dtype: Any, shape: Any, tmp_path: Path) -> None:
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    bits = torch.arange(count, dtype=torch.uint8)
    tensor = (bits % 2 if dtype == torch.bool else bits).view(dtype).reshape(shape)
    assert same(back({"a": {"t": tensor}}, tmp_path / "a"), {"a": {"t": tensor}})


def test_the_order_in_memory_comes_back(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    content = {"a": [image, torch.randn(3, 4).T, torch.randn(4)[None].expand(3, 4).clone()]}
    assert not image.is_contiguous()
    assert same(back(content, tmp_path / "a"), content)
    spread = torch.arange(3.0).expand(2, 3)
    assert torch.equal(back({"a": spread}, tmp_path / "a")["a"], spread)
    assert torch.equal(back({"a": image[:, 1:, ::2]}, tmp_path / "a")["a"], image[:, 1:, ::2])


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.text() | st.integers(), part),
    max_leaves=20,
)


@pytest.mark.slow
@settings(deadline=None)  # it is the disk that takes its time
@given(tree=TREES)
def test_numbers_and_text_come_back(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    assert same(back({"a": tree}, path), {"a": tree})


def test_what_looks_alike_is_kept_apart(tmp_path: Path) -> None:
    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    content = {"a": {1: ones, "1": twos, "b": {"c": ones}, "b/c": twos, "tensor": 3, "dict": []}}
    assert same(back(content, tmp_path / "a"), content)
    shared = {"a": [ones, ones, ones[:1], {"dtype": torch.bfloat16, "tuple": (1, [2])}]}
    assert same(back(shared, tmp_path / "a"), shared)
    found = back({"a": OrderedDict(b=np.float32(0.5), c=np.int64(3))}, tmp_path / "a")
    assert same(found, {"a": {"b": 0.5, "c": 3}})


def test_others_can_look_at_the_tensors(tmp_path: Path) -> None:
    write(tmp_path / "a", {"state": {"x": [torch.arange(3.0)]}})
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert torch.equal(file.get_tensor("state/x/0"), torch.arange(3.0))
        assert file.metadata()["format"] == "bilevel checkpoint"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "a/0 is object <object"),
        (lambda: 0, "a/0 is function"),
        ({1, 2}, r"a/0 is set \{1, 2\}"),
        ({(1, 2): 0}, "a/0 is dict"),
        (b"x", "a/0 is bytes"),
        (torch.eye(2).to_sparse(), "a/0 is a tensor of the layout torch.sparse_coo"),
    ],
)
def test_what_could_only_be_pickled_is_refused(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=reason):
        write(tmp_path / "a", {"a": [value]})
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"a'"):
        write(tmp_path / "a", {})
    with pytest.raises(OutputError, match=r"No such file or directory"):
        write(tmp_path / "c" / "d", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# What is refused


def solver() -> bilevel.Solver:
    problem = bilevel.problems.Quadratic(seed=0)
    return bilevel.Solver(problem, problem.x0, problem.y0, method=bilevel.F2SA(0.5, 0.1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "a"
    run = solver()
    run.step()
    run.save(path)
    return path.read_bytes()


def refuse(path: Path, reason: str = "was refused") -> None:
    """Loading it raises the error that names it, and leaves the solver as it was."""
    run = solver()
    before = run.state_dict()
    with pytest.raises(CheckpointError, match=reason) as caught:
        run.load(path)
    assert isinstance(caught.value, StateError)
    assert repr(str(path)) in str(caught.value)
    assert caught.value.reason
    assert same(run.state_dict(), before)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_refused(kind: str, seed: int, sound: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(damage(sound, kind, random.Random(seed)))
    refuse(tmp_path / "a")


@pytest.mark.slow
def test_a_file_cut_short_anywhere_or_with_any_byte_changed_is_refused(
    sound: bytes, tmp_path: Path
) -> None:
    places = range(0, len(sound), 31)
    for place in places:
        (tmp_path / "a").write_bytes(sound[:place])
        with pytest.raises(CheckpointError, match=r"a' was refused"):
            read(tmp_path / "a")
        changed = sound[:place] + bytes([sound[place] ^ 0x55]) + sound[place + 1 :]
        (tmp_path / "a").write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"a' was refused"):
            read(tmp_path / "a")
    (tmp_path / "a").write_bytes(sound + b"\0")
    refuse(tmp_path / "a", "checksum")


def checked(header: Any, data: bytes = b"") -> bytes:
    """A file with that header and a right checksum, as a stranger could make it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    return whole + hashlib.sha256(whole).digest()


def described(**metadata: str) -> dict[str, Any]:
    checksum = {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}
    known = {"format": "bilevel checkpoint", "version": "1"}
    return {"__metadata__": known | metadata, "sha256": checksum}


STRANGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a checkpoint, or it was cut short"),
    "text": (b"hello\n" * 30, "not a checkpoint"),
    "a zip file": (b"PK\x03\x04" + bytes(100), "not a checkpoint"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a checkpoint"),
    "zeros": (bytes(1000), "not a checkpoint"),
    "a huge header": (b"\xff" * 7 + b"\x7f{" + bytes(100), "not a checkpoint"),
    "a header that is not JSON": (checked(b"{" + bytes(50)), "cannot be read"),
    "tensors beyond the end": (
        checked({"sha256": {"dtype": "F64", "shape": [9], "data_offsets": [0, 72]}}),
        "cannot be read",
    ),
    "another format": (checked({**described(), "__metadata__": {}}), "not a checkpoint of a run"),
    "another version": (checked(described(version="2")), "version '2'.*only version '1'"),
    "no state": (checked(described(versions="{}")), "lacks settings and solver and values|wrong"),
    "not JSON": (checked(described(solver="{")), "its description is wrong"),
    "deep": (checked(described(solver="[" * 100_000 + "]" * 100_000)), "description is wrong"),
    "a tensor that is not there": (checked(described(solver='{"tensor": "b"}')), "KeyError"),
    "an unknown kind": (checked(described(solver='{"object": "os.system"}')), "not known"),
    "two kinds": (checked(described(solver='{"float": "1", "dict": []}')), "description is wrong"),
    "not a number": (checked(described(solver='{"float": "one"}')), "description is wrong"),
    "not a type": (checked(described(solver='{"dtype": "load"}')), "not a type of tensors"),
    "a list as a key": (checked(described(solver='{"dict": [[[], 1]]}')), "description is wrong"),
    "steps in memory that cannot be": (
        checked(described(solver='{"tensor": "sha256", "stride": [-1]}')),
        "description is wrong",
    ),
    "a wrong number of bytes": (
        checked(described(solver='{"tensor": "sha256", "dtype": "float64", "shape": [9]}')),
        "description is wrong",
    ),
}


@pytest.mark.parametrize(("data", "reason"), STRANGE.values(), ids=list(STRANGE))
def test_what_is_not_a_checkpoint_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    refuse(tmp_path / "a", reason)


def test_no_file_a_folder_and_a_model_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", "No such file")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path / "folder", "it is a folder")
    save_file({"weight": torch.zeros(20)}, tmp_path / "model")
    refuse(tmp_path / "model", "checksum")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    """Root may rename a file to /dev/null, after which nobody has it any more."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="it is a pipe or a device"):
        write(tmp_path / "pipe", {"a": 1})
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_malicious_pickle_is_not_executed(writer: str, tmp_path: Path) -> None:
    path, target = tmp_path / "step-000000000009.safetensors", tmp_path / "executed"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Malicious(target)) + bytes(100))
    else:
        torch.save(Malicious(target), path)
    refuse(path, "not a checkpoint")
    problem = bilevel.problems.Quadratic(seed=0)
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints can be read"):
        bilevel.minimize(problem, problem.x0, problem.y0, steps=1, checkpoint=tmp_path)
    assert not target.exists()
    with path.open("rb") as file:  # it would have worked
        pickle.load(file) if writer == "pickle" else torch.load(file, weights_only=False)
    assert target.exists()


def test_an_honest_file_of_another_structure_is_refused(sound: bytes, tmp_path: Path) -> None:
    content = read_bytes(sound, tmp_path)
    for part in ("draw", "randomness", "state", "method"):
        broken = {**content, "solver": {**content["solver"]}}
        del broken["solver"][part]
        write(tmp_path / "a", broken)
        refuse(tmp_path / "a")
    for part in ("k", "x", "points", "accelerated"):
        state = {**content["solver"]["state"], part: [torch.zeros(1)]}
        if part == "k":
            del state["k"]
        write(tmp_path / "a", {**content, "solver": {**content["solver"], "state": state}})
        refuse(tmp_path / "a")


def read_bytes(data: bytes, folder: Path) -> dict[str, Any]:
    (folder / "a").write_bytes(data)
    return read(folder / "a")


@pytest.mark.slow
def test_without_the_extra_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import bilevel, tempfile\n"
        "p = bilevel.problems.Quadratic()\n"
        "try: bilevel.minimize(p, p.x0, p.y0, steps=1, checkpoint=tempfile.mkdtemp())\n"
        "except bilevel.errors.MissingExtraError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bilevel[checkpoint]" in run.stdout
    assert issubclass(CheckpointError, BilevelError)
