"""Whatever is wrong in a stranger's folder, the answer is a model that works or a ValueError."""

from random_folders import attempts


def test_random_folders_give_a_model_or_a_value_error():
    outcomes = list(attempts(600))
    raw = [(said, e) for said, e in outcomes if e is not None and type(e) is not ValueError]
    assert not raw, raw[:5]
    loaded = sum(error is None for _, error in outcomes)
    assert 60 < loaded < 540  # both answers are tried
    assert all(len(str(e)) < 4000 and "\x1b" not in str(e) for _, e in outcomes if e is not None)
