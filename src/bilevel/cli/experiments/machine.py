"""The machine on which figures were measured, and the threads that PyTorch may use on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The machine on which figures were measured.

    Attributes:
        platform: the operating system and the architecture.
        processor: the name of the processor and its widest instruction set that torch uses.
        cores: the number of cores that the operating system reports.
        threads: the number of threads that torch used.
        gpu: the name of the first GPU; None if torch sees none.
        python, torch: the versions.
    """

    platform: str
    processor: str
    cores: int
    threads: int
    gpu: str | None
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine, with the number of threads that torch is set to now."""
        return cls(
            platform=f"{platform.system()} {platform.machine()}",
            processor=f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            python=platform.python_version(),
            torch=torch.__version__,
        )

    def __str__(self) -> str:
        gpu = "no GPU" if self.gpu is None else self.gpu
        return (
            f"{self.platform}, {self.processor}, {self.cores} cores, {self.threads} used, {gpu}, "
            f"Python {self.python}, torch {self.torch}"
        )


def _processor() -> str:
    """Return the processor's name from Linux; on Linux Python knows the architecture only."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.processor() or "unknown processor"


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads inside the block; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
