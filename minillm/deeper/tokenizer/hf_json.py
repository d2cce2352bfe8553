"""The tokenizer's files: tokenizer.json saved and loaded, tiktoken's ranks, other libraries.

A file is written whole or not at all; what a file asks for and we lack is an error that names it.
Explained in notebooks/deeper/02_tokenizer_files.
"""

# Built from notebooks/deeper/02_tokenizer_files.ipynb: edit there, then make build.

import base64
import binascii
import gc
import hashlib
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minillm.bpe import GPT2_PATTERN, PATTERNS, BPETokenizer, merge_word
from minillm.deeper.tokenizer.beside import (
    ROLES,
    TOKENIZER_FILES,
    class_of,
    config_of,
    from_merges,
    named_tokens,
    numbered,
    spelling,
    tokens_to_add,
)
from minillm.deeper.tokenizer.chat_template import choose_template
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.merges import bytes_to_unicode
from minillm.deeper.tokenizer.oniguruma import read_alike
from minillm.deeper.tokenizer.patterns import WatchedPattern
from minillm.deeper.tokenizer.vocabulary import find_merges
from minillm.support.checks.kinds import NULL, SWITCH, TEXT, Kind, any_of, number
from minillm.support.checks.texts import BEGIN_TOKENS, END_TOKENS, check_utf8, is_id
from minillm.support.checks.words import quoted
from minillm.support.files import read_json, recover, transaction

__all__ = [
    "CONFIG_FIELDS",
    "DIGEST",
    "LONGEST_TOKEN",
    "NAMES",
    "TOKENIZER_FIELDS",
    "arguments",
    "check_fields",
    "check_merges",
    "digest",
    "load",
    "load_bpe",
    "no_collection",
    "read_config",
    "read_tiktoken",
    "read_tokenizer",
    "save",
    "spell",
    "splits",
    "to_hf",
    "to_json",
    "to_tiktoken",
    "tokenizer_config",
    "unspell",
]


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Ranks from a file of lines "base64-of-the-bytes rank", as tiktoken and Llama 3 ship.

    Raises: ValueError naming the first line that is damaged or whose rank does not rise.
    """
    ranks: dict[bytes, int] = {}
    last = -1
    for place, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            spelled, digits = line.split()
            token, rank = base64.b64decode(spelled, validate=True), int(digits)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}, line {place} is damaged: {line[:60]!r}") from None
        if rank <= last or token in ranks:
            raise ValueError(
                f"{path}, line {place}: rank {rank} after {last}, token {quoted(token)}"
            )
        ranks[token] = last = rank
    return ranks


_STAND_IN = bytes_to_unicode()

# What each character up to U+0143 stands for; those that stand for nothing become U+FFFF.
_BYTE = dict.fromkeys(range(324), 0xFFFF) | {ord(c): byte for byte, c in _STAND_IN.items()}


def spell(token: bytes) -> str:
    """A token's bytes as `tokenizer.json` writes them: b" the" is "Ġthe"."""
    return "".join(map(_STAND_IN.__getitem__, token))


def unspell(spelling: str) -> bytes:
    """The bytes that a spelling stands for. Raises: ValueError if it is not byte-level."""
    try:
        return spelling.translate(_BYTE).encode("latin-1")  # U+0000 to U+00FF as one byte each
    except UnicodeEncodeError:
        raise ValueError(
            f"token {quoted(spelling)} is not spelled in bytes: no byte-level BPE"
        ) from None


