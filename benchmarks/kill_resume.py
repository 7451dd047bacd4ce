"""Runs that are killed and go on, and checkpoints that are damaged.

Each run is a process of its own that saves after every step. It is killed (SIGKILL) at a random
moment, started again in the same folder, perhaps killed again, and must end with the same bits as
one that was left alone: x, y and the history. Then checkpoints are cut short, changed in one bit,
or have parts exchanged, and each must be refused.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import, in seconds: here once for all processes
from rich.table import Table as Shown
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import methods, report
from bilevel.errors import CheckpointError
from bilevel.errors.checks import check_count
from bilevel.methods import METHODS
from bilevel.methods.f2sa import F2SA
from bilevel.problem import Problem
from bilevel.problems import Quadratic
from bilevel.run import Checkpoint, Result, Solver, minimize
from bilevel.run.checkpoint.file import PART, bytes_of
from bilevel.variables import Table, Variable

STEPS = 24
TWICE = 0.25
"""The share of runs that are killed a second time."""


def _quadratic(method: Any, **more: Any) -> dict[str, Any]:
    problem = Quadratic(sigma_f=0.1, sigma_g=0.1, seed=0)  # for which the settings were chosen
    return {
        "problem": problem,
        "x0": problem.x0,
        "y0": problem.y0,
        "method": method,
        "upper_data": problem.upper_noise,
        "lower_data": problem.lower_noise,
        **more,
    }


def _of_case(case: methods.Case) -> Callable[[], dict[str, Any]]:
    return lambda: _quadratic(case.method())


def _samples() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 4, generator=generator)
    return rows, (rows.sum(1) > 0).long(), torch.arange(60)


def _trusted(x: Any, y: Any, batch: Any) -> Tensor:
    return cross_entropy(y(batch[0]), batch[1])


def _weighted(x: Any, y: Any, batch: Any) -> Tensor:
    losses = cross_entropy(y(batch[0]), batch[1], reduction="none")
    loss: Tensor = (x[batch[2]].sigmoid() * losses).mean()
    return loss


def _module() -> dict[str, Any]:
    """Dropout, BatchNorm, shuffled loaders and optimizers with momentum."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 2)
        )
    loaders = (
        DataLoader(TensorDataset(*_samples()), batch_size=size, shuffle=True, drop_last=True)
        for size in (8, 7)
    )
    method = F2SA(
        inner_steps=2,
        lower_optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        upper_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
    data = dict(zip(("upper_data", "lower_data"), loaders, strict=True))
    start = {"x0": torch.zeros(60), "y0": model}
    return {"problem": Problem(_trusted, _weighted), "method": method, **start, **data}


def _linear(x: Any, y: Tensor, batch: Any) -> Tensor:
    return cross_entropy(batch[0] @ y, batch[1])


def _weighted_linear(x: Any, y: Tensor, batch: Any) -> Tensor:
    losses = cross_entropy(batch[0] @ y, batch[1], reduction="none")
    loss: Tensor = (x[batch[2]].sigmoid() * losses).mean() + 0.01 * (y**2).sum()
    return loss


def _rows(x0: Any, **more: Any) -> dict[str, Any]:
    return {
        "problem": Problem(_linear, _weighted_linear),
        "x0": x0,
        "y0": torch.zeros(4, 2),
        "upper_data": _samples()[:2],
        "lower_data": _samples(),
        "batch_size": 10,
        **more,
    }


def _table() -> dict[str, Any]:
    """A file of a megabyte, most of which is the table and its optimizer's state."""
    method = F2SA(
        lower_lr=0.3,
        inner_steps=2,
        upper_optimizer=lambda params: torch.optim.SparseAdam(params, lr=0.01),
    )
    return _rows(Table(torch.zeros(100_000)), method=method)


def _compiled() -> dict[str, Any]:
    method = F2SA(lower_lr=0.3, upper_lr=1.0, inner_steps=3)
    return _rows(torch.zeros(60), method=method, compile=True)


TASKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{case.name: _of_case(case) for case in methods.CASES},
    "no-bilevel": lambda: _quadratic("no-bilevel"),
    "f2sa, auto, best": lambda: _quadratic("f2sa", select="best"),
    "f3sa, auto, random": lambda: _quadratic("f3sa", select="random"),
    "a module, loaders, optimizers": _module,
    "a table": _table,
    "compiled": _compiled,
}
assert set(METHODS) <= set(TASKS)


