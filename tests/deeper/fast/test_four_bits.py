"""Weights at a file's few bits: bytes and numbers against the library gguf, models by floats."""

import copy
import pickle
import warnings

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from gguf_files import model_of, write
from tokenizer_texts import END, NATURAL
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.beyond.lora.adapters import add_lora
from minillm.bpe import GPT2_PATTERN, BPETokenizer
from minillm.deeper.fast import stored as stored_module
from minillm.deeper.fast.four_bits import FEW, SIZES, blocks, numbers, quantize
from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.fast.small import int8_copy
from minillm.deeper.fast.stored import (
    FourBitMatrix,
    StoredEmbedding,
    StoredLinear,
    four_bit_products,
)
from minillm.deeper.generation.conversation import Conversation
from minillm.deeper.generation.stream import stream_text
from minillm.deeper.pretrained.load import from_pretrained, load_model, save_pretrained
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.training import TrainConfig, train

HERE = pytest.mark.skipif(four_bit_products() is not None, reason=str(four_bit_products()))


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer_of() -> ForeignTokenizer:
    """A tokenizer of 320 tokens, four of them special."""
    names = ("<|im_start|>", "<|im_end|>", "<|other|>", END)
    trained = BPETokenizer.train(" ".join(NATURAL.values()), 320, pattern=GPT2_PATTERN)
    ranks = {token: i for token, i in trained.ranks.items() if i < 316}
    special = {name: 316 + i for i, name in enumerate(names)}
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return ForeignTokenizer(ranks, GPT2_PATTERN, special, chat_template=CHAT, **ends)


def q4_k(x: np.ndarray) -> np.ndarray:
    """Blocks of 256, of which the library only decodes: not the best ones, but right ones."""
    x = x.reshape(-1, 8, 32).astype(np.float32)
    least = np.maximum(-x.min(-1), 0)
    scale = (x.max(-1) + least) / 15
    d, m = (np.float16(v.max(-1, keepdims=True) / 63) for v in (scale, least))
    s, n = (np.round(v / np.maximum(np.float32(w), 1e-8)) for v, w in ((scale, d), (least, m)))
    s, n = (np.clip(v, 0, 63).astype(np.uint8) for v in (s, n))
    step = np.maximum(np.float32(d) * s, 1e-8)[..., None]
    levels = np.clip(np.round((x + (np.float32(m) * n)[..., None]) / step), 0, 15).astype(np.uint8)
    pairs = levels.reshape(-1, 4, 2, 32)
    halves = [v.view(np.uint8) for v in (d, m)]
    twelve = [s[:, :4] | s[:, 4:] >> 4 << 6, n[:, :4] | n[:, 4:] >> 4 << 6]
    twelve += [(s[:, 4:] & 15) | n[:, 4:] << 4]
    return np.concatenate(
        [*halves, *twelve, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], 1
    )


def stored(weight: torch.Tensor, kind: str) -> torch.Tensor:
    x = weight.numpy()
    if kind == "Q4_K":
        return torch.from_numpy(q4_k(x).reshape(len(x), -1))
    return torch.from_numpy(gguf.quantize(x, gguf.GGMLQuantizationType[kind]))


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.08, bos_token_id=316, eos_token_id=317, pad_token_id=319,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
    return model


def file_of(folder, original, kind, monkeypatch, **options):
    plain, library = gguf.quantize, gguf.GGMLQuantizationType.Q4_K
    by_hand = lambda x, k: (  # noqa: E731
        q4_k(x).reshape(len(x), -1) if k == library else plain(x, k)
    )
    monkeypatch.setattr(gguf, "quantize", by_hand)
    return write(folder / f"{kind}.gguf", original, kind=kind, **options)


# Bytes and numbers

