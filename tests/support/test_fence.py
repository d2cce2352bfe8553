"""Templates and patterns of strangers end in time; the process that they run in leaves nothing."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minillm.deeper.tokenizer.chat_template import render_answers, render_chat
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.support import fence

ROOT = Path(__file__).resolve().parents[2]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
BYTES = {bytes([byte]): byte for byte in range(256)}


def chat(template, talk=TALK):
    tokenizer = ForeignTokenizer(BYTES, "(?s:.)", {"<s>": 256}, chat_template=template)
    return render_chat(tokenizer, talk, add_generation_prompt=False)


LOW = 100 << 20


@pytest.fixture
def low(monkeypatch):
    """Limits so low that reaching them takes no time; a process that knows them."""
    monkeypatch.setattr(fence, "MEMORY", LOW)
    if fence._process.running and str(LOW) not in fence._process.running.args[-1]:
        fence.stop()
    assert chat("{{ messages | length }}") == "2"
    monkeypatch.setattr(fence, "SECONDS", 0.1)


def teardown_module():
    fence.stop()


GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)
AGAIN = "{%% for i in range(10**5) %%}{%% set x = %s %%}{%% endfor %%}"

# Each of these ends by a limit, or by an error of its own.
HOSTILE = {
    "multiplied": "{{ 'x' * 10**10 }}",
    "nested ranges": "{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3,
    "nested ranges that write": "{% for i in range(10**5) %}" * 3 + "x" + "{% endfor %}" * 3,
    "center": "{{ 'x' | center(10**10) }}",
    "indent": "{{ ('x\\n' * 10**5) | indent(10**6) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "width of str.format": "{{ '{:>2000000000}'.format('x') }}",
    "width of a width": "{{ '{0:{1}}'.format('x', 10**10) }}",
    "width of format_map": "{{ '{a:>2000000000}'.format_map({'a': 'x'}) }}",
    "width of %": "{{ '%2000000000s' % 'x' }}",
    "width of the filter format": "{{ '%2000000000d' | format(1) }}",
    "digits of a float": "{{ '%.2000000000f' % 1.5 }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ ('\\t' * 10**4).expandtabs(10**8) }}",
    "~ in a loop": GROW % ("'x'", "ns.x ~ ns.x"),
    "+ in a loop": GROW % ("'x'", "ns.x + ns.x"),
    "lists in a loop": GROW % ("[1]", "ns.x + ns.x"),
    "a list multiplied": "{{ [0] * 10**10 }}",
    "products in a loop": GROW % ("9", "ns.x * ns.x"),
    "lists of one list, written": GROW % ("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "lists of one list, as JSON": GROW % ("[1]", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "lists of one list, pprint": GROW % ("[1]", "[ns.x, ns.x]") + "{{ ns.x | pprint }}",
    "dicts of one dict": GROW % ("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "lists of one list, compared": (
        GROW % ("[1]", "[ns.x, ns.x]") + GROW.replace("ns", "no") % ("[1]", "[no.x, no.x]")
    )
    + "{{ ns.x == no.x }}",
    "tuples of one tuple, hashed": GROW % ("(1, 2)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x | tojson }}",
    "a power": "{{ 9**(9**9) }}",
    "a power that never runs": "{% if false %}{{ 10**(10**8) }}{% endif %}",
    "a power of variables": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "digits of a great number": "{{ '%d' % (7 ** (10**7)) }}",
    "filesizeformat": "{{ (7 ** (10**8)) | filesizeformat }}",
    "a number of many digits": "{{ ('f' * 10**8) | int(base=32) }}",
    "macros that call themselves": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call blocks without end": (
        "{% macro f() %}{% call f() %}x{% endcall %}{% endmacro %}{{ f() }}"
    ),
    "a block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "block set": "{% set a %}{{ 'x' * 10**9 }}{% endset %}{{ (a ~ a) | length }}",
    "a filter block": "{% filter replace('x', 'x' * 10**6) %}{{ 'x' * 10**5 }}{% endfilter %}",
    "replace": "{{ ('x' * 10**5) | replace('x', 'y' * 10**6) }}",
    "translate": "{{ ('x' * 10**5).translate({120: 'y' * 10**6}) }}",
    "join": "{{ range(10**5) | join('x' * 10**6) }}",
    "split": "{{ ('x' * 10**8).split('x') | length }}",
    "sum of lists": "{{ ([[0] * 10**5] * 10**5) | sum(start=[]) | length }}",
    "title": "{{ ('a ' * 10**8) | title | length }}",
    "urlize": "{{ ('http://a.' * 10**8) | urlize | length }}",
    "escape": "{{ ('<' * 10**8) | escape | length }}",
    "wordwrap": AGAIN % "(i ~ ' a' * 10**5) | wordwrap(2)",
    "sort": AGAIN % "range(10**5) | sort(reverse=true)",
    "unique": AGAIN % "range(10**5) | unique | list",
    "groupby": AGAIN % "range(10**5) | groupby(attribute='real')",
    "map": AGAIN % "range(10**5) | map('string') | map('length') | list",
    "cycler": AGAIN % "cycler(*range(10**5))",
    "joiner": AGAIN % "joiner('x' * 10**5 ~ i)",
    "dict": AGAIN % "dict.fromkeys(range(10**5))",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "JSON's indent": "{{ [1] | tojson(indent=10**9) }}",
    "JSON's separators": "{{ range(10**5) | list | tojson(separators=('x' * 10**6, '')) }}",
    "a date's form": "{{ strftime_now('%c' * 10**7) }}",
    "idna": "{{ ('é' * 10**6).encode('idna') }}",
    "a reason of great length": "{{ raise_exception('x' * 10**6) }}",
    "brackets": "{{ " + "(" * 9**5 + ")" * 9**5 + " }}",
    "lists in lists": "{{ " + "[" * 9**5 + "]" * 9**5 + " }}",
    "minus signs": "{{ " + "-" * 10**5 + "1 }}",
    "not not": "{{ " + "not " * 5 * 10**4 + "1 }}",
    "a chain of filters": "{{ 1" + "|string" * 30_000 + " }}",
    "a chain of attributes": "{{ messages" + ".x" * 100_000 + " }}",
    "a chain of sums": "{{ 1" + "+1" * 100_000 + " }}",
    "ifs in ifs": "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000,
    "elifs": "{% if 0 %}" + "{% elif 0 %}" * 15_000 + "{% endif %}",
    "macros in macros": "{% macro a() %}" * 5000 + "{% endmacro %}" * 5000,
    "a source that is too long": "x" * 256_001,
    "a comment that is too long": "{# " + "x" * 256_000 + " #}",
    "an attribute of an attribute": "{{ messages | map(attribute='a.' * 10**6) | list }}",
    "text": "{{ 'x' * 3 * 10**6 }}",
    "text, a piece at a time": "{% for i in range(10**5) %}{{ 'x' * 100 }}{% endfor %}",
    "text in a slow loop": "{% for i in range(10**5) %}{{ messages | tojson }}{% endfor %}",
    "another file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_no_template_takes_more_than_its_share(low, how):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^the chat template ") as found:
        chat(HOSTILE[how])
    assert len(str(found.value)) < 1200
    assert time.monotonic() - start < 900  # against hanging: without limits it takes hours


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3, r"takes more than 0\.1 seconds"),
        ("{% if false %}{{ 10**(10**8) }}{% endif %}", r"takes more than 0\.1 seconds"),
        ("x" * 256_001, r"is too long: 'xxx.*'\.\.\., 256,001 characters; at most 256,000"),
    ],
)
def test_the_error_names_the_limit(low, template, message):
    with pytest.raises(ValueError, match=message):
        chat(template)


def test_text_is_bounded():
    with pytest.raises(ValueError, match="writes more than 2,0"):  # of two: the other is harmless
        chat("{{ 'x' * 3 * 10**6 }}")
    assert fence.ANSWER == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the time bounds memory")
def test_memory_is_bounded(low, monkeypatch):
    monkeypatch.setattr(fence, "SECONDS", 600)
    with pytest.raises(ValueError, match="takes more than 100 MB, or breaks Python"):
        chat("{{ ('x' * 10**8) | length }}")
    assert chat("{{ ('x' * 10**7) | length }}") == "10000000"


def test_all_that_one_call_writes_shares_one_limit(monkeypatch):
    """Without marks each beginning of the conversation is written anew."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = ForeignTokenizer(BYTES, "(?s:.)", {"<s>": 256}, chat_template=template)
    seconds = itertools.count()
    monkeypatch.setattr(fence, "monotonic", lambda: next(seconds))  # each takes one
    assert len(render_answers(tokenizer, TALK * 9)[1]) == 9
    with pytest.raises(ValueError, match="takes more than 10 seconds"):
        render_answers(tokenizer, TALK * 10)


