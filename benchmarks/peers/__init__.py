"""``python -m benchmarks peers``: a race to the same target against other libraries.

- ``lineup``: the contestants, each with the same number of settings.
- ``contestants``: one file each, with a function that yields the weights of the samples as it runs.
- ``task``: the data that every contestant is given.
- ``starter``: runs one contestant in its own process and takes its times.
- ``environment``: the Python environment in which all contestants run.
- ``race``: starts the contestants one after another and evaluates the weights they found.
"""
