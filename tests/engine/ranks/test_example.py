"""The example runs alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "data_parallel.py"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param([*TORCHRUN, "--nproc-per-node=1"], marks=pytest.mark.slow),
        [*TORCHRUN, "--nproc-per-node=2"],
    ],
    ids=["alone", "one rank", "two ranks"],
)
def test_the_same_script_finds_the_wrong_labels(launcher: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--steps=100", f"--checkpoint={tmp_path}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [found] = re.findall(r"wrong among them: (\d+)%", ended.stdout)
    assert int(found) > 75  # of all labels 20% are
    assert any(path.name.startswith("step-000000000100") for path in tmp_path.iterdir())
