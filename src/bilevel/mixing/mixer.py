"""DataMixer: the weights of data sources as the upper level, a language model as the lower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_count, checked_number
from bilevel.methods import F2SA, Info, Method, method_of
from bilevel.mixing.mixture import Mixture, named
from bilevel.mixing.tokens import Loss, Tokens, tokens_of
from bilevel.problem import Problem
from bilevel.run.checkpoint.folder import CheckpointLike
from bilevel.run.loggers import Logger
from bilevel.run.minimize import Callback, minimize
from bilevel.run.solver import Solver
from bilevel.sampling import CombinedData


class DataMixer:
    """Learn how much of each source to train a language model on, so that it does well on a target.

    min_x f(y*(x)) over the weights w = softmax(x) of the sources, with the model as y:

        g(x, y) = sum_k w_k * loss_k(y),    loss_k on a batch of source k,
        f(y)    = the loss on a batch of the target.

    Each step is three forward and backward passes: two copies of the model are trained side by
    side, one on g and one on g + f / multiplier, and a source gains weight where the second, which
    has seen the target, does better than the first. Every step draws one batch of each source, so
    even a source without weight is still looked at. What the model can tell apart from its context
    does no harm: the weights of such sources say little, and depend on when the run ends.

    Args:
        sources: two or more, by name; each an iterable of batches of tokens (a DataLoader, a list,
            ...), gone through again when it ends, or a function of a ``torch.Generator`` that
            returns a batch. A batch is a tensor of tokens (sequences, length), or a mapping with
            ``input_ids`` and perhaps ``attention_mask`` and ``labels``. Batches go to where the
            model is.
        target: the same, of the text that the model is wanted for.
        model: any causal language model; it is copied and never changed. One that takes ``labels``
            (Hugging Face) gives its own loss; any other maps tokens to logits, or to its loss.
        model_lr: of AdamW, by which the model is trained; None: 0.003, for a small model from
            scratch. One that was trained before, or is large, needs a smaller one.
        weight_lr: the step of x; None: 10 * model_lr. The model has to keep up with the weights:
            where these swing to and fro, or alike sources drift apart, it is too large.
        multiplier: lam; None: 10. The larger, the smaller the bias.
        method: another method, such as an ``F2SA`` with optimizers of your own; takes the place of
            the three above.
        seed: of everything random.

    Example:
        >>> import torch, bilevel
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))
        >>> def counting(by, generator):  # sequences that go up or down by 1, modulo 4
        ...     first = torch.randint(4, (8, 1), generator=generator)
        ...     return (first + by * torch.arange(9)) % 4
        >>> mixer = bilevel.DataMixer(
        ...     {"up": lambda g: counting(1, g), "down": lambda g: counting(-1, g)},
        ...     target=lambda g: counting(1, g), model=model, model_lr=0.01)
        >>> mixture = mixer.fit(steps=150)
        >>> bool(mixture.weights["up"] > 0.9)
        True

    Reference:
        Pan et al., "ScaleBiO: Scalable Bilevel Optimization for LLM Data Reweighting", ACL 2025.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        target: Any,
        model: nn.Module,
        *,
        model_lr: float | None = None,
        weight_lr: float | None = None,
        multiplier: float | None = None,
        method: Method[Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        _check_sources(sources)
        if target is None:
            raise ArgumentTypeError("target must be an iterable of batches of tokens, not None")
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"model must be an nn.Module, not {model!r}")
        if next(model.parameters(), None) is None:
            raise ArgumentError("model has no parameters; there is nothing to train")
        check_count("seed", seed, least=0)
        settings = {"model_lr": model_lr, "weight_lr": weight_lr, "multiplier": multiplier}
        chosen = {name: value for name, value in settings.items() if value is not None}
        if method is not None and chosen:
            raise ArgumentError(
                f"{', '.join(f'{n}={v!r}' for n, v in chosen.items())} would be ignored, because "
                f"method brings its own; give one of the two"
            )
        self.sources = dict(sources)
        self.target = target
        self.model = model
        self.method = _adamw(**chosen) if method is None else method_of(method)
        self.seed = seed

    def fit(
        self,
        steps: int = 400,
        *,
        callback: Callback | None = None,
        progress: bool = False,
        record_every: int = 10,
        checkpoint: CheckpointLike | None = None,
    ) -> Mixture:
        """Learn the weights.

        Args:
            steps: of the weights and the model.
            callback, progress, checkpoint: as :func:`bilevel.minimize` takes them; a
                :class:`bilevel.loggers.Logger` is also told the weights.
            record_every: record every that many steps, and the last; this costs one evaluation of
                f each time.
        """
        if callback is not None and not callable(callback):
            raise ArgumentTypeError(
                f"callback must be a function of (solver, info) or a Logger, not {callback!r}"
            )
        device = next(self.model.parameters()).device
        course = _Course(list(self.sources), callback)

        def prepared(name: str, batch: Any) -> Tokens:
            return tokens_of(name, batch, device)

        result = minimize(
            _problem(Loss(self.model)),
            torch.zeros(len(self.sources), device=device),
            self.model,
            method=self.method,
            steps=steps,
            upper_data=CombinedData({"target": self.target}, str, prepared),
            lower_data=CombinedData(self.sources, lambda name: f"sources[{name!r}]", prepared),
            seed=self.seed,
            progress=progress,
            callback=course,
            record_every=record_every,
            checkpoint=checkpoint,
        )
        over_time = course.at(result.history["step"].tolist())
        weights = result.x.softmax(0).double().tolist()
        return Mixture(
            weights=dict(zip(self.sources, weights, strict=True)),
            history={
                **result.history,
                **{named(s): over_time[:, i].numpy() for i, s in enumerate(self.sources)},
            },
            model=result.y,
            steps=result.steps,
            seconds=result.seconds,
        )


