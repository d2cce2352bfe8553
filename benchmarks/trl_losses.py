"""Losses of trl on fixed numbers, frozen in tests/trl_losses.json: an oracle of page 18.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch pandas
    /tmp/trl/bin/python benchmarks/trl_losses.py

trl's own methods compute them (`GRPOTrainer._compute_loss`, `DPOTrainer._compute_loss`); a model
that returns the numbers given stands in the place of a network. The gradients are those with
respect to the log-probabilities of the tokens drawn. trl is no requirement of this repository.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

FILE = Path(__file__).resolve().parents[1] / "tests" / "trl_losses.json"
B, T, BETA = 8, 5, 0.2  # two groups of four


def grpo(
    drawn: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor, corrected: bool
) -> torch.Tensor:
    """The loss of one batch, on policy, without padding."""
    options: Any = {"beta": BETA, "loss_type": "grpo", "use_bias_correction_kl": corrected}
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)
    values = {name: getattr(args, name) for name in vars(args)}
    itself = SimpleNamespace(**values)
    itself.args, itself.model = args, torch.nn.Linear(1, 1).eval()
    itself.epsilon_low = itself.epsilon_high = args.epsilon
    itself.aux_loss_enabled = itself._entropy_bonus_enabled = False
    itself.off_policy_mask_threshold, itself.use_vllm = None, False
    itself.current_gradient_accumulation_steps = 1
    itself._metrics = defaultdict(lambda: defaultdict(list))
    itself.accelerator = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, **_: x, gather_for_metrics=lambda x: x, num_processes=1
    )
    itself._get_per_token_logps_and_entropies = lambda *a, **k: (drawn, torch.zeros(B, T), None)
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T, dtype=torch.long),
        "advantages": advantages,
        "ref_per_token_logps": ref,
    }
    return GRPOTrainer._compute_loss(itself, itself.model, inputs)


def dpo(drawn: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """The loss of B / 2 pairs: the chosen rows first, then the rejected ones."""
    args = DPOConfig(output_dir="unused", beta=BETA, use_cpu=True, bf16=False)
    itself = SimpleNamespace(**{name: getattr(args, name) for name in vars(args)})
    itself.args, itself.model = args, torch.nn.Linear(1, 1).eval()
    itself.loss_types, itself.loss_weights = ["sigmoid"], [1.0]
    itself.precompute_ref_logps, itself.aux_loss_enabled = True, False
    itself._metrics, itself._tp_size = defaultdict(lambda: defaultdict(list)), 1
    itself._total_train_tokens = 0
    itself.accelerator = SimpleNamespace(
        gather_for_metrics=lambda x: x, device=torch.device("cpu"), gather=lambda x: x
    )
    nothing = torch.zeros(B, T)  # of these only the metrics are made
    outputs: Any = SimpleNamespace(
        log_probs=drawn, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    ref_chosen, ref_rejected = ref.sum(-1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(B, T + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, T + 1, dtype=torch.long),
        "completion_mask": torch.tensor([0] + [1] * T).expand(B, -1),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    return DPOTrainer._compute_loss(itself, lambda **k: outputs, inputs, False)


def main() -> None:
    generator = torch.Generator().manual_seed(18)
    drawn = -3 * torch.rand(B, T, generator=generator)
    ref = -3 * torch.rand(B, T, generator=generator)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1])
    groups = rewards.view(2, 4)
    spread = groups.std(-1, keepdim=True) + 1e-4  # as GRPOTrainer's scale_rewards="group"
    advantages = ((groups - groups.mean(-1, keepdim=True)) / spread).flatten()
    found: dict[str, Any] = {"trl": trl.__version__, "beta": BETA, "rewards": rewards.tolist()}
    found |= {"drawn": drawn.tolist(), "ref": ref.tolist()}
    for name, loss in {
        "grpo": lambda x: grpo(x, ref, advantages, corrected=False),
        "grpo, corrected": lambda x: grpo(x, ref, advantages, corrected=True),
        "dpo": lambda x: dpo(x, ref),
    }.items():
        leaf = drawn.clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        found[name] = {"loss": value.item(), "gradient": leaf.grad.tolist()}
        print(name, value.item())
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
