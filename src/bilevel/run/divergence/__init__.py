"""Runs that diverge: the signs of it, what is wrong, and what to change.

What a run reports is inspected in blocks, after 4, 8, 16, 32, 64 recorded steps and then after
every 64, so that the device is seldom waited for and a step costs nothing more. There are four
signs.

*Running away.* Of the magnitudes of f(x, z) and g(x, z), ||direction|| and lam ||y - z||, two are a
hundred times larger than they ever were in the first three quarters of the run. What grows like a
power of k, as everything may that begins at zero, does not do that; what grows exponentially soon
does. (Medians over blocks are compared, so that a rare bad batch counts for nothing, and
lam ||y - z|| is taken from the reported gap, lam sqrt(2 (g(x, y) - g(x, z))), which is the same
distance in the metric of g.)

*The multiplier outgrows the step.* A multiplier that is a function of k is ten times what it was at
half the run, and lam ||y - z||, which should tend to a constant, has grown tenfold as well.

*The lower solution lags.* g(x, y) < g(x, z) over half of the run and no less than at first, by more
than f / lam: the copy that is to solve the lower level is worse at it than the penalised one.

*A step beyond 2/L.* Where y is bounded, or g flattens away from its minimum, steps that are too
long do not run away; they jump to and fro. So after 64, 128, 256, ... recorded steps the curvature
L of the lower level is measured, if g did not fall since the last time, by power iterations on
differences of gradients. (Not where y has more than a million numbers, because L needs memory for a
few more of them.)

After a sign, the curvatures of g and f in y tell which of the step sizes is to blame.

What then happens is the ``on_divergence`` of :func:`bilevel.minimize`. "warn": a
:class:`bilevel.errors.DivergenceWarning` says what is wrong and what to change, and the run goes
on, since signs can deceive; one that ends like that has the outcome DIVERGED. "raise": a
:class:`bilevel.errors.DivergenceError` says it. "backtrack": the run goes back to the last good
state, which is kept for this, and halves the step that is to blame, or both where that cannot be
told, with a warning each time, ten times at most; then it raises. None: "warn" where all rates are
given. Where one is "auto", "backtrack", but in place of raising it goes on with a warning (a number
that is not finite raises even so); with more than 16 million numbers to keep, "warn" then too.
"""

from bilevel.run.divergence.guard import BACKTRACKS, REACTIONS, Guard, Reaction

__all__ = ["BACKTRACKS", "REACTIONS", "Guard", "Reaction"]
