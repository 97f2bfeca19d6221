"""Deltas to text: what a choice sends, when, and with which log-probabilities."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.errors import ClientGone, DeadlineExceeded, Draining, EngineDead, HeadraceError, Overloaded
from headrace.core.frames import SequenceDelta, SequenceTiming, TokenLogprobs
from headrace.core.ids import SequenceId
from headrace.core.requests import FinishReason
from headrace.gateway.call import Call
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generate import Choice, Generation, supervise
from headrace.gateway.metrics import TokenGaps
from headrace.gateway.models import ServedModel
from headrace.prompts.stops import StopMatcher
from headrace.prompts.text import TextDelta

CONFIG = GatewayConfig(salt_secret="x" * 16)
TIMING = SequenceTiming(0.1, 0.2, 0.3, 7, 0)


class Letters:
    """A token is a letter."""

    def token_text(self, token_id):
        return chr(token_id)

    token_bytes = token_text


class Text:
    """A detokenizer for it, with stop strings."""

    def __init__(self, *stop):
        self._matcher = StopMatcher(stop, include_stop=False)

    def push(self, token_ids):
        text = ""
        for index, token_id in enumerate(token_ids):
            shown, stopped_by = self._matcher.push(chr(token_id))
            text += shown
            if stopped_by is not None:
                return TextDelta(text, stopped_by, index + 1)
        return TextDelta(text, None, len(token_ids))

    def finish(self):
        return TextDelta(self._matcher.finish(), None, 0)


class Breakdown:
    queue_s = 0.5
    dispatch_s = None


class Stream:
    """Deltas that are all there; ``num_ready`` says how many count as unread at a time."""

    breakdown = Breakdown()

    def __init__(self, deltas, num_ready=1):
        self._deltas = list(deltas)
        self._num_ready = num_ready
        self._num_read = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._deltas:
            raise StopAsyncIteration
        self._num_read += 1
        item = self._deltas.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    @property
    def num_unread(self):
        return min(len(self._deltas), -self._num_read % self._num_ready)


class Dispatch:
    def __init__(self, *streams):
        self._streams = list(streams)
        self.num_open = 0

    @contextlib.asynccontextmanager
    async def stream(self, request, model, version):
        self.num_open += 1
        try:
            found = self._streams.pop(0)
            if isinstance(found, Exception):
                raise found
            yield found
        finally:
            self.num_open -= 1


class Sink:
    def __init__(self):
        self.writes = []

    async def begin(self):
        pass

    async def text(self, index, text, logprobs):
        self.writes.append((index, text, [chr(entry.token_id) for entry in logprobs], None))

    async def last(self, index, text, logprobs, finish_reason):
        self.writes.append((index, text, [chr(entry.token_id) for entry in logprobs], finish_reason))


def deltas(text, sizes=None, finish=FinishReason.LENGTH):
    """One delta for each letter, or of the given sizes."""
    result, rest = [], text
    for size in sizes or [1] * len(text):
        part, rest = rest[:size], rest[size:]
        ids = [ord(letter) for letter in part]
        logprobs = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in ids]
        last = finish if not rest else None
        result.append(SequenceDelta(SequenceId("s/0"), ids, logprobs, last, None, TIMING if last else None))
        if last:
            break
    return result


def call():
    return Call({"type": "http", "method": "POST", "headers": [], "path": "/"}, never, None, CONFIG, ManualClock())


async def never():
    await asyncio.get_running_loop().create_future()


async def generate(*streams, stop=(), include_stop=False):
    sink, one, dispatch = Sink(), call(), Dispatch(*streams)
    model = ServedModel("m", "v", 100, 256, 0.0, Letters(), None)
    choices = [Choice(i, None, Text(*stop), include_stop) for i in range(len(streams))]
    try:
        await Generation(one, dispatch, model, choices, TokenGaps("x", "y")).run(sink)
    finally:
        assert dispatch.num_open == 0
    return sink.writes, one


async def test_each_delta_is_a_write_and_the_last_has_the_reason():
    writes, one = await generate(Stream(deltas("abc")))
    assert writes == [(0, "a", ["a"], None), (0, "b", ["b"], None), (0, "c", ["c"], "length")]
    assert one.usage.num_output == 3
    assert one.usage.num_cached == 7
    assert (one.breakdown.queue, one.breakdown.worker_wait, one.breakdown.decode) == (0.5, 0.1, 0.3)


async def test_what_has_piled_up_is_one_write():
    writes, _ = await generate(Stream(deltas("abcdefg"), num_ready=3))
    assert [text for _, text, _, _ in writes] == ["abc", "def", "g"]


async def test_a_stop_token_is_counted_but_neither_shown_nor_told():
    writes, one = await generate(Stream(deltas("ab!", [2, 1], FinishReason.STOP)))
    assert writes == [(0, "ab", ["a", "b"], None), (0, "", [], "stop")]
    assert one.usage.num_output == 3


async def test_a_stop_token_is_shown_if_asked_for():
    writes, _ = await generate(Stream(deltas("ab!", [3], FinishReason.STOP)), include_stop=True)
    assert writes == [(0, "ab!", ["a", "b", "!"], "stop")]


@given(st.text("abc", min_size=1, max_size=20), st.text("abc", min_size=1, max_size=3), st.data())
def test_nothing_behind_a_stop_string_is_told(text, stop, data):
    """Text and log-probabilities end together before the stop string, however the tokens were framed."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(text), max_size=len(text)))
    num_ready = data.draw(st.integers(1, 4))
    writes, one = asyncio.run(generate(Stream(deltas(text, sizes), num_ready), stop=[stop]))
    expected, found, _ = text.partition(stop)
    assert "".join(write[1] for write in writes) == expected
    assert "".join(letter for write in writes for letter in write[2]) == expected
    assert writes[-1][3] == ("stop" if found else "length")
    assert [write[3] for write in writes[:-1]] == [None] * (len(writes) - 1)
    assert one.usage.num_output == len(expected) + (len(stop) if found else 0)


