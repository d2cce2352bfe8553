"""Conversations to ids and a loss mask, interleaved with transformers' `apply_chat_template`.

    OMP_NUM_THREADS=1 python benchmarks/answers.py

The same template with generation marks, the same tokenizer (of 1,000 tokens), the same 400
conversations of one, two and three turns about a story; the results are compared first. CPU time;
prints the medians over the rounds, in microseconds a conversation, and the median ratio of ours to
theirs in the same round (below 1: ours is quicker). Ours fills templates in another process: what
that takes is printed beside it, and is not in the ratio.
"""

import os
import statistics
import tempfile
import time
from typing import Any

import transformers

from minillm.beyond.answers.conversations import conversation_example
from minillm.beyond.answers.sft import Example
from minillm.bpe import BPETokenizer
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.stories.language import StoryLanguage
from minillm.support import fence

ROUNDS, CONVERSATIONS = 11, 400
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def conversations(stories: list[str]) -> list[list[dict[str, str]]]:
    """Each story in halves, as what is asked and what is answered, one to three times."""
    found = []
    for i in range(CONVERSATIONS):
        messages = []
        for turn in range(i % 3 + 1):
            text = stories[(i + turn) % len(stories)]
            messages += [{"role": "user", "content": text[: len(text) // 2]}]
            messages += [{"role": "assistant", "content": text[len(text) // 2 :]}]
        found.append(messages)
    return found


def main() -> None:
    stories = StoryLanguage("en").corpus(CONVERSATIONS, seed=0)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = BPETokenizer.train(stories, 1000, special_tokens=names)
    ours = ForeignTokenizer(
        trained.ranks,
        trained.pattern,
        trained.special_tokens,
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    with tempfile.TemporaryDirectory() as folder:
        ours.save(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    talks = conversations(stories)

    def one_by_one() -> list[Any]:
        return [conversation_example(ours, talk) for talk in talks]

    def by_transformers() -> list[Any]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        made = [theirs.apply_chat_template(talk, **options) for talk in talks]
        return [Example(m["input_ids"], [bool(x) for x in m["assistant_masks"]]) for m in made]

    assert one_by_one() == by_transformers()
    calls = {"ours": one_by_one, "transformers": by_transformers}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append((time.process_time() - start) / len(talks) * 1e6)
    for name, found in times.items():
        print(f"{name:14} {statistics.median(found):8.0f} microseconds a conversation")
    fence.stop()  # only then its time is known
    ended = os.times()
    apart = (ended.children_user + ended.children_system) / (ROUNDS + 1) / len(talks) * 1e6
    print(f"in the other process {apart:.0f}")
    ratios = [a / b for a, b in zip(times["ours"], times["transformers"], strict=True)]
    print(f"ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
