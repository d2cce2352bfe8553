#!/usr/bin/env bash
# tokenizer.json holds the whole tokenizer: how text is normalized, cut, merged. One would guess that
# AutoTokenizer loads it and that tokenizer_class only names a wrapper around it, as in transformers 4.
# Transformers 5 builds some classes anew (GPT2Tokenizer, Qwen2Tokenizer, GPTNeoXTokenizer, also by their
# old names with Fast): of the file they keep the vocabulary and the merges, and put their own cut and
# normalizer in place of the file's without a word. A config.json beside it decides too:
# with model_type olmo3 the file is kept again, with qwen2 the class named is passed over for Qwen's.
# So one tokenizer.json, here one that makes every digit a piece, gives other ids for the same text.
# Upstream: huggingface/transformers, pull request 44254 (closed); allenai/open-instruct, issue 1896.
# Seen with transformers 5.23.0; 4.57.6 keeps the file (TokenizersBackend.convert_to_native_format).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat > "$place/run.py" <<'PYTHON'
import json
import sys
import tempfile
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
file = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, "12"])}, [("1", "2")]))
file.normalizer = normalizers.Lowercase()
digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel
file.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_(add_prefix_space=False)])
KEPT, GPT2, QWEN2 = ["a", "1", "2"], ["A", "12"], ["A", "1", "2"]
CASES = [  # tokenizer_class, model_type in config.json, pieces of "A12" in transformers 5
    ("PreTrainedTokenizerFast", None, KEPT),
    ("GPT2TokenizerFast", None, GPT2),
    ("GPT2TokenizerFast", "llama", GPT2),
    ("GPT2TokenizerFast", "olmo3", KEPT),
    ("GPT2TokenizerFast", "qwen2", QWEN2),
    ("Qwen2TokenizerFast", None, QWEN2),
    ("GPTNeoXTokenizerFast", None, GPT2),
]
print("transformers", transformers.__version__, "the file:", file.encode("A12").tokens)
changed = file.encode("A12").tokens != KEPT
for name, model_type, expected in CASES:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    file.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = transformers.AutoTokenizer.from_pretrained(folder).tokenize("A12")
    print(f"  {name}, model_type {model_type}: {found}")
    changed |= found != (KEPT if transformers.__version__ < "5" else expected)
sys.exit("this has changed" if changed else 0)
PYTHON
for version in 4.57.6 5.23.0; do
    python3 -m venv "$place/$version"
    "$place/$version/bin/pip" install --quiet "transformers==$version"
    HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$place/$version/bin/python" "$place/run.py" "$place"
done
