"""Checkpoints: the state of a run in a file, whole or not at all, and back bit for bit.

:mod:`~bilevel.checkpoint.file` is one file; :mod:`~bilevel.checkpoint.folder` the files of a run;
:mod:`~bilevel.checkpoint.settings` what made them; :mod:`~bilevel.checkpoint.signals` what may end
a run from outside.
"""

from bilevel.checkpoint.file import read, write
from bilevel.checkpoint.folder import Checkpoint, Folder
from bilevel.checkpoint.signals import Interrupts

__all__ = ["Checkpoint", "Folder", "Interrupts", "read", "write"]
