"""The web edition: its sources in every run, its pages in a real browser (`make test-browser`).

The tests marked `browser` need build/site, Playwright and Chromium, and say so where one is
missing; what they look at is served on the loopback, and nothing else may be asked for.
"""

import functools
import http.server
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

import pytest
import torch

from minillm import (
    CausalLM,
    ModelConfig,
    Sampler,
    StoryLanguage,
    from_pretrained,
    generate,
    sampling,
)
from minillm.attention import build_mask, causal_mask
from minillm.bpe import BPETokenizer
from minillm.exercises.duties import first_wrong

ROOT = Path(__file__).resolve().parents[1]
TOOLS, SITE, SHIPPED = ROOT / "tools/site", ROOT / "build/site", ROOT / "assets/stories-en"
NOTEBOOKS = sorted(
    p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts
)
HOW = (
    "the browser tests need Chromium and Playwright: on Debian `apt-get install chromium`, then "
    "`.venv/bin/pip install playwright==1.65.2` (elsewhere also `.venv/bin/playwright install "
    "chromium`), and the pages themselves, `make site`"
)


@pytest.fixture(scope="module")
def pages():
    """tools/site/pages.py as a module."""
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("site_pages", TOOLS / "pages.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TOOLS))


def code_cell(source, **more):
    cell = {"cell_type": "code", "id": "c1", "metadata": {}, "outputs": [], "execution_count": 1}
    return {**cell, "source": source, **more}


def heading(notebook):
    first = "".join(notebook["cells"][0]["source"])
    return first.splitlines()[0].removeprefix("# ").strip()


# The sources


def test_marks_of_tests_are_left_out_and_code_that_only_draws_is_folded(pages):
    picture = {"output_type": "display_data", "data": {"image/png": "x"}, "metadata": {}}
    printed = {"output_type": "stream", "name": "stdout", "text": "1"}
    cells = [
        code_cell("# NBVAL_IGNORE_OUTPUT\nax.plot(x)", outputs=[picture]),
        code_cell("ax.plot(x)", outputs=[picture, printed]),
        code_cell("ax.plot(x)\nassert x", outputs=[picture]),
        code_cell("print(1)", outputs=[printed]),
        code_cell("x = 1"),
    ]
    pages.marked({"cells": cells}, "../")
    assert [c["metadata"].get("tags", []) for c in cells] == [["hide-input"], [], [], [], []]
    assert cells[0]["source"] == "ax.plot(x)"
    main = next(
        c
        for c in pages.read_notebook(ROOT / "notebooks/03_attention.ipynb")["cells"]
        if "image/png" in str(c.get("outputs"))
    )
    assert pages.only_draws(main)  # the figure at the head of 03


def test_a_page_leads_to_its_exercises_their_solutions_and_the_chapters(pages):
    for name, repository in (("05_rope", "https://x.org/r"), ("deeper/08_roofline", "")):
        path = ROOT / f"notebooks/{name}.ipynb"
        notebook = pages.read_notebook(path)
        pages.with_ways(notebook, path, repository)
        line = notebook["cells"][1]["source"]
        links = dict(re.findall(r"\[([^]]*)\]\(([^)]*)\)", line))
        assert links.pop("Exercises") == "#Exercises"
        assert links.pop("repository", "") == repository
        assert {*links} == {"solutions", "all chapters"}
        for link in links.values():
            assert (path.parent / link.partition("#")[0]).resolve().is_file()
    notebook = pages.read_notebook(ROOT / "notebooks/tour.ipynb")
    pages.with_ways(notebook, ROOT / "notebooks/tour.ipynb", "")
    assert "xercises" not in notebook["cells"][1]["source"]


def test_the_front_page_says_what_readme_says_and_where_the_repository_is(pages):
    tokens = [{"text": "Once", "p": 0.5}, {"text": "", "p": 0.9}]
    story = {"tokens": tokens, "bits": 2.0, "bytes": 4, "floor_bits": 1.0}
    text = pages.front.page(ROOT, story, 4_400_000, "https://x.org/r")
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[2]
    assert first in text and "[The repository](https://x.org/r)" in text
    assert "0.5000 bits a byte" in text and "is\n0.2500." in text
    assert "repository](" not in pages.front.page(ROOT, story, 4_400_000)


def test_every_notebook_of_the_repository_can_be_laid_out(pages):
    for path in NOTEBOOKS:
        notebook = pages.read_notebook(path)
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        exported = [c for c in cells if "".join(c["source"]).startswith("#| export")]
        assert pages.marked(notebook, "../") == len(exported)
        labels = [c for c in notebook["cells"] if "{container} package-label" in c["source"]]
        assert len(labels) == len(exported), path
        for label in labels:
            file = re.search(r"\]\(\.\./(\S+)\.md\)", label["source"])[1]
            assert (ROOT / f"{file}.py").exists()


@pytest.mark.parametrize("change", ["never run", "no outputs"])
def test_a_notebook_without_outputs_stops_the_build_with_its_name(pages, tmp_path, change):
    good = json.loads((ROOT / "notebooks/tour.ipynb").read_text(encoding="utf-8"))
    path = tmp_path / "99_new.ipynb"
    path.write_text(json.dumps(good), encoding="utf-8")
    assert pages.read_notebook(path) == good
    for cell in good["cells"]:
        if cell["cell_type"] == "code" and change == "no outputs":
            cell["outputs"] = []
    if change == "never run":
        good["cells"][1]["execution_count"] = None
    path.write_text(json.dumps(good), encoding="utf-8")
    with pytest.raises(pages.SourceError, match=r"99_new\.ipynb has no outputs.*execute\.py"):
        pages.read_notebook(path)


def test_a_label_names_the_module_and_a_missing_one_is_refused(pages):
    cells = [code_cell("#| default_exp rope"), code_cell("#| export\nx = 1")]
    cells.append(code_cell("#| export deeper.caches.paged\ny = 1"))
    notebook = {"cells": cells}
    assert pages.marked(notebook, "../") == 2
    labels = [c["source"] for c in notebook["cells"] if c["cell_type"] == "markdown"]
    assert "[minillm/rope.py](../minillm/rope.md)" in labels[0]
    assert "[minillm/deeper/caches/paged.py](../minillm/deeper/caches/paged.md)" in labels[1]
    with pytest.raises(pages.SourceError, match=r"minillm/none\.py, which does not exist"):
        pages.marked({"cells": [code_cell("#| export none\nz = 1")]}, "../")


def test_the_figures_that_move_find_their_place_and_stop_the_build_if_it_is_gone(pages):
    for name, (needle, kind, _) in pages.MOVING.items():
        notebook = pages.read_notebook(ROOT / f"notebooks/{name}.ipynb")
        pages.add_figure(name, notebook)
        place = next(i for i, c in enumerate(notebook["cells"]) if c["id"] == f"{kind}-cell")
        static = notebook["cells"][place - 1]
        assert needle in "".join(static["source"])
        assert any("image/png" in output.get("data", {}) for output in static["outputs"])
        with pytest.raises(pages.SourceError, match=f"{name}.ipynb: 0 cells"):
            pages.add_figure(name, {"cells": [code_cell("1")]})


def test_links_to_python_files_lead_to_pages_that_show_them(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "SOURCE", tmp_path)
    text = "[a](../../minillm/rope.py), [b](../../tools/build.py), [c](../../none.py), [d](e.md)"
    path = ROOT / "notebooks/beyond/12_state.ipynb"
    changed = "[a](../../minillm/rope.md), [b](../../tools/build.md), [c](../../none.py), [d](e.md)"
    assert pages.relinked(text, path) == changed
    for file in ("minillm/rope", "tools/build"):
        code = (ROOT / f"{file}.py").read_text(encoding="utf-8")
        assert code in (tmp_path / f"{file}.md").read_text(encoding="utf-8")


def test_names_of_glossary_terms(pages):
    assert pages.names_of_term("Adam, AdamW") == ["Adam", "AdamW"]
    assert pages.names_of_term("gate (of a layer)") == ["gate"]
    assert pages.names_of_term("byte-pair encoding (BPE)") == ["byte-pair encoding", "BPE"]


def test_the_three_claims_have_the_numbers_of_the_repository(pages, tmp_path):
    best, same, real = pages.front.claims(ROOT)
    board = json.loads((ROOT / "assets/scoreboard.json").read_text(encoding="utf-8"))
    live = next(row[3] for row in board if row[:2] == ["10", "network, 2 layers, live"])
    assert f"one to two minutes {live} times" in best and "986 of 1,000" in best
    exported = sum(
        "".join(cell["source"]).startswith("#| export")
        for path in NOTEBOOKS
        if path.parent.name != "solutions"
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    )
    assert f"{exported} cells" in same
    assert "the same 64 greedy tokens" in real
    for name in ("assets/stories-en/README.md", "benchmarks/RESULTS.md", "assets/scoreboard.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "assets/stories-en/README.md").write_text("Nothing.", encoding="utf-8")
    with pytest.raises(pages.front.NumberError, match=r"README\.md no longer has the number"):
        pages.front.claims(tmp_path)


def test_the_api_shows_every_public_name(pages, tmp_path):
    import minillm

    pages.api.lay(ROOT, tmp_path)
    text = "\n".join(p.read_text(encoding="utf-8") for p in (tmp_path / "api").glob("*.md"))
    shown = re.findall(r"^`+\{py:(?:function|class|data)\} (\w+)", text, re.M)
    assert sorted(shown) == sorted(minillm.__all__)
    assert "Sampler(temperature: float = 1.0, top_k: int | None = None" in text


def test_the_workflow_that_publishes_says_that_it_was_never_run():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "never run" in text.split("name:")[0]
    commands = [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]
    assert "make site-tools" in commands and "make site" in commands
    assert all(job["timeout-minutes"] for job in jobs.values())


# Scripts against the package


def texts():
    """2,000 texts: stories of two languages, pages of the course, and strings made to be hard."""
    found = StoryLanguage("en").corpus(500, seed="site") + StoryLanguage("zh").corpus(200, seed=1)
    prose = (ROOT / "assets/course-prose.txt").read_text(encoding="utf-8")
    found += [prose[i : i + 97] for i in range(0, 97 * 600, 97)]
    alphabet = (
        " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u200b\ufeff'sSſtTmMdDkK\u212allLvVeErRaAzZ"
        '059²½٣一二犀é\u0301ßΩжא😀👩‍👧\u00ad_-.,;:!?"()[]{}<>|/\\#$%^&*+=~`'
    )
    draws = torch.Generator().manual_seed(0)
    while len(found) < 2000:
        length = int(torch.randint(0, 60, (1,), generator=draws))
        picks = torch.randint(len(alphabet), (length,), generator=draws).tolist()
        found.append("".join(alphabet[i] for i in picks))
    return found


def rows_of_logits():
    """Logits at random, and as the shipped model gives them."""
    made = 4 * torch.randn(6, 1456, generator=torch.Generator().manual_seed(3))
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    with torch.no_grad():
        real = model(torch.tensor([tokenizer.encode("Once upon a time, a merry goose")]))[0]
    return torch.cat([made, real])


SETTINGS = [{"temperature": t} for t in (0, 0.3, 1, 2)]
SETTINGS += [{"topK": 1}, {"topK": 7}, {"topP": 0.05}, {"topP": 0.9}, {"minP": 0.1}]
SETTINGS += [{"temperature": 1.7, "topK": 40, "topP": 0.95, "minP": 0.02}]


def package_names(setting):
    names = {"topK": "top_k", "topP": "top_p", "minP": "min_p"}
    return {names.get(key, key): value for key, value in setting.items()}


def assert_distributions_agree(run):
    logits = rows_of_logits()
    for setting in SETTINGS:
        expected = Sampler(**package_names(setting)).probabilities(logits)
        got = torch.tensor(run(logits.tolist(), setting), dtype=torch.float32)
        assert torch.equal(got > 0, expected > 0), setting
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def node():
    """Run a module script of Node with JSON in and out."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("needs node; the browser tests ask the same of Chromium")

    def run(code, value, folder=SHIPPED):
        static = (TOOLS / "static").as_uri()
        wrapped = (
            "import { readFileSync } from 'node:fs';"
            f"const S = {json.dumps(static)}, V = JSON.parse(readFileSync(0, 'utf8'));"
            f"const F = {json.dumps(str(folder))};"
            "const read = (name) => new Uint8Array(readFileSync(`${F}/${name}`));"
            f"console.log(JSON.stringify(await (async () => {{ {code} }})()));"
        )
        done = subprocess.run(
            [program, "--input-type=module", "-e", wrapped],
            input=json.dumps(value),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=900,
        )
        if "toWellFormed" in done.stderr:
            pytest.skip("needs node 20 or newer")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


ENCODE = """
  const { Tokenizer } = await import(S + '/tokenizer.js');
  const tokenizer = new Tokenizer(V.json);
  const ids = V.texts.map((text) => tokenizer.encode(text));
  return [ids, ids.map((row) => tokenizer.decode(row))];
"""
DISTRIBUTIONS = """
  const { distribution } = await import(S + '/sampling.js');
  return V.rows.map((row) => [...distribution(Float32Array.from(row), V.setting)]);
"""


def assert_tokenizers_agree(run):
    given = [*texts(), "lone \ud83d half", "\udc00"]
    tokenizer = BPETokenizer.load(SHIPPED)
    json_file = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    ids, decoded = run(ENCODE, {"json": json_file, "texts": given})
    assert len(given) >= 2000
    for text, row, back in zip(given, ids, decoded, strict=True):
        assert row == tokenizer.encode(text), repr(text)
        assert back == tokenizer.decode(row, skip_special_tokens=True)


def test_the_tokenizer_of_the_browser_equals_the_package_in_node(node):
    assert_tokenizers_agree(node)


def test_the_tokenizer_of_the_browser_refuses_a_special_token(node):
    json_file = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    code = ENCODE.replace("return", "").replace("const ids", "let said; try { const ids", 1)
    code = code[: code.index("[ids,")] + "} catch (error) { said = error.message; } return said;"
    said = node(code, {"json": json_file, "texts": ["a<|endoftext|>b"]})
    assert said == "the text spells the special token <|endoftext|>"


def test_the_dials_equal_the_sampler_in_node(node):
    assert_distributions_agree(lambda rows, s: node(DISTRIBUTIONS, {"rows": rows, "setting": s}))


OPEN = """
  const { CausalLM, readSafetensors } = await import(S + '/minillm.js');
  const config = JSON.parse(new TextDecoder().decode(await read('config.json')));
  const weights = await read('model.safetensors');
"""
LOGITS = f"""{OPEN}
  const model = new CausalLM(config, readSafetensors(weights));
  return V.map((ids) => {{
    const cache = model.makeCache();
    return ids.map((id) => [...model.forward(id, cache)]);
  }});
"""
STORIES = f"""{OPEN}
  const {{ distribution, draw }} = await import(S + '/sampling.js');
  const model = new CausalLM(config, readSafetensors(weights));
  return V.begun.map((ids, row) => {{
    const cache = model.makeCache(), told = [];
    let logits;
    for (const id of ids) logits = model.forward(id, cache);
    while (told.length < V.most && told.at(-1) !== config.eos_token_id) {{
      if (told.length) logits = model.forward(told.at(-1), cache);
      told.push(draw(distribution(logits, V.setting), V.uniform?.[row][told.length] ?? 0));
    }}
    return told;
  }});
"""


# Of `beginnings`, those that the package continues with a lead of 0.0004 at every token. Between
# tokens that are nearer to each other rounding decides, on each processor in its own way.
DECIDED = (
    "7 16 23 24 25 27 30 33 34 35 36 37 38 39 40 41 45 50 55 60 63 69 71 74 77 78 89 94 97 99 102 "
    "103 104 105 107 108 109 112 113 114 116 117 118 125 127 132 134 144 147 149"
)
UNIFORM = 3  # the seed of random numbers that all stay 0.0002 from where the draw would change


def beginnings():
    """The first words of 150 stories, as ids."""
    _, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    stories = enumerate(StoryLanguage("en").corpus(150, seed="beginnings"))
    return [tokenizer.encode(" ".join(story.split()[: 2 + i % 40])) for i, story in stories]


def assert_logits_agree(run, most=1e-3):
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    hard = ["", "A", "There was once a brave 犀牛", " 12 \n\t!?"]
    rows = [*map(tokenizer.encode, hard), *beginnings()[20:36]]
    assert len(rows) == 20 and max(map(len, rows)) > 20
    for row, got in zip(rows, run(LOGITS, rows), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row]))[0]
        torch.testing.assert_close(torch.tensor(got), expected, atol=most, rtol=0)


def assert_greedy_stories_agree(run, most):
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    given = beginnings()
    rows = [given[int(i)] for i in DECIDED.split()]
    assert len(rows) == 50
    width = max(map(len, rows))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    expected = generate(model, padded, attention_mask=mask, max_new_tokens=most)[:, width:]
    told = run(STORIES, {"begun": rows, "most": most, "setting": {"temperature": 0}})
    for row, got, wanted in zip(rows, told, expected.tolist(), strict=True):
        assert got == wanted[: len(got)], tokenizer.decode(row)
        assert len(got) == most or got[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            best = model(torch.tensor([row + got[:-1]]))[0, len(row) - 1 :].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 2e-4, "choose another beginning"


def assert_draws_agree(run):
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    rows, most = beginnings()[:10], 50
    uniform = torch.rand(len(rows), most, generator=torch.Generator().manual_seed(UNIFORM))
    uniform = uniform.double()
    for setting in ({}, {"temperature": 1.5, "topK": 50, "topP": 0.9, "minP": 0.01}):
        given = {"begun": rows, "most": most, "setting": setting, "uniform": uniform.tolist()}
        sampler = Sampler(**package_names(setting))
        for row, told, numbers in zip(rows, run(STORIES, given), uniform, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([row + told[:-1]]))[0, len(row) - 1 :]
            drawn = sampling.draw(sampler.probabilities(logits), numbers[: len(told)])
            assert told == drawn.tolist()
            assert len(told) == most or told[-1] == tokenizer.eos_token_id


def test_the_model_of_the_browser_gives_the_packages_logits_in_node(node):
    assert_logits_agree(node)


def test_the_model_of_the_browser_tells_the_packages_greedy_stories_in_node(node):
    assert_greedy_stories_agree(node, most=30)


def test_the_model_of_the_browser_draws_what_the_package_draws_in_node(node):
    assert_draws_agree(node)


GRAMMAR = ROOT / "minillm/stories/grammars/en.txt"
VERDICTS = """
  const { StoryLanguage } = await import(S + '/stories.js');
  const language = new StoryLanguage(V.grammar);
  return V.texts.map((text) => [language.score(text), language.firstWrong(text)]);
"""


def assert_verdicts_agree(run):
    """500 stories, each also with a word of another; and what is no story at all."""
    language, rng = StoryLanguage("en"), random.Random(1)
    given = language.corpus(500, seed="verdicts of the site")
    for text in given[:500]:
        words = text.split(" ")
        words[rng.randrange(len(words))] = rng.choice(rng.choice(given[:500]).split(" "))
        given.append(" ".join(words))
    one = given[0]
    given += ["", " x", "def f(x):", "犀牛 😀", "Once upon a time, a 犀牛", one[:50], one[:-1]]
    given += [one + " ", one + "  And more.", one + "\n", one.replace(" ", "  ", 1)]
    got = run(VERDICTS, {"grammar": GRAMMAR.read_text(encoding="utf-8"), "texts": given})
    valid = 0
    for text, (nats, wrong) in zip(given, got, strict=True):
        expected = language.score(text)
        assert (nats is None) == (expected == -math.inf), text  # JSON has no -Infinity
        assert nats is None or nats == pytest.approx(expected, abs=1e-9)
        assert wrong == first_wrong(language, text), text
        valid += wrong is None
    assert 500 <= valid < 550


def test_the_verdicts_of_the_browser_are_the_packages_in_node(node):
    assert_verdicts_agree(node)


@pytest.fixture
def small(tmp_path):
    """A model in no one's sizes: odd widths, two query heads to a key head, random norms."""
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=31,
        hidden_size=15,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=17,
        max_position_embeddings=40,
        initializer_range=0.5,
        rope_theta=500.0,
        rms_norm_eps=1e-2,
        eos_token_id=30,
        tie_word_embeddings=True,
    )
    model = CausalLM(config, seed=2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_other_sizes_gives_the_packages_logits_in_node(node, small):
    ids = torch.randint(31, (3, 40), generator=torch.Generator().manual_seed(0))
    model, _ = from_pretrained(small, dtype="float32")
    with torch.no_grad():
        expected = model(ids)
    assert expected.std() > 0.5
    got = torch.tensor(node(LOGITS, ids.tolist(), folder=small))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


TRY = f"""{OPEN}
  const said = [];
  for (const [code] of V) {{
    try {{
      said.push(`${{await eval(`async () => {{ ${{code}} }}`)()}}`);
    }} catch (error) {{
      said.push(error.message);
    }}
  }}
  return said;
"""
REFUSED = {  # what is done: what is said
    "readSafetensors(weights.subarray(0, 0))": "or no safetensors file: 0 bytes, too few",
    "readSafetensors(weights.subarray(0, 7))": "the weights are cut short, or no safetensors",
    "readSafetensors(weights.subarray(0, 300))": "300 bytes, too few for the header",
    "readSafetensors(weights.subarray(0, weights.length >> 1))": " bytes of ",
    "readSafetensors(weights.subarray(0, -1))": " bytes of ",
    "readSafetensors(new TextEncoder().encode('<!DOCTYPE html> Not found'))": "25 bytes, too few",
    "readSafetensors(weights.map((x, i) => (i < 3000 && x === 70 ? 71 : x)))": " bytes of BG16,",
    "new CausalLM({ ...config, vocab_size: 32 }, readSafetensors(weights))": (
        "the config wants model.embed_tokens.weight of shape (32,15), the file has (31,15)"
    ),
    "new CausalLM({ ...config, num_hidden_layers: 3 }, readSafetensors(weights))": (
        "model.layers.2.input_layernorm.weight of shape (15), the file has (undefined)"
    ),
    "new CausalLM({ ...config, model_type: 'gpt2' }, readSafetensors(weights))": (
        "the config's model_type must be qwen3, not gpt2"
    ),
    "new CausalLM({ ...config, rope_scaling: { factor: 2 } }, readSafetensors(weights))": (
        "the config's rope_scaling must be null"
    ),
    "new CausalLM({ ...config, rope_theta: undefined }, readSafetensors(weights))": (
        "the config's rope_theta must be positive, not undefined"
    ),
}
REFUSED |= {
    f"const m = new CausalLM(config, readSafetensors(weights)); const cache = m.makeCache({slots});"
    f"for (const id of {ids}) m.forward(id, cache)": said
    for slots, ids, said in (
        (2, [1, 2, 3], "the cache has 2 slots, all full"),
        (2, [31], "no token has the id 31"),
        (2, [-1], "no token has the id -1"),
    )
}


def test_what_no_model_can_be_made_of_is_refused_with_its_reason(node, small):
    code = [[f"return {do}" if do.startswith("r") else do] for do in REFUSED]
    for said, wanted in zip(node(TRY, code, folder=small), REFUSED.values(), strict=True):
        assert wanted in said


def test_the_page_of_the_scripts_shows_them_whole_beside_their_names_in_the_package(
    pages, tmp_path
):
    javascript, static = pages.javascript, TOOLS / "static"
    text = javascript.page(ROOT, static)
    shown = re.findall(r"^`{7}javascript\n(.*?)\n`{7}$", text, re.M | re.S)
    assert "\n\n".join(shown) == "\n\n".join(
        (static / name).read_text(encoding="utf-8").strip() for name in javascript.SCRIPTS
    )
    known = javascript.definitions(ROOT)
    defined = [p for p in shown if re.search(r"^(export )?(class|function) ", p, re.M)]
    labels = [javascript.label(piece, known) for piece in defined]
    assert len(labels) > 15 and all(f"package-label\n{label}\n" in text for label in labels)
    for label in labels:
        named, *links = re.findall(r"`([^`]+)`|\]\(([^)]+)\)", label)
        name = named[0]
        for _, target in links:
            assert (ROOT / target).exists() or (ROOT / target).with_suffix(".py").exists()
        module, name = (links[0][1][:-3].replace("/", "."), name) if links else name.rsplit(".", 1)
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)
    assert "`softmax`" in labels[2] and "03_attention.ipynb" in labels[2]
    for piece, message in (
        ("function nobody() {}", "nobody: the package defines nobody nowhere"),
        ("// Python: no_such\nclass A {}", "A: the package defines no_such nowhere"),
        ("function lookUp() {}", r"look_up \S*checks/model.py; say"),  # written by hand: of no page
    ):
        with pytest.raises(javascript.CounterpartError, match=message):
            javascript.label(piece, known)


# In the browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """The built site on the loopback."""
    if not (SITE / "index.html").exists():
        pytest.skip(HOW)
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    if importlib.util.find_spec("playwright") is None:
        pytest.skip(HOW)
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        except Error as error:
            pytest.skip(f"{HOW} ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium, address):
    """A new page; at the end: no script failed, nothing was missing, nobody else was asked."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(900_000)
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(f"error on {page.url}: {error}"))
    page.on(
        "console",
        lambda m: page.wrong.append(f"{page.url}: {m.text}") if m.type == "error" else None,
    )
    page.on(
        "response",
        lambda r: page.wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None,
    )

    def only_here(request):
        if not request.url.startswith((address, "data:", "blob:")):
            page.wrong.append(f"asked {request.url}")

    page.on("request", only_here)
    yield page
    assert page.wrong == []
    context.close()


def where(path):
    return path.relative_to(ROOT).with_suffix(".html").as_posix()


class Links(HTMLParser):
    """The addresses that a page names, and the names that its own parts have."""

    def __init__(self, text):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        for key in ("href", "src"):
            if given.get(key):
                self.links.append((tag, given[key]))


@pytest.mark.browser
def test_no_link_is_broken_and_nothing_comes_from_elsewhere(address):
    built = {p.resolve(): Links(p.read_text(encoding="utf-8")) for p in SITE.rglob("*.html")}
    broken = []
    for path, page in built.items():
        for tag, link in page.links:
            url = urlparse(link)
            if url.scheme in ("mailto", "data") or (url.netloc and tag == "a"):
                continue  # a reader may follow it; the page itself loads nothing from there
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            ok = target.exists() and SITE in target.parents
            if ok and url.fragment and target in built:
                ok = unquote(url.fragment) in built[target].names
            if not ok:
                broken.append(f"{path.relative_to(SITE)}: <{tag}> {link}")
    assert broken == []
    assert len(built) > len(NOTEBOOKS)


@pytest.mark.browser
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_has_what_its_notebook_has(tab, address, path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    exported = [c for c in cells if "".join(c["source"]).startswith("#| export")]
    pictures = sum("image/png" in o.get("data", {}) for c in cells for o in c["outputs"])
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto(address + where(path))
    assert tab.locator("h1").first.inner_text().startswith(heading(notebook).replace("`", ""))
    shown = [c for c in cells if "".join(c["source"]).strip()]
    assert tab.locator("div.cell div.cell_input").count() == len(shown)
    assert tab.locator("div.cell div.cell_output img").count() == pictures
    assert tab.locator("div.cell_output a.full-size[href$='.png'] > img").count() == pictures
    assert "NBVAL" not in tab.locator("article").inner_text()
    assert tab.locator("div.cell.tag_package-code").count() == len(exported)
    assert tab.locator(".package-label a").count() == len(exported)
    unseen = "[...document.images].filter((i) => { i.loading = 'eager'; return false; }).length"
    assert tab.evaluate(unseen) == 0
    tab.wait_for_function("[...document.images].every((image) => image.complete)")
    assert tab.evaluate("[...document.images].filter((i) => i.naturalWidth === 0).length") == 0
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.locator(".next-page").count() == 1
    if path.parent.name == "solutions":
        folded = tab.locator("details.solution")
        assert folded.count() and not folded.first.evaluate("(d) => d.open")
        hidden = folded.locator("div.cell").filter(has_text='check("').count()
        assert hidden == tab.locator("div.cell").filter(has_text='check("').count() > 0


@pytest.mark.browser
def test_no_other_page_scrolls_sideways_on_a_phone(tab, address):
    tab.set_viewport_size({"width": 390, "height": 800})
    notebooks = {where(path) for path in NOTEBOOKS}
    wide = []
    for path in sorted(SITE.rglob("*.html")):
        name = path.relative_to(SITE).as_posix()
        if name in notebooks or name.startswith("minillm/"):
            continue
        tab.goto(address + name)
        if (width := tab.evaluate("document.documentElement.scrollWidth")) != 390:
            wide.append((name, width))
    assert wide == []


@pytest.mark.browser
def test_search_finds_a_known_word_and_no_nonsense(tab, address):
    tab.goto(address + "search.html?q=rotary")
    tab.wait_for_function("document.querySelectorAll('ul.search li').length > 0")
    assert any("05" in text for text in tab.locator("ul.search li").all_inner_texts())
    tab.goto(address + "search.html?q=xyzzyplugh")
    tab.get_by_text("did not match any documents").wait_for()
    assert tab.locator("ul.search li").count() == 0


CONTRAST = """(selector) => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const paint = (e) => {
    let layers = [];
    for (; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, [r, g, b, a = 1]) =>
      [r, g, b].map((x, i) => a * x + (1 - a) * under[i]), [255, 255, 255]);
  };
  const light = (rgb) => {
    const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(selector)].filter((e) => e.textContent.trim()).map((e) => {
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(paint(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_can_be_read_in_both_colours(tab, address, scheme):
    tab.emulate_media(color_scheme=scheme)
    with_tokens = [p for p in NOTEBOOKS if '"text/html"' in p.read_text(encoding="utf-8")]
    assert len(with_tokens) >= 3
    checked = 0
    for name in ["index.html", *map(where, with_tokens)]:
        tab.goto(address + name)
        dark = (
            tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        )
        assert dark == (scheme == "dark")
        ratios = tab.evaluate(
            CONTRAST, ".story span, .cell_output .text_html span, .cell_output pre"
        )
        checked += len(ratios)
        assert ratios and min(ratios) >= 4.5, name
    assert checked > 300


@pytest.mark.browser
def test_terms_lead_to_the_glossary(tab, address):
    tab.goto(address + "notebooks/03_attention.html")
    link = tab.locator("a.term").first
    assert len(link.get_attribute("title")) > 10
    target = urljoin(tab.url, link.get_attribute("href"))
    tab.goto(target)
    assert tab.locator(f"#{urlparse(target).fragment}").count() == 1


@pytest.mark.browser
def test_print_shows_the_page_alone_with_solutions_unfolded(tab, address):
    tab.goto(address + "notebooks/solutions/03_attention.html")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not tab.locator(".sidebar-drawer").is_visible()
    assert tab.locator("details.solution p").first.is_visible()


# The live model


@pytest.fixture
def live(tab, address):
    tab.goto(address)
    tab.bytes = []
    tab.on("response", lambda response: tab.bytes.append(response))
    tab.get_by_role("button", name=re.compile("here in your browser")).click()
    tab.locator("#panel").wait_for(state="visible")
    tab.get_by_text("The story is over.").wait_for()  # it writes at once
    tab.first_story = tab.locator("#story").inner_text().removesuffix("∎")
    tab.first_note = tab.locator("#story-note").inner_text()
    tab.locator("#again").click()
    tab.get_by_text("A new story").wait_for()
    return tab


@pytest.mark.browser
def test_it_writes_at_once_and_ends_with_a_verdict_and_its_own_floor(live):
    language = StoryLanguage("en")
    for _ in range(3):
        text, note = live.first_story, live.first_note
        nats, size = language.score(text), len(text.encode())
        assert len(text.split()) > 40 and "cost the model" in note
        if nats > -math.inf:
            assert note.startswith("Valid to the last word.")
            assert f"paid for it, is {-nats / math.log(2) / size:.4f}." in note
        else:
            assert note.startswith("Not valid: the first word") and "no floor" in note
        assert live.locator("#write").inner_text() == "Write to the end"
        live.locator("#write").click()
        live.get_by_text("The story is over.").wait_for()
        assert not live.locator(".choices").is_visible()
        assert live.locator("#write").inner_text() == "Tell another"
        live.locator("#write").click()
        live.wait_for_function(
            "(({ busy, over }) => over && !busy)(document.querySelector('#live').live)"
        )
        live.first_story = live.locator("#story").inner_text().removesuffix("∎")
        live.first_note = live.locator("#story-note").inner_text()
        live.locator("#again").click()
        live.get_by_text("A new story").wait_for()


@pytest.mark.browser
def test_a_prompt_that_begins_no_story_is_answered_with_a_sentence(live):
    live.locator("#prompt").fill("Once upon a time, a 犀牛")
    live.locator("#again").click()
    live.get_by_text("No story begins like this: “犀牛” is the first word that none has").wait_for()


@pytest.mark.browser
def test_a_browser_that_lacks_something_keeps_the_recorded_story(tab, address):
    tab.add_init_script("delete String.prototype.toWellFormed")
    tab.goto(address)
    story = tab.locator("#story").inner_text()
    tab.locator("#load").click()
    tab.get_by_text("this browser is too old for it").wait_for()
    assert tab.locator("#status").inner_text().endswith("The recorded story stays.")
    assert tab.locator("#story").inner_text() == story


def set_dial(tab, name, value):
    tab.locator(f"#dial-{name}").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value
    )


def ids_of(tab):
    return tab.evaluate("document.querySelector('#live').live.ids")


@pytest.mark.browser
@pytest.mark.parametrize("prompt", ["", "Once upon a time", "There was once a brave 犀牛"])
def test_greedy_is_that_of_the_package_token_for_token(live, prompt):
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    start = torch.tensor([tokenizer.encode(prompt)])
    expected = generate(model, start, max_new_tokens=320 - start.shape[1])[0, 1:].tolist()
    live.locator("#prompt").fill(prompt)
    live.locator("#again").click()
    live.get_by_text("Begun with your text" if prompt else "A new story").wait_for()
    set_dial(live, "temperature", 0)
    live.locator("#write").click()
    live.get_by_text("The story is over.").wait_for()
    assert ids_of(live) == expected
    assert len(expected) > 40
    with torch.no_grad():
        ids = torch.tensor([[tokenizer.bos_token_id, *expected]])
        log_probs = model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])
    size = len(tokenizer.decode(expected, skip_special_tokens=True).encode())
    cost = -log_probs.sum().item() / math.log(2) / size
    assert f"cost the model {cost:.4f} bits a byte." in live.locator("#story-note").inner_text()
    assert tokenizer.decode(expected, skip_special_tokens=True) == live.locator(
        "#story"
    ).inner_text().removesuffix("∎")


@pytest.mark.browser
def test_dials_change_the_distribution_before_the_draw_and_a_click_chooses(live):
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.bos_token_id]]))[:, -1]
    own = logits.softmax(-1)[0]
    best = own.topk(10).indices.tolist()
    shares = "(all) => all.map((e) => parseFloat(e.textContent.replace('< ', '')))"
    for setting in ({"temperature": 0.5}, {"topK": 3}, {"topP": 0.6}, {"minP": 0.3}):
        for name, value in setting.items():
            set_dial(live, name, value)
        expected = Sampler(**package_names(setting)).probabilities(logits)[0]
        shown = live.locator(".choices .share").evaluate_all(shares)
        for id_, share in zip(best, shown, strict=True):
            assert abs(share - 100 * expected[id_].item()) <= 0.1
        assert ids_of(live) == []  # nothing has been drawn yet
        for name in setting:
            set_dial(live, name, {"temperature": 1, "topK": 0, "topP": 1, "minP": 0}[name])
    set_dial(live, "topK", 1)
    assert live.locator(".choices .cut").count() == 9
    live.locator(".choices button").nth(4).click()  # another word, also one that the dials cut
    live.wait_for_function("document.querySelector('#live').live.ids.length === 1")
    assert ids_of(live) == [best[4]]
    assert f"{own[best[4]]:.3f}" in live.locator("#story span").get_attribute("title")