def splits(token: Any, ranks: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """All ways to make `token` of two others, in the order in which converters list them."""
    cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    pairs = [(token[:i], token[i:]) for i in cuts]
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


LONGEST_TOKEN = 1000  # to try where one can be cut costs its square; GPT-2's longest has 128


def check_merges(
    ranks: Mapping[Any, int], merges: Sequence[Sequence[Any]], *, whole_words: bool = False
) -> None:
    """Make sure that merging by rank does what the listed merges do, in their order.

    Tokens are bytes, or spelled as in a file.
    Raises: ValueError naming the first token or merge for which it does not, or a token that is
        longer than `LONGEST_TOKEN`.
    """
    if long := next((token for token in ranks if len(token) > LONGEST_TOKEN), None):
        start = f"{long[:40]!r}..., {len(long):,} characters"
        raise ValueError(f"the token {start}, is too long: at most {LONGEST_TOKEN:,} are read")
    # token -> its rank, itself, and the same of the two tokens that it is made of
    made: dict[Any, tuple[int, Any, Any, Any]]
    made = {token: (-1, token, None, None) for token in ranks if len(token) == 1}
    earliest: dict[Any, int] = {}  # two bytes at a border -> rank of the first token across it
    last, rank_of, made_of = 0, ranks.get, made.get
    for left, right in merges:
        token = left + right
        rank, halves, others = rank_of(token, -1), made_of(left), made_of(right)
        if rank < last or halves is None or others is None:
            if rank < last or left not in ranks or right not in ranks:
                _refuse_merge(left, right, ranks)
            last = rank
            continue  # `_merge_anew` will look into it
        if token in made:
            continue  # another way to make it, which never comes up
        last = rank
        first = earliest.setdefault((left[-1], right[0]), rank)
        (left_rank, left, _, inner), (right_rank, right, outer, _) = halves, others
        while left_rank >= first or right_rank >= first:  # before that nothing could be across
            if left_rank > right_rank:
                before = left_rank
                left_rank, left, _, inner = inner
                if rank_of(left + right, rank) < before:
                    break
            else:
                before = right_rank
                right_rank, right, outer, _ = outer
                if rank_of(left + right, rank) <= before:  # of two equals the left is first
                    break
        else:
            made[token] = (rank, token, halves, others)
    if len(made) < len(ranks):
        _merge_anew(ranks, merges, made, whole_words)


def _refuse_merge(left: Any, right: Any, ranks: Mapping[Any, int]) -> NoReturn:
    """Raise ValueError for a listed merge of unknown tokens, or out of the order of ids."""
    if not ranks.keys() >= {left, right, left + right}:
        raise ValueError(
            f"the merge of {quoted(left)} and {quoted(right)} is not in the vocabulary"
        )
    raise ValueError(f"the merge of {quoted(left)} and {quoted(right)} is out of the order of ids")


def _merge_anew(
    ranks: Mapping[Any, int],
    merges: Sequence[Sequence[Any]],
    made: Mapping[Any, Any],
    whole: bool,
) -> None:
    """The same check by merging, for tokens that are not in `made`, and for all that hold one."""
    unmade = defaultdict(list)  # by their first three bytes
    for token in ranks:
        if token not in made:
            unmade[tuple(token[:3])].append(token)
    doubtful = {token for tokens in unmade.values() for token in tokens}
    if len(doubtful) > 300:  # quicker to merge all of them than to look for so many
        doubtful = {*ranks}
    for token in ranks.keys() - doubtful:
        found = unmade.keys() & zip(token, token[1:], token[2:], strict=False)
        if any(inside in token for begin in found for inside in unmade[begin]):
            doubtful.add(token)
    listed = {(left, right) for left, right in merges if left + right in doubtful}
    lower: dict[Any, int] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        if token in doubtful:
            parts = merge_word(token, lower)
            if len(parts) == 2 and tuple(parts) not in listed:
                raise ValueError(
                    f"{quoted(token)} should be merged from {quoted(parts)}, which is not listed"
                )
            if len(parts) > 2 and not (whole and listed.issuperset(splits(token, ranks))):
                raise ValueError(
                    f"no merge makes the token {quoted(token)}, and ignore_merges does not help"
                )
        lower[token] = ranks[token]


DIGEST = "minillm_sha256"  # in the model's part of our files; other readers pass over it


def digest(content: Mapping[str, Any]) -> str:
    """A fingerprint of the content, itself left out, by which `load` notices edits."""
    model = {key: value for key, value in content["model"].items() if key != DIGEST}
    text = json.dumps({**content, "model": model}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def arguments(content: Mapping[str, Any], more: Sequence[Any] = ()) -> dict[str, Any]:
    """The arguments of `ForeignTokenizer` that the content of a `tokenizer.json` asks for.

    `more` are the tokens that the files beside it add.
    """
    model = content["model"]
    if DIGEST in model and model[DIGEST] != digest(content):
        raise ValueError(f"edited since it was saved (if on purpose, remove {DIGEST!r})")
    vocab = model["vocab"]
    added = numbered([*(content.get("added_tokens") or ()), *more], vocab)
    _refuse_unknown({**content, "added_tokens": added}, model)
    named: dict[bool, dict[str, int]] = {True: {}, False: {}}  # special or merely added -> ids
    for token in added:
        named[token.get("special", True)][token["content"]] = token["id"]
    ids = named[True] | named[False]
    if doubly := [name for name, i in ids.items() if vocab.get(name) == i]:
        if letters := [name for name in doubly if len(name) == 1]:  # other words need it, too
            raise ValueError(f"the letter {quoted(letters[0])} is an added token: not supported")
        vocab = {**vocab}
        for name in doubly:
            del vocab[name]
    ranks = {unspell(name): i for name, i in vocab.items()}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if DIGEST not in model:
        check_merges(vocab, pairs, whole_words=model.get("ignore_merges", False))
    found = {"ranks": ranks, "special_tokens": named[True], "added_tokens": named[False]}
    found["pattern"] = _pattern(content["pre_tokenizer"], ours=DIGEST in model)
    found["normalizer"] = "NFC" if _normalizer(content) else None
    found["drop_unknown_bytes"] = model.get("unk_token") is None  # as the library does
    begin = _begin_token(content.get("post_processor"))
    return {**found, "add_bos": True, "bos_token": begin} if begin else found


def _normalizer(content: Mapping[str, Any]) -> Any:
    """The file's normalizer; a sequence of one is that one, and a sequence of none is none."""
    found = content.get("normalizer")
    while found and found["type"] == "Sequence" and len(found["normalizers"]) < 2:
        found = found["normalizers"][0] if found["normalizers"] else None
    return found


def _refuse_unknown(content: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise ValueError for the first feature of the file that would change ids and that we lack."""
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"a model of type {quoted(model['type'])}, not byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key} = {quoted(model[key])} is not supported")
    for key in ("truncation", "padding"):
        if content.get(key):
            raise ValueError(f"{key} in the file is not supported: {content[key]}")
    normalizer = _normalizer(content)
    if normalizer and normalizer != {"type": "NFC"}:
        raise ValueError(f"normalizer {quoted(normalizer.get('type'))} is not supported, only NFC")
    decoder = content.get("decoder")
    if decoder and decoder["type"] != "ByteLevel":
        raise ValueError(f"decoder {quoted(decoder['type'])} is not byte-level BPE's")
    for token in content.get("added_tokens") or ():
        flags = ["single_word", "lstrip", "rstrip"] + ["normalized"] * bool(normalizer)
        for flag in flags:
            if token.get(flag):
                raise ValueError(
                    f"added token {quoted(token['content'])} with {flag} is not supported"
                )
    _refuse_overlap(content.get("added_tokens") or ())


def _refuse_overlap(tokens: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a normalized token may share letters of a text with one that is not.

    The library finds those that are not normalized first, whatever begins further left.
    """
    names: dict[bool, list[str]] = {True: [], False: []}
    for token in tokens:
        names[bool(token.get("normalized"))].append(token["content"])
    first, later = names[False], names[True]
    begins = {name[:n] for name in first for n in range(1, len(name) + 1)} if later else set()
    ends = {name[-n:] for name in first for n in range(1, len(name) + 1)} if later else set()
    together = "\0".join(first)
    for name in later:
        shared = any(name[:n] in ends or name[-n:] in begins for n in range(1, len(name) + 1))
        if shared or name in together or any(other in name for other in first):
            raise ValueError(
                f"added token {quoted(name)} is normalized and overlaps one that is not: "
                "not supported"
            )


def _pattern(pre_tokenizer: Mapping[str, Any] | None, *, ours: bool = False) -> str | list[str]:
    """The patterns of the Split and Digits steps, and ByteLevel's own at the end if it has one.

    One alone that is not published comes as a list: what it leaves out is a word as well.
    """
    steps = [pre_tokenizer or {"type": None}]
    if steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    *cuts, level = steps
    kinds = [step["type"] for step in steps]
    if level["type"] != "ByteLevel" or not {"Split", "Digits"}.issuperset(kinds[:-1]):
        raise ValueError(f"pre_tokenizer {kinds} is not supported: only Split, Digits, ByteLevel")
    if level.get("add_prefix_space"):
        raise ValueError("pre_tokenizer with add_prefix_space is not supported")
    own = [GPT2_PATTERN] if level.get("use_regex", True) else []
    patterns = [_cut_by(step, alone=len(cuts) + len(own) == 1, ours=ours) for step in cuts] + own
    if not patterns:
        raise ValueError("pre_tokenizer ByteLevel must cut by its own regex, or after another step")
    return patterns[0] if len(patterns) == 1 and patterns[0] in PATTERNS.values() else patterns


def _cut_by(step: Mapping[str, Any], *, alone: bool, ours: bool) -> str:
    """The pattern of one step, as `regex` reads it. None may take text away."""
    if step["type"] == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    how, pattern = (step["behavior"], step.get("invert", False)), step["pattern"].get("Regex")
    whole = alone and pattern in PATTERNS.values()  # there is no text between its words
    if pattern is None or not (how == ("Isolated", False) or (how == ("Removed", True) and whole)):
        raise ValueError(f"pre_tokenizer Split {step} is not supported")
    WatchedPattern(pattern)  # what is no regular expression at all says so
    return pattern if ours else read_alike(pattern, theirs=True)


def _begin_token(processor: Mapping[str, Any] | None) -> str | None:
    """The begin token that a post-processor adds to a text, if it adds any."""
    steps = [processor] if processor else []
    if processor and processor["type"] == "Sequence":
        steps = processor["processors"]
    steps = [step for step in steps if step["type"] != "ByteLevel"]  # that one moves offsets only
    if not steps:
        return None
    if len(steps) > 1 or steps[0]["type"] != "TemplateProcessing":
        raise ValueError(f"post_processor {[step['type'] for step in steps]} is not supported")
    *before, last = steps[0]["single"]
    if "Sequence" not in last or len(before) > 1 or any("SpecialToken" not in b for b in before):
        raise ValueError("post_processor adds more than one begin token")
    return before[0]["SpecialToken"]["id"] if before else None


def to_json(tokenizer: "BPETokenizer") -> dict[str, Any]:
    """The content of `tokenizer.json`.

    Tokens that no merge makes (some vocabularies have them) are listed with all their splits, and
    `ignore_merges` lets a whole word be one of them, as Llama 3's file does.
    Raises: ValueError if a special or added token is spelled as the file spells another, or for a
        pattern that other libraries would read otherwise.
    """
    ranks, whole_words = tokenizer.ranks, False
    merges: list[tuple[bytes, ...]] = []
    for token, parts in find_merges(ranks):
        whole_words |= len(parts) > 2
        merges += [tuple(parts)] if len(parts) == 2 else splits(token, ranks)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = tokenizer.special_tokens
    named = _by_id({**special, **tokenizer.added_tokens})
    added = [{"id": i, "content": t, **flags, "special": t in special} for t, i in named.items()]
    pattern = tokenizer.pattern
    patterns = [pattern] if isinstance(pattern, str) else pattern
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    alike = [read_alike(one, theirs=False) for one in patterns]
    cuts: list[dict[str, Any]] = [{**split, "pattern": {"Regex": one}} for one in alike]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    model |= {"byte_fallback": False, "ignore_merges": whole_words}
    model["vocab"] = _vocabulary(ranks, named)
    model["merges"] = [[spell(left), spell(right)] for left, right in merges]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": tokenizer.normalizer and {"type": tokenizer.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, level]},
        "post_processor": _begin_template(tokenizer) if tokenizer.add_bos else None,
        "decoder": level,
        "model": model,
    }
    model[DIGEST] = digest(content)
    return content


def _by_id(ids: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _vocabulary(ranks: Mapping[bytes, int], named: Mapping[str, int]) -> dict[str, int]:
    """The spelling and the id of every token, special ones included.

    Of an added token that is missing here, `tokenizers` overlooks the id, and numbers it itself.
    """
    vocab = {spell(token): i for token, i in ranks.items()}
    if alike := vocab.keys() & named.keys():
        token = min(alike)
        raise ValueError(
            f"a file cannot tell the token {quoted(unspell(token))} from the name {quoted(token)}"
        )
    return _by_id({**vocab, **named})


def _begin_template(tokenizer: "BPETokenizer") -> dict[str, Any]:
    name, i = tokenizer.bos_token, tokenizer.bos_token_id
    begin = [{"SpecialToken": {"id": name, "type_id": n}} for n in (0, 1)]
    text = [{"Sequence": {"id": "AB"[n], "type_id": n}} for n in (0, 1)]
    return {
        "type": "TemplateProcessing",
        "single": [begin[0], text[0]],
        "pair": [begin[0], text[0], begin[1], text[1]],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]}},
    }


