"""DataMixer: weights that are known, models of every kind, what is reported, saved and refused."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    BilevelError,
    DataExhaustedError,
    InputError,
    NonFiniteError,
    ObjectiveError,
    OutputError,
)
from tests.mixing.texts import (
    COUNTS,
    SHARES,
    Bigrams,
    Frequencies,
    drawn,
    sequence,
    target_counts,
)


def best_weights(target: list[int]) -> list[float]:
    """The best on a grid over the simplex, from the loss in closed form."""
    q = torch.tensor(target, dtype=torch.float64) / sum(target)
    p = torch.tensor(list(COUNTS.values()), dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    grid = [
        (i / 100, j / 100, (100 - i - j) / 100)
        for i, j in itertools.product(range(101), repeat=2)
        if i + j <= 100
    ]
    w = torch.tensor(grid, dtype=torch.float64)
    best: list[float] = w[((w @ p).log() @ q).argmax()].tolist()
    return best


def counting(by: int) -> Any:
    """Batches of sequences that go up by ``by``, modulo 6."""

    def batch(generator: torch.Generator) -> Tensor:
        first = torch.randint(6, (8, 1), generator=generator)
        return (first + by * torch.arange(9)) % 6

    return batch


UP, DOWN = counting(1), counting(-1)


def mixer(model: nn.Module | None = None, **options: Any) -> bilevel.DataMixer:
    given: dict[str, Any] = {"sources": {"up": UP, "down": DOWN}, "target": UP, "model_lr": 0.01}
    return bilevel.DataMixer(model=model or Bigrams(), **{**given, **options})


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["forward", pytest.param("midpoint", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [target_counts(), [20, 30, 10, 40]])
def test_the_best_weights_are_found(scheme: Any, target: list[int]) -> None:
    best = best_weights(target)
    if target == target_counts():
        assert best == pytest.approx(list(SHARES.values()))
    found = bilevel.DataMixer(
        {name: [sequence(counts)] for name, counts in COUNTS.items()},
        [sequence(target)],
        Frequencies(),
        method=bilevel.F2SA(1.0, 10.0, multiplier=50.0, inner_steps=5, scheme=scheme),
    ).fit(steps=150)
    assert list(found.weights.values()) == pytest.approx(best, abs=0.011)  # the grid's step is 0.01


@pytest.mark.slow
def test_the_best_weights_are_found_and_kept_with_the_default_settings() -> None:
    found = bilevel.DataMixer(
        {name: drawn(counts, 8) for name, counts in COUNTS.items()},
        drawn(target_counts(), 16),
        Frequencies(),
        model_lr=0.005,
    ).fit(steps=800, record_every=100)
    for name, share in SHARES.items():
        assert found.history[f"weight/{name}"][-4:] == pytest.approx([share] * 4, abs=0.03)


@pytest.mark.slow
def test_sources_that_are_alike_keep_the_same_weight() -> None:
    found = mixer(sources={"one": UP, "two": UP, "three": UP}).fit(steps=200)
    assert list(found.weights.values()) == pytest.approx([1 / 3] * 3, abs=0.05)


def test_one_step_is_the_formula() -> None:
    """The weights after two steps, from the same steps written out."""
    torch.manual_seed(1)
    start = Bigrams().double()
    batches = {"up": torch.arange(6)[None], "down": torch.arange(5, -1, -1)[None]}
    target = torch.tensor([[0, 1, 2, 4, 5]])
    lam, gamma, rate = 5.0, 0.5, 0.3
    method = bilevel.F2SA(gamma, rate, multiplier=lam, inner_steps=1)
    found = bilevel.DataMixer(
        {name: [batch] for name, batch in batches.items()}, [target], start, method=method
    ).fit(steps=2, record_every=1)

    def loss(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = torch.func.functional_call(start, parameters, (tokens,))
        return cross_entropy(logits[0, :-1], tokens[0, 1:])

    def losses(parameters: dict[str, Tensor]) -> Tensor:
        return torch.stack([loss(parameters, batch) for batch in batches.values()])

    def moved(parameters: dict[str, Tensor], pull: float) -> dict[str, Tensor]:
        leaves = {n: p.detach().requires_grad_() for n, p in parameters.items()}
        total = x.softmax(0) @ losses(leaves) + pull * loss(leaves, target)
        grads = torch.autograd.grad(total, list(leaves.values()))
        return {n: p - gamma * g for (n, p), g in zip(leaves.items(), grads, strict=True)}

    x = torch.zeros(2, dtype=torch.float64)
    y = z = {name: parameter.detach() for name, parameter in start.named_parameters()}
    for step in range(2):
        y, z = moved(y, 1 / lam), moved(z, 0.0)
        w = x.softmax(0)
        d = lam * (losses(y) - losses(z)).detach()
        x = x - rate * w * (d - w @ d)  # the gradient of softmax(x) @ d
        for i, name in enumerate(batches):
            # x is in single precision
            assert found.history[f"weight/{name}"][step] == pytest.approx(
                float(x.softmax(0)[i]), abs=1e-6
            )


class WithLabels(nn.Module):
    """As models of Hugging Face are called; its loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bigrams()
        self.masks: list[Tensor | None] = []

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        self.masks.append(attention_mask)
        logits = self.inner(input_ids)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class WithLogits(WithLabels):
    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(logits=self.inner(tokens))