@pytest.mark.browser
def test_the_live_page_is_small_local_and_works_offline_once_loaded(live, address):
    live.wait_for_load_state("networkidle")
    total = sum(len(response.body()) for response in live.bytes)
    entries = (
        "performance.getEntries().filter((e) => e.encodedBodySize).map((e) => e.encodedBodySize)"
    )
    assert total <= sum(live.evaluate(entries)) < 7e6 and total > 4e6
    names = [r.url.rsplit("/", 1)[1] for r in live.bytes if "/live/" in r.url]
    assert sorted(names) == ["config.json", "en.txt", "model.safetensors", "tokenizer.json"]
    assert live.evaluate("crossOriginIsolated") is False  # no special headers
    live.context.set_offline(True)
    for _ in range(3):
        before = len(ids_of(live))
        live.locator("#draw").click()
        live.wait_for_function(f"document.querySelector('#live').live.ids.length === {before + 1}")


@pytest.mark.browser
def test_the_keyboard_is_enough_and_everything_has_a_name(live):
    live.locator("#draw").focus()
    live.keyboard.press("Enter")
    live.wait_for_function("document.querySelector('#live').live.ids.length === 1")
    live.keyboard.press("Tab")
    assert live.evaluate("document.activeElement.id") == "write"
    for name in ("Temperature", "Top-k", "Top-p", "Min-p"):
        dial = live.get_by_role("slider", name=re.compile(name))
        dial.focus()
        before = dial.input_value()
        live.keyboard.press("ArrowLeft" if name == "Top-p" else "ArrowRight")
        assert dial.input_value() != before and dial.get_attribute("aria-valuetext")
    assert live.get_by_role("textbox", name="Begin with").count() == 1
    choice = live.locator(".choices button").first
    assert re.search(r", [<\d].*%; without the dials", choice.get_attribute("aria-label"))
    choice.focus()
    live.keyboard.press("Enter")
    live.wait_for_function("document.querySelector('#live').live.ids.length === 2")
    assert "probability" in live.locator("#status").inner_text()
    live.locator("#prompt").fill("a <|endoftext|>")
    live.keyboard.press("Enter")
    live.get_by_text("the text spells the special token <|endoftext|>").wait_for()


