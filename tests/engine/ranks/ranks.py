"""Processes that are ranks of one process group, and run what a test tells them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 240
"""Seconds until a test gives up on a rank; the machine may be busy."""


class Ranks:
    """So many processes; inside, :meth:`run` calls a function on each."""

    def __init__(self, count: int, folder: Path, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, count, str(folder / "store"), backend),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function of a rank's number and the arguments returns on each; None: it died."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer"
            try:
                answers.append(pipe.recv())
            except EOFError:  # it died
                answers.append((True, None))
        for rank, (fine, answer) in enumerate(answers):
            assert fine, f"on rank {rank}:\n{answer}"
        return [answer for _, answer in answers]


def _serve(pipe: Connection, rank: int, count: int, store: str, backend: str) -> None:
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or fully_shard would take a GPU
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=PATIENCE),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            answer = True, function(rank, *arguments)
        except Exception:  # whatever it is, the test fails with it, and the rank serves the next
            answer = False, traceback.format_exc()
        pipe.send(answer)


def raised(function: Callable[[], Any]) -> tuple[str, str]:
    """The name and the message of what a call raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")
