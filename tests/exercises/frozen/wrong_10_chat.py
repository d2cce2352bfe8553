"""Wrong answers of 10_chat: exercise, answer, words that its message holds."""

COMPUTED = {
    "nothing is kept": 70,
    "the cache is kept": 11,
    "the template drops the first answer's 12 tokens of thought, which came first": 28,
    "the template writes the time into the system message, after 5 tokens": 65,
    "the answer was stopped after 15 tokens; the template writes its end token": 12,
}


def agree(held, prompt):
    n = 0
    while n < min(len(held), len(prompt)) and held[n] == prompt[n]:
        n += 1
    return n


def no_scores(held, lengths, prompt):
    return min(agree(held, prompt), *lengths)


def first_layer(held, lengths, prompt):
    return min(agree(held, prompt), lengths[0], len(prompt) - 1)


def last_layer(held, lengths, prompt):
    return min(agree(held, prompt), lengths[-1], len(prompt) - 1)


def no_layers(held, lengths, prompt):
    return min(agree(held, prompt), len(prompt) - 1)


def alike_anywhere(held, lengths, prompt):
    return min(len({*held} & {*prompt}), *lengths, len(prompt) - 1)


def work(n, q, a):
    return sum(i * (q + a) + q + a - 1 for i in range(n)), n * (q + a) - 1


def last_computed_too(n, q, a):
    return sum((i + 1) * (q + a) for i in range(n)), n * (q + a)


def questions_only(n, q, a):
    return n * (q + a - 1), n * (q + a) - 1


def last_never_computed(n, q, a):
    return work(n, q, a)[0], n * (q + a - 1)


THOUGHT = "the template drops the first answer's 12 tokens of thought, which came first"

TIME = "the template writes the time into the system message, after 5 tokens"

STOPPED = "the answer was stopped after 15 tokens; the template writes its end token"

WRONG = [
    ("10_chat.1", no_scores, "no scores yet"),
    ("10_chat.1", first_layer, "positions only"),
    ("10_chat.1", last_layer, "a layer holds"),
    ("10_chat.1", no_layers, "a layer holds"),
    ("10_chat.1", alike_anywhere, "after the first difference"),
    ("10_chat.1", lambda held, lengths, prompt: prompt, "a number of positions"),
    ("10_chat.1", lambda held, lengths, prompt: 0, "positions may stay, not 0"),
    ("10_chat.2", {**COMPUTED, "nothing is kept": 10}, "the whole prompt"),
    ("10_chat.2", {**COMPUTED, "the cache is kept": 10}, "drawn and not computed"),
    ("10_chat.2", {**COMPUTED, THOUGHT: 12}, "stands before the thought"),
    ("10_chat.2", {**COMPUTED, TIME: 11}, "after the first difference"),
    ("10_chat.2", {**COMPUTED, STOPPED: 11}, "the end token that nobody drew"),
    ("10_chat.2", {**COMPUTED, STOPPED: ...}, "not filled in yet"),
    ("10_chat.2", 11, "a dictionary"),
    ("10_chat.3", last_computed_too, "drawn, not computed"),
    ("10_chat.3", questions_only, "all that was said before"),
    ("10_chat.3", last_never_computed, "a turn later"),
    ("10_chat.3", lambda n, q, a: work(n, q, a)[::-1], "first all anew"),
    ("10_chat.3", lambda n, q, a: work(n, q, a)[0], "two numbers"),
    ("10_chat.3", lambda n, q, a: (work(n, q, a)[0] + 3 * n, n * (q + a) - 1), "all anew it is"),
]