WEIGHTS = SHIPPED / "model.safetensors"
SMALL_ARRAYS = """
  for (const kind of ["Float32Array", "Uint8Array", "Uint16Array", "Uint32Array"]) {
    window[kind] = new Proxy(window[kind], { construct(target, given) {
      const made = Reflect.construct(target, given);
      if (made.length > 200_000) throw new RangeError("Array buffer allocation failed");
      return made;
    } });
  }
"""


@pytest.mark.browser
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 404, "body": ""}, "model.safetensors could not be loaded (404)"),
        ({"body": b""}, "cut short, or no safetensors file: 0 bytes"),
        ({"body": b"<!DOCTYPE html><p>Sorry"}, "cut short, or no safetensors file: 23 bytes"),
        (
            {"body": WEIGHTS.read_bytes()[:1_000_000]},
            f": 1000000 bytes of {WEIGHTS.stat().st_size}",
        ),
        (None, "this browser has no room for arrays of the model's size"),
    ],
    ids=["missing", "empty", "another file", "cut short", "no room"],
)
def test_without_the_weights_the_recorded_story_stays_with_a_sentence(tab, address, answer, said):
    if answer is None:
        tab.add_init_script(SMALL_ARRAYS)
    else:
        tab.route("**/*.safetensors", lambda route: route.fulfill(**answer))
    tab.goto(address)
    story = tab.locator("#story").inner_text()
    tab.locator("#load").click()
    tab.get_by_text("The live model cannot run here").wait_for()
    assert said in (sentence := tab.locator("#status").inner_text())
    assert sentence.endswith("The recorded story stays.")
    assert tab.locator("#story").inner_text() == story and len(story.split()) > 50
    assert tab.locator("#load").is_enabled() and not tab.locator("#panel").is_visible()
    if answer and "status" in answer:
        tab.wrong.clear()  # the missing file is what this is about
    if answer:  # and what a second try brings
        tab.unroute("**/*.safetensors")
        tab.locator("#load").click()
        tab.locator("#panel").wait_for(state="visible")


