#!/usr/bin/env bash
# A decoder of transformers that gets a cache and no position_ids asks the cache how much it holds, and
# counts on from there. Bamba does not: without position_ids its attention layers turn every new token as
# if it stood at position 0. No error, no warning, and generate, which hands the positions in, hides it; a
# loop of one's own over forward does not. GraniteMoeHybrid, built from the same parts, counts on.
# Seen with transformers 5.23.0 (models/bamba/modeling_bamba.py, BambaModel.forward).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" install --quiet)
"${pip[@]}" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${pip[@]}" torch==2.13.0+cpu transformers==5.23.0 numpy==2.4.6
cat > "$place/run.py" <<'PYTHON'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False), torch.manual_seed(0)
print("transformers", transformers.__version__)
sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
sizes |= {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MODELS = {
    "Bamba": {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
}
ids = torch.randint(1, 50, (1, 24))
off = {}
for name, keys in MODELS.items():
    config = getattr(transformers, f"{name}Config")(**sizes, **keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    whole = model(ids).logits
    for given in (False, True):
        found, cache = [], None
        for t in range(24):
            where = {"position_ids": torch.tensor([[t]])} if given else {}
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True, **where)
            cache = out.past_key_values
            found.append(out.logits)
        off[name, given] = float((torch.cat(found, 1) - whole).abs().max() / whole.abs().max())
        how = "with position_ids" if given else "without"
        print(f"  {name:16} token by token, {how:17}: off by {off[name, given]:.0e} of the largest logit")
wrong = off.pop(("Bamba", False))
sys.exit(0 if wrong > 1e-3 and max(off.values()) < 5e-5 else "this has changed")
PYTHON
"$place/venv/bin/python" "$place/run.py"
