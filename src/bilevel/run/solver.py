"""Solver: a problem, a method and its state, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from bilevel.engine import Execution, LossScale, make_evaluator, with_compiled_steps
from bilevel.engine.ranks import GroupChoice, ranks_of
from bilevel.engine.restart import Restart
from bilevel.engine.stacked import TaskProblem, TaskVariable
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataExhaustedError,
    NonFiniteError,
    ObjectiveError,
    RunError,
)
from bilevel.methods import Info, Method, State
from bilevel.problem import Problem, ProximalProblem
from bilevel.run.checkpoint import settings
from bilevel.run.checkpoint.shared import on_every_rank
from bilevel.run.saving import Resumable
from bilevel.run.setup import Arguments, Sampling, agree_on_ranks, announce_ranks, prepare
from bilevel.sampling import DirectionSize, Draw, Episodes, EpisodicDraw, interrupts
from bilevel.stepping import GivenSizes, StepSizePolicy, batches_to_reach
from bilevel.variables import Variable, local_part


class Point(NamedTuple):
    """What a run returns.

    Attributes:
        x: the upper variable.
        y: its lower solution.
        k: the outer step that x belongs to.
        compared: F at the start of the run and at x; None: they were not compared.
        moved: whether x is clearly elsewhere than where the run began, if steps of x are found.
    """

    x: Any
    y: Any
    k: int
    compared: tuple[float, float] | None = None
    moved: bool = True


class Solver(Resumable):
    """A run that the caller steps through.

    Args:
        problem: the two objectives.
        x0, y0: where to start; they are copied and never changed. A tensor or module that stands
            twice in one of them is one variable, in every copy. A function without arguments builds
            what cannot be copied, a module that ``fully_shard`` has divided: it is called
            once for each copy that the method holds, and these are given the numbers of the first.
        method: a name in :data:`bilevel.METHODS` or a method object such as ``bilevel.F2SA(...)``.
        upper_data, lower_data: what the batches of f and of g are drawn from. None: no data, the
            batch is None. A tensor, or a tuple or dict of tensors with one first dimension: rows
            are sampled with replacement on the device where they lie. A Dataset: the same, and
            collated. A DataLoader or any iterable of batches: gone through again and again. A
            function: called with a ``torch.Generator``, it returns a batch. Several of these at
            once: see :class:`bilevel.sampling.CombinedData`. The two are independent: each has a
            generator of its own, and nothing pairs a batch of f with one of g. Both advance with
            every evaluation that needs them, so in each inner step, and for the x direction once
            more; how often each does depends on the method. Data in which f and g belong together,
            such as the tasks of few-shot learning, is given as ``data``.
        data: :class:`bilevel.Episodes`, in which the batches of f and of g come in pairs, one for
            each task; in place of upper_data and lower_data.
        batch_size: rows per minibatch where they are sampled here. None: all of them every time.
        direction_batch_size: how many samples are behind the x direction. None: one minibatch, or
            where a found step of x meets an x of which a minibatch reaches few entries, such as a
            weight for each sample, as many as the inner steps use. "all": one pass over all data,
            in order.
        compile: run each step as a compiled program (F2SA and F2BA with plain steps of y; needs
            PyTorch 2.11, while everything else runs from 2.4 on). The first step then takes seconds
            and every later one a fraction of its time; the iterates differ only by rounding (the
            exception is in docs/compile.md), and a run may change over in either direction. What
            cannot be compiled runs as it is, after a :class:`bilevel.errors.CompileWarning`. Python
            code that the objectives run beside their computation runs only when they are compiled.
        accumulate: for large models (F2SA and F2BA): differentiate the terms of Phi one after
            another, so that the activations of only one of them are alive, and where f is not
            evaluated between the copies, one gradient. A dtype such as ``torch.bfloat16``: and
            keep the gradient of f in it, where that is large, while that of g is computed
            (objectives compiled with ``mode="reduce-overhead"`` overwrite what is not copied, and
            need a dtype, if only ``torch.float32``). False: all at once, in one backward pass.
        loss_scale: for objectives in float16 (F2SA and F2BA), see :class:`~bilevel.LossScale`.
            None: Phi is differentiated as it is. With it the gradients of all copies are held at a
            time.
        chunk_size: the largest part in which samples are evaluated, so that memory stays flat:
            those behind the x direction and, with F2SA and F2BA, each minibatch, whose gradients
            are accumulated over its parts. That gives the gradient of the whole for objectives that
            are means over their batch; others, such as sums, are refused. None: as batch_size.
        seed: of everything random in the run, the objectives' own use of torch's global generator
            included.
        device: where the copies of x0 and y0 and the batches go. None: they stay where they are.
        process_group: the ranks that solve the problem together, each on minibatches of its own,
            with gradients averaged (F2SA, F2BA and F3SA). "default": all ranks, where
            ``torch.distributed`` is initialised; the first rank then logs that they do. None: this
            process alone. What is promised on several ranks is in docs/distributed.md.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = bilevel.F2SA(lower_lr=0.5)
        >>> solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
        >>> for _ in range(3):
        ...     info = solver.step()
        >>> info.step, info.multiplier
        (2, 10.0)
    """

    def __init__(
        self,
        problem: Problem,
        x0: Any,
        y0: Any,
        *,
        method: str | Method[Any] = "f2sa",
        upper_data: Any = None,
        lower_data: Any = None,
        data: Episodes | None = None,
        batch_size: int | None = None,
        direction_batch_size: DirectionSize = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
        accumulate: bool | torch.dtype = False,
        loss_scale: LossScale | None = None,
        chunk_size: int | None = None,
        process_group: GroupChoice = "default",
    ) -> None:
        sampling = partial(
            Sampling, upper_data, lower_data, batch_size, direction_batch_size, chunk_size, data
        )
        execution = partial(Execution, compile, accumulate, loss_scale, chunk_size)
        given = Arguments(problem, x0, y0, method, sampling, execution, seed, device, process_group)
        ranks = ranks_of(process_group)
        made = on_every_rank(ranks, partial(prepare, given, ranks))
        announce_ranks(made.ranks, process_group)
        self.problem = problem
        self.ranks = made.ranks
        self.method = made.method
        self.evaluator = make_evaluator(problem, made.draw, made.execution, made.method, made.ranks)
        self._randomness = made.randomness
        self._redraw = made.redraw
        self._one_pass_data = made.sampling.one_pass
        self._description = made.description
        self._in_step = False
        if self.ranks is not None:
            agree_on_ranks(self.ranks, made, self._settings())
        begin = partial(self._begin, made.sampling, made.x, made.y)
        self.state: State = on_every_rank(self.ranks, begin)
        optimizers = settings.of_optimizers(self.state)
        if self.ranks is not None:
            metrics = {"metrics": list(self.evaluator.metric_names)}
            self.ranks.require_same(optimizers | metrics, settings.differences)
        self._description["optimizers"] = optimizers
        if made.execution.compile:
            self.evaluator = with_compiled_steps(
                self.evaluator, made.execution, self.method, self.state
            )

    def _begin(self, sampling: Sampling, x: Variable, y: Variable) -> State:
        """Check the objectives at the starting point; the method's state there."""
        with self._randomness:
            draw = self.draw
            use_x = not self.method.acts_on_y(draw)
            self.evaluator.metric_names = sampling.check(
                self.problem, x, y, *draw.peek(), use_x=use_x
            )
            if self.problem.y_prox is not None:
                self.evaluator.problem = ProximalProblem(self.problem, x)
            if isinstance(draw, EpisodicDraw):
                # ranks hold different tasks, but must take the same number of inner steps
                draw.renewed = self.ranks is None and getattr(self.method, "inner_steps", 1) > 1
                if draw.stacked:
                    y = TaskVariable.stack(y, draw.tasks)
                    self.evaluator.problem = TaskProblem(self.evaluator.problem)
                self.evaluator.restart = Restart(y.clone(), draw.episodes)
            state: State = self.method.init(self.evaluator.problem, x, y)
            most = self.method.most_direction_batches
            if most > 1 and self.ranks is None:  # ranks would have to choose the same
                draw.batches = batches_to_reach(self.problem, draw, state.x, state.solution, most)
            return state

    @property
    def k(self) -> int:
        """How many steps were taken."""
        return self.state.k

    @property
    def x(self) -> Any:
        """A copy of the upper variable, in the structure of x0.

        It can be set, to a value in that structure: the run goes on from there, in its set, with a
        fresh optimizer, with what was estimated along the way forgotten, and y as it is.
        """
        self.settle()
        with self._reaching():
            return self.state.x.detached()

    @x.setter
    def x(self, value: Any) -> None:
        state = self.state
        self.settle()
        state.x_update.restart(self._placed("x", state.x, value))
        state.reset_estimators()
        if type(state.policy) is not GivenSizes:  # what it has found belongs to the old x
            state.policy = self._new_policy()

    @property
    def y(self) -> Any:
        """A copy of the lower variable that solves the lower level, in the structure of y0.

        The last step fitted it at the x from which that step started, see :meth:`lower_solution`.
        To set it puts every copy of y there, with fresh optimizers; of several tasks, all of them.
        """
        self.settle()
        with self._reaching():
            return self.state.solution.detached()

    @y.setter
    def y(self, value: Any) -> None:
        self.settle()
        self.state.restart(self._placed("y", self.state.solution, value))

    def _placed(self, called: str, variable: Variable, value: Any) -> Variable:
        """A copy of the variable at ``value``, which is in its structure."""
        placed = variable.clone()
        tensors = placed.tensors_like(value, called)
        for path, tensor in zip(variable.names, tensors, strict=True):
            name = called + path.removeprefix(variable.name)
            if tensor.is_complex() or tensor.is_meta:
                what = "complex numbers" if tensor.is_complex() else "a tensor without values"
                raise ArgumentTypeError(f"{name} is set to {what}")
            if not bool(torch.isfinite(local_part(tensor)).all()):
                raise ArgumentError(f"{name} is set to a number that is not finite")
        with torch.no_grad(), self._reaching():
            for leaf, tensor in zip(placed.leaves, tensors, strict=True):
                leaf.copy_(tensor)
            modules = [node for node in (value,) if isinstance(node, torch.nn.Module)]
            theirs = [buffer for module in modules for buffer in module.buffers()]
            for mine, buffer in zip(placed.buffers, theirs, strict=False):
                mine.copy_(buffer)
            if self.ranks is not None:
                self.ranks.broadcast(placed)
        return placed

    def _new_policy(self) -> StepSizePolicy:
        """Where step sizes come from at the start of a run."""
        state = self.state
        fresh: State = self.method.init(
            self.evaluator.problem, state.x.clone(), state.solution.clone()
        )
        return fresh.policy

    def step(self, *, measure: bool = True) -> Info:
        """One outer step; what it reports.

        Without ``measure`` the losses are not evaluated only to be reported. A non-finite loss or
        gradient raises :class:`bilevel.errors.NonFiniteError` before it is applied to anything; the
        state is then finite, in the middle of the step. (What an optimizer of the user's own makes
        of finite gradients is seen at the next evaluation.)

        After an interrupt, such as Ctrl-C, the next step sees the samples and random numbers of the
        one that was interrupted, unless they are batches of an iterable, which are used up. The
        copies of y stay where its inner steps have brought them. To go on with the bits of a run
        that was not interrupted, load a :meth:`state_dict` of before, or use a checkpoint of
        :func:`bilevel.minimize`, with which Ctrl-C waits for the end of the step.
        """
        # Fast path: compiled code alone needs no RNG or autograd context.
        if self.evaluator.closed:
            mark = self.draw.mark()
            try:
                return self.evaluator.outer_step(self.method.step, self.state, measure=measure)
            except BaseException as error:
                self._clean_up(error)
                self._put_back(self.draw, mark, error)
                raise
        with self._running(), self._alone_in_step(), self._samples_kept():
            return self.evaluator.outer_step(self.method.step, self.state, measure=measure)

    @contextmanager
    def _samples_kept(self) -> Iterator[None]:
        """For a step: an interrupt puts the streams back to where they were."""
        draw = self.draw
        mark = draw.mark()
        try:
            yield
        except BaseException as error:
            self._put_back(draw, mark, error)
            raise

    def _put_back(self, draw: Draw, mark: Any, error: BaseException) -> None:
        if interrupts(type(error)):
            draw.go_back(mark)

    @contextmanager
    def _alone_in_step(self) -> Iterator[None]:
        """Refuse a step within a step; other threads wait for their turn before they come here."""
        if self._in_step:
            raise ObjectiveError(
                "solver.step() was called by an objective, its data or a schedule of a step that "
                "is being taken by the same solver; take steps one after another, or use another "
                "Solver inside"
            )
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def lower_solution(self) -> Any:
        """A copy of the lower solution of the current x, in the structure of y0.

        A step fits y at x and then moves x, so :attr:`y` lags one step behind. This takes one more
        step, as long as the last one, only to fit y at the current x (and more steps of y where
        their lengths are found), and then puts the run back to where it was. It is :attr:`y` itself
        before the first step, where that meets a number that is not finite or, in one process, the
        end of a GPU's memory, and where the data is an iterator that cannot go back. (Any other
        iterable of batches is not rewound: the batches of the extra step are used up.)
        """
        final = self.final_point()
        return final.y if self._is_at(final.x) else self.y

    def final_point(self) -> Point:
        """Copies of x and of its lower solution, as :func:`bilevel.minimize` returns them.

        With ``upper_lr="auto"`` it is the last x that passed its test: the extra step of
        :meth:`lower_solution` also tests where the steps since then have led.
        """
        if self.k and not self._one_pass_data:
            try:
                return self._fitted_at_x()
            except (NonFiniteError, DataExhaustedError):
                pass  # the point of the last step is finite, and is returned below
            except torch.cuda.OutOfMemoryError:
                if self.ranks is not None:  # the other ranks wait for this one
                    raise
        return Point(self.x, self.y, self.k)

    def _fitted_at_x(self) -> Point:
        before = self.state_dict()
        try:
            self.state.policy.close()
            undecided = True
            while undecided:
                # The same k again: a schedule may not be defined beyond the last step of a run.
                self.state.k -= 1
                self.step(measure=False)
                undecided = self.state.policy.undecided
            policy = self.state.policy
            k, returned = policy.step_of(self.state), policy.returned
            moved = policy.moved(self.state)
            with self._running():
                compared = policy.conclude(self.evaluator, self.state)
            found = Point(self.x if returned else None, self.y, k, compared, moved)
        finally:
            rewinds = self.draw.upper.probed and self.draw.lower.probed
            self._load(before, data=rewinds)
        return found if returned else found._replace(x=self.x)

    def _is_at(self, point: Any) -> bool:
        here, there = (Variable(value, "x").leaves for value in (self.x, point))
        pairs = zip(here, there, strict=True)
        return all(torch.equal(local_part(a), local_part(b)) for a, b in pairs)

    def assume_unchanged(self) -> AbstractContextManager[None]:
        """For a loop in which only the steps themselves change what the objectives use.

        With ``compile=True`` a step first checks that the objectives are still what was compiled:
        a number in a closure, an attribute, a global. Inside this context only the first step
        checks, which saves a tenth of the time of small steps. :func:`bilevel.minimize` without a
        callback does this.

        Example:
            >>> import bilevel
            >>> problem = bilevel.problems.Quadratic(seed=0)
            >>> solver = bilevel.Solver(problem, problem.x0, problem.y0)
            >>> with solver.assume_unchanged():
            ...     for _ in range(3):
            ...         info = solver.step()
            >>> solver.k
            3
        """
        return self.evaluator.assume_unchanged()

    def settle(self) -> None:
        """Wait until all steps are computed.

        A step on a GPU may return before it is computed. A number that is not finite is then
        reported by one of the next steps, by this method, or when x, y or the state are read.
        Nothing has moved since, and k is again the number of the step that met it.
        """
        with self._running():
            self.evaluator.settle(self.state)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """For steps: with the run's randomness, and without gradients left after an error."""
        try:
            with self._reaching(), self._randomness, torch.enable_grad():
                yield
        except BaseException as error:  # an interrupt too: the next step must start clean
            self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        for variable in self.state.variables():
            variable.clear_grads()
        if isinstance(error, RunError):
            error.state = self.state_dict()
        if isinstance(error, NonFiniteError):
            variables = self.state.variables()
            leaves = [local_part(leaf) for variable in variables for leaf in variable.leaves]
            error.kept = all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