@dataclass(frozen=True)
class Row:
    """What became of one kind of run or of damage.

    Attributes:
        what: "killed" or "damaged".
        kind: of run, or of damage.
        tried: how many.
        held: of these how many ended with the same bits, or were refused by the error that names
            the file.
        kills: how often they were killed.
        while_saving: how often a file was being written at that moment.
    """

    what: str
    kind: str
    tried: int
    held: int
    kills: int = 0
    while_saving: int = 0


def digest(result: Result) -> str:
    """The bits of a result, but for the seconds."""
    found = hashlib.sha256()
    for value in (result.x, result.y):
        variable = Variable(value, "v")
        for tensor in (*variable.leaves, *variable.buffers):
            found.update(bytes_of(tensor))
    for name, column in result.history.items():
        if name != "seconds":
            found.update(column.tobytes())
    found.update(f"{result.steps} {result.selected_step} {result.outcome.name}".encode())
    return found.hexdigest()


def go(task: str, steps: int, folder: str, answer: str) -> None:
    """What a process does: the whole run, and its digest to a file."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or a kill leaves processes behind
    torch.set_num_threads(1)
    often = Checkpoint(folder, every_steps=1, keep=2)
    result = minimize(**TASKS[task](), steps=steps, checkpoint=often)
    whole = Path(answer + PART)
    whole.write_text(digest(result))
    whole.replace(answer)


class Killer:
    """Starts runs, kills them and looks at what they come to.

    Args:
        steps: of each run.
        seed: of the moments.
        folder: for the files of the runs.
    """

    def __init__(self, steps: int, seed: int, folder: Path) -> None:
        kinds = multiprocessing.get_all_start_methods()
        # its processes begin with everything imported
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in kinds else None)
        if "forkserver" in kinds:
            self._context.set_forkserver_preload([__name__])
        self._steps = steps
        self._random = random.Random(seed)
        self._folder = folder
        self._expected: dict[str, str] = {}
        self._count = 0

    def expected(self, task: str) -> str:
        """The digest of the run that is left alone, by a process that also saves."""
        if task not in self._expected:
            folder = self._fresh()
            process = self._start(task, folder)
            process.join()
            self._expected[task] = self._answer(folder)
        return self._expected[task]

    def kill_and_resume(self, task: str) -> tuple[bool, int, int]:
        """Whether the bits are the same, the number of kills, and of those during a save."""
        expected = self.expected(task)
        folder = self._fresh()
        planned = 1 + (self._random.random() < TWICE)
        kills = while_saving = 0
        while kills < planned:
            process = self._start(task, folder)
            self._wait_for(process, folder, self._random.randrange(self._steps - kills))
            process.kill()
            process.join()
            if process.exitcode == 0:  # it was faster, and has ended; once more from the start
                folder = self._fresh()
                kills = while_saving = 0
                continue
            kills += 1
            while_saving += any(folder.glob(f".*{PART}")) if folder.exists() else False
        process = self._start(task, folder)
        process.join()
        leftovers = list(folder.glob(f".*{PART}"))
        return self._answer(folder) == expected and not leftovers, kills, while_saving

    def _fresh(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _start(self, task: str, folder: Path) -> BaseProcess:
        process: BaseProcess = self._context.Process(
            target=go, args=(task, self._steps, str(folder), f"{folder}.digest")
        )
        process.start()
        return process

    @staticmethod
    def _answer(folder: Path) -> str:
        answer = Path(f"{folder}.digest")
        return answer.read_text() if answer.exists() else f"no answer in {folder}"

    def _wait_for(self, process: BaseProcess, folder: Path, step: int) -> None:
        """Until the run has come to that step, and then for a part of the time of a step."""
        begun = time.perf_counter()
        reached = 0
        while process.is_alive() and reached < step:
            time.sleep(0.001)
            reached = max(
                (int(path.stem[5:]) for path in folder.glob("step-*.safetensors")), default=0
            )
        each = (time.perf_counter() - begun) / max(reached, 1)
        time.sleep(self._random.random() * min(each, 0.05))


def damage(data: bytes, kind: str, chance: random.Random) -> bytes:
    """A file with something done to it, which leaves it other than it was."""
    while True:
        damaged = DAMAGES[kind](data, chance)
        if damaged != data:
            return damaged


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _flipped(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _flipped_in_header(data: bytes, chance: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    return _flipped(data[:end], chance) + data[end:]


def _swapped_fields(data: bytes, chance: random.Random) -> bytes:
    """Two tensors, or two parts of the description, exchange their names."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    fields = chance.choice([header["__metadata__"], header])
    one, other = chance.sample([name for name in fields if name != "__metadata__"], 2)
    fields[one], fields[other] = fields[other], fields[one]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _swapped_bytes(data: bytes, chance: random.Random) -> bytes:
    size = chance.randint(1, 64)
    first, second = sorted(chance.sample(range(0, len(data) - size, size), 2))
    middle = data[first + size : second]
    start, ends = data[:first], data[second + size :]
    return start + data[second : second + size] + middle + data[first : first + size] + ends


