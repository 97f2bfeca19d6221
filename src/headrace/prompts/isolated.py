"""Chat templates rendered in a process of their own, because not all that they can do can be counted.

The fuel of :class:`~headrace.prompts.template.ChatTemplate` counts instructions and the texts they make. It does not
count what the library does inside one of them: ``[1] * 10**8`` is one small instruction, and so is printing a list that
holds itself twice, thirty levels deep. Only something outside the interpreter can stop those.
"""

import asyncio
import contextlib
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.prompts.render_process import Definition, Job, Outcome
from headrace.prompts.template import ENDLESS, ChatTemplate

_CPU_S = 0.2
_CPU_S_PER_MESSAGE = 0.0003
_CPU_S_PER_BYTE = 2e-7
"""Several times what the fuel of an honest template can take; see ``TemplateLimits``."""

_SILENCE_S = 10.0
"""A process that neither answers nor ends: it is stopped, or the machine hardly runs."""

MAX_PENDING_RENDERS = 256
"""Requests of one model that may wait for its process; one takes well under a millisecond as a rule."""


class IsolatedTemplate:
    """A :class:`ChatTemplate` in a process of its own, which is ended when a rendering takes too much, and replaced.

    One rendering at a time: a template that takes long makes only the requests for its own model wait.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Starts the process; takes some 0.2 s, so call it off the event loop."""
        self._definition = _line(Definition(template.sources, template.variables, template.limits))
        self._pool = ThreadPoolExecutor(1, "template")
        self._closed = False
        self._num_pending = 0
        self._child: subprocess.Popen[bytes] | None = self._start()

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """As :meth:`ChatTemplate.render`; ``messages``, ``tools`` and ``variables`` are JSON-like.

        Raises:
            InvalidRequest: as there; or the rendering took more time or memory than any honest one.
            Overloaded: ``MAX_PENDING_RENDERS`` wait already.
        """
        if self._num_pending >= MAX_PENDING_RENDERS:
            raise Overloaded(f"{self._num_pending} requests wait for the model's chat template", retry_after_s=1.0)
        job = Job(
            [dict(m) for m in messages],
            add_generation_prompt,
            None if tools is None else [dict(tool) for tool in tools],
            variables,
            0.0,
        )
        num_bytes = len(msgspec.json.encode(job))
        job.cpu_s = _CPU_S + _CPU_S_PER_MESSAGE * len(messages) + _CPU_S_PER_BYTE * num_bytes
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._ask, _line(job))
        self._num_pending += 1
        work.add_done_callback(self._rendered)
        return await work

    def close(self) -> None:
        """End the process; a rendering in progress is refused. Idempotent."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        child = self._child
        if child is not None:
            child.kill()

    def _rendered(self, _work: object) -> None:
        self._num_pending -= 1

    def _ask(self, line: bytes) -> str:
        # A process that somebody else ended is no fault of these messages, hence a second one.
        for is_last in (False, True):
            child = self._child or self._start()
            self._child = child
            answer = _exchange(child, line)
            if answer is not None:
                outcome = msgspec.json.decode(answer, type=Outcome)
                if outcome.refusal is not None:
                    raise InvalidRequest(outcome.refusal, param="messages")
                return outcome.text
            self._child = None
            status = _end(child)
            if status == -signal.SIGPROF or is_last or self._closed:
                break
        if status == -signal.SIGPROF:
            raise InvalidRequest(ENDLESS, param="messages")
        raise InvalidRequest(
            "the model's chat template ended the process that rendered it: it needs too much memory or never ends",
            param="messages",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace.prompts.render_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, _end, child)
        if _exchange(child, self._definition) is None:
            raise RuntimeError(f"the process that renders chat templates did not start: exit status {_end(child)}")
        return child


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> bytes | None:
    """The answer to ``line``; None if the process ended, or was silent for ``_SILENCE_S``."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except OSError:
        return None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    if not poll.poll(_SILENCE_S * 1000):
        return None
    answer = child.stdout.readline()
    return answer if answer.endswith(b"\n") else None


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill and reap the process, and close its pipes; the exit status is the one it had, if it had ended."""
    child.kill()
    status = child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # What is left in the buffer cannot be written any more.
            with contextlib.suppress(OSError):
                pipe.close()
    return status
