"""How much Kneser-Ney smoothing takes from a count: estimated from the counts themselves.

Explained in notebooks/deeper/01_story_language.ipynb.
"""

# Built from notebooks/deeper/01_story_language.ipynb: edit there, then make build.

from collections import Counter

from minillm.ngram import Table

__all__ = ["estimate_discounts"]


def estimate_discounts(table: Table) -> tuple[float, float, float]:
    """What to take from a count of 1, of 2 and of more, by how many n-grams were seen 1 to 4 times.

    Source: Chen and Goodman 1999, equation 26; where that gives no proper discounts, one for all:
    n1 / (n1 + 2 n2), or 1/2.
    """
    found = Counter(min(count, 5) for row in table.values() for count in row.values())
    n1, n2, n3, n4 = (found[i] for i in (1, 2, 3, 4))
    ney = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
    if not (n1 and n2 and n3 and n4):
        return ney, ney, ney
    three = 1 - 2 * ney * n2 / n1, 2 - 3 * ney * n3 / n2, 3 - 4 * ney * n4 / n3
    return three if all(0 < d < i for i, d in enumerate(three, 1)) else (ney, ney, ney)
