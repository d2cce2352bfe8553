"""BART's and Marian's files: read, written, sharded, damaged, refused."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from seq2seq_checkpoints import CASES, batch, make, pair

import minillm
from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig
from minillm.deeper.pretrained.seq2seq import read_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_we_write_transformers_reads(name, tmp_path):
    theirs, ours = pair(name, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info[kind] for kind in info), info
    x, y, *_ = batch()
    expected = theirs(input_ids=x, decoder_input_ids=y).logits
    torch.testing.assert_close(again(input_ids=x, decoder_input_ids=y).logits, expected)
    assert (
        again.generate(x, max_new_tokens=9).tolist()
        == theirs.generate(x, max_new_tokens=9).tolist()
    )
    back = EncoderDecoder.from_pretrained(tmp_path / "ours")
    assert back.config == ours.config and torch.equal(back(x, y), ours(x, y))
    names = {k for k in load_file(tmp_path / "theirs" / "model.safetensors")}
    assert names == set(load_file(tmp_path / "ours" / "model.safetensors"))


@torch.no_grad()
def test_several_files_and_older_names_are_read(tmp_path):
    theirs, ours = pair("bart", tmp_path)
    x, y, *_ = batch()
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(EncoderDecoder.from_pretrained(tmp_path / "shards")(x, y), ours(x, y))
    old = load_file(tmp_path / "model.safetensors")
    del old["final_logits_bias"]
    old = {k.removeprefix("model."): v for k, v in old.items()}  # a file of the bare model
    old["encoder.embed_tokens.weight"] = old["shared.weight"].clone()
    old["encoder.version"] = torch.tensor([3.0])
    save_file(old, tmp_path / "model.safetensors")
    back = EncoderDecoder.from_pretrained(tmp_path)
    torch.testing.assert_close(back(x, y), ours(x, y) - ours.final_logits_bias)
    assert back.lm_head.weight is back.encoder.embed_tokens.weight


def test_weights_are_trained_and_saved_over_what_was_there(tmp_path):
    _, model = pair("marian", tmp_path)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["encoder.embed_positions.weight", "decoder.embed_positions.weight"]
    assert not model.training
    x, y, *_ = batch()
    model(x, y).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.0 if p.grad is None else 0.01 * p.grad
    model.save_pretrained(tmp_path)
    assert torch.equal(EncoderDecoder.from_pretrained(tmp_path)(x, y), model(x, y))
    assert not (tmp_path / "generation_config.json").exists()


def test_dtypes_are_kept_or_asked_for(tmp_path):
    make("bart", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    assert EncoderDecoder.from_pretrained(tmp_path).lm_head.weight.dtype == torch.bfloat16
    wide = EncoderDecoder.from_pretrained(tmp_path, dtype="float32")
    assert all(p.dtype == torch.float32 for p in wide.parameters())
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        EncoderDecoder.from_pretrained(tmp_path, dtype="int8")
    wide.save_pretrained(tmp_path / "wide")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_an_activation_of_ours_is_written_under_their_name(tmp_path):
    model = EncoderDecoder(Seq2SeqConfig(20, d_model=8, activation_function="gelu_sigmoid"))
    model.eval().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    x = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(
        theirs(input_ids=x, decoder_input_ids=x).logits, model(x, x), atol=1e-6, rtol=1e-5
    )


FC1 = "model.encoder.layers.1.fc1.weight"
CROSS = "model.decoder.layers.2.encoder_attn.out_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(CROSS), rf"missing: {CROSS}"),
        (lambda t: t.update({CROSS.replace("2", "9"): t[CROSS]}), r"unexpected: .*layers\.9\."),
        (lambda t: t.update({FC1: t[FC1][:5]}), r"fc1\.weight is \(5, 24\), .* \(40, 24\)"),
        (lambda t: t.update({FC1: t[FC1].int()}), r"fc1\.weight holds torch.int32"),
        (
            lambda t: t.update({"lm_head.weight": t["model.shared.weight"] + 1}),
            "tie_word_embeddings is true, and the weights differ: .*lm_head",
        ),
        (lambda t: t.pop("model.shared.weight"), r"missing: model\.encoder\.embed_tokens"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    make("bart", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        EncoderDecoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mbart"}, "unknown model_type 'mbart'"),
        ({"normalize_before": True}, "normalize_before=True of a bart config is not computed"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm=True"),
        ({"static_position_embeddings": True}, "static_position_embeddings=True of a bart"),
        ({"normalize_embedding": False}, "normalize_embedding=False"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"encoder_layers": 5}, r"missing: model\.encoder\.layers\.2 \(.* 5, and weights of 2\)"),
        (
            {"decoder_layers": 10**9},
            r"missing: model\.decoder\.layers\.3 \(.* 10{9}, and weights of 3",
        ),
        ({"decoder_layers": 2}, r"unexpected: model\.decoder\.layers\.2\."),
        ({"activation_function": "mish"}, "'mish' is unknown: choose one of relu"),
    ],
)
def test_configs_whose_effect_is_not_computed_are_refused(change, message, tmp_path):
    make("bart", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        EncoderDecoder.from_pretrained(tmp_path)


def test_missing_keys_mean_what_transformers_takes_them_to_mean():
    for kind in ("bart", "marian"):
        theirs = transformers.AutoConfig.for_model(kind)
        ours = read_config({"model_type": kind})
        for key, value in vars(ours).items():
            if hasattr(theirs, key) and key != "decoder_vocab_size":
                assert value == getattr(theirs, key), key
        assert read_config(theirs.to_dict()) in (ours, ours.__class__(
            **{**vars(ours), "decoder_vocab_size": theirs.to_dict().get("decoder_vocab_size")}
        ))  # fmt: skip


def test_a_search_that_is_asked_for_is_not_passed_over_in_silence(tmp_path):
    make("marian", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EncoderDecoder.from_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    asked = {**json.loads(path.read_text()), "num_beams": 4, "bad_words_ids": [[52]]}
    path.write_text(json.dumps(asked))
    with pytest.warns(UserWarning, match=r"num_beams=4, bad_words_ids=\[\[52\]\]"):
        EncoderDecoder.from_pretrained(tmp_path)


def test_what_is_not_forced_in_the_generation_file_is_not_forced(tmp_path):
    theirs = make("bart", tmp_path)
    theirs.generation_config.forced_eos_token_id = None
    theirs.save_pretrained(tmp_path)
    ours = EncoderDecoder.from_pretrained(tmp_path)
    assert ours.config.forced_eos_token_id is None
    x, *_ = batch()
    expected = theirs.generate(x, max_new_tokens=7)
    assert ours.generate(x, max_new_tokens=7).tolist() == expected.tolist()


def test_the_names_are_public_and_no_folder_is_an_error(tmp_path):
    assert minillm.EncoderDecoder is EncoderDecoder
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        minillm.EncoderDecoder.from_pretrained(tmp_path)
