"""DataMixer: weights of data sources at the upper level, a language model at the lower level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_function, check_seed, checked_number
from bilevel.methods import F2SA, Info, Method, method_of
from bilevel.mixing.mixture import Mixture, weight_key
from bilevel.mixing.tokens import LanguageModelLoss, TokenBatch, check_batch
from bilevel.problem import Problem
from bilevel.run import Callback, CheckpointLike, Solver, minimize
from bilevel.run.loggers import Logger
from bilevel.sampling import CombinedData
from bilevel.variables import Stateful


class DataMixer:
    """Learn how much of each source to train a language model on, so that it does well on a target.

    It solves min_x f(y*(x)) with the weights w = softmax(x) of the sources and the model y:

        g(x, y) = sum_k w_k * loss_k(y),    loss_k on a batch of source k,
        f(y)    = the loss on a batch of the target.

    Each step takes three forward and backward passes. Two copies of the model are trained side by
    side, one on g and one on g + f / multiplier; a source gains weight if the second copy, which
    has seen the target, does better on it than the first. Every step draws one batch of each
    source, so a source that has lost its weight can regain it. A source that the model recognizes
    from the context does no harm; the weights of such sources mean little and depend on when the
    run ends.

    Args:
        sources: two or more sources by name. Each is an iterable of batches of tokens (a
            DataLoader, a list, ...), which is restarted when it ends, or a function of a
            ``torch.Generator`` that returns a batch. A batch is a tensor of tokens of shape
            (sequences, length), or a mapping with ``input_ids`` and optionally ``attention_mask``
            and ``labels``. Batches are moved to the device of the model.
        target: batches of the text that the model is meant for, in the same formats.
        model: any causal language model; it is copied and never changed. A model that takes
            ``labels`` (Hugging Face) computes its own loss; any other maps tokens to logits or to
            its loss.
        model_lr: the learning rate of AdamW, which trains the model. None: 0.003, which suits a
            small model trained from scratch; a large or pretrained model needs a smaller rate.
        weight_lr: the step size of x; None: 10 * model_lr. The model has to keep up with the
            weights: if they oscillate, or similar sources drift apart, it is too large.
        multiplier: the penalty parameter lambda; None: 10. A larger one has a smaller bias.
        method: another method, such as an ``F2SA`` with your own optimizers, in place of the three
            arguments above.
        seed: determines everything random.

    Example:
        >>> import torch, bilevel
        >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4))
        >>> def counting(by, generator):  # sequences that count up or down by 1, modulo 4
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
        check_seed("seed", seed)
        settings = {"model_lr": model_lr, "weight_lr": weight_lr, "multiplier": multiplier}
        chosen = {name: value for name, value in settings.items() if value is not None}
        if method is not None and chosen:
            raise ArgumentError(
                f"{', '.join(f'{n}={v!r}' for n, v in chosen.items())} would be ignored, because "
                f"method has settings of its own; give either the method or these settings"
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
            steps: the number of steps of the weights and the model.
            callback, progress, checkpoint: as for :func:`bilevel.minimize`; a
                :class:`bilevel.loggers.Logger` also receives the weights.
            record_every: the number of steps between two records; the last step is always recorded.
                Each record costs one evaluation of f.
        """
        if callback is not None:
            either = "a function of (solver, info) or a Logger"
            check_function("callback", callback, "solver", "info", expected=either)
        device = next(self.model.parameters()).device
        recorder = _WeightRecorder(list(self.sources), callback)

        def prepared(name: str, batch: Any) -> TokenBatch:
            return check_batch(name, batch, device)

        result = minimize(
            _problem(LanguageModelLoss(self.model)),
            torch.zeros(len(self.sources), device=device),
            self.model,
            method=self.method,
            steps=steps,
            upper_data=CombinedData({"target": self.target}, str, prepared),
            lower_data=CombinedData(self.sources, lambda name: f"sources[{name!r}]", prepared),
            seed=self.seed,
            progress=progress,
            callback=recorder,
            record_every=record_every,
            checkpoint=checkpoint,
            accumulate=isinstance(self.method, F2SA),  # the activations of one copy at a time
        )
        curves = recorder.at(result.history["step"].tolist())
        weights = result.x.softmax(0).double().tolist()
        return Mixture(
            weights=dict(zip(self.sources, weights, strict=True)),
            history={
                **result.history,
                **{weight_key(s): curves[:, i].numpy() for i, s in enumerate(self.sources)},
            },
            model=result.y,
            steps=result.steps,
            seconds=result.seconds,
        )


class _WeightRecorder:
    """A callback that keeps the weights of every recorded step and passes them to a logger.

    A step that is taken again, after resuming or going back, is kept only once.
    """

    def __init__(self, sources: list[str], callback: Callback | None) -> None:
        self._sources = sources
        self._callback = callback
        self._weights: dict[int, Tensor] = {}

    def __call__(self, solver: Solver, info: Info) -> bool | None:
        current = self._weights[info.step] = solver.x.softmax(0).double().cpu()
        if isinstance(self._callback, Logger):
            weights = zip(self._sources, current.tolist(), strict=True)
            self._callback.log(
                info.step, {weight_key(source): weight for source, weight in weights}
            )
        return None if self._callback is None else self._callback(solver, info)

    def at(self, steps: list[int]) -> Tensor:
        """The weights at these steps, one row for each step."""
        empty = torch.empty(0, len(self._sources), dtype=torch.float64, device="cpu")
        return torch.stack([self._weights[step] for step in steps]) if steps else empty

    def state_dict(self) -> dict[str, Any]:
        steps = list(self._weights)
        state = {"steps": torch.tensor(steps, device="cpu"), "weights": self.at(steps)}
        if isinstance(self._callback, Stateful):
            state["callback"] = self._callback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps, weights = state["steps"].tolist(), state["weights"]
        self._weights = dict(zip(steps, weights, strict=True))
        if isinstance(self._callback, Stateful) and "callback" in state:
            self._callback.load_state_dict(state["callback"])


def _adamw(
    model_lr: float = 3e-3, weight_lr: float | None = None, multiplier: float = 10.0
) -> F2SA:
    """F2SA at three gradients per step."""
    checked_number("model_lr", model_lr, above=True)
    if weight_lr is None:
        # AdamW moves the model by about model_lr per step, however large the gradient is. With a
        # weight_lr of 20 * model_lr the weights oscillated after a thousand steps; with 10, never.
        weight_lr = 10 * model_lr
    return F2SA(
        upper_lr=checked_number("weight_lr", weight_lr, above=True),
        multiplier=checked_number("multiplier", multiplier, above=True),
        inner_steps=1,
        single_pass=True,
        lower_optimizer=lambda params: torch.optim.AdamW(params, lr=model_lr, betas=(0.9, 0.95)),
    )


def _problem(loss: LanguageModelLoss) -> Problem:
    def lower(x: Tensor, model: nn.Module, batch: dict[str, TokenBatch]) -> Tensor:
        return x.softmax(0) @ loss(model, list(batch.values())).to(x.dtype)

    def upper(x: Tensor, model: nn.Module, batch: dict[str, TokenBatch]) -> Tensor:
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
            f"sources must be two or more, because they are weighed against each other, not "
            f"{len(sources)} ({', '.join(map(repr, sources)) or 'none'})"
        )
    for name, data in sources.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the names of sources must be text, not {name!r}")
        if data is None:
            raise ArgumentTypeError(
                f"sources[{name!r}] must be an iterable of batches of tokens, not None"
            )
