"""By how much variables move: updates, schedules, optimizers, and "auto"."""
