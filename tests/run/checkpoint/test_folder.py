"""The files of a run: when they are written, which are kept, and what if they cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bilevel
from bilevel import Checkpoint
from bilevel.errors import CheckpointError, CheckpointWarning, OutputError
from bilevel.run.checkpoint import Folder, file
from bilevel.run.checkpoint.lock import LOCK, locked
from tests.run.checkpoint.test_resume import assert_same, quadratic, stopping_at

OPTIONS = quadratic(bilevel.F2SA(0.5, 0.2))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in folder.iterdir())


def minimize(folder: Any, steps: int = 12, **more: Any) -> bilevel.Result:
    return bilevel.minimize(**OPTIONS, steps=steps, checkpoint=folder, **more)


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_saved_at_its_start_and_its_end(tmp_path: Path) -> None:
    minimize(str(tmp_path / "deep" / "run"))
    assert steps_in(tmp_path / "deep" / "run") == [0, 12]
    minimize(tmp_path / "none", steps=0)
    assert steps_in(tmp_path / "none") == [0]


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, [12]), (2, [10, 12]), (3, [5, 10, 12]), (9, [0, 5, 10, 12])]
)
def test_the_newest_are_kept(keep: int, kept: list[int], tmp_path: Path) -> None:
    minimize(Checkpoint(tmp_path, every_steps=5, keep=keep))
    assert steps_in(tmp_path) == kept


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = {"notes.txt", "step-1.safetensors", "step-000000000001.txt", ".hidden", "a.part"}
    for name in others:
        (tmp_path / name).write_text("mine")
    minimize(Checkpoint(tmp_path, every_steps=1, keep=1))
    ours = {"step-000000000012.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == others | ours


def test_seconds_count_from_the_last_file(tmp_path: Path) -> None:
    clock = Clock()
    folder = Folder(Checkpoint(tmp_path, every_steps=100, every_seconds=60.0), clock)
    assert not folder.due(7)
    assert folder.due(100)
    clock.now = 59.0
    assert not folder.due(8)
    clock.now = 60.0
    assert folder.due(9)
    folder.save(9, dict)
    assert not folder.due(9)
    clock.now = 120.0
    assert folder.due(10)
    never = Folder(Checkpoint(tmp_path, every_seconds=None), clock)
    clock.now = 1e9
    assert not never.due(100)


def test_what_was_left_half_written_is_removed(tmp_path: Path) -> None:
    whole = minimize(None)
    minimize(tmp_path, callback=stopping_at(5))
    half = tmp_path / ".step-000000000008.safetensors.0a1b2c3d.part"
    half.write_bytes((tmp_path / "step-000000000006.safetensors").read_bytes()[:999])
    assert_same(minimize(tmp_path), whole)
    assert not half.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "folder", "pickle"])
def test_a_damaged_newest_file_is_passed_over(damage: str, tmp_path: Path) -> None:
    whole = minimize(None)
    minimize(Checkpoint(tmp_path, every_steps=2, keep=2), callback=stopping_at(6))
    assert steps_in(tmp_path) == [6, 7]
    newest = tmp_path / "step-000000000007.safetensors"
    data = newest.read_bytes()
    newest.unlink()
    if damage == "folder":
        newest.mkdir()
    else:
        newest.write_bytes({"cut": data[:-1], "empty": b"", "pickle": b"cos\nabort\n(tR."}[damage])
    with pytest.warns(CheckpointWarning) as caught:
        result = minimize(Checkpoint(tmp_path, every_steps=100, keep=1))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert repr(str(newest)) in message
    assert message.endswith("; the run goes on from step-000000000006.safetensors")
    assert_same(result, whole)


def test_a_damaged_file_never_pushes_out_a_sound_one(tmp_path: Path) -> None:
    often = Checkpoint(tmp_path, every_steps=2, keep=1)
    minimize(often, callback=stopping_at(3))
    assert steps_in(tmp_path) == [4]
    (tmp_path / "step-000000000009.safetensors").write_bytes(b"damaged")
    with pytest.warns(CheckpointWarning, match="goes on from step-000000000004"):
        minimize(often, callback=stopping_at(5))
    assert steps_in(tmp_path) == [6, 9]


def test_if_none_is_sound_nothing_is_begun(tmp_path: Path) -> None:
    for step in (3, 6):
        (tmp_path / f"step-{step:012d}.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints.*name another folder"):
        minimize(tmp_path)
    assert steps_in(tmp_path) == [3, 6]


# Disks


def assert_goes_on_without_space(folder: Path, filler: Any) -> None:
    """Once there is no space the run warns and ends; with space again it has what was saved."""
    whole = minimize(None)
    often = Checkpoint(folder, every_steps=4, keep=2)

    def fill(solver: bilevel.Solver, info: Any) -> None:
        if info.step == 5:
            filler.fill()

    with pytest.warns(CheckpointWarning) as caught:
        result = minimize(often, callback=fill)
    filler.free()
    assert_same(result, whole)
    assert len(caught) == 2  # after 8 steps and at the end
    message = str(caught[0].message)
    assert "step-000000000008.safetensors' could not be written" in message
    assert "the run goes on, the newest checkpoint is that of step 4" in message
    assert steps_in(folder) == [0, 4]  # and nothing half-written
    assert_same(minimize(often), whole)


class Disk:
    """A small one, which can be filled to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        whole = pytest.raises(OSError, match="No space left on device")
        with open(self.path / "fill", "wb", buffering=0) as filler, whole:
            while True:
                filler.write(bytes(4096))

    def free(self) -> None:
        (self.path / "fill").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only who may mount can have a small disk")
    yield Disk(tmp_path)
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_full_disk_does_not_stop_the_run(disk: Disk) -> None:
    assert_goes_on_without_space(disk.path / "run", disk)


