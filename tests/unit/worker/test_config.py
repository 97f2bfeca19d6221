import pytest

from headrace.core.config import convert
from headrace.core.errors import ConfigError
from headrace.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heartbeat_s", 0),
        ("handshake_timeout_s", -1),
        ("stall_timeout_s", 0),
        ("exit_when_stuck_s", 0),
        ("drain_timeout_s", 0),
        ("max_connections", 0),
        ("max_outgoing_bytes", 0),
        ("max_held", -1),
    ],
)
def test_settings_that_make_no_sense_are_named(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        convert({key: value}, WorkerConfig, source="test")
