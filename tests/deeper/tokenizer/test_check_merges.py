"""The check of a list of merges: as strict as merging every token anew, and right about ids."""

import random
import time
import tracemalloc
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import trained
from tokenizers import Tokenizer, models

from minillm.bpe import GPT4_PATTERN, BPETokenizer
from minillm.deeper.tokenizer.hf_json import check_merges, spell, splits
from minillm.deeper.tokenizer.vocabulary import find_merges

BYTES = {bytes([byte]): byte for byte in range(256)}


def accepts(check, *arguments, **options):
    try:
        check(*arguments, **options)
    except ValueError:
        return False
    return True


def merge_every_token(ranks, merges, *, whole_words=False):
    """What the check says, the long way: every token is merged by the ranks below its own."""
    listed, last = defaultdict(set), -1
    for left, right in merges:
        rank = ranks.get(left + right)
        if rank is None or left not in ranks or right not in ranks or rank < last:
            raise ValueError("unknown, or out of order")
        last = rank
        listed[left + right].add((left, right))
    for token, parts in find_merges(ranks):
        if len(parts) == 2 and tuple(parts) not in listed[token]:
            raise ValueError("not listed")
        if len(parts) > 2 and not (whole_words and listed[token] == {*splits(token, ranks)}):
            raise ValueError("no merge makes it")


def random_file(rng, *, odd):
    """A vocabulary of few letters and a list of merges, as a converter or a trainer writes it.

    If `odd`, some tokens are made of no two others, and some merges are wrong.
    """
    letters = [b"a", b"b", b"c"][: rng.choice([1, 2, 3])]
    tokens, ranks = list(letters), dict(BYTES)
    for _ in range(rng.randrange(1, 14)):
        token = rng.choice(tokens) + rng.choice(tokens)
        if odd and rng.random() < 0.15:
            token = b"".join(rng.choices(letters, k=rng.randrange(2, 6)))
        if token not in ranks:
            tokens.append(token)
            ranks[token] = len(ranks) + rng.randrange(3) * 300
    ranks = dict(zip(ranks, sorted(ranks.values()), strict=True))
    made = dict(find_merges(ranks))
    merges = []
    for token, parts in made.items():
        ways = splits(token, ranks)
        if len(parts) == 2 and rng.random() < 0.6:
            ways = [tuple(parts)]
        if odd and ways and rng.random() < 0.1:
            ways = [rng.choice(ways)]
        merges += ways
    if odd and merges and rng.random() < 0.3:
        i, j = rng.randrange(len(merges)), rng.randrange(len(merges))
        merges[i], merges[j] = merges[j], merges[i]
    if odd and merges and rng.random() < 0.2:
        del merges[rng.randrange(len(merges))]
    return ranks, merges


@settings(max_examples=1500)
@given(seed=st.integers(0, 10**9), odd=st.booleans(), whole_words=st.booleans())
def test_it_is_as_strict_as_merging_every_token(seed, odd, whole_words):
    ranks, merges = random_file(random.Random(seed), odd=odd)
    expected = accepts(merge_every_token, ranks, merges, whole_words=whole_words)
    assert accepts(check_merges, ranks, merges, whole_words=whole_words) == expected
    spelled = {spell(token): i for token, i in ranks.items()}
    pairs = [(spell(left), spell(right)) for left, right in merges]
    assert accepts(check_merges, spelled, pairs, whole_words=whole_words) == expected


def test_the_random_files_are_of_both_kinds():
    rng, found = random.Random(0), [0, 0]
    for _ in range(1000):
        found[accepts(check_merges, *random_file(rng, odd=True), whole_words=True)] += 1
    assert min(found) > 200


@settings(max_examples=300)
@given(seed=st.integers(0, 10**9), text=st.text("abc", min_size=1, max_size=14))
def test_what_it_accepts_gives_the_ids_of_tokenizers(seed, text):
    ranks, merges = random_file(random.Random(seed), odd=True)
    if not accepts(check_merges, ranks, merges, whole_words=True):
        return
    spelled = {spell(token): i for token, i in ranks.items()}
    pairs = [(spell(left), spell(right)) for left, right in merges]
    theirs = Tokenizer(models.BPE(spelled, pairs, ignore_merges=True))
    assert BPETokenizer(ranks, r"(?s:.+)").encode(text) == theirs.encode(text).ids


