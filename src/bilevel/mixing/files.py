"""``bilevel mix``: from text files to the weights of sources, and to a folder of results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilevel.data.output import written
from bilevel.errors import InputError, InterruptedRunError
from bilevel.methods import Info
from bilevel.mixing.mixer import DataMixer
from bilevel.mixing.mixture import TABLE, TENSORS, WEIGHTS, Mixture
from bilevel.mixing.text import (
    CONTEXT,
    DESCRIPTION,
    CharacterModel,
    Characters,
    RandomWindows,
    Transformer,
    read_text,
)
from bilevel.run import Solver

PLOT = "weights.png"
FILES = (WEIGHTS, TABLE, PLOT, TENSORS, DESCRIPTION)

_EVALUATED = 100_000  # characters at the beginning of the target on which the model is evaluated

Tell = Callable[[str], None]
"""Receives, in words, what is being done."""


@dataclass(frozen=True)
class MixedTexts:
    """The weights of some texts, and the model that was trained with them.

    Attributes:
        mixture: the weights and their history.
        model: the model that was trained with the weights.
        characters: the number of characters of each source.
        target: the number of characters of the target.
        loss: the loss of the model on the target, in nats per character. The model was not trained
            on the target; the weights were.
        seconds: the time that the work took.
    """

    mixture: Mixture
    model: CharacterModel
    characters: dict[str, int]
    target: int
    loss: float
    seconds: float

    def write(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write the weights, the figure and the model; all files or none."""
        text = json.dumps(self.model.describe(), indent=1, ensure_ascii=False)
        with written(folder, overwrite) as part:
            self.mixture.write(part, model=True)
            self.mixture.plot(part / PLOT)
            (part / DESCRIPTION).write_text(text + "\n", encoding="utf-8")

    def summary(self) -> list[str]:
        """The result in three lines, and a fourth if the weights cannot be trusted."""
        sizes = ", ".join(f"{name} ({count:,})" for name, count in self.characters.items())
        weights = sorted(self.mixture.weights.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{name} {weight:.1%}" for name, weight in weights)
        kinds = len(self.model.characters)
        lines = [
            f"Sources, with their characters: {sizes}; the target has {self.target:,}. There are "
            f"{kinds} different characters.",
            f"To be trained on: {shares}.",
            f"A small model trained in these proportions has a loss of {self.loss:.3f} per "
            f"character on the target, after {self.mixture.steps:,} steps.",
        ]
        guessing = math.log(kinds)
        if self.loss > 1.1 * guessing:  # an untrained model is about as good as guessing
            lines.append(
                f"That is worse than guessing ({guessing:.3f}), so do not trust the weights. The "
                f"sources may be so short that the model learns them by heart, or too different "
                f"from the target: try more text, other sources, or another number of --steps."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """The weights and figures as a JSON object."""
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
    """The values of ``--source``, such as ``web=pages.txt``, as paths by name."""
    paths: dict[str, Path] = {}
    for option in given:
        name, sign, path = option.partition("=")
        if not (name and sign and path):
            raise InputError(f"--source {option!r} must be NAME=PATH, such as web=pages.txt")
        if name in paths:
            raise InputError(f"--source names {name!r} twice; give each source its own name")
        paths[name] = Path(path)
    if len(paths) < 2:
        raise InputError(
            f"two or more sources are needed, to be weighed against each other, not {len(paths)}; "
            f"give each as --source NAME=PATH"
        )
    return paths


def mix_files(
    sources: Mapping[str, Path],
    target: Path,
    *,
    steps: int = 400,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Tell = lambda stage: None,
) -> MixedTexts:
    """Read the sources and the target, and weigh the sources for the target.

    Args:
        sources: text files, or folders of text files, by name.
        target: a file or folder of the text that the model is meant for.
        steps: the number of steps of the weights and the model.
        seed: determines everything random.
        checkpoint: a folder in which the run is saved and from which it is resumed.
        tell: receives, in words, what is being done.
    """
    tell("reading")
    texts = {name: read_text(path) for name, path in sources.items()}
    wanted = read_text(target)
    return mix_texts(texts, wanted, steps=steps, seed=seed, checkpoint=checkpoint, tell=tell)


def mix_texts(
    sources: Mapping[str, str],
    target: str,
    *,
    steps: int = 400,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Tell = lambda stage: None,
) -> MixedTexts:
    """Weigh texts for a target text with a small model of characters."""
    start = time.perf_counter()
    for name, text in (*((f"source {n!r}", t) for n, t in sources.items()), ("target", target)):
        if len(text) < CONTEXT:
            raise InputError(
                f"the {name} has {len(text)} characters; it needs {CONTEXT} or more, better 10,000"
            )
    characters = Characters.of(*sources.values(), target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Transformer(len(characters))

    def tell_step(solver: Solver, info: Info) -> None:
        weights = zip(sources, solver.x.softmax(0).tolist(), strict=True)
        name, weight = max(weights, key=lambda pair: pair[1])
        tell(f"step {info.step + 1} of {steps}, the heaviest source is {name} ({weight:.1%})")

    mixture = DataMixer(
        {name: RandomWindows(characters.encode(text), count=4) for name, text in sources.items()},
        # The noise of f does not cancel between the two copies of the model, so f gets twice as
        # many pieces.
        RandomWindows(characters.encode(target), count=8),
        module,
        # Tuned on Shakespeare: with a multiplier of 10, the right source stayed below a weight of
        # 0.9 for one seed of five.
        model_lr=5e-3,
        weight_lr=0.1,
        multiplier=3.0,
        seed=seed,
    ).fit(steps, callback=tell_step, checkpoint=checkpoint)
    if mixture.steps < steps:  # only an interruption ends this run early
        raise InterruptedRunError(mixture.steps)
    tell("evaluating the model")
    assert isinstance(mixture.model, Transformer)
    model = CharacterModel(mixture.model.eval(), characters)
    return MixedTexts(
        mixture=mixture,
        model=model,
        characters={name: len(text) for name, text in sources.items()},
        target=len(target),
        loss=model.loss(target[:_EVALUATED]),
        seconds=time.perf_counter() - start,
    )


def spoiled(text: str, seed: int = 0) -> tuple[dict[str, str], str]:
    """Three sources and a target from one text; only the first source is like the target.

    The target is the last tenth of the text. Of the rest, the first third is kept as it is, the
    second is shuffled character by character, and the last is reversed.
    """
    cut = len(text) * 9 // 10
    third = cut // 3
    middle = text[third : 2 * third]
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(third, generator=generator, device="cpu").tolist()
    sources = {
        "clean": text[:third],
        "shuffled": "".join([middle[i] for i in order]),
        "reversed": text[2 * third : cut][::-1],
    }
    return sources, text[cut:]
