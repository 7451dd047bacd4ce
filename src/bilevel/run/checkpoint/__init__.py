"""Checkpoints: the state of a run in a file, whole or not at all, and back bit for bit.

- ``file``: one file of one process;
- ``shared``, ``storage``: a checkpoint of several ranks;
- ``folder``: the checkpoints of a run;
- ``lock``: one run at a time in a folder;
- ``settings``: what made a checkpoint, so that those of other runs are refused;
- ``signals``: Ctrl-C and SIGTERM, which end a run after its step.
"""

from bilevel.run.checkpoint.file import read, write
from bilevel.run.checkpoint.folder import Checkpoint, Folder
from bilevel.run.checkpoint.signals import Interrupts

__all__ = ["Checkpoint", "Folder", "Interrupts", "read", "write"]