class WithLoss(WithLabels):
    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        return cross_entropy(self.inner(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    "kind",
    [WithLabels, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (WithLogits, WithLoss))],
)
def test_models_of_every_kind_find_the_same(kind: type[WithLabels]) -> None:
    plain = Bigrams()
    model = kind()
    model.inner.load_state_dict(plain.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = mixer(plain).fit(steps=100)
    found = mixer(model).fit(steps=100)
    assert expected.weights["up"] > 0.6
    assert found.weights == pytest.approx(expected.weights, abs=1e-3)
    assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())


@pytest.mark.slow
def test_batches_of_every_kind_are_the_same() -> None:
    tokens = [UP(torch.Generator().manual_seed(i)) for i in range(3)]
    down = [t.flip(1) for t in tokens]
    padded = [torch.cat([t, torch.zeros_like(t[:, :2])], 1) for t in tokens]
    mask = torch.cat([torch.ones(8, 9), torch.zeros(8, 2)], 1)
    labels = [torch.cat([t, torch.full((8, 2), -100)], 1) for t in tokens]
    kinds: dict[str, Any] = {
        "tensors": tokens,
        "narrow": [t.to(torch.int32) for t in tokens],
        "arrays": [t.numpy() for t in tokens],
        "loader": DataLoader(TensorDataset(torch.cat(tokens)), batch_size=8),
        "mapping": [{"input_ids": t} for t in tokens],
        "masked": [{"input_ids": t, "attention_mask": mask} for t in padded],
        "labelled": [
            {"input_ids": t, "labels": wanted} for t, wanted in zip(padded, labels, strict=True)
        ],
    }
    model = Bigrams()
    found = {
        kind: mixer(model, sources={"up": given, "down": down}, target=tokens).fit(steps=30)
        for kind, given in kinds.items()
    }
    for mixture in found.values():  # lists of three batches were gone through ten times
        assert mixture.weights == pytest.approx(found["tensors"].weights, abs=1e-6)


def test_the_mask_reaches_a_model_that_takes_it() -> None:
    tokens = torch.arange(6)[None]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    model = WithLabels()
    sources = {"up": [{"input_ids": tokens, "attention_mask": mask}], "down": [tokens.flip(1)]}
    found = mixer(model, sources=sources, target=[tokens]).fit(steps=1)
    assert any(seen is not None and torch.equal(seen, mask) for seen in found.model.masks)
    assert any(seen is None for seen in found.model.masks)


@pytest.mark.slow
def test_same_seed_same_weights() -> None:
    model = Bigrams()
    once, again, other = (mixer(model, seed=s).fit(steps=30).weights for s in (3, 3, 4))
    assert once == again != other


def test_history_and_loggers_have_the_weights_of_every_recorded_step() -> None:
    class Kept(bilevel.loggers.Logger):
        def __init__(self) -> None:
            self.values: dict[str, list[float]] = {}

        def log(self, step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                self.values.setdefault(name, []).append(value)

    kept = Kept()
    found = mixer().fit(steps=25, record_every=10, callback=kept)
    history = found.history
    assert history["step"].tolist() == [0, 10, 20, 24]
    assert kept.values["weight/up"] == history["weight/up"].tolist()
    assert kept.values["upper"] == history["upper"].tolist()
    assert (history["weight/up"] + history["weight/down"]) == pytest.approx(np.ones(4))
    assert found.weights["up"] == history["weight/up"][-1]
    assert list(found.to_frame()) == list(history)
    assert "up: 0." in repr(found)


def test_a_callback_may_end_the_run() -> None:
    found = mixer().fit(steps=100, record_every=5, callback=lambda solver, info: info.step == 10)
    assert found.steps == 11
    assert len(found.history["weight/up"]) == len(found.history["step"]) == 3


def test_a_run_that_was_stopped_goes_on_with_its_weights(tmp_path: Path) -> None:
    model = Bigrams()
    whole = mixer(model).fit(steps=30, record_every=4)
    stopped = mixer(model).fit(
        steps=30,
        record_every=4,
        callback=lambda solver, info: info.step == 12,
        checkpoint=tmp_path / "run",
    )
    assert stopped.steps == 13
    resumed = mixer(model).fit(steps=30, record_every=4, checkpoint=tmp_path / "run")
    assert resumed.weights == whole.weights
    assert resumed.history["step"].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 29]
    for name in resumed.history.keys() - {"seconds"}:
        assert (resumed.history[name] == whole.history[name]).all(), name


