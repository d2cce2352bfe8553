"""Two sequences, pictures and conversations on a pretended GPU: the numbers of the CPU."""

import pytest
import qwen_vl_checkpoints
import seq2seq_checkpoints
import torch
import vision_checkpoints
from pretended_device import PretendedDevice, same_there

from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.generation.conversation import Conversation
from minillm.deeper.generation.stream import stream_text
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.model import CausalLM
from minillm.sampling import Sampler


def gradients(m, out):
    learned = [p for p in m.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().mean(), learned)]


def each_step(run, *things, kind="cuda"):
    """What two more new tokens ask and send. `run` takes their number first."""
    counts = []
    for new in (1, 3):
        device = same_there(lambda *x, new=new: run(new, *x), *things, kind=kind, atol=1e-5)
        counts.append(device.waits)
    return counts[1] - counts[0]


@pytest.mark.parametrize("case", ["bart-two-ends", "marian-two-vocabularies"])
def test_an_encoder_and_a_decoder(case, tmp_path):
    m = seq2seq_checkpoints.pair(case, tmp_path)[1]
    x, y, x_mask, y_mask = seq2seq_checkpoints.batch()

    def forward(m, x, y, x_mask, y_mask):
        options = {"attention_mask": x_mask, "decoder_attention_mask": y_mask}
        return gradients(m, m(x, decoder_input_ids=y, **options))

    same_there(forward, m, x, y, x_mask, y_mask)
    for sampler in ({"temperature": 0}, {"seed": 3, "top_p": 0.9}):

        def write(new, m, x, x_mask, sampler=sampler):
            options = {"attention_mask": x_mask, "min_new_tokens": new}
            return m.generate(x, max_new_tokens=new, sampler=Sampler(**sampler), **options)

        assert each_step(write, m, x, x_mask) == {"item": 2, "tolist": 2}


@pytest.mark.parametrize("case", vision_checkpoints.TOWERS)
def test_a_vision_transformer(case, tmp_path):
    theirs = vision_checkpoints.make_tower(case)
    m = VisionTransformer.from_pretrained(vision_checkpoints.save(theirs, tmp_path))
    pixels = vision_checkpoints.pictures_for(m.config)
    device = same_there(lambda m, x: [m(x), *m.hidden_states(x)], m, pixels)
    assert not device.waits and not device.sent


@pytest.mark.parametrize(
    ("case", "kind"), [("clip-llama", "cuda"), ("siglip-qwen2", "cuda"), ("clip-mistral", "mps")]
)
def test_a_model_that_reads_pictures(case, kind, tmp_path):
    theirs = vision_checkpoints.make_llava(case)
    m = PictureLM.from_pretrained(vision_checkpoints.save(theirs, tmp_path)).eval()
    pixels = vision_checkpoints.pictures_for(theirs.config.vision_config)
    ids = torch.randint(6, 60, (2, 4), generator=torch.Generator().manual_seed(0))
    marks = torch.full((2, m.config.features_per_picture), vision_checkpoints.PLACEHOLDER)
    ids = torch.cat([ids[:, :2], marks, ids[:, 2:]], 1)
    same_there(lambda m, ids, x: m(ids, pixels=x), m, ids, pixels, kind=kind)

    def write(new, m, ids, pixels):
        options = {"max_new_tokens": new, "eos_token_id": None, "sampler": Sampler(seed=1)}
        return m.generate(ids, pixels=pixels, **options)

    copies = {"cpu": 2} if kind == "mps" else {}  # there is no float64 to draw with
    assert each_step(write, m, ids, pixels, kind=kind) == {"item": 2, **copies}


@pytest.mark.parametrize("case", ["merge-3", "yarn"])
def test_qwen2_vl(case, tmp_path):
    m = qwen_vl_checkpoints.pair(case, tmp_path)[1].eval()
    layouts = [[3, (1, 2, 2), 2], [2, (1, 1, 2), 1, (2, 1, 1)]]
    ids, mask, pixels, grids, _ = qwen_vl_checkpoints.draw(m.config, layouts)

    def forward(m, ids, mask, pixels, grids):
        return gradients(m, m(ids, pixels, grids, attention_mask=mask))

    same_there(forward, m, ids, mask, pixels, grids, atol=1e-5)

    def write(new, m, ids, mask, pixels, grids):
        options = {"attention_mask": mask, "max_new_tokens": new, "eos_token_id": None}
        return m.generate(ids, pixels, grids, **options)

    assert each_step(write, m, ids, mask, pixels, grids) == {"item": 2}


# Texts


NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    plain = BPETokenizer.train(["the cat sat on the mat"] * 4, 280, special_tokens=NAMES)
    options = {"eos_token": NAMES[-1], "chat_template": TEMPLATE}
    return ForeignTokenizer(plain.ranks, plain.pattern, plain.special_tokens, **options)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_a_conversation(family, tokenizer):
    state = {"state": {"num_heads": 4}, "num_attention_heads": None, "intermediate_size": None}
    given = {"num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.3}
    given |= {} if family == "llama" else {"model_type": family, **state}
    config = ModelConfig(
        tokenizer.vocab_size, 32, 2, eos_token_id=tokenizer.special_tokens["<|im_end|>"], **given
    )

    def run(m):
        talk, sampler = Conversation(m, tokenizer), Sampler(seed=2)
        answers = [
            "".join(talk.ask(text, max_new_tokens=5, sampler=sampler))
            for text in ("Where is the cat?", "And the mat?")
        ]
        piece = "".join(stream_text(m, tokenizer, "the cat", max_new_tokens=5, sampler=sampler))
        messages = [{"role": "user", "content": "the mat"}]
        more = "".join(stream_text(m, tokenizer, messages, max_new_tokens=5, stop="zz"))
        return [*answers, piece, more, *talk.ids, talk.reused]

    same_there(run, CausalLM(config).eval())


def test_a_prompt_on_the_cpu_is_told(tokenizer):
    """Ids that were forgotten on the CPU are an error of torch that names both devices."""
    m = CausalLM(ModelConfig(tokenizer.vocab_size, 32, 2, 4, 48))
    with PretendedDevice(), pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        m.to("cuda")(torch.tensor([[1, 2]]))
