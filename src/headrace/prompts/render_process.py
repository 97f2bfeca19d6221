"""The program of a rendering process: templates arrive on standard input, then messages, one JSON object a line.

It is started by :mod:`headrace.prompts.isolated` alone. The kernel ends it when one rendering takes too much processor
time or memory, wherever it then is: no code of the template's can prevent that.
"""

import os
import resource
import signal
import sys

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.prompts.template import ChatTemplate, TemplateLimits

_MAX_MEMORY_BYTES = 1 << 30


class Definition(msgspec.Struct):
    """The first line."""

    templates: dict[str, str]
    variables: dict[str, str]
    limits: TemplateLimits


class Job(msgspec.Struct):
    """Every other line."""

    messages: list[dict[str, object]]
    add_generation_prompt: bool
    tools: list[dict[str, object]] | None
    variables: dict[str, object]
    cpu_s: float
    """The processor time after which the process ends."""


class Outcome(msgspec.Struct):
    """The answer to each line: a text, or why there is none."""

    text: str = ""
    refusal: str | None = None


def main() -> None:
    """Serve until standard input ends."""
    # A terminal's Ctrl-C reaches everybody in the group; this process ends when its gateway does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    definition = msgspec.json.decode(lines.readline(), type=Definition)
    template = ChatTemplate(definition.templates, variables=definition.variables, limits=definition.limits)
    # Last words of the library may quote what a tenant wrote.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    outcome = Outcome()
    while True:
        answers.write(msgspec.json.encode(outcome) + b"\n")
        answers.flush()
        line = lines.readline()
        if not line.endswith(b"\n"):
            return
        outcome = _render(template, msgspec.json.decode(line, type=Job))


def _render(template: ChatTemplate, job: Job) -> Outcome:
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
    try:
        text = template.render(
            job.messages, add_generation_prompt=job.add_generation_prompt, tools=job.tools, **job.variables
        )
        return Outcome(text)
    except InvalidRequest as error:
        return Outcome(refusal=str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
