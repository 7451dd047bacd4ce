"""Loggers: everything of every step arrives, in TensorBoard's own files too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bilevel
from bilevel.errors import ArgumentTypeError, MissingExtraError, OutputError

PROBLEM = bilevel.problems.Quadratic(seed=0)
RECORDED = ("upper", "lower", "gap", "direction_norm", "multiplier", "lower_lr", "upper_lr")


class Kept(bilevel.loggers.Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))


class Run:
    """As much of a run of Weights & Biases as is asked of it."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], *, step: int) -> None:
        self.lines.append((step, data))


def run(callback: Any, **options: Any) -> bilevel.Result:
    return bilevel.minimize(PROBLEM, PROBLEM.x0, PROBLEM.y0, callback=callback, **options)


def test_a_logger_of_ones_own_is_told_what_the_history_has() -> None:
    kept = Kept()
    history = run(kept, steps=7, record_every=3).history
    assert [step for step, _ in kept.lines] == history["step"].tolist() == [0, 3, 6]
    for name in RECORDED:
        assert [values[name] for _, values in kept.lines] == history[name].tolist()


def test_what_a_method_has_not_is_left_out() -> None:
    kept = Kept()
    run(kept, steps=1, method="soba")
    ((_, values),) = kept.lines
    assert "multiplier" not in values
    assert values["upper"] > 0


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with bilevel.loggers.TensorBoard(tmp_path / "deep" / "events", prefix="run/") as logger:
        history = run(logger, steps=6, record_every=2).history
    events = EventAccumulator(str(tmp_path / "deep" / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"run/{name}" for name in RECORDED}
    for name in RECORDED:
        read = events.Scalars(f"run/{name}")
        assert [event.step for event in read] == history["step"].tolist()
        # event files hold single precision
        assert [event.value for event in read] == history[name].astype(np.float32).tolist()


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingExtraError, match=r"bilevel\[tensorboard\]"):
        bilevel.loggers.TensorBoard(tmp_path)


def test_a_run_of_wandb_is_told_every_step() -> None:
    told = Run()
    history = run(bilevel.loggers.WandB(told, prefix="run/"), steps=4).history
    assert [step for step, _ in told.lines] == [0, 1, 2, 3]
    assert [line["run/upper"] for _, line in told.lines] == history["upper"].tolist()


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"run"):
        bilevel.loggers.WandB("my-project")


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/events", "a" * 300])
def test_a_folder_that_cannot_be_one_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bilevel.errors.OutputError, match="folder="):
        bilevel.loggers.TensorBoard(folder)


class FullDisk:
    """Stands for a writer of TensorBoard, whose thread's errors come with the next call."""

    def add_scalar(self, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    close = add_scalar


def test_a_disk_that_becomes_full_is_told_with_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = bilevel.loggers.TensorBoard(tmp_path)
    logger.close()
    logger._writer = FullDisk()
    said = f"folder='{tmp_path}' cannot be written to: No space left"
    with pytest.raises(OutputError, match=said):
        run(logger)
    with pytest.raises(OutputError, match=said):
        logger.close()