KINDS = [*SIZES, "BF16"]  # the last is what Q8_0 may become


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_our_bytes_are_those_of_the_library(kind):
    for seed in range(3):
        w = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))
        w[0, :32], w[1, :32], w[2] = 0, 0.5, w[2].abs()
        w[3] = torch.arange(512) % 16 - 8.0  # each on a level
        w[4] = (torch.arange(512) % 31 - 15) / 2  # each on one or half-way
        w[5], w[6], w[7] = w[5] * 1e4, w[6] * 1e-6, -w[7].abs()
        w[8, 0] = 60_000
        assert torch.equal(quantize(w, kind), stored(w, kind))


@pytest.mark.parametrize(("shape", "kind"), [((2, 33), "Q4_0"), ((2, 32), "Q8_0"), ((32,), "Q4_1")])
def test_what_the_quantiser_does_not_take(shape, kind):
    with pytest.raises(ValueError, match=rf"'{kind}' of \({shape[0]}.*a multiple of 32"):
        quantize(torch.ones(shape), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_library(kind):
    rows = stored(torch.randn(48, 512, generator=torch.Generator().manual_seed(1)), kind)
    theirs = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(numbers(rows, kind).numpy(), theirs)
    if kind == "BF16":
        return  # no blocks
    levels, scale, least = blocks(rows, kind)
    assert levels.shape == (48, 16, 32) and scale.shape == least.shape == (48, 16)
    assert levels.max() == (255 if kind == "Q8_0" else 15)


def test_six_bits_of_scales_in_any_bytes():
    rows = np.random.default_rng(0).integers(0, 256, (16, 2 * 144), dtype=np.uint8)
    rows[:, [1, 3, 145, 147]] &= 0x3B  # no infinity, no NaN
    theirs = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(numbers(torch.from_numpy(rows), "Q4_K").numpy(), theirs)


# One matrix


@HERE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(64,), (17,), (1100, 48), (1,)])
def test_the_product_is_that_of_the_numbers(kind, sizes):
    """Of one matrix, of several above each other, and of rows that are no multiple of 16."""
    generator = torch.Generator().manual_seed(2)
    rows = [stored(torch.randn(n, 256, generator=generator), kind) for n in sizes]
    w = torch.cat([numbers(r, kind) for r in rows])
    matrix = FourBitMatrix([StoredLinear(r, kind) for r in rows])
    for T in (1, 3, FEW):
        x = torch.randn(T, 256, generator=generator)
        y = matrix(x)
        assert y.shape == (T, sum(sizes)) and y.dtype == torch.float32
        assert (y - x @ w.T).norm() < 0.01 * (x @ w.T).norm()
        torch.testing.assert_close(matrix(x, y), y + y, atol=1e-3, rtol=0)
    columns = torch.rand(256, generator=generator)
    scaled = FourBitMatrix([StoredLinear(r, kind) for r in rows], columns)
    assert (scaled(x) - x @ (w * columns).T).norm() < 0.01 * (x @ (w * columns).T).norm()


@HERE
def test_matrices_of_several_kinds_are_one():
    generator = torch.Generator().manual_seed(3)
    found = [
        (stored(torch.randn(size, 256, generator=generator), kind), kind)
        for size, kind in ((96, "Q4_K"), (32, "Q4_K"), (24, "Q8_0"))
    ]
    matrix = FourBitMatrix([StoredLinear(*pair) for pair in found])
    assert len(matrix.parts) == 2
    x, w = torch.randn(2, 256), torch.cat([numbers(*pair) for pair in found])
    assert (matrix(x) - x @ w.T).norm() < 0.01 * (x @ w.T).norm()


