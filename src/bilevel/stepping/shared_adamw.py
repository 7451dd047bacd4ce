"""AdamW with one preconditioner for all copies of the lower variable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import checked_number
from bilevel.variables.forms import empty_or, record, tensor


class SharedAdamW(torch.optim.Optimizer):
    """AdamW whose second moments are those of the first copy, for every copy.

    The x direction of :class:`~bilevel.F2SA` is lam times a difference between y and z. With an
    AdamW each, the two move in two metrics: each divides its gradient by that gradient's own size,
    and what differs between them, which is what f adds, is divided away. Here y, the copy that
    moves first, keeps the second moment v and z uses it; the first moments stay their own:

        v   <- beta_2 v + (1 - beta_2) grad_y^2                            (of y alone)
        m_i <- beta_1 m_i + (1 - beta_1) grad_i                            (of each copy i)
        i   <- (1 - lr * weight_decay) i - lr * mhat_i / ( sqrt(vhat) + eps )

    with mhat = m / (1 - beta_1^t) and vhat = v / (1 - beta_2^t). Used alone, for x say, it is
    AdamW. All copies together hold one tensor of the size of y less than with an AdamW each. It
    matters on the way, while gradients are larger than their noise: on a logistic regression the
    x direction after ten full-batch steps has a cosine of 0.73 with the gradient of F, and one of
    0.32 with an AdamW each. With minibatches of ten samples there is no gain.

    To be returned by ``lower_optimizer`` of F2SA, F2BA or F3SA, which tell each copy whom to
    follow; in other methods every copy is the first.

    Args:
        params: tensors or groups of them, as every torch optimizer takes them.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = bilevel.F2SA(
        ...     upper_lr=0.2,
        ...     multiplier=50.0,
        ...     lower_optimizer=lambda params: bilevel.SharedAdamW(params, lr=0.01),
        ... )
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=300)
        >>> bool(problem.value(result.x) < problem.value(problem.x0))
        True

    Reference:
        Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    # a step is scaled and skipped as a scaler of gradients asks, without waiting for the device
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        checked_number("lr", lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ArgumentTypeError(f"betas must be two numbers, not {betas!r}")
        for number, beta in enumerate(betas):
            if checked_number(f"betas[{number}]", beta) >= 1:
                raise ArgumentError(f"betas[{number}] must be below 1, not {beta!r}")
        checked_number("eps", eps, above=True)
        checked_number("weight_decay", weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        self._leader: SharedAdamW | None = None

    def follow(self, leader: SharedAdamW) -> None:
        """From now on use the second moments of ``leader``, whose parameters are a copy of these.

        It has to take its step before this takes the corresponding one.
        """
        shapes = [
            [[p.shape for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in (self, leader)
        ]
        if shapes[0] != shapes[1]:
            raise ArgumentError(
                f"an optimizer of parameters of the shapes {shapes[0]} cannot follow one of "
                f"{shapes[1]}"
            )
        self._leader = leader

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move against the gradients; there is no ``closure`` to evaluate."""
        leader = self if self._leader is None else self._leader
        for group, theirs in zip(self.param_groups, leader.param_groups, strict=True):
            for param, source in zip(group["params"], theirs["params"], strict=True):
                if param.grad is not None:
                    self._move(param, group, leader.state[source])

    def check_entries(self, saved: dict[int, dict[str, Any]], path: str) -> None:
        """Refuse saved numbers of the parameters that are not those that a step makes."""
        params = [param for group in self.param_groups for param in group["params"]]
        for number, entries in saved.items():
            like = params[number]
            forms = {"step": tensor(()), "exp_avg": tensor(like.shape)}
            if self._leader is None:
                forms["exp_avg_sq"] = tensor(like.shape)
            empty_or(record(forms))(entries, f"{path}/{number}")

    def _move(self, param: Tensor, group: dict[str, Any], shared: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        grad, keep = self._unscaled(param.grad)
        mine = self.state[param]
        if not mine:
            mine["step"] = torch.zeros((), device=param.device)
            mine["exp_avg"] = torch.zeros_like(param)
            if mine is shared:
                mine["exp_avg_sq"] = torch.zeros_like(param)
        mine["step"] += keep
        mine["exp_avg"].mul_(1 - (1 - beta1) * keep).add_(grad, alpha=1 - beta1)
        if mine is shared:
            mine["exp_avg_sq"].mul_(1 - (1 - beta2) * keep).addcmul_(grad, grad, value=1 - beta2)

        param.mul_(1 - lr * group["weight_decay"] * keep)
        metric = torch.div(shared["exp_avg_sq"], _unbiased(beta2, shared["step"]))
        metric.sqrt_().add_(group["eps"])
        move = torch.div(mine["exp_avg"], metric, out=metric)
        param.sub_(move.mul_(lr * keep / _unbiased(beta1, mine["step"])))

    def _unscaled(self, grad: Any) -> tuple[Tensor, Any]:
        """The gradient, in its own place, and 1 or, where the step is to be skipped, 0."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found: Tensor | None = getattr(self, "found_inf", None)
        if scale is not None:
            grad.div_(scale)
        if found is None:
            return grad, 1.0
        return grad.masked_fill_(found.bool(), 0.0), 1 - found.double()


def _unbiased(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step; in double precision, because beta is close to 1."""
    return 1 - beta ** step.double().clamp(min=1.0)