class _Course:
    """A callback that keeps the weights of every recorded step, and tells them to another.

    A step that is taken again, after a checkpoint or going back, is kept once.
    """

    def __init__(self, sources: list[str], callback: Callback | None) -> None:
        self._sources = sources
        self._callback = callback
        self._weights: dict[int, Tensor] = {}

    def __call__(self, solver: Solver, info: Info) -> bool | None:
        now = self._weights[info.step] = solver.x.softmax(0).double().cpu()
        if isinstance(self._callback, Logger):
            weights = zip(self._sources, now.tolist(), strict=True)
            self._callback.log(info.step, {named(source): weight for source, weight in weights})
        return None if self._callback is None else self._callback(solver, info)

    def at(self, steps: list[int]) -> Tensor:
        """The weights at those steps, one row for each."""
        empty = torch.empty(0, len(self._sources), dtype=torch.float64)
        return torch.stack([self._weights[step] for step in steps]) if steps else empty

    def state_dict(self) -> dict[str, Any]:
        steps = list(self._weights)
        return {"steps": torch.tensor(steps), "weights": self.at(steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps, weights = state["steps"].tolist(), state["weights"]
        self._weights = dict(zip(steps, weights, strict=True))


def _adamw(
    model_lr: float = 3e-3, weight_lr: float | None = None, multiplier: float = 10.0
) -> F2SA:
    """F2SA at the price of three gradients, with only one copy's activations alive."""
    checked_number("model_lr", model_lr, above=True)
    if weight_lr is None:
        # AdamW moves the model by about model_lr a step, however far the weights want it to go:
        # at 20 times model_lr the weights were seen to swing after a thousand steps, at 10 never
        weight_lr = 10 * model_lr
    return F2SA(
        upper_lr=checked_number("weight_lr", weight_lr, above=True),
        multiplier=checked_number("multiplier", multiplier, above=True),
        inner_steps=1,
        single_pass=True,
        accumulate=True,
        lower_optimizer=lambda params: torch.optim.AdamW(params, lr=model_lr, betas=(0.9, 0.95)),
    )


def _problem(loss: Loss) -> Problem:
    def lower(x: Tensor, model: nn.Module, batch: dict[str, Tokens]) -> Tensor:
        return x.softmax(0) @ loss(model, list(batch.values())).to(x.dtype)

    def upper(x: Tensor, model: nn.Module, batch: dict[str, Tokens]) -> Tensor:
        return loss(model, list(batch.values()))[0]

    return Problem(upper, lower)


def _check_sources(sources: Any) -> None:
    if not isinstance(sources, Mapping):
        raise ArgumentTypeError(
            f"sources must be a mapping from names to iterables of batches, not "
            f"{type(sources).__name__}"
        )
    if len(sources) < 2:
        raise ArgumentError(
            f"sources must be two or more, to be weighed against each other, not {len(sources)} "
            f"({', '.join(map(repr, sources)) or 'none'})"
        )
    for name, data in sources.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the names of sources must be text, not {name!r}")
        if data is None:
            raise ArgumentTypeError(
                f"sources[{name!r}] must be an iterable of batches of tokens, not None"
            )
