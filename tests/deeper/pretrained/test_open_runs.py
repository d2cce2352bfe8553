"""from_pretrained on the folder of a run: its newest whole checkpoint, or one sentence."""

import pytest
import torch

from minillm.beyond.lora.adapters import add_lora
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import Trainer
from minillm.model import CausalLM
from minillm.training import TrainConfig, WindowBatches

IDS = torch.arange(8)[None]


def small(**keys):
    return CausalLM(ModelConfig(260, 16, 1, 2, 24, max_position_embeddings=64, **keys))


def trained(folder, model, **part):
    batches = WindowBatches(torch.arange(99) % 50, 2, 8)
    run = Run(folder, checkpoint_interval=2, **part)
    trainer = Trainer(model, batches, TrainConfig(4), run=run, progress=False)
    trainer.train()
    return trainer.model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma"])
def test_the_newest_checkpoint_and_its_tokenizer(family, tmp_path):
    tokenizer = BPETokenizer.train("a b c " * 9, 260, special_tokens=["<|endoftext|>"])
    model = trained(tmp_path, small(model_type=family), tokenizer=tokenizer)
    for place in (tmp_path, tmp_path / "step-00000004"):
        found, read = from_pretrained(place)
        assert found.config == model.config and torch.equal(found(IDS), model(IDS))
        assert read.ranks == tokenizer.ranks and read.special_tokens == tokenizer.special_tokens
    before, _ = from_pretrained(tmp_path / "step-00000002", dtype="bfloat16")
    assert before.lm_head.weight.dtype == torch.bfloat16
    assert not torch.equal(before(IDS).float(), model(IDS))


def test_without_a_tokenizer_there_is_none_and_a_finished_model_goes_before(tmp_path):
    model = trained(tmp_path, small())
    assert from_pretrained(tmp_path)[1] is None
    model.lm_head.weight.data.zero_()
    save_pretrained(model, None, tmp_path)
    assert not from_pretrained(tmp_path)[0].lm_head.weight.any()


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    trained(tmp_path, small())
    before = from_pretrained(tmp_path / "step-00000002")[0](IDS)
    for step in (4, 2):
        weights = tmp_path / f"step-{step:08d}" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4])
        with pytest.raises(ValueError, match="bytes instead of"):
            from_pretrained(weights.parent)
        if step == 4:
            with pytest.warns(UserWarning, match="passed over"):
                assert torch.equal(from_pretrained(tmp_path)[0](IDS), before)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(ValueError, match="whole"):
        from_pretrained(tmp_path)


def own_attention(model):
    model.model.layers[0].self_attn.forward = lambda x, *rest, **named: x
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: add_lora(model := small(), 2, 4) and model, "an adapter that is not merged"),
        (lambda: own_attention(small()), "has its own forward"),
        (lambda: torch.nn.Embedding(260, 260), "is not a CausalLM but Embedding"),
    ],
)
def test_what_its_config_does_not_make_is_one_sentence(make, why, tmp_path):
    trained(tmp_path, make())
    with pytest.raises(ValueError, match="reads it into a model") as error:
        from_pretrained(tmp_path)
    assert why in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_run_takes_no_texts_for_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer"):
        Run(tmp_path, tokenizer=["a"])