async def test_choices_end_on_their_own():
    writes, one = await generate(Stream(deltas("ab")), Stream(deltas("x")), Stream(deltas("pqr")))
    texts = ["".join(text for i, text, _, _ in writes if i == index) for index in range(3)]
    assert texts == ["ab", "x", "pqr"]
    assert one.finish_reasons == ["length"] * 3
    assert one.usage.num_output == 6


async def test_one_refused_choice_refuses_them_all():
    with pytest.raises(Overloaded):
        await generate(Stream(deltas("ab")), Overloaded("full"), Stream(deltas("cd")))


@pytest.mark.parametrize(
    "status_and_code", [(503, "overloaded"), (503, "draining"), (400, "invalid_value"), (500, None)]
)
async def test_an_engines_error_keeps_its_kind(status_and_code):
    status, code = status_and_code
    last = SequenceDelta(SequenceId("s/0"), finish=FinishReason.ERROR, error="it says why", error_code=code)
    with pytest.raises(HeadraceError, match="it says why") as caught:
        await generate(Stream([*deltas("ab")[:-1], last]))
    assert caught.value.status == status
    assert caught.value.code == (code or "internal_error")


async def test_a_stream_that_ends_without_a_finish_is_an_error():
    with pytest.raises(EngineDead):
        await generate(Stream(deltas("abc")[:-1]))


async def test_a_lost_worker_is_an_error_after_its_text():
    with pytest.raises(EngineDead, match="gone"):
        await generate(Stream([*deltas("abc")[:-1], EngineDead("gone")]))


async def run_supervised(work, receive=never, *, timeout_s=10.0, expelled=None, **ticks):
    one = call()
    one.receive = receive
    expelled = expelled or asyncio.get_running_loop().create_future()
    await supervise(one, work, timeout_s=timeout_s, expelled=expelled, **ticks)


async def cancelled(work_ended):
    try:
        await never()
    finally:
        work_ended.append(True)


async def test_a_client_that_leaves_cancels_the_work():
    async def leave():
        return {"type": "http.disconnect"}

    ended = []
    with pytest.raises(ClientGone):
        await run_supervised(cancelled(ended), leave)
    assert ended == [True]


async def test_work_that_ends_with_the_client_is_not_cancelled():
    async def leave():
        return {"type": "http.disconnect"}

    async def quick():
        return None

    await run_supervised(quick(), leave)


async def test_the_deadline_cancels_the_work():
    ended = []
    with pytest.raises(DeadlineExceeded):
        await run_supervised(cancelled(ended), timeout_s=0.01)
    assert ended == [True]


async def test_the_end_of_the_drain_cancels_the_work():
    ended, expelled = [], asyncio.get_running_loop().create_future()
    expelled.set_result(Draining("bye"))
    with pytest.raises(Draining):
        await run_supervised(cancelled(ended), expelled=expelled)
    assert ended == [True]


async def test_ticks_come_while_the_work_goes_on():
    ticks, enough = [], asyncio.Event()

    async def tick():
        ticks.append(1)
        if len(ticks) == 3:
            enough.set()

    await run_supervised(enough.wait(), first_tick_s=0.0, tick_s=0.001, on_tick=tick)
    assert len(ticks) == 3
