"""From texts to the weights of their sources, and from those to a folder of results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilevel.data import output as folders
from bilevel.data.output import printable
from bilevel.errors import InputError, InterruptedRunError, OutputError
from bilevel.methods import Info
from bilevel.mixing.mixer import DataMixer
from bilevel.mixing.mixture import TABLE, TENSORS, WEIGHTS, Mixture
from bilevel.mixing.text import (
    CONTEXT,
    DESCRIPTION,
    CharacterModel,
    Characters,
    Transformer,
    Windows,
    read_text,
)
from bilevel.run import Solver

PLOT = "weights.png"
FILES = (WEIGHTS, TABLE, PLOT, TENSORS, DESCRIPTION)

_JUDGED = 100_000  # characters of the target, from its beginning, that the loss in the end is of

Report = Callable[[str], None]


@dataclass(frozen=True)
class Mixed:
    """What was found about the sources of some text.

    Attributes:
        mixture: the weights.
        model: trained with them.
        characters: how many each source has.
        target: how many the target has.
        loss: of the model on the target, in nats per character. The model has not seen the target;
            the weights have.
        seconds: that the work took.
    """

    mixture: Mixture
    model: CharacterModel
    characters: dict[str, int]
    target: int
    loss: float
    seconds: float

    def write(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write weights, figure and model; all of them or none."""
        text = json.dumps(self.model.describe(), indent=1, ensure_ascii=False)
        try:
            with folders.written(folder, overwrite) as part:
                self.mixture.write(part, model=True)
                self.mixture.plot(part / PLOT)
                (part / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"{printable(folder)} cannot be written: {error}") from error

    def summary(self) -> list[str]:
        """What was found, in three lines; in a fourth, why it may be worth nothing."""
        sizes = ", ".join(f"{name} ({count:,})" for name, count in self.characters.items())
        weights = sorted(self.mixture.weights.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{name} {weight:.1%}" for name, weight in weights)
        kinds = len(self.model.characters)
        lines = [
            f"Characters of {sizes}, weighed for a target of {self.target:,}; {kinds} kinds.",
            f"To be trained on: {shares}.",
            f"A small model trained so has a loss of {self.loss:.3f} per character on the target, "
            f"after {self.mixture.steps:,} steps.",
        ]
        guessing = math.log(kinds)
        if self.loss > 1.1 * guessing:  # a model that has learned nothing is about as good
            lines.append(
                f"That is worse than guessing ({guessing:.3f}), so do not trust the weights. The "
                f"sources may be so short that the model learns them by heart, or too unlike the "
                f"target: try more text, other sources, or another number of --steps."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """The figures as a plain object."""
        return {
            **self.mixture.to_json(),
            "seconds": self.seconds,
            "loss": self.loss,
            "characters": self.characters,
            "target": self.target,
            "vocabulary": len(self.model.characters),
            "files": list(FILES),
        }


def named_paths(given: Sequence[str]) -> dict[str, Path]:
    """What follows ``--source``, such as ``web=pages.txt``, as paths by name."""
    paths: dict[str, Path] = {}
    for option in given:
        name, sign, path = option.partition("=")
        if not (name and sign and path):
            raise InputError(f"--source {option!r} must be NAME=PATH, such as web=pages.txt")
        if name in paths:
            raise InputError(f"--source names {name!r} twice; give each a name of its own")
        paths[name] = Path(path)
    if len(paths) < 2:
        raise InputError(
            f"two or more sources are weighed against each other, not {len(paths)}; name each by "
            f"--source NAME=PATH"
        )
    return paths


def mix_files(
    sources: Mapping[str, Path],
    target: Path,
    *,
    steps: int = 400,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Report = lambda stage: None,
) -> Mixed:
    """Read the sources and the target, and weigh the former for the latter.

    Args:
        sources: text files, or folders of them, by name.
        target: the same, of the text that is wanted.
        steps: of the weights and the model.
        seed: of everything random.
        checkpoint: a folder in which the run is saved, and from which it goes on.
        tell: is told what is done next.
    """
    tell("reading")
    texts = {name: read_text(path) for name, path in sources.items()}
    options: dict[str, Any] = {"steps": steps, "seed": seed, "checkpoint": checkpoint}
    return mix_texts(texts, read_text(target), tell=tell, **options)


def mix_texts(
    sources: Mapping[str, str],
    target: str,
    *,
    steps: int = 400,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Report = lambda stage: None,
) -> Mixed:
    """Weigh texts for another, by a small model of characters."""
    start = time.perf_counter()
    for name, text in {
        **{f"source {n!r}": t for n, t in sources.items()},
        "target": target,
    }.items():
        if len(text) < CONTEXT:
            raise InputError(
                f"the {name} has {len(text)} characters; it takes {CONTEXT} or more, better 10,000"
            )
    characters = Characters.of(*sources.values(), target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Transformer(len(characters))

    def told(solver: Solver, info: Info) -> None:
        weights = zip(sources, solver.x.softmax(0).tolist(), strict=True)
        name, weight = max(weights, key=lambda pair: pair[1])
        tell(f"step {info.step + 1} of {steps}, most of it {name} ({weight:.1%})")

    mixture = DataMixer(
        {name: Windows(characters.encode(text), count=4) for name, text in sources.items()},
        # noise in f is not shared by the two copies of the model: twice the pieces for it
        Windows(characters.encode(target), count=8),
        module,
        # found on Shakespeare: with a multiplier of 10, one seed of five stayed below 0.9
        model_lr=5e-3,
        weight_lr=0.1,
        multiplier=3.0,
        seed=seed,
    ).fit(steps, callback=told, checkpoint=checkpoint)
    if mixture.steps < steps:  # nothing else ends it early
        raise InterruptedRunError(mixture.steps)
    tell("judging the model")
    assert isinstance(mixture.model, Transformer)
    model = CharacterModel(mixture.model.eval(), characters)
    return Mixed(
        mixture=mixture,
        model=model,
        characters={name: len(text) for name, text in sources.items()},
        target=len(target),
        loss=model.loss(target[:_JUDGED]),
        seconds=time.perf_counter() - start,
    )


def spoiled(text: str, seed: int = 0) -> tuple[dict[str, str], str]:
    """Three sources and a target from one text, of which only the first source is like the target.

    The last tenth is the target. Of the rest, the first third stays as it is, the second has its
    characters shuffled, and the last is reversed.
    """
    cut = len(text) * 9 // 10
    third = cut // 3
    middle = text[third : 2 * third]
    order = torch.randperm(third, generator=torch.Generator().manual_seed(seed)).tolist()
    sources = {
        "clean": text[:third],
        "shuffled": "".join([middle[i] for i in order]),
        "reversed": text[2 * third : cut][::-1],
    }
    return sources, text[cut:]
