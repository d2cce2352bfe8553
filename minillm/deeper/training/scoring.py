"""How probable a text is to a model: each token's log-probability, bits per byte by windows.

Written by hand. Whole documents, each alone, are for `minillm.training`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from minillm.bpe import well_formed
from minillm.support.checks.texts import check_text, check_tokenizer
from minillm.support.checks.words import our_words
from minillm.support.modes import EvalMode
from minillm.training import begin_id


@torch.no_grad()
def token_log_probs(
    model: nn.Module, input_ids: Tensor, *, attention_mask: Tensor | None = None
) -> Tensor:
    """The log-probability, in nats, of each token but the first, after those before it.

    Of what was generated after a prompt of T ids:

        ids = generate(model, prompt, max_new_tokens=20)
        log_probs = token_log_probs(model, ids)[:, T - 1 :]  # (B, 20)

    These are the model's own, whatever a sampler did. Rows that ended are filled with the pad or
    end token: leave those numbers out. They carry no gradient: a loss of your own takes
    `model(ids).log_softmax(-1)`.
    Shape: (B, T) ids, (B, T) mask with padding on the left -> (B, T - 1).
    Raises: ValueError as the model does, for ids that are no tensor (B, T).
    """
    given = {} if attention_mask is None else {"attention_mask": attention_mask[:, :-1]}
    with EvalMode(model):
        logits = model(input_ids[:, :-1], **given).float()
    return logits.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)


@our_words
def evaluate_text(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
) -> float:
    """Bits per byte of one long text, read in windows that overlap; the work grows with its length.

    Each window moves on by `stride` tokens (None: half of it), and only tokens that no window has
    counted yet count: all but the first window's have at least window - stride tokens before them.
    What `begin_id` names stands before the text; for a tokenizer without such a token the first
    token has nothing to be predicted from, and its bytes are left out.

        bits = evaluate_text(model, tokenizer, Path("my.txt").read_text("utf-8"), window=256)

    Args:
        window: tokens that the model reads at once (None: its context, 1024 at most).
    Raises: ValueError for several texts or none, and for sizes that do not fit.
    """
    check_tokenizer(tokenizer)
    check_text(text)
    known = getattr(getattr(model, "config", None), "max_position_embeddings", 1024)
    window = min(known, 1024) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride} must be from 1 to the window, {window}")
    text = well_formed(text)
    ids, begin = tokenizer.encode_ordinary(text), begin_id(tokenizer)
    num_bytes = len(text.encode())
    if begin is None:
        num_bytes -= len(tokenizer.decode_bytes(ids[:1]))
    else:
        ids = [begin, *ids]
    if len(ids) < 2 or not num_bytes:
        raise ValueError(f"nothing to measure in {text!r:.40}: {len(ids)} tokens")
    device, nats, counted = next(model.parameters()).device, 0.0, 1
    for start in range(0, len(ids) - 1, stride):
        piece = torch.tensor([ids[start : start + window + 1]], device=device)
        log_probs = token_log_probs(model, piece)[0]
        new = start + piece.shape[1] - counted  # tokens that no window has counted
        nats -= float(log_probs[-new:].double().sum())
        counted += new
        if counted == len(ids):
            break
    return nats / math.log(2) / num_bytes
