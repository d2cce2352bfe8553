"""Texts of many scripts for the tests of tokenizers, and a tokenizer trained on them."""

from hypothesis import strategies as st

from minillm.bpe import BPETokenizer

END = "<|endoftext|>"
NATURAL = {
    "english": "The cat, it's said, sat on 12345 mats; we'll see... \"Who?\" asked THEY'RE cat.",
    "chinese": "猫坐在垫子上，共有三只。“谁来了？”他问：一二三，12345！𠀀是很少见的字。",
    "german": "Die Straße führt über Größenwahn, Käse & Öl; „schön“, sagte er – für 3,50 €.",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю. Ёж №5!",
    "arabic": "القطة جلست على السجادة، أليس كذلك؟ ١٢٣٤٥",
    "hindi": "बिल्ली चटाई पर बैठी है। क्या आप जानते हैं? १२३",
    "emoji": "👩‍👩‍👧‍👦 🐈‍⬛ 🇨🇳 👍🏽 ❤️ ok 🙂🙃",
    "code": "def f(x):\n    if x <= 10_000:\n\t\treturn x**2  # sq\n\n\n    return {'a': [1, 2]}\n",
    "line ends": "one\r\ntwo\rthree\n\r\n \n  four \r\n\t five\u2028six\u0085seven   \n",
    "controls": "a\x00b\x01\x1c\x1d\x1e\x1f\x7f c\x00\x00 \ufeffd\u200be\u00ad",
    "marks": "e\u0301a\u0308 \u0301x ñ n\u0303 ſ 'ſ K ﬁ ǆ",
}

# Characters younger than Python's tables are left out: tiktoken's may be too old to know them.
# Special tokens, too: hypothesis tries strings that stand in our own code.
unicode_text = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=80).filter(
    lambda text: not any(token in text for token in (END, "<s>", "<x>"))
)
likely_text = st.text("the catT\n\r\t 12'sSlré中\u3000\x1c!.,", max_size=80)


def trained(pattern):
    return BPETokenizer.train(
        list(NATURAL.values()) * 2 + ["1234567 the The  \n\n   "] * 30,
        700,
        pattern=pattern,
        special_tokens=[END],
    )
