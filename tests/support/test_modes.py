"""A model in use is in eval mode, and is given back as it was."""

import pytest
from torch import nn

from minillm.support.modes import EvalMode


def modes(model):
    return [part.training for part in model.modules()]


@pytest.mark.parametrize("chosen", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_each_part_is_given_back_as_it_was(chosen):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    parts = list(model.modules())
    for number, part in enumerate(parts):
        part.training = number in chosen
    before = modes(model)
    for _ in range(2):  # entered again
        off = EvalMode(model)
        with off:
            assert not any(modes(model))
            with EvalMode(model, model):  # inside another
                assert not any(modes(model))
            assert not any(modes(model))
        assert modes(model) == before
        with pytest.raises(KeyError), off:
            raise KeyError
        assert modes(model) == before


def test_what_is_no_model_is_left_alone():
    with EvalMode(len, None, object()):
        pass