ODD = {
    "lone \ud800 surrogates \udc00 and pairs \ud83d\ude00 in two": None,
    "NUL \0, escape \x1b[2J, line ends \r\n\x0b\x1c\x85\u2028": None,
    '", true]\n["forged", true]\n': None,
    "\ufeff and \uffff": None,
}


@pytest.mark.parametrize("text", ODD)
def test_texts_pass_unchanged(text):
    talk = [{"role": "user", "content": text}]
    for template, expected in {
        "{{ messages[0].content }}": text,
        "{{ messages[0].content | upper | length }}": str(len(text.upper())),
        "{{ messages[0] | tojson }}": json.dumps(talk[0], ensure_ascii=False),
        "{{ messages[0].content | list | join('') }}": text,
    }.items():
        [found] = fence.fill(template, [({"messages": talk}, False)], fence.Time())
        assert found == expected
    with pytest.raises(ValueError, match=re.escape(repr(text)[1:9])):
        raise fence.fill("{{ raise_exception(x | pprint) }}", [({"x": text}, 0)], fence.Time())[0]


def test_a_long_conversation_is_written_whole(monkeypatch):
    """More than `ANSWER` bytes, as they are the caller's own."""
    monkeypatch.setattr(fence, "ANSWER", 1000)
    with pytest.raises(ValueError, match="writes more than"):
        chat("{{ 'x' * 10**5 }}")
    talk = [{"role": "user", "content": '猫"\n' * 30_000}]
    assert chat("{{ messages[0].content }}!", talk) == talk[0]["content"] + "!"


