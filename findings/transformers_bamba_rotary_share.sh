#!/usr/bin/env bash
# A Bamba model turns a part of each head. One would guess that partial_rotary_factor in its config says
# which part, as it does for other families. Beside the other keys it is overwritten with 0.5 without a
# word; inside of rope_parameters it is kept. So two files that say the same give two models.
# Seen with transformers 5.23.0 (BambaConfig).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0
cat > "$place/run.py" <<'PYTHON'
import sys

import transformers
from transformers import BambaConfig

print("transformers", transformers.__version__)
table = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
beside = BambaConfig(partial_rotary_factor=0.75).rope_parameters["partial_rotary_factor"]
inside = BambaConfig(rope_parameters=table).rope_parameters["partial_rotary_factor"]
print(f"0.75 beside the other keys: {beside}; in rope_parameters: {inside}")
sys.exit(0 if (beside, inside) == (0.5, 0.75) else "this has changed")
PYTHON
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" "$place/run.py"
