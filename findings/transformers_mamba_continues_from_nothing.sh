#!/usr/bin/env bash
# A model with a cache gives the same logits for a prompt in one piece, in two pieces, and token by token:
# chats, guesses that are checked and generate(prefill_chunk_size=...) rest on it. In transformers Mamba,
# Falcon Mamba and Jamba hold to it token by token only. A second piece of more than one token keeps the
# convolution's past, but the scan begins from an empty state, as if nothing had been read, and that state
# is what the cache then holds. No error, no warning; so Jamba's logits depend on prefill_chunk_size, an
# option for saving memory. Mamba 2 and Falcon H1 do it right.
# Seen with transformers 5.23.0, torch 2.13.0, without the kernels of mamba_ssm (models/mamba/
# modeling_mamba.py: the branch "Full sequence form" hands no state to the scan).
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
print("transformers", transformers.__version__, "torch", torch.__version__)
plain = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8},
    "Jamba": heads | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "FalconH1": heads | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1},
}
ids, as_seen = torch.randint(1, 50, (1, 24)), True
for name, keys in MODELS.items():
    config = getattr(transformers, f"{name}Config")(**plain, **keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for w in (w for w in model.parameters() if w.dim() > 1):
        w.mul_(4)  # fresh weights are so small that the state hardly counts
    whole, off = model(ids).logits, []
    key = "past_key_values" if "num_attention_heads" in keys else "cache_params"
    for pieces in ((16, *[1] * 8), (16, 8)):
        found, cache = [], None
        for piece in ids.split(pieces, dim=1):
            out = model(piece, **{key: cache}, use_cache=True)
            cache, found = out[key], [*found, out.logits]
        off.append(float((torch.cat(found, 1) - whole).abs().max() / whole.abs().max()))
    print(f"  {name:12} off by {off[0]:.0e} token by token, by {off[1]:.0e} in two pieces")
    if name == "Jamba":
        ask = {"output_logits": True, "return_dict_in_generate": True, "prefill_chunk_size": 16}
        pieces = model.generate(ids, **ask, max_new_tokens=1).logits[0]
        chunked = float((pieces - whole[:, -1]).abs().max() / whole[:, -1].abs().max())
        print(f"  {name:12} generate with prefill_chunk_size=16: off by {chunked:.0e}")
        as_seen &= chunked > 1e-4
    as_seen &= off[0] < 5e-5 and (off[1] > 1e-4) == (name in ("Mamba", "FalconMamba", "Jamba"))
sys.exit(0 if as_seen else "this has changed")
PYTHON
"$place/venv/bin/python" "$place/run.py"
