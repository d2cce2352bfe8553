"""The layers of Mamba, Mamba-2 and Bamba, made from a config.

Written by hand; beyond/12_state explains them.
"""

from functools import partial

from torch import nn

from minillm.config import ModelConfig
from minillm.model import llama_layer, make_part
from minillm.nn.mamba import Mamba2Mixer, MambaLayer, MambaMixer

__all__ = ["layer"]


def layer(c: ModelConfig, number: int) -> nn.Module:
    """A layer that keeps a state, or where the config says so, one that attends."""
    if not c.has_state(number):
        return llama_layer(c, number)
    mixer: MambaMixer | Mamba2Mixer
    if c.family.state == "mamba":
        mixer = MambaMixer(c.hidden_size, c.state, activation=c.hidden_act)
    else:
        eps = c.rms_norm_eps
        mixer = Mamba2Mixer(c.hidden_size, c.state, activation=c.hidden_act, norm_eps=eps)
    mlp = None if c.intermediate_size is None else make_part("mlp", c, number)
    norm = partial(make_part, "norm", c)
    return MambaLayer(mixer, mlp, norm=norm, residual_in_fp32=c.state.residual_in_fp32)
