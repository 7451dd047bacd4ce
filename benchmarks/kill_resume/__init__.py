"""Runs that are killed and resumed, and checkpoints that are damaged.

Each run is a process that saves a checkpoint after every step. It is killed (SIGKILL) at a random
moment, started again in the same folder and perhaps killed again, and must end with the same bits
in x, y and the history as a run that was not killed. Then checkpoints are cut short, changed in one
bit or have parts exchanged, and each must be refused.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from rich.table import Table

from benchmarks import report
from benchmarks.kill_resume.damages import DAMAGES, damage
from benchmarks.kill_resume.killing import Killer, digest
from benchmarks.kill_resume.tasks import TASKS
from bilevel import Solver
from bilevel.errors import CheckpointError
from bilevel.errors.checks import check_count

__all__ = ["DAMAGES", "TASKS", "Killer", "Row", "damage", "digest", "refusals", "run", "table"]

STEPS = 24
"""The number of steps of each run."""


@dataclass(frozen=True)
class Row:
    """The figures of one kind of run or of damage.

    Attributes:
        what: "killed" or "damaged".
        kind: the kind of run or of damage.
        tried: the number of runs, or of damaged checkpoints.
        held: the number of runs that ended with the same bits, or of checkpoints that were refused
            by an error that names the file.
        kills: the number of kills.
        while_saving: the number of kills while a checkpoint was being written.
        while_compiling: the number of kills before a process had taken its first, compiled step.
    """

    what: str
    kind: str
    tried: int
    held: int
    kills: int = 0
    while_saving: int = 0
    while_compiling: int = 0


def refusals(count: int, seed: int, folder: Path) -> list[Row]:
    """Damage checkpoints of several runs in every way and try to load each."""
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
    """Kill ``runs`` runs, all kinds in turn, and damage ``damaged`` checkpoints."""
    check_count("runs", runs)
    check_count("damaged", damaged, least=0)
    names = list(islice(cycle(TASKS), runs))
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(STEPS, seed, Path(folder))
        found: dict[str, list[tuple[bool, int, int, int]]] = {}
        for name in track(names):
            found.setdefault(name, []).append(killer.kill_and_resume(name))
        rows = [
            Row("killed", name, len(ends), *(sum(column) for column in zip(*ends, strict=True)))
            for name, ends in found.items()
        ]
        return rows + refusals(damaged, seed, Path(folder))


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing, with the totals."""
    total = [
        Row(
            what,
            "all",
            *(
                sum(getattr(row, field) for row in rows if row.what == what)
                for field in ("tried", "held", "kills", "while_saving", "while_compiling")
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
            "while compiling": lambda row: row.while_compiling,
        },
    )
