"""The live training of notebook 10 with other seeds: floors reached, of first weights and stories.

    python benchmarks/live.py 10        # seeds 0 to 9; a minute and a half each on two quiet cores

Runs the page's own cells, so what is measured is what a reader gets.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from minillm import CausalLM, ModelConfig
from minillm.stories.language import StoryLanguage

PAGE = Path(__file__).parents[1] / "notebooks/10_minillm.ipynb"
CELLS = ("322c4439", "1db0ee4e", "65345f34f", "cc0b6742")  # text, device, model, training


def main() -> None:
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(PAGE.read_text("utf-8"))["cells"]}
    reached = []
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        page = {"torch": torch, "math": math, "CausalLM": CausalLM, "ModelConfig": ModelConfig}
        page["language"] = StoryLanguage("en")
        start = time.process_time()
        for name in CELLS:
            with mock.patch("IPython.display.display"):  # no page to draw the curve on
                exec(cells[name].replace("seed=0", f"seed={seed}"), page)
        reached.append(page["reached"] / page["floor"])
        seconds = time.process_time() - start
        print(f"seed {seed}: {reached[-1]:.4f} floors, {seconds:.0f} s of work", flush=True)
    least, most, mean = min(reached), max(reached), statistics.mean(reached)
    print(f"{least:.2f} to {most:.2f} floors, {mean:.2f} on average")


if __name__ == "__main__":
    main()
