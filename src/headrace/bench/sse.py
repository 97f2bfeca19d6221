"""Server-sent events, the part of them that OpenAI-compatible servers use."""

MAX_EVENT_BYTES = 16 * 2**20


class EventTooLarge(Exception):
    """A server sent an event without end; nothing sensible is that long."""


class EventParser:
    """Bytes in, the data of complete events out. Comments and fields other than ``data`` are dropped.

    Lines end with LF, CRLF or CR, chunks may be cut anywhere (WHATWG HTML, section 9.2.6).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that ``chunk`` completes, in order; the lines of one event are joined by LF.

        Raises:
            EventTooLarge: an event is longer than ``MAX_EVENT_BYTES``.
        """
        buffer = self._rest + chunk
        # A CR at the very end may be half of a CRLF: it waits for the next chunk.
        held_cr = buffer.endswith(b"\r")
        lines = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + (b"\r" if held_cr else b"")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._num_bytes = [], 0
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
                self._num_bytes += len(value)
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events
