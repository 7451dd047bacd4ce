"""``python -m benchmarks peers``: a race to the same target against what can be installed.

- ``lineup``: who races, each with as many settings.
- ``contestants``: one file each, with a function that yields the weights of the samples as it goes.
- ``task``: what all of them are given.
- ``starter``: runs one contestant in a process of its own, and holds the clock.
- ``environment``: the Python environment they all run in.
- ``race``: starts them one after another, and evaluates what they found.
"""