def _emptied(data: bytes, chance: random.Random) -> bytes:
    """A block that never came to the disk."""
    start = chance.randrange(len(data))
    stop = min(len(data), start + 512)
    return data[:start] + bytes(stop - start) + data[stop:]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut short": _cut,
    "one bit flipped": _flipped,
    "one bit of the header flipped": _flipped_in_header,
    "fields exchanged": _swapped_fields,
    "bytes exchanged": _swapped_bytes,
    "a block of zeros": _emptied,
}


def refusals(count: int, seed: int, folder: Path) -> list[Row]:
    """Damage checkpoints of several runs in every way, and try to load each."""
    chance = random.Random(seed)
    solvers, files = [], []
    for name in ("f2sa", "f3sa, auto, random", "a module, loaders, optimizers"):
        options = TASKS[name]()
        options.pop("select", None)
        solver = Solver(**options)
        for _ in range(3):
            solver.step()
        solver.save(folder / "sound.safetensors")
        solvers.append(solver)
        files.append((folder / "sound.safetensors").read_bytes())
    kinds = list(DAMAGES)
    tried = dict.fromkeys(kinds, 0)
    refused = dict.fromkeys(kinds, 0)
    path = folder / "damaged.safetensors"
    for number in range(count):
        kind = kinds[number % len(kinds)]
        which = chance.randrange(len(solvers))
        path.write_bytes(damage(files[which], kind, chance))
        tried[kind] += 1
        try:
            solvers[which].load(path)
        except CheckpointError as error:
            refused[kind] += repr(str(path)) in str(error)
    return [Row("damaged", kind, tried[kind], refused[kind]) for kind in kinds]


def run(
    *, runs: int = 200, damaged: int = 1000, seed: int = 0, track: report.Track = iter
) -> list[Row]:
    """So many runs over all kinds in turn, and so many damaged checkpoints."""
    check_count("runs", runs)
    check_count("damaged", damaged, least=0)
    names = list(islice(cycle(TASKS), runs))
    with tempfile.TemporaryDirectory() as place:
        killer = Killer(STEPS, seed, Path(place))
        found: dict[str, list[tuple[bool, int, int]]] = {}
        for name in track(names):
            found.setdefault(name, []).append(killer.kill_and_resume(name))
        rows = [
            Row("killed", name, len(ends), *(sum(column) for column in zip(*ends, strict=True)))
            for name, ends in found.items()
        ]
        return rows + refusals(damaged, seed, Path(place))


def table(rows: Sequence[Row]) -> Shown:
    """The rows to read."""
    total = [
        Row(
            what,
            "all",
            *(
                sum(getattr(row, field) for row in rows if row.what == what)
                for field in ("tried", "held", "kills", "while_saving")
            ),
        )
        for what in ("killed", "damaged")
    ]
    return report.table(
        "held: killed runs that ended with the same bits, damaged files that were refused",
        [*rows, *total],
        {
            "what": lambda row: row.what,
            "kind": lambda row: row.kind,
            "tried": lambda row: row.tried,
            "held": lambda row: row.held,
            "kills": lambda row: row.kills,
            "while saving": lambda row: row.while_saving,
        },
    )