class Largest(TorchDispatchMode):
    """How many numbers of four bytes the largest tensor had that any operation gave."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, tuple | list) else (out,):
            if isinstance(y, torch.Tensor) and y.element_size() >= 4:
                self.found = max(self.found, y.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_matrix_is_made_whole_of_numbers(kind):
    rows = stored(torch.randn(4096, 256, generator=torch.Generator().manual_seed(4)), kind)
    table, linear = StoredEmbedding(rows, kind), StoredLinear(rows, kind)
    x = torch.randn(40, 256)
    with Largest() as largest:
        y = linear(x)
        if four_bit_products() is None:
            FourBitMatrix([linear])(x[:1])
    assert largest.found <= 2 * 1024 * 256 < rows.shape[0] * 256
    torch.testing.assert_close(y, x @ numbers(rows, kind).T, atol=1e-3, rtol=1e-4)
    ids = torch.tensor([[5, 4095], [0, 5]])
    assert torch.equal(table(ids), numbers(rows, kind)[ids])
    with pytest.raises(IndexError):
        table(torch.tensor([-1]))


# A model


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """KL divergence a token, in nats."""
    ours, theirs = (logits.double().log_softmax(-1).flatten(0, -2) for logits in (found, wanted))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True).item()


def by_steps(model, ids):
    cache = model.make_cache(batch_size=len(ids))
    return torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize("kind", [*SIZES, "Q8_0, two of four bits", "Q8_0, bfloat16"])
@torch.no_grad()
def test_a_model_as_stored_is_the_decoded_one(kind, original, tmp_path, monkeypatch):
    kind, _, how = kind.partition(", ")
    if how:
        choice = how == "bfloat16"
        monkeypatch.setattr("minillm.deeper.fast.stored.sixteen_bits_are_quicker", lambda: choice)
    path = file_of(tmp_path, original, kind, monkeypatch)
    with warnings.catch_warnings():
        if four_bit_products() is None:
            warnings.simplefilter("error")
        model = load_model(path, weights="as stored")
    floats = load_model(path)
    assert isinstance(model, PackedLM) and type(floats) is CausalLM and not model.training
    assert model.num_parameters() == floats.num_parameters()
    without = {"exclude_embeddings": True}
    assert model.num_parameters(**without) == floats.num_parameters(**without)
    assert model.flops_per_token(100) == floats.flops_per_token(100)
    ids = torch.randint(0, 316, (2, 48), generator=torch.Generator().manual_seed(0))
    wanted = floats(ids)
    uniform = divergence(torch.zeros_like(wanted), wanted)
    assert uniform > 0.2  # what the bound below is compared with
    # a prompt goes by decoded numbers, steps and few rows by rounded x
    assert how in ("", "two of four bits") or model.lm_head.stored_kind == "BF16"
    if model.lm_head.stored_kind == "BF16":  # rounded once more
        assert divergence(model(ids), wanted) < 3e-3 * uniform
    else:
        torch.testing.assert_close(model(ids), wanted, atol=1e-4, rtol=1e-4)
    assert divergence(by_steps(model, ids), wanted) < 3e-3 * uniform
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    found = model(ids[:, :12], attention_mask=mask)
    real = mask.bool()
    assert divergence(found[real], floats(ids[:, :12], attention_mask=mask)[real]) < 3e-3 * uniform


@HERE
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_it_holds_a_third_of_the_bytes(kind, original, tmp_path, monkeypatch):
    path = file_of(tmp_path, original, kind, monkeypatch)
    model, floats = (load_model(path, weights=w) for w in ("as stored", None))
    kept = [*model.parameters(), *model.buffers()]
    for part in model.modules():
        kept += [t for parts in getattr(part, "parts", ()) for t in parts[:2]]
    kept = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in kept}.values())
    assert kept < sum(p.nbytes for p in floats.parameters()) / 3


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3"])
@torch.no_grad()
def test_other_families(name, tmp_path):
    """A head that is the embedding, biases, norms of q and k; rows that are no multiple of 64."""
    original = model_of(name)
    for weight in original.parameters():  # as drawn there, small errors would grow
        weight.mul_(0.2 if weight.ndim > 1 else 1)
    path = write(tmp_path / "model.gguf", original, kind="Q8_0")
    model, floats = load_model(path, weights="as stored"), load_model(path)
    ids = torch.randint(0, 316, (1, 24), generator=torch.Generator().manual_seed(0))
    found, wanted = by_steps(model, ids), floats(ids)
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert model.num_parameters() == floats.num_parameters()


@torch.no_grad()
def test_it_writes_streams_and_talks(original, tmp_path, monkeypatch):
    path = file_of(tmp_path, original, "Q4_1", monkeypatch, tokenizer=tokenizer_of())
    model, tokenizer = from_pretrained(path, weights="as stored")
    ids = torch.tensor([tokenizer.encode("the cat")])
    options = {"max_new_tokens": 12, "eos_token_id": None}
    whole = generate(model, ids, **options)
    for kind in ("static", "paged"):
        assert torch.equal(generate(model, ids, cache=kind, **options), whole)
    twins = generate(model, ids.repeat(3, 1), **options)
    assert torch.equal(twins, twins[:1].expand(3, -1))
    assert "".join(stream_text(model, tokenizer, "the cat", max_new_tokens=12))
    talk = Conversation(model, tokenizer)
    for text in ("Hi", "And then?"):
        assert isinstance(talk.ask(text, max_new_tokens=6), str)
    assert len(talk.messages) == 4
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin(ids), model(ids))
    assert torch.equal(model.packed()(ids), model(ids)) or four_bit_products()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_0"])
@torch.no_grad()
def test_other_kinds_get_eight_bits_and_say_so(kind, original, tmp_path):
    path = write(tmp_path / "model.gguf", original, kind=kind)
    with pytest.warns(UserWarning, match=f"{kind} become 8 bits: .* 1/220") as said:
        model = load_model(path, weights="as stored")
    if four_bit_products() is None:
        assert [part.stored_kind for part in model.modules() if hasattr(part, "stored_kind")]
        assert said[0].filename == __file__
    floats, ids = load_model(path), torch.arange(100)[None]
    wanted = floats(ids)
    uniform = divergence(torch.zeros_like(wanted), wanted)
    for found in (model(ids), by_steps(model, ids)):
        assert divergence(found, wanted) < 3e-3 * uniform


@HERE
@torch.no_grad()
def test_a_compiler_gets_the_product_as_it_is(original, tmp_path, monkeypatch):
    model = load_model(file_of(tmp_path, original, "Q4_0", monkeypatch), weights="as stored")
    torch._dynamo.reset()
    model.compiled_run = torch.compile(model.run, dynamic=False, backend="eager")
    ids, options = torch.arange(6)[None], {"max_new_tokens": 6, "eos_token_id": None}
    found = generate(model, ids, cache="static", compile=True, **options)
    assert torch.equal(found, generate(model, ids, **options))
    torch._dynamo.reset()


# What cannot be


@pytest.fixture
def path(original, tmp_path, monkeypatch):
    return file_of(tmp_path, original, "Q4_0", monkeypatch)


def test_options_that_do_not_fit(path, tmp_path):
    for options, words in (
        ({"weights": "4 bits"}, "unknown weights='4 bits': 'as stored', or None"),
        ({"weights": "as stored", "dtype": "bfloat16"}, "not in torch.bfloat16 on cpu"),
        ({"weights": "as stored", "device": "meta"}, "not in torch.float32 on meta"),
    ):
        with pytest.raises(ValueError, match=words):
            from_pretrained(path, **options)
    save_pretrained(load_model(path), None, tmp_path / "folder")
    with pytest.raises(ValueError, match=r"is for a GGUF file, and .*folder is none"):
        from_pretrained(tmp_path / "folder", weights="as stored")


@HERE
@torch.no_grad()
def test_it_only_generates(path, tmp_path):
    model, ids = load_model(path, weights="as stored"), torch.arange(6)[None]
    before = model(ids)
    for what, words in (
        (lambda: save_pretrained(model, None, tmp_path / "new"), "copy that file, or open it"),
        (lambda: train(model, [(ids, ids)], TrainConfig(1)), "only generates: train the model"),
        (lambda: add_lora(model, rank=2, alpha=4), "only generates: adapters"),
        (lambda: int8_copy(model), "this takes a CausalLM, not a PackedLM"),
        (lambda: model.load_state_dict({}), "takes no weights"),
        (lambda: model.bfloat16(), "not in torch.bfloat16 on cpu"),
        (lambda: model.to("meta"), "not in torch.float32 on meta"),
    ):
        with pytest.raises(ValueError, match=words):
            what()
    assert not (tmp_path / "new").exists()
    assert torch.equal(model.to("cpu").float()(ids), before)


def test_a_packed_model_is_not_trained(path):
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match="a PackedLM only generates: train the model"):
        train(load_model(path).packed("linear"), [(ids, ids)], TrainConfig(1))


def test_a_hook_is_refused_when_it_is_packed_again(path):
    model = load_model(path, weights="as stored")
    model.model.layers[1].mlp.up_proj.register_forward_hook(print)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj has a forward hook"):
        model.packed()


def test_a_file_cut_short(path):
    data = path.read_bytes()
    for length in (100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"Q4_0\.gguf"):
            from_pretrained(path, weights="as stored")


@torch.no_grad()
def test_rows_that_no_block_takes_become_floats(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", transformers.AutoModelForCausalLM.from_config(config))
    words = r"m\.gguf: .*so the weights become float32"
    with pytest.warns(UserWarning, match=words):
        model = load_model(path, weights="as stored")
    ids = torch.arange(9)[None]
    assert isinstance(model, PackedLM)
    torch.testing.assert_close(model(ids), load_model(path)(ids), atol=1e-4, rtol=1e-4)


@pytest.fixture
def asked_anew():
    four_bit_products.cache_clear()
    yield
    four_bit_products.cache_clear()


def _absent(*_):
    raise AttributeError("no such operator")


def _refused(*_):
    raise RuntimeError("not for this processor\nand more")


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (_absent, r"no product of four-bit matrices \(no such operator\)"),
        (_refused, r"no product of four-bit matrices \(not for this processor\)"),
        (lambda x, packed, scales: torch.zeros(1, 1072), "gives wrong sums"),
        (lambda x, packed, scales: torch.full((1, 1072), torch.nan), "gives wrong sums"),
    ],
)
@torch.no_grad()
def test_without_a_product_that_is_right_the_weights_are_floats(
    product, words, path, monkeypatch, asked_anew
):
    monkeypatch.setattr(stored_module, "level_product", product)
    monkeypatch.setattr(stored_module, "pack", lambda rows, kind: (rows, rows))
    with pytest.warns(UserWarning, match=f"{words}.*so the weights become float32"):
        model = load_model(path, weights="as stored")
    ids = torch.arange(9)[None]
    assert isinstance(model, PackedLM) and model.lm_head.weight.numel()
    torch.testing.assert_close(model(ids), load_model(path)(ids), atol=1e-4, rtol=1e-4)


@HERE
@pytest.mark.parametrize(
    ("times", "disturbed", "slow"), [(9, 0, False), (11, 0, True), (9, 15, False)]
)
def test_a_product_that_takes_too_long_is_not_taken(
    times, disturbed, slow, monkeypatch, asked_anew
):
    """By a clock of our own, on which a product in float32 takes a second.

    Disturbed are the first calls: another program has the processor, as it does on busy machines.
    """
    passed, real = [], stored_module.level_product

    def product(*args):
        passed.append(times if len(passed) > 2 * disturbed else 100)
        return real(*args)

    def linear(x, w):
        passed.append(1)

    monkeypatch.setattr(stored_module, "level_product", product)
    monkeypatch.setattr(stored_module.F, "linear", linear)
    monkeypatch.setattr(stored_module.time, "perf_counter", lambda: float(sum(passed)))
    assert (four_bit_products() is not None) == slow