NAMES = [
    f"model.layers.{i}.{part}_proj"
    for i in range(22)
    for part in ("self_attn.q", "mlp.up", "a.b.c")
]
TOO_SLOW = {
    "a group repeated": r"(([a-z._0-9])+)+!",
    "dots repeated": "(.*)*!",
    "one or more, repeated": "(.+)+!",
    "repeated three times": "(((.*)*)*)*!",
    "two dots": "(.*.*)*!",
    "many dots": ".*" * 20 + "!",
    "lazy dots": "(?s:" + ".*?" * 20 + ")!",
    "the same twice": "(.|.)+!",
    "one or two": "(.|..)+!",
    "words and dots": r"(\w*\.*)*!",
    "each may be there": "(?:(?:.?){9}){9}!",
    "counts of counts": "(?:(?:(?:.{0,9}){0,9}){0,9}){0,9}!",
    "a look ahead": "(?=(.+)+!).*",
    "no look ahead": "(?!(.+)+!).*",
    "at each letter": "(?:(?!(.+)+!).)*!",
    "a condition": "(z)?(?(1)z|(.+)+!)",
    "letters of any case": "(?i:(([a-z._0-9])+)+!)",
    "back to a group": r"(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5\6!",
    "back to a name": "(?P<a>.*)+(?P=a)!",
    "verbose": "(?x) ( ( . ) + ) + ! # a comment",
    "one atom": "(?:(?>.|..)+|.)+(?<!.)!",
    "sets of any case": "(?i)" + "[\0-\U0010ffff]" * 9999,
}
REFUSED = {
    "recursion": "(?R)",
    "recursion by number": "(.)(?1)",
    "recursion by name": "(?P<a>.)(?&a)",
    "a look behind of any length": "(?<=.*)a",
    "a class": r"\p{L}+",
    "a great count": "a{99999999999999999999}",
    "groups in groups": "(" * 100_000 + "a" + ")" * 100_000,
    "no groups in groups": "(?:" * 50_000 + "a" + ")" * 50_000,
    "no end": "(" * 200_000,
    "too long": "a" * 256_001,
}
HARMLESS = {
    "counts of counts": "(a{1,9999}){1,9999}",
    "alternatives": "a|" * 9999 + "b",
    "sets": "[a-z]" * 9999,
    "a great count": ".{0,4294967294}",
    "atoms": "(?>.+)!",
    "repeated for good": "(?:.++)+!",
    "layers": r".*\.1\..*(up|q)_proj",
}


