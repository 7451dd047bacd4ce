"""Runs: the solver, the loop around it, what is recorded, saved and said."""
