"""A training step with LoRA beside peft's, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/lora.py

The shipped model's shape, 4 rows of 128 tokens, rank 8 on all linear layers but the head: forward,
loss, backward, AdamW. Ours, peft on the same model of ours (only the adapters differ), peft on
transformers' model, and ours with all weights trained. CPU time; prints the medians and the median
over the rounds of each to peft's on the same model in the same round.
"""

import copy
import statistics
import time
import warnings

import torch
import transformers
from torch import nn

from minillm import CausalLM, ModelConfig, add_lora

warnings.simplefilter("ignore")
import peft  # noqa: E402 (it warns when imported)

B, T, RANK, ROUNDS = 4, 128, 8, 30
SHAPE = {"vocab_size": 1456, "hidden_size": 224, "intermediate_size": 608, "head_dim": 32}
SHAPE |= {"num_hidden_layers": 3, "num_attention_heads": 7, "num_key_value_heads": 7}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def contenders() -> dict[str, nn.Module]:
    base = CausalLM(ModelConfig(**SHAPE, model_type="qwen3", tie_word_embeddings=True))
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    )
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS)
    ours, full = copy.deepcopy(base), copy.deepcopy(base)
    add_lora(ours, RANK, RANK, TARGETS)
    same = copy.deepcopy(base)
    peft.inject_adapter_in_model(config, same)
    for name, p in same.named_parameters():
        p.requires_grad_("lora_" in name)
    whole = peft.get_peft_model(theirs, config)
    return {"ours": ours, "peft": same, "peft, transformers": whole, "all weights": full}


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (B, T + 1))
    models = contenders()
    steps = {}
    for name, model in models.items():
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        steps[name] = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        print(f"{name:20} {sum(p.numel() for p in trained):9,} trained")
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(ROUNDS + 2):
        for name, model in models.items():
            start = time.process_time()
            found = model(ids[:, :-1])
            logits = getattr(found, "logits", found)
            nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            steps[name].step()
            steps[name].zero_grad()
            if i > 1:
                times[name].append(time.process_time() - start)
    print(
        f"torch {torch.__version__}, peft {peft.__version__}, {torch.get_num_threads()} thread(s)"
    )
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["peft"], strict=True))
        print(f"{name:20} {1e3 * statistics.median(found):7.1f} ms   {ratio:.2f} of peft's")


if __name__ == "__main__":
    main()
