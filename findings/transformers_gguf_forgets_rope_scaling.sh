#!/usr/bin/env bash
# A GGUF of a Llama says how its rotation was stretched: `llama.rope.scaling.type` with a factor where it
# is linear, and a tensor `rope_freqs.weight` of divisors for Llama 3.1 and later, whose converters write no
# key. transformers opens the file, reads the base of the rotation and passes over both, with neither an
# error nor a warning: the model runs with plain rotations, and its logits are another model's. (Of
# gpt-oss it reads the keys: modeling_gguf_pytorch_utils.py has a part for that name alone.)
# Seen with transformers 5.23.0 and gguf 0.19.0 (integrations/ggml.py, GGUF_CONFIG_MAPPING).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" install --quiet)
"${pip[@]}" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${pip[@]}" torch==2.13.0+cpu transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 accelerate==1.15.0
cat > "$place/run.py" <<'PYTHON'
import sys

import gguf
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_grad_enabled(False), torch.manual_seed(0)
print("transformers", transformers.__version__)
low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {"default": {}, "linear": {"factor": 4.0}, "llama3": {"factor": 8.0, **low_high}}
heads, off = {"num_attention_heads": 4, "initializer_range": 0.1}, {}
for kind, more in KINDS.items():
    rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope))
    file = gguf.GGUFWriter(f"{sys.argv[1]}/{kind}.gguf", "llama")
    values = {"context_length": 4096, "block_count": 2, "vocab_size": 64, "embedding_length": 64}
    values |= {"feed_forward_length": 96, "head_count": 4, "head_count_kv": 4}
    values |= {"rope_dimension_count": 16, "rope_freq_base": 10000.0}
    values |= {"layer_norm_rms_eps": model.config.rms_norm_eps, "tokenizer_model": "llama"}
    values |= {"token_list": [f"t{i}" for i in range(64)], "token_scores": [0.0] * 64}
    for key, value in values.items():
        getattr(file, f"add_{key}")(value)
    if kind == "linear":
        file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), file.add_rope_scaling_factor(4.0)
    if kind == "llama3":
        plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        file.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, w in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # the order of rows in which llama.cpp rotates
            w = w.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)
        file.add_tensor(names.get_name(name, try_suffixes=(".weight",)), w.numpy())
    file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file()
    file.close()
    read = LlamaForCausalLM.from_pretrained(sys.argv[1], gguf_file=f"{kind}.gguf", dtype="float32")
    wanted, found = (one.eval()(torch.arange(60)[None]).logits for one in (model, read))
    off[kind] = float((wanted - found).abs().max() / wanted.abs().max())
    print(f"  {kind}: off by {off[kind]:.0%} of the largest logit; read as", read.config.rope_parameters)
passed_over = off["default"] < 1e-5 and min(off["linear"], off["llama3"]) > 0.05
sys.exit(0 if passed_over else "this has changed")
PYTHON
"$place/venv/bin/python" "$place/run.py" "$place" 2>&1 | grep -v "it/s"
