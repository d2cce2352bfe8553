#!/usr/bin/env bash
# A folder has a tokenizer.json, and added_tokens.json names one token more. One would guess that the
# token is there however much else the folder says. In transformers 5 it is, until
# tokenizer_config.json has the key added_tokens_decoder: with it, even if it is empty,
# added_tokens.json is passed over without a word. And the ids that these files give are not kept: a
# token that the vocabulary lacks gets the next free id (here 8), whatever the file says (here 9).
# Seen with transformers 5.23.0 and tokenizers 0.23.3
# (PreTrainedTokenizerBase._from_pretrained; TokenizersBackend).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3
cat > "$place/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, models

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
END = {"content": "<end>", "special": True, "lstrip": False, "rstrip": False}
END |= {"normalized": False, "single_word": False}
CASES = {
    "no added_tokens_decoder": ({}, {"<tool>": 8}),
    "an empty one": ({"added_tokens_decoder": {}}, {}),
    "one that says <end> is 9": ({"added_tokens_decoder": {"9": END}}, {"<end>": 8}),
}
changed = False
for number, (name, (keys, expected)) in enumerate(CASES.items()):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    letters = {letter: i for i, letter in enumerate("abcdefgh")}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 8}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **keys}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = transformers.AutoTokenizer.from_pretrained(folder).get_added_vocab()
    print(f"{name}: added tokens {found}")
    changed |= found != expected
sys.exit("this has changed" if changed else 0)
PYTHON
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" "$place/run.py" "$place"