class Limit:
    """No file may be longer than a few bytes."""

    def fill(self) -> None:
        resource = pytest.importorskip("resource")
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self.before[1]))

    def free(self) -> None:
        resource = pytest.importorskip("resource")
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.slow
def test_a_file_that_may_not_grow_does_not_stop_the_run(tmp_path: Path) -> None:
    assert_goes_on_without_space(tmp_path, Limit())


@pytest.mark.slow
def test_a_disk_that_fails_to_sync_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def fill(self) -> None:
            def fsync(descriptor: int) -> None:
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(file.os, "fsync", fsync)

        def free(self) -> None:
            monkeypatch.undo()

    assert_goes_on_without_space(tmp_path, Broken())


def test_a_run_that_cannot_be_saved_is_not_begun(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(OutputError, match="No space left on device"):
        minimize(disk.path)
    disk.free()
    assert not list(disk.path.iterdir())


def test_a_read_only_folder_is_refused_at_once(disk: Disk) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    with pytest.raises(OutputError, match=r"Read-only file system"):
        minimize(disk.path)
    with pytest.raises(OutputError, match=r"checkpoint="):
        minimize(disk.path / "run")


def test_a_folder_that_became_read_only_still_gives_its_checkpoint(disk: Disk) -> None:
    whole = minimize(None)
    minimize(disk.path, callback=stopping_at(5))
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    with pytest.warns(CheckpointWarning, match="Read-only file system"):
        assert_same(minimize(disk.path), whole)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        minimize(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"(File exists|Not a dir)"):
            minimize(folder)


def test_an_optimizer_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                self.state[group["params"][0]]["odd"] = object()
            return super().step(closure)

    options = OPTIONS | {"method": bilevel.F2SA(0.5, upper_optimizer=lambda p: Odd(p, lr=0.1))}
    with pytest.raises(bilevel.errors.StateError, match=r"solver/state/x_update/.*/odd is object"):
        bilevel.minimize(**options, steps=2, checkpoint=tmp_path)


def saved_run(folder: Path, **options: Any) -> bilevel.Result:
    problem = bilevel.problems.Quadratic(seed=0)
    given = {"steps": 3, "checkpoint": folder, **options}
    return bilevel.minimize(problem, problem.x0, problem.y0, **given)


def test_a_second_run_in_the_folder_of_a_first_is_refused(tmp_path: Path) -> None:
    refused = []

    def begins_another(solver: Any, info: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"another run \(process {os.getpid()} on"):
            saved_run(tmp_path)
        refused.append(info.step)

    saved_run(tmp_path, callback=begins_another)
    assert refused == [0, 1, 2]
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    saved_run(tmp_path, steps=4)  # the lock is free again


def test_a_run_that_fails_frees_its_folder(tmp_path: Path) -> None:
    def fails(solver: Any, info: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        saved_run(tmp_path, callback=fails)
    saved_run(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_a_child_of_a_run_that_was_killed_does_not_hold_its_lock(tmp_path: Path) -> None:
    """As the workers of a DataLoader, which outlive their parent for a while."""
    script = (
        "import os, pathlib, signal, sys, time\n"
        "from bilevel.run.checkpoint.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        print(child, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait()
    try:
        assert (tmp_path / LOCK).exists()
        with locked(tmp_path):
            pass
        assert not (tmp_path / LOCK).exists()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_lock_in_another_process_is_refused_and_named(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from bilevel.run.checkpoint.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError, match=rf"process {process.pid} on .*name another"):
            saved_run(tmp_path)
        process.stdin.close()
    saved_run(tmp_path)


def test_where_the_system_has_no_flock_a_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bilevel.run.checkpoint.lock.fcntl", None)
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"remove \.lock"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
