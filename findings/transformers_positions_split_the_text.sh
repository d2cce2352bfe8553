#!/usr/bin/env bash
# position_ids say where each token stands. One would guess that they only turn the queries and the keys,
# that attention_mask=None is the same as a mask of ones, and that use_cache changes the speed but never
# the logits. In transformers all three are wrong at once: with neither a mask nor a cache, each place
# where the positions do not go up by one is taken for the start of another text packed into the same
# row, and no token sees past it. So a gap (0 1 2 10 11 12) cuts the text in two, and positions stretched
# by two leave every token alone with itself. With a cache, which is the default, or with a mask of ones,
# nothing is cut. So training without a cache (the Trainer and gradient checkpointing switch it off) and
# generating with one are two models. Positions that start at 5 and go up by one cut nothing.
# Since transformers 4.53.1, not in 4.53.0 (huggingface/transformers, pull request 39194, for packing);
# seen with 5.23.0 (masking_utils.find_packed_sequence_indices).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" install --quiet)
"${pip[@]}" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${pip[@]}" transformers==5.23.0 torch==2.13.0+cpu
cat > "$place/run.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)).eval()
ids = torch.arange(1, 7)[None]
CASES = {
    "in a row": ([5, 6, 7, 8, 9, 10], [0, 0, 0, 0, 0, 0]),
    "a gap": ([0, 1, 2, 10, 11, 12], [0, 0, 0, 3, 3, 3]),
    "stretched": ([0, 2, 4, 6, 8, 10], [0, 1, 2, 3, 4, 5]),
}


@torch.no_grad()
def logits(tokens, positions, **options):
    return model(tokens, position_ids=torch.tensor([positions]), **options).logits[0]


changed = False
for name, (positions, expected) in CASES.items():
    cached = logits(ids, positions)
    masked = logits(ids, positions, use_cache=False, attention_mask=torch.ones_like(ids))
    bare = logits(ids, positions, use_cache=False)
    agree = torch.allclose(cached, masked, atol=1e-5)
    # The first token that each one really sees: its logits are those of the text from there on.
    sees = [
        next(start for start in range(i, -1, -1) if torch.allclose(
            logits(ids[:, start : i + 1], positions[start : i + 1])[-1], bare[i], atol=1e-5))
        for i in range(6)
    ]
    print(f"{name} {positions}: ones = cache: {agree}; with neither, each sees from {sees}")
    changed |= not agree or sees != expected
sys.exit("this has changed" if changed else 0)
PYTHON
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" "$place/run.py"
