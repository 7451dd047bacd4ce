"""By how much variables move: updates, schedules, the user's optimizers, and "auto"."""

from bilevel.stepping import schedules
from bilevel.stepping.accelerated import AcceleratedSteps
from bilevel.stepping.curvature import slope_of, steepest_curvature
from bilevel.stepping.differentiable import Carried, InnerRule
from bilevel.stepping.forms import policy_form
from bilevel.stepping.found import FoundSizes
from bilevel.stepping.nesterov import Nesterov, NesterovUpdate
from bilevel.stepping.policy import GivenSizes, StepSizePolicy
from bilevel.stepping.rates import (
    FoundRate,
    OptimizerFactory,
    PenaltyRates,
    Rates,
    StepSizes,
    rate_or_optimizer,
)
from bilevel.stepping.reach import PER_INNER_STEP, batches_to_reach
from bilevel.stepping.schedules import (
    Constant,
    Power,
    Ramp,
    Rate,
    Schedule,
    as_schedule,
    as_share,
    positive_at,
    share_at,
)
from bilevel.stepping.shared_adamw import SharedAdamW
from bilevel.stepping.traits import Traits
from bilevel.stepping.updates import NoUpdate, Update, updates_of_copies

__all__ = [
    "PER_INNER_STEP",
    "AcceleratedSteps",
    "Carried",
    "Constant",
    "FoundRate",
    "FoundSizes",
    "GivenSizes",
    "InnerRule",
    "Nesterov",
    "NesterovUpdate",
    "NoUpdate",
    "OptimizerFactory",
    "PenaltyRates",
    "Power",
    "Ramp",
    "Rate",
    "Rates",
    "Schedule",
    "SharedAdamW",
    "StepSizePolicy",
    "StepSizes",
    "Traits",
    "Update",
    "as_schedule",
    "as_share",
    "batches_to_reach",
    "policy_form",
    "positive_at",
    "rate_or_optimizer",
    "schedules",
    "share_at",
    "slope_of",
    "steepest_curvature",
    "updates_of_copies",
]
