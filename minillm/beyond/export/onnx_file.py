"""An exported decoding step as a file in the ONNX format, which runs where there is no PyTorch.

Shown in notebooks/beyond/17_leaving_the_notebook.ipynb. Needs the packages onnx and onnxscript,
and asks for them only when `to_onnx` is called.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from minillm.support.files import replacing, transaction

OPSETS = range(18, 26)  # the versions of ONNX's operators that torch 2.13 writes

_ONE_FILE = 2**30  # bytes of weights in the file itself, which may have twice as many


def to_onnx(program: ExportedProgram, path: str | Path, *, opset: int = 20) -> None:
    """Write an exported step as an ONNX file, weights included; those above 1 GiB go beside it.

    Inputs are input_ids, position, keys, values; outputs logits, new_keys, new_values. Where
    `path` is a file already, it is replaced as a whole, or stays if something goes wrong.
    Raises: ValueError for an opset that is not in OPSETS, or that the step cannot be written in,
        and for one that computes in bfloat16; ImportError without onnx and onnxscript.
    """
    if opset not in OPSETS:
        known = f"{OPSETS[0]} to {OPSETS[-1]}"
        raise ValueError(f"unknown ONNX opset {opset!r}; known are {known}")
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("to_onnx needs the packages onnx and onnxscript") from None
    values = (*program.state_dict.values(), *program.constants.values(), *program.example_inputs[0])
    if any(getattr(value, "dtype", None) is torch.bfloat16 for value in values):
        raise ValueError(
            "the step computes in bfloat16, which onnxruntime cannot on a CPU: "
            "export_step(model.float(), ...), or model.half() for a file of the same size"
        )
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = torch.onnx.export(
                program,
                (),
                input_names=["input_ids", "position", "keys", "values"],
                output_names=["logits", "new_keys", "new_values"],
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    finally:
        log.setLevel(level)
    if (written := made.model.opset_imports[""]) != opset:  # torch logs it and goes on
        raise ValueError(f"this step cannot be written in ONNX opset {opset}, only in {written}")
    path = Path(path)
    if sum(tensor.nbytes for tensor in program.state_dict.values()) <= _ONE_FILE:
        with replacing(path) as temporary:
            made.save(str(temporary), external_data=False)
    else:  # the file names the other one: the two take their places together
        with transaction(path.parent) as staging:
            made.save(str(staging / path.name), external_data=True)
