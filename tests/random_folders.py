"""Checkpoints of every kind of model with something wrong in them, drawn by a seed.

`python tests/random_folders.py 100000` tries as many and prints what is no ValueError; the suite
tries fewer (tests/deeper/pretrained/test_random_folders.py).
"""

import copy
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minillm import CausalLM, ModelConfig
from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig
from minillm.deeper.pictures.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.deeper.pretrained.load import save_pretrained

_SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL |= {"intermediate_size": 24, "max_position_embeddings": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
_STATE = {"state_size": 4, "conv_kernel": 3, "expand": 2, "num_heads": 2, "n_groups": 1}
_MAMBA = {k: v for k, v in _SMALL.items() if k not in ("num_attention_heads", "intermediate_size")}
_LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen3": {"tie_word_embeddings": True},
    "gpt2": {},
    "falcon": {},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**_EXPERTS, **_LATENT, "first_k_dense_replace": 1},
    "mamba2": {"state": _STATE},
    "bamba": {"state": _STATE, "attn_layer_indices": (1,), "partial_rotary_factor": 0.5},
}
_TEXT = ModelConfig(**_SMALL, model_type="llama")
_EYE = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24}
_EYE |= {"num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP = VisionConfig("clip_vision_model", **_EYE)
_QWEN_EYE = QwenVisionConfig(16, depth=2, embed_dim=16, num_heads=2, patch_size=4)
_QWEN = {"image_token_id": 3, "video_token_id": 4, "mrope_section": (2, 1, 1)}


def _save_language(model: Any, folder: Path) -> None:
    save_pretrained(model, None, folder)


def _save_other(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def makers() -> dict[str, tuple[Callable[[], Any], Callable[[Any, Path], None], Any]]:
    """Of each kind: how a small model is made, how it is saved, and its class."""
    found: dict[str, Any] = {}
    for kind, keys in _LANGUAGE.items():
        sizes = {**(_MAMBA if kind == "mamba2" else _SMALL), "model_type": kind, **keys}
        made = lambda sizes=sizes: CausalLM(ModelConfig(**sizes))  # noqa: E731
        found[kind] = made, _save_language, CausalLM
    for kind in ("bart", "marian"):
        config = Seq2SeqConfig(32, kind, max_position_embeddings=32, d_model=16)
        found[kind] = (lambda c=config: EncoderDecoder(c)), _save_other, EncoderDecoder
    for kind in ("vit", "siglip_vision_model", "clip_vision_model"):
        eye = VisionConfig(kind, **_EYE, vision_use_head=kind != "clip_vision_model")
        found[kind] = (lambda c=eye: VisionTransformer(c)), _save_other, VisionTransformer
    llava = PictureConfig(_CLIP, _TEXT, image_token_index=3)
    found["llava"] = (lambda: PictureLM(llava)), _save_other, PictureLM
    text = ModelConfig(**_SMALL, model_type="qwen2")
    qwen = QwenVLConfig(text, _QWEN_EYE, **_QWEN)
    found["qwen2_vl"] = (lambda: QwenVL(qwen)), _save_other, QwenVL
    return found


_STRANGE = [None, True, False, "", "x", "auto", "\x1b[2J", -1, 0, 1, 2, 3, 7, 2**31, 10**9, 10**30]
_STRANGE += [-0.5, 0.0, 0.5, 1e-30, 1e308, float("inf"), [], [0], [1, "x"], [[]], [None], {}]
_STRANGE += [{"a": 1}, {"rope_type": "x"}, {"rope_type": "yarn"}, {"factor": 0}, "gelu", [8, 0]]


def _tables(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A table and those inside it."""
    yield data
    for value in data.values():
        if isinstance(value, dict):
            yield from _tables(value)


def _change_config(data: dict[str, Any], draw: random.Random) -> str:
    place = draw.choice(list(_tables(data)))
    key = draw.choice([*place, "quantization_config", "head_dim", "text_config", "vision_config"])
    if draw.random() < 0.15:
        place.pop(key, None)
        return f"without {key}"
    place[key] = copy.deepcopy(draw.choice(_STRANGE))
    if draw.random() < 0.2:  # a number of the right kind, and wrong
        place[key] = draw.randint(1, 64)
    return f"{key}={place[key]!r}"


def _change_weight(tensors: dict[str, torch.Tensor], draw: random.Random) -> str:
    name = draw.choice(list(tensors))
    x, other = tensors[name], draw.choice(list(tensors))
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "int32": lambda: x.int(),
        "float8": lambda: x.to(torch.float8_e4m3fn),
        "bool": lambda: x.bool(),
        "bfloat16": lambda: x.bfloat16(),
        "float64": lambda: x.double(),
        "a number": lambda: x.flatten()[0].clone(),
        "flat": lambda: x.flatten(),
        "one more axis": lambda: x[None],
        "one row": lambda: x[:1].clone() if x.dim() else x,
        "no rows": lambda: x[:0].clone() if x.dim() else x,
        "another": lambda: tensors[other].clone(),
        "complex": lambda: x.to(torch.complex64),
    }
    way = draw.choice([*ways, "gone", "renamed", "all float8"])
    if way == "gone":
        del tensors[name]
    elif way == "renamed":
        tensors[draw.choice([f"x.{name}", f"model.{name}", name[3:], other])] = tensors.pop(name)
    elif way == "all float8":
        tensors.update({k: v.to(torch.float8_e4m3fn) for k, v in tensors.items()})
    else:
        tensors[name] = ways[way]()
    return f"{name}: {way}"


def use(model: Any) -> None:
    """One pass through a model that was loaded, small enough to be one that we made."""
    if isinstance(model, CausalLM):
        model(torch.tensor([[1, 2, 3]]))
    elif isinstance(model, EncoderDecoder):
        model(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]]))
    elif isinstance(model, VisionTransformer):
        c = model.config
        model(torch.zeros(1, c.num_channels, *c.size, dtype=next(model.parameters()).dtype))
    else:
        model(torch.tensor([[1, 2]]))


def attempts(
    count: int, seed: int = 0, kinds: list[str] | None = None
) -> Iterator[tuple[str, BaseException | None]]:
    """So many folders: what was changed, and what came of it, None if the model was loaded.

    A model that was loaded is used once if only its weights were changed.
    """
    draw, known = random.Random(seed), makers()
    with tempfile.TemporaryDirectory() as root:
        whole: dict[str, tuple[Any, Any]] = {}
        for kind in kinds or known:
            make, save, _ = known[kind]
            save(make(), Path(root, kind))
            text = Path(root, kind, "config.json").read_text(encoding="utf-8")
            whole[kind] = text, load_file(Path(root, kind, "model.safetensors"))
        for _ in range(count):
            kind = draw.choice(list(whole))
            folder, (text, tensors) = Path(root, "tried"), whole[kind]
            shutil.copytree(Path(root, kind), folder)
            said, weights = [kind], draw.random() < 0.35
            if weights:
                tensors = {k: v.clone() for k, v in tensors.items()}
                said.append(_change_weight(tensors, draw))
                tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            else:
                data = json.loads(text)
                said += [_change_config(data, draw) for _ in range(draw.choice([1, 1, 2]))]
                (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
                if draw.random() < 0.1:
                    ends = {"eos_token_id": draw.choice(_STRANGE), "num_beams": 3}
                    path = folder / "generation_config.json"
                    path.write_text(json.dumps(ends), encoding="utf-8")
                    said.append(f"ends {ends['eos_token_id']!r}")
            failure: BaseException | None = None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = known[kind][2].from_pretrained(folder)
                    if weights:
                        use(model)
            except Exception as error:
                failure = error
            shutil.rmtree(folder)
            yield ", ".join(said), failure


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    loaded = refused = raw = 0
    for said, failure in attempts(count, seed):
        loaded += failure is None
        refused += isinstance(failure, ValueError)
        if failure is not None and type(failure) is not ValueError:
            raw += 1
            place = traceback.extract_tb(failure.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            print(
                f"{said!r:.200}: {type(failure).__name__}: {failure!r:.150} ({where})", flush=True
            )
    print(f"{count} folders: {loaded} loaded, {refused} refused, {raw} ended in another error")


if __name__ == "__main__":
    main()
