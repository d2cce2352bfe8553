"""Tokenizers that are no plain byte-level BPE, such as SentencePiece's: read by `tokenizers`.

`WrappedTokenizer` puts that library behind the methods of `BPETokenizer`, so that generation,
evaluation and saving need not know which they have; `load_tokenizer` says which class reads the
tokenizer of a folder. Written by hand, not built.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bpe import BPETokenizer, well_formed
from minillm.deeper.tokenizer.beside import TOKENIZER_FILES, class_of
from minillm.deeper.tokenizer.chat_template import render_chat
from minillm.deeper.tokenizer.hf_json import (
    DIGEST,
    read_config,
    read_tokenizer,
    tokenizer_config,
    unspell,
)
from minillm.support.checks.texts import BEGIN_TOKENS, END_TOKENS, ids_of
from minillm.support.checks.words import quoted
from minillm.support.door import TokenizerDoors
from minillm.support.files import transaction, write_json

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

if TYPE_CHECKING:
    import tokenizers

    from minillm.bpe import Allowed

_BYTE = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")

_KNOWN = ("ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip")

_BESIDE = "\ue000"  # stands for the tokens before and after: no decoder changes it


def spelling(decoder: Decoder | None) -> Callable[[str], bytes]:
    """How a decoder's tokens spell what is no character: from such a token to its bytes.

    Raises: ValueError for a decoder of another kind, or one that replaces by a regex or across
        tokens.
    """
    steps = [] if decoder is None else [json.loads(decoder.__getstate__())]
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    kinds = [step["type"] for step in steps]
    if not steps or not set(kinds).issubset(_KNOWN):
        raise ValueError(f"decoder {kinds} is not supported, only {', '.join(_KNOWN)}")
    fused = False
    for step in steps:
        if step["type"] == "Replace" and (
            "String" not in step["pattern"] or (fused and len(step["pattern"]["String"]) > 1)
        ):
            raise ValueError(f"decoder Replace is not supported with {step['pattern']}")
        if fused and step["type"] in ("ByteFallback", "ByteLevel"):
            raise ValueError(f"decoder {kinds} is not supported: {step['type']} of joined tokens")
        fused |= step["type"] in ("Fuse", "ByteLevel")
    return unspell if "ByteLevel" in kinds else _fallen_back


def _fallen_back(token: str) -> bytes:
    """The byte that stands for itself. Raises: ValueError if none does."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1] if byte else "", 16)])