@pytest.mark.browser
def test_the_recorded_story_is_shaded_by_the_models_own_probabilities(tab, address):
    tab.goto(address)
    spans = tab.locator("#story span").evaluate_all(
        "(all) => all.map((e) => [e.textContent, e.title, getComputedStyle(e).backgroundColor])"
    )
    model, tokenizer = from_pretrained(SHIPPED, dtype="float32")
    assert spans[-1][0] == "∎"
    text = "".join(text for text, _, _ in spans[:-1])
    ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
    assert ids.shape[1] == len(spans) + 1
    with torch.no_grad():
        probs = model(ids[:, :-1])[0].softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    for (_, title, color), p in zip(spans, probs, strict=True):
        assert abs(float(title.split()[-1]) - p) < 2e-3
        alpha = [*map(float, re.findall(r"[\d.]+", color)), 1.0][3]
        assert abs(alpha - 0.6 * min(1, -math.log2(p) / 8)) < 0.01


@pytest.fixture
def run(tab, address):
    """Run a script on the front page, as `node` does."""
    tab.goto(address)
    read = "async (name) => new Uint8Array(await (await fetch(`${S}/live/${name}`)).arrayBuffer())"

    def run(code, value):
        wrapped = f"async ([S, V]) => {{ const read = {read}; {code} }}"
        return tab.evaluate(wrapped, [address + "_static", value])

    return run


