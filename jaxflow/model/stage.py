"""The part of a model that one pipeline stage holds (SARATHI §3.2)."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxflow.config import ConfigError, ModelConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers [first, stop) of a model with `layers` layers.

    The first stage embeds. The last stage has the final norm and the head.
    """

    first: int
    stop: int
    layers: int

    @property
    def embeds(self) -> bool:
        """Return True for the first stage."""
        return self.first == 0

    @property
    def samples(self) -> bool:
        """Return True for the last stage."""
        return self.stop == self.layers

    @property
    def is_model(self) -> bool:
        """Return True if the stage is the complete model."""
        return self.embeds and self.samples

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the model's config with the layers of the stage only."""
        return dataclasses.replace(model, layers=model.layers[self.first : self.stop])

    def holds(self, name: str, tied: bool) -> bool:
        """Return whether the stage holds a weight outside the layers.

        tied: the head is the table of the embeddings, which then lies on the first and on the last stage.
        """
        if name in ("embed", "positions"):
            return self.embeds or (name == "embed" and tied and self.samples)
        return self.samples

    def weights(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the stage's part of a tree in the layout of `jaxflow.model.weights`."""
        tied = "lm_head" not in tree
        outer = {name: value for name, value in tree.items() if name != "layers" and self.holds(name, tied)}
        return outer | {"layers": tree["layers"][self.first : self.stop]}


def stages_of(layers: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with these numbers of layers, first stage first. Raises: ConfigError."""
    if not layers or min(layers) < 1:
        raise ConfigError("stages", list(layers), "a positive number of layers for each stage")
    stops = list(itertools.accumulate(layers))
    return tuple(Stage(stop - n, stop, stops[-1]) for n, stop in zip(layers, stops, strict=True))
