import subprocess
import sys

import msgspec

from headrace.apps import logs

CODE = """
import sys
from headrace.apps import logs
import structlog, logging
logs.configure(logs.LogConfig(format="json"), process="p")
structlog.get_logger("a").info("first", n=1)
logging.getLogger("b").warning("second %s", "x")
logs.log_progress("load", 1, 2)
logs.log_progress("load", 1, 2)
sys.stdin.readline()
structlog.get_logger("a").info("nobody reads this")
logging.getLogger("b").warning("nor this")
sys.stderr.write("survived")
"""


def test_lines_are_json_and_a_reader_that_left_stops_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        lines = [msgspec.json.decode(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert b"survived" in process.stderr.read()
    assert [line["event"] for line in lines] == ["first", "second x", "progress"]
    assert {line["process"] for line in lines} == {"p"}
    assert lines[2]["done"] == 1


def test_a_log_line_for_a_person() -> None:
    line = '{"event":"cannot serve","reason":"no model x","level":"error","timestamp":"2026-01-02T03:04:05Z"}'
    assert logs.readable(line) == "  03:04:05 error    cannot serve reason=no model x"
    assert logs.readable('{"event":"progress","stage":"load","done":1,"total":2}') is None
    for other in ("Traceback (most recent call last):", "[1, 2]", '{"event":', ""):
        assert logs.readable(other) == other
