"""Checkpoints: the state of a run in a file, whole or not at all, and back bit for bit.

:mod:`~bilevel.run.checkpoint.file` is one file; :mod:`~bilevel.run.checkpoint.folder` the files of a run;
:mod:`~bilevel.run.checkpoint.settings` what made them; :mod:`~bilevel.run.checkpoint.signals` what may end
a run from outside.
"""

from bilevel.run.checkpoint.file import read, write
from bilevel.run.checkpoint.folder import Checkpoint, Folder
from bilevel.run.checkpoint.signals import Interrupts

__all__ = ["Checkpoint", "Folder", "Interrupts", "read", "write"]
