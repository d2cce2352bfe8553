"""A static cache is compiled once, and still knows its length."""

import pytest
import torch
from small_caches import IDS, MAX, Decoder, new
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.mark.parametrize(
    ("heads", "backend"), [("GQA", "eager"), ("MLA", "eager"), ("GQA", "aot_eager")]
)
def test_static_decoding_is_compiled_once(heads, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Decoder(heads)
    real = torch.arange(20) >= torch.tensor([0, 3, 9])[:, None]
    real_all = nn.functional.pad(real, (0, MAX - 20), value=True)
    step = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    expected = model(IDS, real=real)
    cache = model.make_cache("static", 3)
    for conversation in (cache, cache, model.make_cache("static", 3), cache.fork()):
        conversation.reset()
        model(IDS[:, :12], real=real_all, cache=conversation)  # the prompt, as it is
        for t in range(12, 20):
            logits = step(IDS[:, t : t + 1], real=real_all, cache=conversation)
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=0, atol=1e-10)
        assert conversation.length == 20
        with pytest.raises(ValueError, match="21 new positions after 20 exceed max_length=40"):
            conversation.key_positions(21)
    assert counter.frame_count == 1
    twin = cache.fork()  # a copy at the first write, then the same compiled step
    for conversation in (twin, cache):
        conversation.crop(12)
        for t in range(12, 16):
            logits = step(IDS[:, t : t + 1], real=real_all, cache=conversation)
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=0, atol=1e-10)
    assert counter.frame_count == 2


@pytest.mark.parametrize("length", [10**15, 10**30])
def test_more_room_than_there_is_is_an_error_of_the_caller(length):
    with pytest.raises(ValueError, match=f"batch_size=3, max_length={length}: "):
        new("static", 3, max_length=length)