class _Counts:
    """A callback with a state of its own, which ends the run at its fourth call."""

    calls = 0

    def __call__(self, solver: Any, info: Any) -> bool:
        self.calls += 1
        return self.calls == 4

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_the_state_of_a_callback_goes_on_too(tmp_path: Path) -> None:
    model, first, second = Bigrams(), _Counts(), _Counts()
    stopped, resumed = (
        mixer(model).fit(steps=9, record_every=1, callback=counts, checkpoint=tmp_path / "run")
        for counts in (first, second)
    )
    assert (stopped.steps, resumed.steps) == (4, 9)
    assert second.calls == 9


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"callback"):
        mixer().fit(steps=1, callback="runs")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    sources = {'up, "quoted"': UP, "döwn": DOWN}
    found = mixer(sources=sources).fit(steps=20)
    found.save(tmp_path / "deep" / "mixed", model=True)
    model = Bigrams()
    loaded = bilevel.Mixture.load(tmp_path / "deep" / "mixed", model=model)
    assert loaded.model is model
    assert loaded.weights == found.weights
    assert (loaded.steps, loaded.seconds) == (20, found.seconds)
    for name, values in found.history.items():
        assert loaded.history[name].tolist() == values.tolist()
    trained = found.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    with (tmp_path / "deep" / "mixed" / "weights.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row['weight/up, "quoted"']) for row in rows] == (
        found.history['weight/up, "quoted"'].tolist()
    )
    assert bilevel.Mixture.load(tmp_path / "deep" / "mixed").model is None


def test_a_model_with_tied_parameters_is_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(6, 8)
            self.head = nn.Linear(8, 6, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Any:
            return self.head(self.tokens(tokens) ** 3 + self.tokens(tokens))

    found = mixer(Tied()).fit(steps=5)
    found.save(tmp_path / "tied", model=True)
    again = Tied()
    bilevel.Mixture.load(tmp_path / "tied", model=again)
    assert torch.equal(again.tokens.weight, found.model.tokens.weight)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    found = mixer().fit(steps=2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        found.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    found.save(tmp_path, overwrite=True)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["notes.txt", "weights.csv", "weights.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "does not describe a mixture"),
        ('{"format": "bilevel label cleaner"}', "does not describe a mixture"),
        ('{"format": "bilevel mixture", "version": 9, "bilevel": "7.0"}', "bilevel 7.0"),
        ('{"format": "bilevel mixture", "version": 1, "weights": {}}', "lacks 'history'"),
    ],
)
def test_what_is_no_mixture_is_not_loaded(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "weights.json").write_text(content)
    with pytest.raises(InputError, match=message):
        bilevel.Mixture.load(tmp_path)


def test_tensors_of_another_model_are_not_loaded(tmp_path: Path) -> None:
    mixer().fit(steps=1).save(tmp_path / "mixed", model=True)
    with pytest.raises(InputError, match=r"model\.safetensors does not fit the model"):
        bilevel.Mixture.load(tmp_path / "mixed", model=Bigrams(7))


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path: Path) -> None:
    found = mixer(sources={"$up": UP, "_down": DOWN}).fit(steps=5)
    found.plot(tmp_path / "weights.png")
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    found.plot(tmp_path / "weights.svg")
    assert "down" in json.dumps((tmp_path / "weights.svg").read_text())
    with pytest.raises(
        ArgumentError, match=r"path must end in \.png, \.pdf or \.svg, not 'w\.txt'"
    ):
        found.plot("w.txt")


def batches(*shape: int) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.long)]


