"""What a template's limits do not count is stopped from outside, and costs only the request that asked for it."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.prompts.isolated import IsolatedTemplate
from headrace.prompts.template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
TWICE = "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
SUM = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
UNCOUNTED = {
    "a list times a number": "{{ [1] * 100000000 }}",
    "a search in one": "{{ 2 in [1] * 1000000000 }}",
    "as JSON": "{{ ([1] * 1000000000) | tojson }}",
    "lists in lists": TWICE + "{{ ns.x }}",
    "lists in lists as JSON": TWICE + "{{ ns.x | tojson }}",
    "lists in lists as text": TWICE + "{{ ns.x | string | length }}",
    "lists in lists as an error": TWICE + "{{ raise_exception(ns.x) }}",
    "lists and lists": SUM + "{{ ns.x | length }}",
    "a wide format": "{{ '{:>10000000000}'.format(1) }}",
    "indented JSON": "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "a long date": "{{ strftime_now('%c' * 400000) }}",
}


def isolated(source: str) -> IsolatedTemplate:
    return IsolatedTemplate(ChatTemplate({"default": source}, variables={"bos_token": "<s>"}))


@pytest.fixture(scope="module")
def echo() -> Iterator[IsolatedTemplate]:
    template = isolated(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}{{ mood }}"
        "{% if messages | length > 4 %}{{ [1] * 100000000 }}{% endif %}"
    )
    yield template
    template.close()


async def test_renders_what_the_template_renders(echo: IsolatedTemplate) -> None:
    assert await echo.render([{"role": "user", "content": "日本 🙂\n\0"}]) == "<s>日本 🙂\n\0"
    assert await echo.render(HI, tools=[{"a": 1.5}], mood=2**70) == f'<s>hi[{{"a": 1.5}}]{2**70}'
    many = await asyncio.gather(*(echo.render([{"role": "user", "content": str(i)}]) for i in range(50)))
    assert many == [f"<s>{i}" for i in range(50)]


async def test_a_refusal_is_the_templates_own_words() -> None:
    template = isolated("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match=r"^roles must alternate$"):
        await template.render(HI)
    template.close()


@pytest.mark.parametrize("source", UNCOUNTED.values(), ids=UNCOUNTED)
async def test_what_is_not_counted_is_stopped(source: str) -> None:
    template = isolated(source)
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        await template.render(HI)
    # Some 0.2 s on a quiet machine; the bound is for a busy one.
    assert time.perf_counter() - started < 5.0
    template.close()


async def test_the_loop_goes_on_while_a_template_does_not_end(echo: IsolatedTemplate) -> None:
    endless = asyncio.create_task(echo.render(HI * 5))
    num_turns = 0
    while not endless.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 100
    with pytest.raises(InvalidRequest, match="did not end"):
        await endless


async def test_the_next_request_finds_a_new_process(echo: IsolatedTemplate) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="did not end"):
            await echo.render(HI * 5)
        assert await echo.render(HI) == "<s>hi"


async def test_a_process_that_was_killed_is_replaced_unseen(echo: IsolatedTemplate) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        child = echo._child
        assert child is not None
        os.kill(child.pid, number)
        assert await echo.render(HI) == "<s>hi"


async def test_the_process_ends_with_its_owner() -> None:
    closed, dropped = isolated("x"), isolated("x")
    pids = [child.pid for t in (closed, dropped) if (child := t._child) is not None]
    closed.close()
    del closed, dropped
    gc.collect()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


async def test_closing_refuses_what_is_being_rendered(echo: IsolatedTemplate) -> None:
    template = isolated("{{ [1] * 100000000 }}")
    endless = asyncio.create_task(template.render(HI))
    await asyncio.sleep(0)
    template.close()
    with pytest.raises((InvalidRequest, asyncio.CancelledError)):
        await endless


async def test_waiting_renderings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.prompts.isolated.MAX_PENDING_RENDERS", 3)
    template = isolated("{{ messages[0].content }}")
    outcomes = await asyncio.gather(*(template.render(HI) for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str] * 3 + [Overloaded] * 2
    assert await template.render(HI) == "hi"
    template.close()
