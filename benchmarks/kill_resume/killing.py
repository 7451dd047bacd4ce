"""Runs in processes that are killed and resumed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._dynamo  # Optimizers import it, which takes seconds: once here, for all processes.

from benchmarks.kill_resume.tasks import COMPILED, TASKS
from bilevel import Checkpoint, Result, minimize
from bilevel.run.checkpoint.file import PART, bytes_of
from bilevel.variables import Variable

TWICE = 0.25
"""The fraction of runs that are killed a second time."""

COMPILING = 0.5
"""The fraction of kills of a compiled run that come while its first step is being compiled."""


def digest(result: Result) -> str:
    """Hash all bits of a result except the times."""
    bits = hashlib.sha256()
    for value in (result.x, result.y):
        variable = Variable(value, "v")
        for tensor in (*variable.leaves, *variable.buffers):
            bits.update(bytes_of(tensor))
    for name, column in result.history.items():
        if name != "seconds":
            bits.update(column.tobytes())
    bits.update(f"{result.steps} {result.selected_step} {result.outcome.name}".encode())
    return bits.hexdigest()


def run_to_end(task: str, steps: int, folder: str, answer: str) -> None:
    """Make the whole run, or the rest of it, and write its digest to the file ``answer``."""
    # More compile threads are processes, which a kill of this one would leave behind.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # What a killed process left half-written there, the next one finds.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}.compiled"
    torch.set_num_threads(1)
    every_step = Checkpoint(folder, every_steps=1, keep=2)
    result = minimize(**TASKS[task](), steps=steps, checkpoint=every_step)
    whole = Path(answer + PART)
    whole.write_text(digest(result))
    whole.replace(answer)


class Killer:
    """Starts runs, kills them, resumes them and compares the results.

    Args:
        steps: the number of steps of each run.
        seed: the seed of the moments at which runs are killed.
        folder: the folder for the files of the runs.
    """

    def __init__(self, steps: int, seed: int, folder: Path) -> None:
        kinds = multiprocessing.get_all_start_methods()
        # Processes of a fork server start with everything imported.
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in kinds else None)
        if "forkserver" in kinds:
            self._context.set_forkserver_preload([__name__])
        self._steps = steps
        self._random = random.Random(seed)
        self._folder = folder
        self._expected: dict[str, str] = {}
        self._first_step: dict[str, float] = {}  # its seconds, those of compilation included
        self._count = 0

    def expected(self, task: str) -> str:
        """Return the digest of the run that is not killed; it saves checkpoints as well."""
        if task not in self._expected:
            folder = self._fresh()
            process = self._start(task, folder)
            self._wait_for_step(process, folder, 0)
            begun = time.perf_counter()
            self._wait_for_step(process, folder, 1)
            self._first_step[task] = time.perf_counter() - begun
            process.join()
            self._expected[task] = self._answer(folder)
        return self._expected[task]

    def kill_and_resume(self, task: str) -> tuple[bool, int, int, int]:
        """Return whether the bits agree, the kills, and those during a save and a compilation."""
        expected = self.expected(task)
        folder = self._fresh()
        planned = 1 + (self._random.random() < TWICE)
        kills = while_saving = while_compiling = 0
        while kills < planned:
            before = _newest(folder)
            process = self._start(task, folder)
            compiling = task in COMPILED and self._random.random() < COMPILING
            if compiling:
                self._wait_for_step(process, folder, 0)
                time.sleep(self._random.random() * self._first_step[task])
            else:
                self._wait_for(process, folder, self._random.randrange(self._steps - kills))
            process.kill()
            process.join()
            if process.exitcode == 0:  # The run ended before the kill: start again.
                folder = self._fresh()
                kills = while_saving = while_compiling = 0
                continue
            kills += 1
            while_saving += any(folder.glob(f".*{PART}")) if folder.exists() else False
            while_compiling += compiling and _newest(folder) == max(before, 0)
        process = self._start(task, folder)
        process.join()
        leftovers = list(folder.glob(f".*{PART}"))
        held = self._answer(folder) == expected and not leftovers
        return held, kills, while_saving, while_compiling

    def _fresh(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _start(self, task: str, folder: Path) -> BaseProcess:
        process: BaseProcess = self._context.Process(
            target=run_to_end, args=(task, self._steps, str(folder), f"{folder}.digest")
        )
        process.start()
        return process

    @staticmethod
    def _answer(folder: Path) -> str:
        answer = Path(f"{folder}.digest")
        return answer.read_text() if answer.exists() else f"the run in {folder} wrote no digest"

    def _wait_for(self, process: BaseProcess, folder: Path, step: int) -> None:
        """Wait until the run has reached that step, and then for a random part of a step's time."""
        begun = time.perf_counter()
        reached = self._wait_for_step(process, folder, step) if step else 0
        each = (time.perf_counter() - begun) / max(reached, 1)
        time.sleep(self._random.random() * min(each, 0.05))

    @staticmethod
    def _wait_for_step(process: BaseProcess, folder: Path, step: int) -> int:
        """Wait until a checkpoint of that step or a later one is there; the step of the newest."""
        reached = -1
        while process.is_alive() and reached < step:
            time.sleep(0.001)
            reached = max(reached, _newest(folder))
        return reached


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint; -1: there is none."""
    return max((int(path.stem[5:]) for path in folder.glob("step-*.safetensors")), default=-1)