if TYPE_CHECKING:
    from minillm.bpe import BPETokenizer

NAMES = ("bos_token", "eos_token", "pad_token")

_TEMPLATE = "chat_template.jinja"


def tokenizer_config(tokenizer: Any) -> dict[str, Any]:
    """What `tokenizer_config.json` says of a tokenizer of either class.

    Of one that was loaded, a token that the files did not name is guessed again by the next reader.
    """
    found = {name: getattr(tokenizer, name) for name in NAMES}
    if (named := tokenizer.named_tokens) is not None:
        known, usual = (
            tokenizer.special_tokens,
            {"bos_token": BEGIN_TOKENS, "eos_token": END_TOKENS},
        )
        guess = {n: next((t for t in tokens if t in known), None) for n, tokens in usual.items()}
        guess["pad_token"] = tokenizer.eos_token
        if tokenizer.add_bos:
            guess["bos_token"] = tokenizer.bos_token  # the tokenizer's file says it
        found = {n: token for n, token in found.items() if n in named or token != guess[n]}
        found = {**named, **found}
    found["chat_template"] = tokenizer.chat_template
    found = {"tokenizer_class": "PreTrainedTokenizerFast", **found}
    return {key: value for key, value in found.items() if value is not None}


def save(tokenizer: "BPETokenizer", directory: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face reads; both whole.

    Raises: ValueError as `to_json`, before anything is written.
    """
    files = {
        "tokenizer_config.json": tokenizer_config(tokenizer),
        "tokenizer.json": to_json(tokenizer),
    }
    # files of an older tokenizer would be read beside the new ones
    with transaction(Path(directory), remove=TOKENIZER_FILES) as staging:
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False, indent=1)
            (staging / name).write_text(text, encoding="utf-8")


_OBJECT: Kind = "an object", lambda value: isinstance(value, dict)

_LIST: Kind = "a list", lambda value: isinstance(value, list)

_TOKEN: Kind = "a token or null", lambda value: value is None or isinstance(value, str | dict)

_ID: Kind = "an id", is_id


def _is_merge(value: Any) -> bool:
    if isinstance(value, str):
        return value.count(" ") == 1
    return isinstance(value, list) and len(value) == 2 and all(isinstance(t, str) for t in value)


# A place in the file ("*": each item of a list or an object) -> what must stand there, if anything.
TOKENIZER_FIELDS: dict[str, Kind] = {
    "model": _OBJECT,
    "model.type": TEXT,
    "model.vocab": any_of(_OBJECT, _LIST),
    "model.vocab.*": ("an id or a scored piece", lambda value: is_id(value) or _is_scored(value)),
    "model.unk_id": any_of(_ID, NULL),
    "model.merges": _LIST,
    "model.merges.*": ("two tokens", _is_merge),
    "model.dropout": any_of(number("from 0 to 1", lambda x: 0 <= x <= 1), NULL),
    **dict.fromkeys(
        ("model.byte_fallback", "model.fuse_unk", "model.ignore_merges"), any_of(SWITCH, NULL)
    ),
    **dict.fromkeys(("model.unk_token", "model.continuing_subword_prefix"), any_of(TEXT, NULL)),
    "model.end_of_word_suffix": any_of(TEXT, NULL),
    "added_tokens": any_of(_LIST, NULL),
    "added_tokens.*": _OBJECT,
    "added_tokens.*.id": _ID,
    "added_tokens.*.content": ("some text", lambda value: isinstance(value, str) and value != ""),
    **{
        f"added_tokens.*.{flag}": any_of(SWITCH, NULL)
        for flag in ("special", "single_word", "lstrip", "rstrip", "normalized")
    },
    **dict.fromkeys(("truncation", "padding"), any_of(_OBJECT, NULL)),
    **{
        place: test
        for step, steps in (
            ("normalizer", "normalizers"),
            ("pre_tokenizer", "pretokenizers"),
            ("post_processor", "processors"),
            ("decoder", "decoders"),
        )
        for place, test in (
            (step, any_of(_OBJECT, NULL)),
            (f"{step}.type", TEXT),
            (f"{step}.{steps}", _LIST),
            (f"{step}.{steps}.*", _OBJECT),
            (f"{step}.{steps}.*.type", TEXT),
            (f"{step}.{steps}.*.pattern.Regex", TEXT),
            (f"{step}.pattern.Regex", TEXT),
            (f"{step}.{steps}.*.individual_digits", any_of(SWITCH, NULL)),
        )
    },
}

CONFIG_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(ROLES, _TOKEN),
    **{f"{name}.content": TEXT for name in ROLES},
    "chat_template": any_of(TEXT, _LIST, NULL),
    "chat_template.*": _OBJECT,
    **dict.fromkeys(("chat_template.*.name", "chat_template.*.template"), TEXT),
    **{
        place: test
        for name in ("additional_special_tokens", "extra_special_tokens")
        for place, test in (
            (name, any_of(_LIST, _OBJECT, NULL)),
            (f"{name}.*", _TOKEN),
            (f"{name}.*.content", TEXT),
        )
    },
    "added_tokens_decoder": any_of(_OBJECT, NULL),
    "added_tokens_decoder.*": _OBJECT,
}


def _is_scored(value: Any) -> bool:
    """A piece of a Unigram model: its text and a finite score."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        return False
    return isinstance(value[1], int | float) and abs(value[1]) < float("inf")


def check_fields(content: Mapping[str, Any], fields: Mapping[str, Kind]) -> None:
    """Raise ValueError for the first value of a file that is not what the table asks for."""
    for place, kind in fields.items():
        _check_field(content, place.split("."), "", kind)


def _check_field(value: Any, place: list[str], before: str, kind: Kind) -> None:
    (key, *rest), (wanted, fits) = place, kind
    items: Iterable[tuple[Any, Any]] = ()
    if key == "*" and isinstance(value, dict | list):
        values = value.values() if isinstance(value, dict) else value
        if not rest and all(map(fits, values)):
            return  # in one go, since there may be 100,000
        items = value.items() if isinstance(value, dict) else enumerate(value)
    elif isinstance(value, dict) and key in value:
        items = [(key, value[key])]
    for name, item in items:
        if rest:
            _check_field(item, rest, f"{before}{name}.", kind)
        elif not fits(item):
            raise ValueError(f"{before}{name} should be {wanted}, not {item!r:.60}")


def _check_ids(content: Mapping[str, Any]) -> None:
    """Raise ValueError if two tokens share an id, or one token has two."""
    vocab = content["model"].get("vocab", {})
    if isinstance(vocab, list):
        return  # its places are the ids
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    for name, i in added.items():
        if vocab.get(name, i) != i:
            raise ValueError(
                f"{quoted(name)} has the id {i} as added, {vocab[name]} as ordinary token"
            )
    ids = Counter({**vocab, **added}.values())
    if len(ids) < ids.total():
        shared = max(ids, key=ids.__getitem__)
        raise ValueError(f"two tokens share the id {shared}")


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's search for circles of objects: a large file makes none, in 400,000 lists."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_tokenizer(path: Path) -> dict[str, Any]:
    """What a `tokenizer.json` holds, of any kind, or vocab.json and merges.txt in its place.

    Raises: ValueError naming the file and the place if it is damaged or contradicts itself.
    """
    with suppress(OSError):  # a folder that cannot be written is read as it is
        recover(path.parent)  # from a save that was interrupted
    kind = class_of(path.parent)
    content = read_json(path) if kind is None else from_merges(path.parent, kind)
    try:
        check_fields(content, TOKENIZER_FIELDS)
        _check_ids(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a tokenizer file: {type(error).__name__} {error}") from None
    return content


def read_config(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The named tokens and the chat template that lie beside a `tokenizer.json`, None if missing.

    Under "more" are the tokens that are added to its content, under "special" those of all that
    are to be special beside the named ones.
    Raises: ValueError naming the file if one is damaged.
    """
    path, template = folder / "tokenizer_config.json", folder / _TEMPLATE
    config = config_of(folder)
    try:
        check_fields(config, CONFIG_FIELDS)
        roles, further = named_tokens(folder, config)
        named = {name: spelling(token) for name, token in roles.items()}
        found: dict[str, Any] = {name: named.get(name) for name in NAMES}
        found |= {"named_tokens": named, "more": tokens_to_add(folder, config, content)}
        if not template.exists():
            found["chat_template"] = choose_template(config.get("chat_template"))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None
    if template.exists():
        try:
            found["chat_template"] = template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{template}: {error}") from None
    own = [t["content"] for t in content.get("added_tokens") or () if t.get("special")]
    return {**found, "special": [*own, *map(spelling, further)]}


def load(path: Path) -> dict[str, Any]:
    """The arguments of `ForeignTokenizer` that a `tokenizer.json` (or its folder) asks for.

    Raises: ValueError if the file is damaged or was edited, or needs a feature that we lack.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    with no_collection():
        content = read_tokenizer(path)
        config = read_config(path.parent, content)
        try:
            found = arguments(content, config.pop("more"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            message = f"{path}: not a tokenizer file: {type(error).__name__} {error}"
            raise ValueError(message) from None
    more = config.pop("special")
    found = {**config, **found}
    for name in (*found["special_tokens"], *found["added_tokens"]):
        check_utf8(f"{path}: a token", name)
    check_utf8(f"{path.parent}: the chat template", found.get("chat_template") or "")
    for name in [*(found[name] for name in NAMES), *more]:  # special, as transformers has them
        if name in found["added_tokens"]:
            found["special_tokens"][name] = found["added_tokens"].pop(name)
    return found


def load_bpe(path: str | Path) -> BPETokenizer:
    """Read a `tokenizer.json`, or the folder that holds it: ours, or any byte-level BPE.

    Raises: ValueError if a file is damaged or was edited, or needs a feature that we lack.
    """
    found = load(Path(path))
    whole = not found["drop_unknown_bytes"] or all(bytes([b]) in found["ranks"] for b in range(256))
    if whole and not (found["added_tokens"] or found["normalizer"] or found["chat_template"]):
        own = ("ranks", "pattern", "special_tokens", "add_bos", *NAMES)
        plain = BPETokenizer(**{name: found[name] for name in own if name in found})
        names = {name: getattr(plain, name) for name in NAMES}
        if {n: token for n, token in names.items() if token is not None} == found["named_tokens"]:
            return plain
    return ForeignTokenizer(**found)


if TYPE_CHECKING:
    import tiktoken
    import tokenizers

    from minillm.bpe import BPETokenizer


def to_tiktoken(tokenizer: "BPETokenizer", name: str = "minillm") -> "tiktoken.Encoding":
    """The same ranks, pattern and special tokens as a `tiktoken.Encoding`; it adds no begin token.

    Added tokens become special, as tiktoken knows no others.
    Warns if one special token lies inside another: which one tiktoken then finds is left to chance.
    Raises: ValueError if the tokenizer has a normalizer or several patterns: tiktoken has no
        normalizer, and one pattern.
    """
    import tiktoken

    if len(single := [token for token in tokenizer.ranks if len(token) == 1]) < 256:
        raise ValueError(f"tiktoken needs all 256 bytes, and this tokenizer has {len(single)}")
    if tokenizer.normalizer:
        raise ValueError(
            f"tiktoken has no normalizer, and this tokenizer uses {tokenizer.normalizer}"
        )
    pattern = tokenizer.pattern
    if not isinstance(pattern, str):
        if len(pattern) > 1:
            raise ValueError(f"tiktoken cuts text by one pattern, and this tokenizer by {pattern}")
        pattern = rf"{pattern[0]}|(?:(?!{pattern[0]})[\s\S])+"  # what is between its words
    names = {**tokenizer.special_tokens, **tokenizer.added_tokens}
    inside = [(a, b) for a in names for b in names if a != b and a in b]
    if inside:
        warnings.warn(
            f"special token {inside[0][0]!r} lies inside {inside[0][1]!r}: "
            "tiktoken may find the shorter one, this package takes the longer",
            stacklevel=2,
        )
    return tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=tokenizer.ranks,
        special_tokens=names,
    )


def to_hf(tokenizer: "BPETokenizer") -> "tokenizers.Tokenizer":
    """The same tokenizer as a `tokenizers.Tokenizer`; special tokens are always found in text.

    Raises: ImportError without that library.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError("to_hf needs a library: pip install tokenizers") from None

    return tokenizers.Tokenizer.from_str(json.dumps(to_json(tokenizer)))
