#!/usr/bin/env bash
# mlx.core.load opens GGUF files. mlx has bfloat16, so one would guess that a matrix stored as BF16 arrives
# as bfloat16. It arrives as float16, without a word: eight bits of exponent become five. What lies beyond
# 65,504 turns into infinity and what lies below 3e-8 into 0, although both are plain numbers in the file.
# The same bits in a safetensors file arrive as bfloat16, so one model gives two results by its container.
# Seen with mlx 0.32.4 (mlx/io/gguf.cpp: every type but F32, F16 and the quantised ones that it knows goes
# through gguflib's conversion to float16).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" gguf==0.19.0 numpy==2.4.6
cat > "$place/run.py" <<'PYTHON'
import sys
from importlib.metadata import version

import gguf
import mlx.core as mx
import numpy as np

print("mlx", version("mlx"), "gguf", version("gguf"))
numbers = np.array([[1.0, -3.0, 2.0**17, -(2.0**20), 2.0**-30, 2.0**-40, 0.5, 0.0]], np.float32)
BF16 = gguf.GGMLQuantizationType.BF16
stored = gguf.quants.quantize(numbers, BF16)
assert np.array_equal(gguf.quants.dequantize(stored, BF16), numbers)  # each is exact in bfloat16
writer = gguf.GGUFWriter(f"{sys.argv[1]}/model.gguf", "llama")
writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=BF16)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
mx.save_safetensors(f"{sys.argv[1]}/model.safetensors", {"w": mx.array(numbers).astype(mx.bfloat16)})
from_gguf = mx.load(f"{sys.argv[1]}/model.gguf")["blk.0.attn_q.weight"]
from_safetensors = mx.load(f"{sys.argv[1]}/model.safetensors")["w"]
found = np.array(from_gguf.astype(mx.float32))
kept = np.array(from_safetensors.astype(mx.float32))
print("  stored            ", *numbers[0])
print("  from GGUF         ", *found[0], from_gguf.dtype)
print("  from safetensors  ", *kept[0], from_safetensors.dtype)
lost = np.isinf(found).sum() == 2 and (found == 0).sum() == 3
same = from_gguf.dtype == mx.float16 and lost and np.array_equal(kept, numbers)
sys.exit(0 if same else "this has changed")
PYTHON
"$place/venv/bin/python" "$place/run.py" "$place"
