#!/usr/bin/env bash
# ONNX's RMSNormalization has stash_type, 1 unless said: by the operator's text all inputs are cast to
# 32-bit floats, normalized, and cast back. One would guess that onnx's own reference evaluator, which
# exists to show what the operators mean, does that, and that a runtime may be a little off. It is the
# other way round: the reference takes no other stash_type than 1 and then computes in the input's own
# dtype. With 16-bit halves the square of 256 is infinite, so a row with one such number, as a model's
# residual stream has, becomes zeros. onnxruntime computes as the text says: a float16 export that is
# right fails a test against the reference. LayerNormalization is alike.
# Upstream: onnx/onnx, pull request 8439. Seen with onnx 1.23.2 (reference/ops/op_rms_normalization.py,
# op_layer_normalization.py) and onnxruntime 1.32.0.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > "$place/run.py" <<'PYTHON'
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")
print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
NORMS = {"RMSNormalization": 23, "LayerNormalization": 17}


def both(name, x):
    """The reference's numbers and onnxruntime's."""
    half = TensorProto.FLOAT16
    values = [helper.make_tensor_value_info(key, half, [4]) for key in "xsy"]
    node = helper.make_node(name, ["x", "s"], ["y"], epsilon=1e-6)
    graph = helper.make_graph([node], "norm", values[:2], values[2:])
    opset = helper.make_opsetid("", NORMS[name])
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    feed = {"x": np.array(x, np.float16), "s": np.ones(4, np.float16)}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return [run.run(None, feed)[0].tolist() for run in (ReferenceEvaluator(model), session)]


changed = False
for name in NORMS:
    for x in ([3, -4, 5, 6], [300, -400, 500, 600]):
        reference, runtime = both(name, x)
        close = np.allclose(reference, runtime, atol=0.01)
        print(f"  {name} of {x}: reference {np.round(reference, 2)}, runtime {np.round(runtime, 2)}")
        changed |= close != (x[0] == 3) or (x[0] == 300 and any(reference))
sys.exit("this has changed" if changed else 0)
PYTHON
"$place/venv/bin/python" "$place/run.py"