@pytest.mark.browser
def test_the_model_in_the_browser(run):
    assert_logits_agree(run)
    assert_greedy_stories_agree(run, most=240)
    assert_draws_agree(run)


@pytest.mark.browser
def test_the_scripts_on_their_page_are_those_that_run(tab, address):
    tab.goto(address + "javascript.html")
    shown = tab.locator("div.highlight pre").all_inner_texts()
    files = [(TOOLS / "static" / name) for name in ("minillm.js", "sampling.js", "tokenizer.js")]
    text = "\n\n".join(path.read_text(encoding="utf-8").strip() for path in files)
    assert "\n\n".join(piece.strip() for piece in shown) == text
    assert tab.locator(".package-label").count() > 15
    tab.locator(".package-label a").filter(has_text="layers.py").first.click()
    assert "class RMSNorm" in tab.locator("article").inner_text()


@pytest.mark.browser
def test_the_tokenizer_and_the_dials_in_the_browser(run):
    def run_texts(code, value):
        ids, decoded = run(
            code.replace("V.texts", "JSON.parse(V.texts)"),
            {**value, "texts": json.dumps(value["texts"])},
        )
        return ids, decoded

    assert_tokenizers_agree(run_texts)
    assert_distributions_agree(lambda rows, s: run(DISTRIBUTIONS, {"rows": rows, "setting": s}))