GOOD = [torch.arange(6)[None]]
BAD_ARGUMENTS: list[tuple[dict[str, Any], type[BilevelError], str]] = [
    ({"sources": {"up": UP}}, ArgumentError, r"sources"),
    ({"sources": {}}, ArgumentError, r"sources"),
    ({"sources": [UP, DOWN]}, ArgumentTypeError, "sources"),
    ({"sources": {1: UP, 2: DOWN}}, ArgumentTypeError, "sources"),
    ({"sources": {"up": UP, "down": None}}, ArgumentTypeError, r"sources\['down'\] must be"),
    ({"target": None}, ArgumentTypeError, "target"),
    ({"model": "gpt2"}, ArgumentTypeError, "model"),
    ({"model": nn.ReLU()}, ArgumentError, "model"),
    ({"model_lr": 0.0}, ArgumentError, "model_lr"),
    ({"weight_lr": -1.0}, ArgumentError, "weight_lr"),
    ({"multiplier": "big"}, ArgumentTypeError, "multiplier"),
    ({"method": "f2sa"}, ArgumentError, "model_lr"),
    ({"seed": -1}, ArgumentError, "seed"),
]
BAD_BATCHES: list[tuple[Any, type[BilevelError], str]] = [
    ([], ArgumentError, "{} is empty"),
    (iter([]), DataExhaustedError, "{} ended after 0 batches"),
    (5, ArgumentTypeError, "{}"),
    ([torch.zeros(2, 5)], ArgumentTypeError, "{}"),
    ([torch.zeros(2, 5, dtype=torch.bool)], ArgumentTypeError, "{}"),
    (batches(5), ArgumentError, r"{}"),
    (batches(2, 5, 3), ArgumentError, r"{}"),
    (batches(2, 1), ArgumentError, r"{}"),
    (batches(0, 5), ArgumentError, r"{}"),
    (["to be or not"], ArgumentTypeError, "{}"),
    ([[[1, 2, 3]]], ArgumentTypeError, "{}"),
    ([{"tokens": GOOD[0]}], ArgumentError, r"{}"),
    ([{"input_ids": [1, 2]}], ArgumentTypeError, "{}"),
    ([torch.tensor([[1, 2, 6]])], ArgumentError, "{}.* 6"),
    ([torch.tensor([[1, -2, 3]])], ArgumentError, "{}"),
    (
        [{"input_ids": GOOD[0], "labels": GOOD[0][:, 1:]}],
        ArgumentError,
        r"{}",
    ),
    ([{"input_ids": GOOD[0], "attention_mask": torch.ones(1, 3)}], ArgumentError, "{}"),
    (
        [{"input_ids": GOOD[0], "labels": torch.full((1, 6), -100)}],
        ArgumentError,
        "{}",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(
    options: dict[str, Any], error: type[BilevelError], message: str
) -> None:
    given = {"model": Bigrams(), **options}
    with pytest.raises(error, match=message):
        mixer(given.pop("model"), **given)


@pytest.mark.parametrize("place", ["sources['down']", "target"])
@pytest.mark.parametrize(("data", "error", "message"), BAD_BATCHES)
def test_bad_batches_are_named(
    place: str, data: Any, error: type[BilevelError], message: str
) -> None:
    if isinstance(data, Iterator):
        data = iter([])  # each test its own
    options = {"target": data} if place == "target" else {"sources": {"up": UP, "down": data}}
    with pytest.raises(error, match=message.replace("{}", re.escape(place))):
        mixer(**options).fit(steps=1)


def test_a_bad_batch_later_on_is_named_too() -> None:
    late = [GOOD[0], GOOD[0], torch.tensor([[1, 9, 2]])]
    with pytest.raises(ArgumentError, match=r"sources\['down'\]"):
        mixer(sources={"up": UP, "down": late}).fit(steps=5)


def test_an_iterator_that_ends_for_good_says_so() -> None:
    with pytest.raises(DataExhaustedError, match=r"sources\['down'\] ended after 3 batches") as e:
        mixer(sources={"up": UP, "down": iter(GOOD * 3)}).fit(steps=5)
    assert e.value.result.steps == 3


class Wrong(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.output = output

    def forward(self, tokens: Tensor) -> Any:
        return self.output if not callable(self.output) else self.output(self, tokens)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "it returned NoneType"),
        ({"a": 1}, "it returned dict"),
        (lambda self, tokens: self.weight * torch.ones(len(tokens)), r"a tensor of shape \(8,\)"),
        (
            lambda self, tokens: self.weight * torch.ones(len(tokens), 6),
            r"tokens of shape \(8, 9\) it returned a tensor of shape \(8, 6\)",
        ),
    ],
)
def test_a_model_that_returns_neither_logits_nor_a_loss_is_refused(
    output: Any, message: str
) -> None:
    with pytest.raises(ObjectiveError, match=message):
        mixer(Wrong(output)).fit(steps=1)


def test_a_model_that_takes_labels_but_gives_no_loss_is_refused() -> None:
    class NoLoss(WithLabels):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            return SimpleNamespace(logits=self.inner(input_ids))

    with pytest.raises(ObjectiveError, match="gave no loss for a batch of target, but SimpleName"):
        mixer(NoLoss()).fit(steps=1)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(NonFiniteError, match="is not finite at step 0"):
        mixer(Wrong(lambda self, tokens: self.weight.log() * 0)).fit(steps=1)
