"""run.json: what is damaged in it is named, and never ends a training that has ended well."""

import json
from argparse import Namespace

import pytest

from minillm.cli.run_info import check_same_run, finish_run_info

ASKED = {"corpus": "stories-en", "hidden_size": 8}
DAMAGED = [
    '{"options',
    "[]",
    "{}",
    '{"options": 5}',
    '{"options": {}}',
    '{"options": {"corpus": 3}}',
    '{"options": {"corpus": "stories-en", "hidden_size": 8, "hidden_size": 8}}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_record_is_named_on_resuming(tmp_path, text):
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.json.*: remove it to resume"):
        check_same_run(Namespace(output_dir=tmp_path, **ASKED))
    (tmp_path / "run.json").unlink()
    check_same_run(Namespace(output_dir=tmp_path, **ASKED))


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_record_is_replaced_at_the_end(tmp_path, text):
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    found = finish_run_info(Namespace(output_dir=tmp_path, **ASKED), {"seconds": 2.0}, [])
    assert found["seconds"] == 2.0
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == found


def test_a_run_that_had_ended_keeps_its_results(tmp_path):
    a = Namespace(output_dir=tmp_path, **ASKED)
    finish_run_info(a, {"seconds": 2.0}, [{"loss": 1.5}])
    found = finish_run_info(a, {"seconds": 0.1}, [])
    assert found["seconds"] == 2.0 and found["loss"] == 1.5
    with pytest.raises(ValueError, match="hidden_size: saved 8, now 16"):
        check_same_run(Namespace(output_dir=tmp_path, **{**ASKED, "hidden_size": 16}))