# Figures that move


@pytest.mark.browser
def test_the_moving_mask_is_the_packages(tab, address):
    tab.goto(address + "notebooks/03_attention.html")
    code = "async ([t, s, w]) => (await import('../_static/figures.js')).mask(t, s, w)"
    places = torch.arange(6)
    for S in range(1, 7):
        for T in range(1, S + 1):
            assert tab.evaluate(code, [T, S, None]) == causal_mask(T, S).tolist()
            for window in (1, 2, 5):
                expected = build_mask(places[S - T : S], places[:S], window=window)
                assert tab.evaluate(code, [T, S, window]) == expected.tolist()
    figure = tab.locator(".figure-mask")
    for name, value in (("Keys S", 5), ("Queries T", 2), ("Window", 3)):
        figure.get_by_label(name).evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value
        )
    cells = figure.locator("td.may, td.not").evaluate_all("(a) => a.map((e) => e.className)")
    expected = build_mask(torch.tensor([3, 4]), torch.arange(5), window=3).flatten().tolist()
    assert [name == "may" for name in cells] == expected
    assert "position 4 and reads 3 of 5 keys" in figure.inner_text()


@pytest.mark.browser
def test_the_moving_temperature_is_the_packages(tab, address):
    tab.goto(address + "notebooks/09_sampling.html")
    figure = tab.locator(".figure-temperature")
    data = json.loads(figure.locator("script").text_content())
    p = torch.tensor(
        [[*data["likely"].values(), *[data["rest"] / data["others"]] * data["others"]]]
    )
    assert abs(p.sum().item() - 1) < 1e-6
    shown = "(e) => [...e.querySelectorAll('.share')].map((s) => parseFloat(s.textContent))"
    for t in (0.1, 0.5, 1.0, 2.0, 4.0):
        figure.locator("input").evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", t
        )
        shares = sampling.temperature(p.log(), t).softmax(-1)[0]
        expected = [*shares[:8].tolist(), shares[8:].sum().item()]
        assert figure.evaluate(shown) == pytest.approx(expected, abs=6e-4)
    last = re.findall(r"t = (\S+) +(\S+) +(\S+) +(\S+)", output_of_temperature())
    assert len(last) == 5  # the table of the page: drifted, turned, the others
    for t, drifted, turned, others in last:
        shares = sampling.temperature(p.log(), float(t)).softmax(-1)[0]
        got = [shares[0].item(), shares[7].item(), shares[8:].sum().item()]
        assert got == pytest.approx([float(drifted), float(turned), float(others)], abs=6e-4)


def output_of_temperature():
    """What page 09 prints about five temperatures."""
    notebook = json.loads((ROOT / "notebooks/09_sampling.ipynb").read_text(encoding="utf-8"))
    outputs = ["".join(o.get("text", "")) for c in notebook["cells"] for o in c.get("outputs", [])]
    return next(text for text in outputs if "all 1,000 others" in text)
