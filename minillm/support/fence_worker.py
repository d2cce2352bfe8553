"""The other side of `minillm.support.fence`: here run the programs that came with somebody's file.

A script, not for import: it is started in a process of its own, reads one line of JSON for each
task and writes one with the answer, until its input ends. It knows Jinja and nothing of this
package, and never imports torch. Written by hand.
"""

from __future__ import annotations

import faulthandler
import json
import re
import signal
import sys
from datetime import datetime
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

BEGIN, END = "\ufdd0", "\ufdd1"  # an answer's, where marked; no characters, so no text needs them


@cache
def environment(marked: bool) -> Environment:
    """Jinja as chat templates expect it, with the answers' begins and ends `marked` or not.

    Source: transformers, `utils/chat_template_utils.py`.
    """
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant says, for training; nothing else needs it."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marked:
                return body
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [begin, *body, end]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    found.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


@lru_cache(maxsize=16)
def compiled(template: str, marked: bool) -> Template:
    return environment(marked).from_string(template)


def filled(template: str, variables: dict[str, Any], marked: bool) -> tuple[str, bool]:
    """What a template writes, and True; or why it refuses, and False."""
    try:
        return compiled(template, marked).render(variables), True
    except MemoryError:
        raise
    except Exception as error:  # Jinja's own, 1 / 0, "a".index("b"), 5 | dictsort, ...
        return str(error)[:1000], False


def do(task: dict[str, Any]) -> Any:
    """What `support.fence` asks for: which names a pattern fits, or what a template writes."""
    if "pattern" in task:
        try:
            pattern = re.compile(task["pattern"])
        except (re.error, RecursionError, OverflowError) as error:
            return str(error)
        return [pattern.fullmatch(name) is not None for name in task["names"]]
    return [filled(task["template"], *wanted) for wanted in task["wanted"]]


def set_alarm(seconds: float) -> None:
    """End this process after that time, whatever it does then; 0: do not."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def main(memory: int, folders: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    if hasattr(signal, "pthread_sigmask"):
        alarm = signal.Signals["SIGALRM"]
        signal.signal(alarm, signal.SIG_DFL)  # whatever the parent has done to it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {alarm})
    if sys.platform == "linux":
        resource = import_module("resource")  # Windows has none
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.path += folders
    if folders:
        environment(False)  # what an import takes is nobody's time
    for line in sys.stdin.buffer:
        task = json.loads(line)
        set_alarm(task["seconds"])
        answer = json.dumps(do(task), ensure_ascii=False).encode("utf-8", "surrogatepass")
        set_alarm(0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
