"""A vocabulary as a whole: which merges make its tokens, and which of them a smaller one keeps.

Explained in notebooks/deeper/02_tokenizer_files.
"""

# Built from notebooks/deeper/02_tokenizer_files.ipynb: edit there, then make build.

from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any

from minillm.bpe import BPETokenizer, merge_word
from minillm.deeper.tokenizer.foreign import ForeignTokenizer

__all__ = ["find_merges", "prune"]


def find_merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Each token of two bytes or more, in order, with the parts that lower ranks make of it.

    Two parts are the merge that makes the token; more mean that no merge of two tokens does.
    """
    lower: dict[bytes, int] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            yield token, merge_word(token, lower)
        lower[token] = ranks[token]


def prune(tokenizer: BPETokenizer, keep_ids: Iterable[int]) -> tuple[BPETokenizer, list[int]]:
    """A smaller tokenizer, and the old id of each of its ids: new embedding = old[old_ids].

    Kept are the bytes, special and added tokens, `keep_ids` and the tokens they are merged
    from: a text whose old ids are all kept is cut into the same tokens.
    """
    named = {**tokenizer.special_tokens, **tokenizer.added_tokens}
    keep = {*map(index, keep_ids), *named.values()}
    if unknown := keep.difference(tokenizer.ranks.values(), named.values()):
        raise ValueError(f"no token has the id {min(unknown)}; there are {len(tokenizer)} ids")
    for token, parts in reversed([*find_merges(tokenizer.ranks)]):
        if tokenizer.ranks[token] in keep:
            keep.update(tokenizer.ranks[part] for part in parts)
    old_ids = sorted(keep | {i for token, i in tokenizer.ranks.items() if len(token) == 1})
    new_id = {old: new for new, old in enumerate(old_ids)}
    ranks = {token: new_id[i] for token, i in tokenizer.ranks.items() if i in new_id}
    special = {token: new_id[i] for token, i in tokenizer.special_tokens.items()}
    names = ("bos_token", "eos_token", "pad_token", "add_bos")
    options: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    if isinstance(tokenizer, ForeignTokenizer):
        more = ("normalizer", "chat_template", "drop_unknown_bytes", "named_tokens")
        options |= {name: getattr(tokenizer, name) for name in more}
        options["added_tokens"] = {t: new_id[i] for t, i in tokenizer.added_tokens.items()}
    return type(tokenizer)(ranks, tokenizer.pattern, special, **options), old_ids
