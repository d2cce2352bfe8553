#!/usr/bin/env bash
# torch packs a matrix of four-bit numbers with _convert_weight_to_int4pack_for_cpu and multiplies by the
# packed bytes with _weight_int4pack_mm_for_cpu. Whoever saves the packed bytes, as torch and safetensors
# gladly do, would guess that any processor reads them. But their order is the order in which this
# processor's instructions want them: with AVX-512 a row is paired with the one 32 further on in blocks of
# 64 rows, with AVX2 with the one 16 further on in blocks of 32, without either with its neighbour. Shape
# and dtype are the same, nothing says which it was, and another processor multiplies by the wrong numbers
# without a word. Here one machine plays two, by ATEN_CPU_CAPABILITY (it must have AVX2).
# Seen with torch 2.13.0 (aten/src/ATen/native/cpu/int4mm_kernel.cpp, weight_to_int4pack_kernel).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" install --quiet)
"${pip[@]}" --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${pip[@]}" torch==2.13.0+cpu numpy==2.4.6
cat > "$place/run.py" <<'PYTHON'
import sys
from pathlib import Path

import torch

here = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__, "as a processor with", here)
if here != sys.argv[2]:
    sys.exit(f"this machine cannot play {sys.argv[2]}")
rows, columns, group = 64, 64, 32
numbers = torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(0)).int()
packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
torch.save(packed, Path(sys.argv[1]) / f"{here}.pt")
# Scale 1 and middle 0: a number q counts as q - 8. The identity gives back the matrix.
scales = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(columns // group, rows, 2).contiguous()
eye = torch.eye(columns, dtype=torch.bfloat16)
changed = False
for file in sorted(Path(sys.argv[1]).glob("*.pt")):
    found = torch.load(file)
    same_kind = (found.shape, found.dtype) == (packed.shape, packed.dtype)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, found, group, scales)
    right = torch.equal(product.int() + 8, numbers.T)
    print(f"  packed as {file.stem}: same shape and dtype {same_kind}, right numbers {right}")
    changed |= not same_kind or right != (file.stem == here)
sys.exit("this has changed" if changed else 0)
PYTHON
mkdir "$place/packed"
ATEN_CPU_CAPABILITY=default "$place/venv/bin/python" "$place/run.py" "$place/packed" DEFAULT
ATEN_CPU_CAPABILITY=avx2 "$place/venv/bin/python" "$place/run.py" "$place/packed" AVX2