@pytest.mark.parametrize("how", TOO_SLOW)
def test_no_pattern_takes_longer_than_its_time(low, how):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^the pattern '\(?.* takes more than 0\.1 seconds"):
        fence.matches(TOO_SLOW[how], NAMES)
    assert time.monotonic() - start < 900


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_no_pattern_is_refused(how):
    with pytest.raises(ValueError, match=r"is no pattern: |is too long: ") as found:
        fence.matches(REFUSED[how], NAMES)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("how", HARMLESS)
def test_patterns_match_as_re_does(how):
    expected = [name for name in NAMES if re.fullmatch(HARMLESS[how], name)]
    assert fence.matches(HARMLESS[how], iter(NAMES)) == expected
    assert bool(expected) == (how in ("layers", "a great count"))


def pid():
    return int(chat("{{ 1 }}")) and fence._process.running.pid


def test_one_process_serves_until_it_is_ended(low):
    first = pid()
    assert pid() == first
    with pytest.raises(ValueError, match="refuses these messages: no"):
        chat("{{ raise_exception('no') }}")
    assert pid() == first
    with pytest.raises(fence.TooMuchError):
        chat(HOSTILE["nested ranges"])
    assert fence._process.running is None
    second = pid()
    assert second != first
    os.kill(second, signal.SIGTERM)  # by somebody else
    fence._process.running.wait()
    assert pid() != second


def test_a_process_that_ends_within_a_task_is_an_error(monkeypatch):
    pid()
    ended = fence._process.running
    ended.kill()
    ended.wait()
    monkeypatch.setattr(ended, "poll", lambda: None)  # it ends just after we looked
    with pytest.raises(ValueError, match="or breaks Python"):
        chat("a")
    assert chat("a") == "a"


