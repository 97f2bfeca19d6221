"""Stop strings over a text that arrives in pieces."""

from collections.abc import Sequence

from headrace.core.errors import InvalidRequest


class StopMatcher:
    """Finds the first of several stop strings, and says how much text is safe to show meanwhile.

    *First* is the stop string whose last character comes first; of several that end there, the longest. This does not
    depend on how the text is cut. Each character costs one automaton step for each stop string (Knuth, Morris and
    Pratt 1977), and the text held back is exactly the longest end of it that could still begin a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Raises:
        InvalidRequest: a stop string is empty.
        """
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._stops = [(stop, _failure_links(stop)) for stop in dict.fromkeys(stops)]
        self._first_characters = {stop[0] for stop, _ in self._stops}
        self._include_stop = include_stop
        self._matched = [0] * len(self._stops)
        """For each stop string, how many of its characters the end of the text matches."""
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string if one was completed: then nothing more may be pushed."""
        if not self._held and not any(character in text for character in self._first_characters):
            return text, None
        num_held = len(self._held)
        buffer = self._held + text
        for index, character in enumerate(text):
            hit = self._advance(character)
            if hit is not None:
                end = num_held + index + 1
                self._held = ""
                return buffer[: end if self._include_stop else end - len(hit)], hit
        num_shown = len(buffer) - max(self._matched)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def finish(self) -> str:
        """What was held back: no more text comes, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        hit: str | None = None
        for which, (stop, links) in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != character:
                matched = links[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[which] = matched
            if matched == len(stop) and (hit is None or len(stop) > len(hit)):
                hit = stop
        return hit


def _failure_links(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    links = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = links[matched - 1]
        if stop[matched] == stop[index]:
            matched += 1
        links[index] = matched
    return links
