"""What a user of another library hands in by habit gets one sentence that says what is wanted."""

import inspect
import re

import pytest
import torch

import minillm
from minillm import (
    BPETokenizer,
    CausalLM,
    ModelConfig,
    TrainConfig,
    Trainer,
    WindowBatches,
    add_lora,
    attention_maps,
    beam_search,
    evaluate,
    generate,
    get_batch,
    save_pretrained,
    stream_text,
)
from minillm.beyond.answers.sft import Example

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def ours():
    tokenizer = BPETokenizer.train("a b c " * 9, 260, special_tokens=["<|endoftext|>"])
    return CausalLM(ModelConfig(260, 16, 1, 2, 24)), tokenizer


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ours[0].save_pretrained(folder, ours[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer


IDS = torch.tensor([[1, 2, 3]])
EXAMPLE = Example([1, 2, 3], [False, True, True])
CASES = {
    "their model": (lambda m, t: generate(m, IDS, max_new_tokens=1), 0, "no model of minillm"),
    "their model, saved": (lambda m, t: save_pretrained(m, None, "x"), 0, "no model of minillm"),
    "their config": (lambda m, t: CausalLM(m.config), 0, "not a transformers.LlamaConfig"),
    "their tokenizer": (lambda m, t: evaluate(m, t, ["a"]), 1, "BPETokenizer.load"),
    "their tokenizer, streamed": (
        *(lambda m, t: [*stream_text(m, t, "a", max_new_tokens=1)], 1),
        "no tokenizer of minillm",
    ),
    "their tokenizer, saved": (lambda m, t: save_pretrained(m, t, "x"), 1, "BPETokenizer.load"),
    "their library's tokenizer": (
        *(lambda m, t: evaluate(m, t.backend_tokenizer, ["a"]), 1),
        "a tokenizers.Tokenizer is no tokenizer",
    ),
    "their encoding": (
        *(lambda m, t: generate(m, t("a", return_tensors="pt"), max_new_tokens=1), 1),
        "hand in its entries, **encoding",
    ),
    "a batch to decode, special tokens left out": (
        *(lambda m, t: t.decode(IDS, skip_special_tokens=True), None),
        "[decode(row) for row in ids]",
    ),
    "examples to train on": (
        *(lambda m, t: Trainer(m, [EXAMPLE], TrainConfig(1), progress=False).train(), None),
        "ConversationBatches(examples, batch_size, context_length) makes batches",
    ),
    "their map": (lambda m, t: attention_maps(m, IDS), 0, "self_attn is LlamaAttention"),
    "a dict as config": (lambda m, t: CausalLM({"vocab_size": 9}), None, "not a builtins.dict"),
    "a name as model": (
        *(lambda m, t: generate("gpt2", IDS, max_new_tokens=1), None),
        "'gpt2' is no model of minillm: from_pretrained",
    ),
    "a text as prompt": (
        *(lambda m, t: generate(m, "a", max_new_tokens=1), None),
        r"torch.tensor([tokenizer.encode(text)])",
    ),
    "a list as prompt": (
        *(lambda m, t: generate(m, [[1]], max_new_tokens=1), None),
        r"torch.tensor([tokenizer.encode(text)])",
    ),
    "a batch of beams": (
        *(lambda m, t: beam_search(m, IDS.expand(2, -1), num_beams=2, max_new_tokens=1), None),
        "beams go on from one prompt",
    ),
    "a batch to decode": (lambda m, t: t.decode(IDS), None, "[decode(row) for row in ids]"),
    "one text to evaluate": (lambda m, t: evaluate(m, t, "a"), None, "must be several texts"),
    "texts to train on": (
        *(lambda m, t: Trainer(m, ["a"], TrainConfig(1), progress=False).train(), None),
        "RowBatches or TextDocuments",
    ),
    "their batches": (
        *(lambda m, t: Trainer(m, [t("a")], TrainConfig(1), progress=False).train(), 1),
        "inputs are ids[:, :-1], targets ids[:, 1:]",
    ),
    "a text as tokens": (lambda m, t: WindowBatches("a b c", 1, 2), None, "tokenizer.encode(text)"),
    "texts as tokens": (lambda m, t: get_batch(["a", "b"], 1, 1), None, "a row of token ids"),
    "steps for a config": (lambda m, t: Trainer(m, [], 100), None, "TrainConfig(100), not 100"),
    "a config for a model": (
        *(lambda m, t: Trainer(m.config, [], TrainConfig(1)), None),
        "model must be an nn.Module, such as CausalLM(config)",
    ),
    "an optimizer's name": (
        *(lambda m, t: Trainer(m, [], TrainConfig(1), optimizer="adamw"), None),
        "a function of the model, lambda model:",
    ),
    "an optimizer's class": (
        *(lambda m, t: Trainer(m, [], TrainConfig(1), optimizer=torch.optim.SGD), None),
        "a function of the model, lambda model:",
    ),
    "a run's name": (
        *(lambda m, t: Trainer(m, [], TrainConfig(1), run="x"), None),
        "run must be a Run, such as Run(folder), not 'x'",
    ),
    "texts to encode": (lambda m, t: t.encode(["a", "b"]), None, "encode_batch takes several"),
    "texts, special or not": (
        *(lambda m, t: t.encode_ordinary(["a", "b"]), None),
        "encode_batch takes several",
    ),
    "one id to decode": (lambda m, t: t.decode(97), None, "for one id [97]"),
    "their names of sizes": (
        *(lambda m, t: ModelConfig(vocab_size=9, n_layer=1), None),
        "n_layer is num_hidden_layers here; it has vocab_size, hidden_size",
    ),
    "a text for the tokenizer": (
        *(lambda m, t: minillm.evaluate_text(m, "a", t), None),
        "the order is model, tokenizer, texts",
    ),
    "rows without an end token": (
        *(lambda m, t: minillm.RowBatches([[1, 2]], 1, None), None),
        "special_tokens=['<|endoftext|>']) makes one, WindowBatches needs none",
    ),
    "a path to train on": (lambda m, t: Trainer(m, "x", TrainConfig(1)), None, "not be 'x'"),
    "a path to learn from": (lambda m, t: BPETokenizer.train(__file__, 300), None, "read_text"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sentence_says_what_is_wanted(case, ours, theirs):
    call, which, words = CASES[case]
    model = theirs[0] if which == 0 else ours[0]
    tokenizer = theirs[1] if which == 1 else ours[1]
    with pytest.raises(ValueError) as error:
        call(model, tokenizer)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_their_model_trains_behind_a_function_of_ids_to_scores(theirs):
    class Scores(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids).logits

    batches = [(IDS, IDS + 1)]
    with pytest.raises(TypeError, match=r"must return its logits \(B, T, V\), a tensor"):
        Trainer(theirs[0], batches, TrainConfig(1), progress=False).train()
    history = Trainer(Scores(theirs[0]), batches, TrainConfig(3), progress=False).train()
    assert history[-1]["loss"] > 0


def test_adapters_go_onto_their_model(theirs):
    names = add_lora(theirs[0], 2, 4)
    assert "model.layers.0.self_attn.q_proj" in names
    minillm.remove_lora(theirs[0])


SPELLINGS = {  # a keyword of another library: where it is typed, what it is called here
    **dict.fromkeys(["r", "lora_alpha", "target_modules", "lora_dropout"], add_lora),
    **dict.fromkeys(["do_sample", "temperature", "top_k", "num_beams", "max_length"], generate),
    **dict.fromkeys(["stop_strings", "streamer", "num_return_sequences"], generate),
    "logits_processor": generate,
    **dict.fromkeys(["torch_dtype", "device_map"], minillm.from_pretrained),
    **dict.fromkeys(["n_layer", "n_head", "n_embd", "block_size", "bias"], ModelConfig),
    **dict.fromkeys(["d_model", "n_positions", "layer_norm_epsilon"], ModelConfig),
    **dict.fromkeys(["learning_rate", "max_iters", "grad_clip", "bf16", "batch_size"], TrainConfig),
    **dict.fromkeys(["num_train_epochs", "save_steps", "logging_steps"], TrainConfig),
    **dict.fromkeys(["args", "train_dataset", "eval_dataset", "callbacks", "tokenizer"], Trainer),
}


@pytest.mark.parametrize("word", SPELLINGS)
def test_a_keyword_of_theirs_is_told_in_our_words(word, ours):
    part = SPELLINGS[word]
    with pytest.raises((TypeError, ValueError)) as error:
        part(**{word: 1})
    said = re.search(rf"; {word} is (.+?) here; it has (.+)$", str(error.value))
    known, called = said[2].split(", "), said[1]
    assert word not in known
    name = called.partition("=")[0].partition("(")[0].partition(" ")[0]
    assert name in known or hasattr(minillm, name)


@pytest.mark.parametrize(
    "part, word, ours",
    [
        (generate, "max_length", "max_new_tokens"),
        (stream_text, "temperature", "sampler=Sampler(temperature=...)"),
        (beam_search, "num_return_sequences", "num_return"),
        (minillm.evaluate_text, "max_length", "window"),
        (minillm.ConversationBatches, "max_length", "context_length"),
    ],
)
def test_a_keyword_is_told_in_the_words_of_the_function(part, word, ours):
    with pytest.raises(TypeError) as error:
        part(**{word: 1})
    assert f"{part.__name__} has no {word}; {word} is {ours} here; it has " in str(error.value)


def train_on(batch, model=None, **more):
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(260, 16, 1, 2, 24)) if model is None else model
    return Trainer(model, [batch], TrainConfig(2), progress=False, **more).train()


ROW = torch.arange(1, 13).expand(2, -1)


@pytest.mark.parametrize("ignored", [0, 1, 4])
def test_targets_that_are_the_inputs_are_refused(ignored):
    targets = ROW.clone()
    targets[:, :ignored] = -100
    with pytest.raises(ValueError, match=r"inputs are ids\[:, :-1\], targets ids\[:, 1:\]$"):
        train_on((ROW, targets))


def test_targets_that_may_be_the_inputs_are_learned():
    constant = torch.tensor([[1], [2]]).expand(2, 12)  # what follows a token is the same token
    mostly = ROW.clone()
    mostly[0, -1] = 99
    own_shift = {"loss": lambda x, y: minillm.cross_entropy(x[:, :-1], y[:, 1:])}
    no_decoder = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))
    assert train_on((constant, constant)) and train_on((ROW, mostly))
    assert train_on((ROW[:, :3], ROW[:, :3]))  # too few to tell
    assert train_on((ROW, ROW), **own_shift) and train_on((ROW, ROW), no_decoder)


class Forgetful(torch.nn.Module):
    """An attention that leaves the cache alone, as one that takes `**more` easily does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, cache=None, mask=None, is_causal=True, **more):
        return self.inner(x, mask=None, is_causal=True, **more)


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_an_attention_that_forgets_the_cache_is_named(layers):
    model = CausalLM(ModelConfig(260, 16, 2, 2, 24))
    for i in layers:
        model.model.layers[i].self_attn = Forgetful(model.model.layers[i].self_attn)
    wanted = rf"^layer {layers[0]} did not call cache.update\(keys, values\): see help"
    for kind in ("dynamic", "static"):
        with pytest.raises(ValueError, match=wanted):
            generate(model, IDS, max_new_tokens=4, cache=kind)
    ids = generate(model, IDS, max_new_tokens=4, cache=None, eos_token_id=None)
    assert torch.equal(ids[:, -1], model(ids[:, :-1])[:, -1].argmax(-1))


def test_an_adapter_is_no_model(ours, tmp_path):
    model = CausalLM(ModelConfig(260, 16, 1, 2, 24))
    add_lora(model, 2, 4)
    minillm.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"it holds an adapter: load_adapter\(model, '"):
        minillm.from_pretrained(tmp_path / "adapter")


def test_an_unknown_keyword_is_answered_with_those_that_are_known():
    with pytest.raises(TypeError, match=r"^Sampler has no heat; it has temp"):
        minillm.Sampler(heat=1.0)
    assert list(inspect.signature(minillm.Sampler).parameters)[:2] == ["temperature", "top_k"]
    assert list(inspect.signature(generate).parameters)[:2] == ["model", "input_ids"]


def test_what_is_shown_of_a_thing_says_its_sizes(ours, tmp_path):
    model, tokenizer = ours
    assert repr(tokenizer) == "BPETokenizer(260 tokens, 1 of them special)"
    cache = model.make_cache(batch_size=2)
    assert repr(cache) == "KVCache(1 layers, 2 rows, 0 positions, 0 bytes)"
    model(IDS.expand(2, -1), cache=cache)
    assert repr(cache) == "KVCache(1 layers, 2 rows, 3 positions, 768 bytes)"
    rows = minillm.RowBatches([[1, 2, 3]], 2, 0)
    assert repr(rows) == "RowBatches(1 rows, 2 a batch)"
    windows = WindowBatches(torch.arange(99), 2, 8)
    assert repr(windows) == "WindowBatches(99 tokens, batches of 2 x 8)"
    texts = minillm.TextDocuments(["a b"], tokenizer.encode_ordinary)
    documents = minillm.DocumentBatches(texts, 4, 16, eos_token_id=259)
    assert repr(documents) == "DocumentBatches(TextDocuments, batches of 4 x 16, padded)"
    pairs = minillm.ConversationBatches([minillm.completion_example(tokenizer, "a", "b")], 2, 16)
    assert repr(pairs) == "ConversationBatches(1 examples, batches of 2 x 16, padded)"
    assert iter(pairs) is pairs


def test_a_model_has_the_methods_one_reaches_for(ours, tmp_path):
    model, tokenizer = ours
    ids = model.generate(IDS, max_new_tokens=2)
    assert torch.equal(ids, generate(model, IDS, max_new_tokens=2))
    model.save_pretrained(tmp_path, tokenizer)
    again, _ = minillm.from_pretrained(tmp_path)
    assert torch.equal(again.generate(IDS, max_new_tokens=2), ids)