def test_threads_get_their_own_answers():
    found = {}

    def work(n):
        for _ in range(20):
            found.setdefault(n, set()).add(chat("{{ messages[0].content }}" + f" {n}"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: {f"hi {n}"} for n in range(5)}


SCRIPT = """
import os, signal, subprocess, sys, time
from minillm.support import fence
def fill(template):
    return fence.fill(template, [({"x": "hi"}, False)], fence.Time())[0]
FOREVER = "{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3
assert fill("{{ x }}") == "hi"
child = fence._process.running
"""


def run(code, *, python=(sys.executable, "-X", "dev", "-W", "error"), code_is=0, **options):
    """What a program writes, in a Python that shows each resource left open."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    done = subprocess.run(
        [*python, "-c", SCRIPT + code],
        capture_output=True,
        text=True,
        timeout=900,
        env=settings,
        **options,
    )
    assert (done.returncode, done.stderr) == (code_is, "")
    return done.stdout


def gone(pid):
    """Whether a process has ended, or ends soon."""
    for _ in range(60_000):
        try:
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("how", ["pass", "sys.exit()", "fence.stop()", "os._exit(0)"])
def test_nothing_is_left_when_the_program_ends(how):
    ended = int(run(f"print(child.pid, flush=True)\n{how}"))
    assert os.name == "nt" or gone(ended)


@pytest.mark.skipif(os.name == "nt", reason="asks by POSIX's signals whether a process lives")
def test_a_task_ends_though_its_parent_is_killed():
    code = (
        "print(child.pid, flush=True)\nfence.SECONDS = 0.5\n"
        "os.read = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the task is sent\n"
        "fill(FOREVER)"
    )
    assert gone(int(run(code, code_is=-signal.SIGKILL)))


@pytest.mark.skipif(os.name == "nt", reason="no SIGALRM")
def test_a_parent_that_ignores_alarms_changes_nothing():
    run("""
fence.stop()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
fence.SECONDS = 0.2
try:
    fill(FOREVER)
except fence.TooMuchError as error:
    assert "0.2 seconds" in str(error)
""")


def test_without_alarms_python_ends_itself(tmp_path, monkeypatch):
    """As on Windows."""
    worker = tmp_path / "worker.py"
    future = "from __future__ import annotations\n"
    code = fence._WORKER.read_text(encoding="utf-8")
    code = code.replace(future, f"{future}import signal\ndel signal.setitimer\n")
    worker.write_text(code, encoding="utf-8")
    if hasattr(signal, "setitimer"):
        monkeypatch.setattr(fence, "_WORKER", worker)
    fence.stop()
    first = pid()
    monkeypatch.setattr(fence, "SECONDS", 0.2)
    for template in (HOSTILE["nested ranges"], HOSTILE["a power"]):
        with pytest.raises(ValueError, match=r"takes more than 0\.2 seconds"):
            chat(template)
    assert pid() != first
    fence.stop()


@pytest.mark.skipif(os.name == "nt", reason="a console's Ctrl-C cannot be sent by a test")
def test_ctrl_c_ends_the_task_and_writes_nothing():
    out = run(
        """
import threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
read = os.read
def interrupted(*where):  # the task is sent
    os.read = read
    threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()  # as a terminal does
    return read(*where)
os.read = interrupted
fence.SECONDS = 600
try:
    fill(FOREVER)
except KeyboardInterrupt:
    print("interrupted", fence._process.running, child.returncode)
print(fill("{{ x }} again"))
""",
        start_new_session=True,
    )
    assert out == f"interrupted None {-signal.SIGKILL}\nhi again\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_a_process_of_its_own():
    out = run("""
import threading
fence._process.lock.acquire()  # another thread is at it
forked = os.fork()
if not forked:
    assert fill("{{ x }} child") == "hi child" and fence._process.running.pid != child.pid
    pipes = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{n}")] if sys.platform == "linux" else []
    print(sum("pipe" in pipe for pipe in pipes), flush=True)
    sys.exit()  # with all that Python does at its end
assert os.waitpid(forked, 0)[1] == 0
fence._process.lock.release()
assert child.poll() is None and fill("{{ x }}") == "hi"
assert fence._process.running is child
pipes = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{n}")] if sys.platform == "linux" else []
print(sum("pipe" in pipe for pipe in pipes))
""")
    in_child, in_parent = out.split()
    assert in_child == in_parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_workers_of_a_data_loader_write_templates():
    out = run(
        """
from torch.utils.data import DataLoader
class Texts:
    def __len__(self): return 6
    def __getitem__(self, i): return fill("{{ x }}" + str(i))
loader = DataLoader(Texts(), 2, num_workers=2, multiprocessing_context="fork")
print(*(text for batch in loader for text in batch))
""",
        python=(sys.executable, "-W", "ignore:This DataLoader:UserWarning"),  # two, on one core
    )
    assert out == "hi0 hi1 hi2 hi3 hi4 hi5\n"


def test_odd_input_and_output_do_not_matter():
    code = "import sys; sys.stdin = sys.stdout = sys.stderr = None\n" + SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_libraries_are_those_of_the_parent(tmp_path):
    """Not from site-packages alone: from a folder that only PYTHONPATH names, odd letters in it."""
    import jinja2
    import markupsafe

    folder = tmp_path / 'a "猫" b'
    folder.mkdir()
    for module in (jinja2, markupsafe):
        place = Path(module.__file__).parent
        if sys.platform == "win32":
            pytest.skip("making a link needs a privilege")
        (folder / place.name).symlink_to(place)
    (folder / "json.py").write_text("raise SystemExit('not the standard library')")
    out = run(
        "fence.stop(); sys.path.insert(0, sys.argv[1])\n"
        "for name in [n for n in sys.modules if n.split('.')[0] in ('jinja2', 'markupsafe')]:\n"
        "    del sys.modules[name]\n"
        "fill('a'); print(fence._process.running.args[-1])".replace(
            "sys.argv[1]", repr(str(folder))
        )
    )
    assert json.loads(out)[1] == [str(folder)] * 2


def test_the_process_imports_neither_torch_nor_the_package():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(fence._WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"torch", "minillm", "numpy", "subprocess"} & {*done.stdout.split()}
