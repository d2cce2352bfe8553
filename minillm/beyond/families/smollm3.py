"""SmolLM3: Llama, but that every fourth layer turns neither queries nor keys.

Written by hand. Source: Yang et al. 2025 (Rope to Nope and Back Again), which layers without a
rotation come from; numbers as transformers' smollm3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from minillm.config import UNSET, ModelConfig
from minillm.model import Decoder
from minillm.rope import Rotation
from minillm.support.checks.kinds import Kind, list_of, whole
from minillm.support.family import Family


@dataclass(frozen=True)
class SmolLM3Config(ModelConfig):
    """Llama's keys, and which layers turn: 1 for one that does, 0 for one that does not."""

    tie_word_embeddings: bool = True
    rope_theta: float = 2e6
    no_rope_layers: tuple[int, ...] = UNSET  # without it the interval decides
    no_rope_layer_interval: int = 4  # so many layers on, one does not turn

    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "no_rope_layers": list_of(whole(0, 1)),
        "no_rope_layer_interval": whole(1),
    }

    def check(self) -> None:
        super().check()
        turns = self.no_rope_layers
        if turns is not None and len(turns) != self.num_hidden_layers:
            layers = f"num_hidden_layers is {self.num_hidden_layers}"
            raise ValueError(f"no_rope_layers has {len(turns)} numbers, but {layers}")

    def turns(self, layer: int) -> bool:
        """Whether that layer rotates queries and keys."""
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return self.no_rope_layers[layer] == 1


class SmolDecoder(Decoder):
    """A stack in which some layers get no rotation."""

    def layer_rotation(self, layer: int, rope: Any, position_ids: Tensor) -> Rotation | None:
        config: Any = self.config
        return rope if config.turns(layer) else None


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Windows, which no published model uses, are refused."""
    if (window := found.pop("sliding_window", None)) is not None:
        raise ValueError(f"smollm3: use_sliding_window with {window} positions is not supported")


SMOLLM3 = Family(
    config=SmolLM3Config,
    decoder=SmolDecoder,
    architecture="SmolLM3ForCausalLM",
    usual={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "use_sliding_window": False,
    },
    windowed=True,
    read=read,
)