def make_special(tokenizer: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Make these tokens special, each with the flags that it has if it is an added one."""
    from tokenizers import AddedToken

    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name) or AddedToken(name, normalized=False)
        if not token.special:
            token.special = True
            tokenizer.add_tokens([token])


class WrappedTokenizer(TokenizerDoors):
    """A `tokenizers.Tokenizer` with the methods of `BPETokenizer` that make sense for it.

    What `tokenizer.json` says counts, also about begin tokens, as in transformers. (Where a config
    names `LlamaTokenizer`, transformers 5 puts a new rule for spaces in place of the file's: text
    that begins with a space or follows a special token gets one space less than in Llama 2.)

    A SentencePiece tokenizer puts a space before the first word. `decode` takes it away again;
    `decode_bytes` and `decoder` keep it, as what they read may be the middle of a text.

    Args:
        tokenizer: the library's own; it is not copied.
        bos_token, eos_token, pad_token: which special tokens begin and end a text, and fill a
            batch (default: the first well-known name; the end token also fills).
        chat_template: a Jinja2 template for `apply_chat_template`.
        named_tokens: what it sees under names such as "unk_token" (default: the three above).
    Raises: ValueError if one of the names is no token, or for a decoder that we cannot follow.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.library, self.chat_template = tokenizer, chat_template
        self.named_tokens = named_tokens
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for name in filter(None, (bos_token, eos_token, pad_token)):
            if tokenizer.token_to_id(name) is None:
                raise ValueError(
                    f"{quoted(name)} should be a special token, but is no token at all"
                )
        make_special(tokenizer, filter(None, (bos_token, eos_token, pad_token)))
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self.special_tokens = {token.content: i for i, token in added if token.special}
        known = self.special_tokens.keys()
        self.bos_token = bos_token or next((name for name in BEGIN_TOKENS if name in known), None)
        self.eos_token = eos_token or next((name for name in END_TOKENS if name in known), None)
        self.pad_token = pad_token or self.eos_token
        begin = None if self.bos_token is None else tokenizer.token_to_id(self.bos_token)
        with _failures_are_errors():
            framed = tokenizer.encode("").ids  # what the file puts around each text
        if unknown := [i for i in framed if tokenizer.id_to_token(i) is None]:
            raise ValueError(f"the post_processor adds the id {unknown[0]}, which no token has")
        self._add_bos = framed[:1] == [begin]
        spellings = sorted(map(re.escape, known), key=len, reverse=True)
        self._special = re.compile("|".join(spellings) or "(?!)")
        self._spelled = spelling(tokenizer.decoder)

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts the begin token first; set it to True to have it do so."""
        return self._add_bos

    @add_bos.setter
    def add_bos(self, value: bool) -> None:
        name, before = self.bos_token, self.library.post_processor
        if not value or name is None:
            raise ValueError(f"add_bos can be set to True, with a begin token, not {value!r}")
        if self._add_bos:
            return
        from tokenizers import processors

        known = [(name, self.library.token_to_id(name))]
        added = processors.TemplateProcessing(single=[name, "$A"], special_tokens=known)
        steps = [step for step in (before, added) if step is not None]
        self.library.post_processor = processors.Sequence(steps)
        self._add_bos = True
        if self.named_tokens is not None:  # in the file, too
            self.named_tokens = {**self.named_tokens, "bos_token": name}

    @classmethod
    def load(cls, path: str | Path) -> WrappedTokenizer:
        """Read a `tokenizer.json`, or the folder that holds it, and what lies beside it.

        Raises: ValueError if a file is damaged; ImportError without the library `tokenizers`.
        """
        try:
            from tokenizers import AddedToken, Tokenizer
        except ImportError:
            message = "this kind of tokenizer needs a library: pip install tokenizers"
            raise ImportError(message) from None
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        content = read_tokenizer(path)  # to see that nothing in it is damaged
        config = read_config(path.parent, content)
        more, special = config.pop("more"), config.pop("special")
        text = path.read_text(encoding="utf-8") if path.exists() else json.dumps(content)
        try:
            with _failures_are_errors():
                tokenizer = Tokenizer.from_str(text)
                tokenizer.add_tokens([AddedToken(**token) for token in more])
                make_special(tokenizer, special)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path}: the library tokenizers cannot read it: {error}") from None
        try:
            return cls(tokenizer, **config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        text = well_formed(text)
        library = self._blind if self._special.search(text) else self.library
        with _failures_are_errors():
            return library.encode(text, add_special_tokens=False).ids

    def offsets(self, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Where in `text` the characters of each of its `ids` stand, as (begin, end).

        Raises: ValueError if neither `encode_ordinary` nor `encode` gives these ids for it.
        """
        for library in (self.library, self._blind):
            with _failures_are_errors():
                found = library.encode(well_formed(text), add_special_tokens=False)
            if found.ids == [*ids]:
                return found.offsets
        raise ValueError(f"the tokenizer writes another text than {text[:80]!r}")

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        """A copy that sees no special tokens."""
        copy = type(self.library).from_str(self.library.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(
        self, text: str, *, allowed_special: Allowed = (), add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of `text`; a special token that it spells becomes one id, if allowed.

        What the file puts around a text is added, or not if `add_special_tokens=False`; a text that
        spells the begin token itself gets no other.
        Raises: ValueError if the text spells a special token that is not allowed.
        """
        text = well_formed(text)
        if isinstance(allowed_special, str):
            allowed_special = self.special_tokens if allowed_special == "all" else [allowed_special]
        with _failures_are_errors():
            ids = self.library.encode(text, add_special_tokens=add_special_tokens).ids
        if self._special.search(text):  # what lies inside an added token is none
            with _failures_are_errors():
                alone = self.library.encode(text, add_special_tokens=False).ids
            for special, i in self.special_tokens.items():
                if i in alone and special in text and special not in allowed_special:
                    raise ValueError(
                        f"the text spells the special token {quoted(special)}: allow it by "
                        "allowed_special, or call encode_ordinary to read it as plain text"
                    )
            if self.add_bos and add_special_tokens and alone[:1] == ids[:1]:
                del ids[0]
        return ids

    @cached_property
    def unk_token(self) -> str | None:
        """What the model writes for what it cannot spell; None if it has no token for that."""
        model = self.library.model
        if hasattr(model, "unk_token"):
            return model.unk_token
        # a Unigram model knows its id, and tells it only so
        number = json.loads(model.__getstate__()).get("unk_id")
        return None if number is None else self.library.id_to_token(number)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the tokens stand for in the middle of a text, as the library decodes it.

        An id that no token has adds none. Raises: ValueError for what is no id.
        """
        return b"".join(map(self._bytes_of, ids_of(ids)))

    def _bytes_of(self, i: int) -> bytes:
        token = self.library.id_to_token(i) if i < self.vocab_size else None
        if token is None:
            return b""
        with _failures_are_errors():
            text = self.library.decoder.decode([_BESIDE, token, _BESIDE])[1:-1]
        if "\ufffd" in text:  # the library gives text only, but this may be a part of a character
            with suppress(ValueError):
                data = self._spelled(token)
                return data if data.decode("utf-8", "replace") == text else text.encode()
        return text.encode()

    def decode(
        self, ids: Iterable[int], *, errors: str = "replace", skip_special_tokens: bool = False
    ) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD, or an error if errors="strict".

        Raises: ValueError for what is no id, or for errors of another name.
        """
        if errors not in ("replace", "strict"):
            raise ValueError(f"errors must be 'replace' or 'strict', not {quoted(errors)}")
        left_out = {*self.special_tokens.values()} if skip_special_tokens else ()
        ids = [i for i in ids_of(ids) if i < self.vocab_size and i not in left_out]
        data = self.decode_bytes(ids)
        if errors == "strict":
            data.decode("utf-8", errors)
        with _failures_are_errors():
            return self.library.decode(ids, skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, written by the chat template that came with the tokenizer.

        Raises: ValueError if there is no template, or if a message spells a special token.
        """
        text = render_chat(self, messages, add_generation_prompt=add_generation_prompt)
        with _failures_are_errors():
            return self.library.encode(well_formed(text), add_special_tokens=False).ids

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face reads."""
        config = {**tokenizer_config(self), "clean_up_tokenization_spaces": False}
        with transaction(Path(directory), remove=TOKENIZER_FILES) as staging:  # would be read
            write_json(staging / "tokenizer_config.json", config)
            text = self.library.to_str(pretty=True)
            (staging / "tokenizer.json").write_text(text, encoding="utf-8")

    def to_hf(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer."""
        return self.library

    def __len__(self) -> int:
        return self.library.get_vocab_size()

    @cached_property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the greatest id plus one."""
        return max(self.library.get_vocab().values()) + 1


@contextmanager
def _failures_are_errors() -> Iterator[None]:
    """What the Rust library raises, a bare `Exception` or a panic, becomes a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library tokenizers gave up: {error}") from None


# Names of files that say that there is a tokenizer.
_SIGNS = re.compile(
    r"tokeni[sz]|tiktoken|tekken|special_tokens|added_tokens|vocab|merges|sentencepiece|spiece"
    r"|\bbpe\b|\.(spm|model)$",
    re.IGNORECASE,
)


def warn_of_unread(place: object, names: Iterable[str]) -> None:
    """Warn, naming the files, if a place without a tokenizer has those of one that is not read."""
    if unread := sorted(name for name in names if _SIGNS.search(name)):
        road = (
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers may write one"
        )
        message = f"{place} has {', '.join(unread[:9])} but no tokenizer.json: no tokenizer is read"
        warnings.warn(f"{message}; {road}", stacklevel=3)


def load_tokenizer(folder: str | Path) -> BPETokenizer | WrappedTokenizer | None:
    """The folder's tokenizer; None if there is none.

    A byte-level BPE comes as `BPETokenizer`; what that class refuses is wrapped from the library
    `tokenizers`, be it SentencePiece's or a byte-level BPE that cuts text in its own way.

    Raises: ValueError if a file is damaged; ImportError if the library is needed and missing.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists() and class_of(folder) is None:
        if folder.is_dir():
            warn_of_unread(folder, [file.name for file in folder.iterdir()])
        return None
    try:
        return BPETokenizer.load(folder)
    except ValueError as refusal:
        if path.exists() and DIGEST.encode() in path.read_bytes():
            raise  # our own file: nobody else knows better
        try:
            return WrappedTokenizer.load(folder)
        except ImportError as error:
            raise ImportError(f"{refusal}: {error}") from None
