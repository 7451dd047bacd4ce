"""A script that is made for several ranks runs on one, and takes the steps of a plain process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bilevel
from bilevel.run.history import MEASURED
from tests.engine.ranks import tasks
from tests.engine.ranks.ranks import Ranks, raised
from tests.engine.ranks.tasks import METHODS, SAMPLES, START, numbers

DOUBLE = torch.float64
WRAPPED = ("DDP", "FSDP2")

ON_GPU: dict[str, Any] = {
    "plain module": lambda: tasks.network(DOUBLE).cuda(),
    "DDP": lambda: DistributedDataParallel(tasks.network(DOUBLE).cuda()),
    "FSDP2": lambda: partial(tasks.divided, DOUBLE),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(1, tmp_path_factory.mktemp("rank")) as ranks:
        yield ranks


Found: TypeAlias = tuple[Tensor, list[Tensor], Tensor]
"""x, y and what was recorded."""


def _sampled(
    rank: int,
    kind: str,
    method: str,
    steps: int = 6,
    checkpoint: Path | None = None,
    **options: Any,
) -> Found:
    """Rows drawn at random, so that the samples are compared too."""
    data = tasks.samples(1, DOUBLE)
    result = bilevel.minimize(
        bilevel.Problem(tasks.upper, tasks.lower),
        torch.zeros(SAMPLES, dtype=DOUBLE),
        ON_GPU[kind]() if options.get("device") == "cuda" else START[kind](DOUBLE),
        upper_data=data,
        lower_data=data,
        batch_size=4,
        **tasks.how(method),
        steps=steps,
        checkpoint=checkpoint,
        **options,
    )
    recorded = torch.stack([torch.as_tensor(result.history[name]) for name in MEASURED])
    return result.x, numbers(result.y), recorded


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", WRAPPED)
def test_iterates_and_samples_are_those_of_a_plain_process(
    one: Ranks, kind: str, method: str
) -> None:
    alone = _sampled(0, "plain module", method)
    [found] = one.run(_sampled, kind, method)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def _on_gpu(rank: int, kind: str, method: str) -> Found:
    x, y, recorded = _sampled(rank, kind, method, device="cuda")
    return x.cpu(), [leaf.cpu() for leaf in y], recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_and_on_a_gpu(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, "nccl") as gpu:
        for method in METHODS:
            alone = _on_gpu(0, "plain module", method)
            for kind in WRAPPED:
                [found] = gpu.run(_on_gpu, kind, method)
                torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPED)
def test_goes_on_from_its_checkpoint(one: Ranks, kind: str, tmp_path: Path) -> None:
    [(x, *_)] = one.run(_sampled, kind, "F2SA, AdamW", 6)
    one.run(_sampled, kind, "F2SA, AdamW", 3, tmp_path)
    [(same, *_)] = one.run(_sampled, kind, "F2SA, AdamW", 6, tmp_path)
    assert torch.equal(same, x)


def _refused(rank: int, name: str) -> tuple[str, str]:
    x0: Any = torch.zeros(SAMPLES, dtype=DOUBLE)
    y0: nn.Module = DistributedDataParallel(tasks.network(DOUBLE))
    options: dict[str, Any] = {}
    if name == "rows of others":
        x0 = bilevel.Table(torch.zeros(8, dtype=DOUBLE), first=0, rows=SAMPLES)
    else:
        options["process_group"] = None
    data = tasks.samples(1, DOUBLE)
    return raised(
        lambda: bilevel.minimize(
            bilevel.Problem(tasks.upper, tasks.lower),
            x0,
            y0,
            upper_data=data,
            lower_data=data,
            method=METHODS["F2SA"],
            steps=1,
            **options,
        )
    )


@pytest.mark.parametrize("name", ["rows of others", "no group"])
def test_what_takes_other_ranks_or_a_group_says_so(one: Ranks, name: str) -> None:
    [(kind, message)] = one.run(_refused, name)
    assert kind == "ArgumentError"
    assert "is made for several ranks" in message


def _compiled(rank: int) -> Any:
    with pytest.warns(bilevel.errors.CompileWarning, match="modules that are not wrapped"):
        return _sampled(0, "DDP", "F2SA", 2, None, compile=True)


@pytest.mark.slow
def test_compile_is_left_out_with_a_warning(one: Ranks) -> None:
    x, *_ = _sampled(0, "plain module", "F2SA", 2)
    [(same, *_)] = one.run(_compiled)
    torch.testing.assert_close(same, x, rtol=0, atol=1e-12)


def _judged(rank: int, wrapped: bool) -> Any:
    """Weights of samples from their features, by a plain module with batch norm."""

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        features, target, _ = batch
        return (x(features)[:, 0].sigmoid() * (y(features)[:, 0] - target) ** 2).mean()

    torch.manual_seed(2)
    x0 = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).double()
    y0 = tasks.network(DOUBLE)
    data = tasks.samples(1, DOUBLE)
    result = bilevel.minimize(
        bilevel.Problem(tasks.upper, lower),
        x0,
        DistributedDataParallel(y0) if wrapped else y0,
        upper_data=data,
        lower_data=data,
        batch_size=4,
        method=METHODS["F2SA"],
        steps=3,
    )
    return [tensor.clone() for tensor in result.x.state_dict().values()]


@pytest.mark.slow
def test_statistics_of_one_rank_cannot_differ(one: Ranks) -> None:
    [found] = one.run(_judged, True)
    torch.testing.assert_close(found, _judged(0, False), rtol=0, atol=1e-12)
