"""Examples for fine-tuning from a file of JSON lines, in the two forms that trl knows.

Written by hand; what an example is, and which of its tokens are learned, is explained in
beyond/13_answers. Source: trl's documentation, "Dataset formats and types".
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from minillm.beyond.answers.conversations import conversation_example
from minillm.beyond.answers.sft import Example, token_mask
from minillm.support.checks.texts import check_tokenizer
from minillm.support.checks.words import quoted


def completion_example(tokenizer: Any, prompt: str, completion: str) -> Example:
    """A prompt and what shall follow it as ids; only the completion and its end are learned.

    The begin token comes first if the tokenizer has `add_bos`, the end token last if it has one. A
    token on the border that holds a piece of both is learned.
    Raises: ValueError for what is no text, or a completion without a token.
    """
    check_tokenizer(tokenizer)
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, not {quoted(value)}")
    text = prompt + completion
    ids = tokenizer.encode_ordinary(text)
    mask = token_mask(tokenizer, text, ids, [(len(prompt), len(text))])
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if getattr(tokenizer, "add_bos", False) and begin is not None and ids[:1] != [begin]:
        ids, mask = [begin, *ids], [False, *mask]
    if end is not None:
        ids, mask = [*ids, end], [*mask, True]
    if not completion or not any(mask[1:]):
        raise ValueError(f"nothing to learn in the completion {completion!r:.40}")
    return Example(ids, mask)


def read_examples(tokenizer: Any, path: str | os.PathLike[str]) -> list[Example]:
    """The examples of a JSON lines file, for `ConversationBatches`.

    A line is {"messages": [{"role": ..., "content": ...}, ...]}, which the tokenizer's chat
    template writes; or {"prompt": ..., "completion": ...}, both texts, or both lists of messages.
    Other keys are passed over, empty lines too.

        examples = read_examples(tokenizer, "train.jsonl")
        batches = ConversationBatches(examples, batch_size=8, context_length=512)

    Raises: ValueError, with the number of the line, for one of another form; FileNotFoundError.
    """
    check_tokenizer(tokenizer)
    if not isinstance(path, str | os.PathLike):
        kind = f"conversations in memory are for conversation_examples, not {quoted(path)}"
        raise ValueError(f"path must be the name of a file; {kind}")
    examples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                examples.append(_example(tokenizer, json.loads(line)))
            except ValueError as error:  # no JSON is one, too
                raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from None
    if not examples:
        raise ValueError(f"{os.fspath(path)} holds no example")
    return examples


def _example(tokenizer: Any, record: Any) -> Example:
    if not isinstance(record, Mapping):
        raise ValueError(f"must be an object, not {quoted(record)}")
    if "messages" in record:
        return conversation_example(tokenizer, record["messages"])
    if not {"prompt", "completion"} <= record.keys():
        found = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"needs messages, or prompt and completion; it has {found}")
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversation_example(tokenizer, [*prompt, *completion])
    return completion_example(tokenizer, prompt, completion)
