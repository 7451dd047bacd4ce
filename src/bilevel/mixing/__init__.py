"""Data mixing: how much of each source a language model should be trained on, for a target."""

from bilevel.mixing.mixer import DataMixer
from bilevel.mixing.mixture import Mixture
from bilevel.mixing.text import CharacterModel, load_model

__all__ = ["CharacterModel", "DataMixer", "Mixture", "load_model"]
