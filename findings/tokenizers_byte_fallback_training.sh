#!/usr/bin/env bash
# byte_fallback=True spells a character that a vocabulary lacks with the 256 tokens <0x00> to <0xFF>. One
# would guess that training a BPE(byte_fallback=True) with tokenizers puts these 256 in, as sentencepiece
# does with its option of the same name. Nothing puts them in: the trained file says byte_fallback true,
# and a character that the training text lacked is <unk> all the same. Named in initial_alphabet, each
# gives only its first character, "<". Named as special tokens they are there, but decode leaves special
# tokens out unless told, so the character that went in is missing from what comes back. And training a
# Unigram(byte_fallback=True) makes a model whose byte_fallback is false.
# Upstream: huggingface/tokenizers, pull request 1183 (the comments) and issue 1515. Seen with
# tokenizers 0.23.3 (models/bpe/trainer.rs, models/unigram/trainer.rs) and sentencepiece 0.2.3.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet tokenizers==0.23.3 sentencepiece==0.2.3
cat > "$place/run.py" <<'PYTHON'
import io
import json
import sys

import sentencepiece
import tokenizers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, trainers

TEXT = ["the cat sat on the mat", "a hat and a cat"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
print("tokenizers", tokenizers.__version__, "sentencepiece", sentencepiece.__version__)
two, found = ["<0xC3>", "<0xA9>"], []


def train(model, trainer, expected):
    trainer.show_progress = False
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.train_from_iterator(TEXT, trainer)
    ids = tokenizer.encode("é").ids
    tokens = [tokenizer.id_to_token(i) for i in ids]
    flag = json.loads(tokenizer.to_str())["model"]["byte_fallback"]
    print(f"  é is {tokens}, comes back as {tokenizer.decode(ids)!r}, byte_fallback is {flag}")
    found.append((tokens, tokenizer.decode(ids), flag) == expected)


for special, first, expected in (([], [], ["<unk>"]), ([], BYTES, ["<unk>"]), (BYTES, [], two)):
    print(f"BPE, {len(special)} bytes as special tokens, {len(first)} in initial_alphabet")
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", *special], initial_alphabet=first)
    train(models.BPE(byte_fallback=True, unk_token="<unk>"), trainer, (expected, "", True))
print("Unigram")
trainer = trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>")
train(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=True), trainer, (["<unk>"], "", False))
options = {"model_type": "bpe", "vocab_size": 290, "byte_fallback": True, "minloglevel": 2}
SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=(file := io.BytesIO()), **options)
google = SentencePieceProcessor(model_proto=file.getvalue())
tokens, back = google.encode("é", out_type=str), google.decode(google.encode("é"))
print(f"sentencepiece\n  é is {tokens}, comes back as {back!r}")
found.append((tokens[1:], back) == (two, "é"))
sys.exit(0 if all(found) else "this has changed")
PYTHON
"$place/venv/bin/python" "$place/run.py"