def test_a_token_that_no_merge_makes_is_looked_for_inside_others():
    """`cab` has a lower rank than the `ab` it would need; inside `cabd` it is made after all."""
    ranks = BYTES | {b"cab": 256, b"ab": 257, b"cabd": 258}  # c, ab make cab after all
    assert dict(find_merges(ranks))[b"cab"] == [b"c", b"a", b"b"]
    assert dict(find_merges(ranks))[b"cabd"] == [b"cab", b"d"]
    merges = [(b"c", b"ab"), (b"a", b"b"), (b"cab", b"d")]
    check_merges(ranks, merges, whole_words=True)
    with pytest.raises(ValueError, match=r"no merge makes the token b'cab'"):
        check_merges(ranks, merges)
    with pytest.raises(ValueError, match=r"b'cabd' should be merged from \[b'cab', b'd'\]"):
        check_merges(ranks, merges[:-1], whole_words=True)


@pytest.mark.parametrize("damage", ["lost", "moved", "halves", "ranks"])
def test_one_damaged_line_among_many_is_found(damage):
    rng = random.Random(0)
    tokenizer = trained(GPT4_PATTERN)
    ranks, merges = tokenizer.ranks, tokenizer.merges
    tokens = [left + right for left, right in merges]
    check_merges(ranks, merges)
    for _ in range(60):
        changed, values, i = list(merges), dict(ranks), rng.randrange(len(merges) - 1)
        token = b"".join(merges[i])
        if damage == "lost":
            del changed[i]
        elif damage == "moved":
            changed[i], changed[i + 1] = changed[i + 1], changed[i]
        elif damage == "halves":
            ways = [pair for pair in splits(token, ranks) if pair != merges[i]]
            changed[i] = ways[0] if ways else (b"?", b"?")
        else:
            other = tokens[i + 1]
            values[token], values[other] = values[other], values[token]
        with pytest.raises(ValueError, match=r"not listed|order of ids|no merge|not in the voc"):
            check_merges(values, changed)


def test_an_unknown_merge_at_the_very_beginning():
    merges = [(b"a", b"b"), (b"a", b"c")]
    with pytest.raises(ValueError, match=r"merge of b'a' and b'b' is not in the vocabulary"):
        check_merges(BYTES | {b"ac": 256}, merges)
    check_merges(BYTES | {b"ac": 256}, merges[1:])


@pytest.mark.parametrize("token", ["a" * 60_000, b"a" * 60_000, "ab" * 501])
@pytest.mark.parametrize("whole_words", [True, False])
def test_a_token_of_great_length_is_refused_at_once(token, whole_words):
    letters = {token[i : i + 1]: i for i in range(2)}
    tracemalloc.start()
    with pytest.raises(ValueError, match="is too long: at most 1,000 are read") as found:
        check_merges({**letters, token: 300}, [], whole_words=whole_words)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20 and len(str(found.value)) < 150
    tracemalloc.stop()
    check_merges({**letters, token[:1000]: 300}, [], whole_words=True)


def test_all_ways_to_cut_a_token_are_found_without_keeping_all_halves():
    tracemalloc.start()
    assert splits("a" * 20_000 + "b", {"a": 0, "a" * 20_000: 1, "b": 2}) == [("a" * 20_000, "b")]
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_many_tokens_that_no_merge_makes_are_not_looked_for_in_each_other():
    def seconds(count):
        ranks = BYTES | {b"aaa%06d" % i: 256 + i for i in range(count)}
        start = time.process_time()
        check_merges(ranks, [], whole_words=True)
        with pytest.raises(ValueError, match="no merge makes the token b'aaa000000'"):
            check_merges(ranks, [])
        return time.process_time() - start

    few = min(seconds(2000) for _ in range(3))
    assert seconds(20_000) < 40 * few  # each in each of the others: 100 times
