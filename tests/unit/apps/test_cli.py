"""What the command says when the world outside is not as it should be."""

import errno

import pytest

from headrace.apps import cli


def ends_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    cli.main()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/some/file"), "headrace: /some/file: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "headrace: /x: Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "headrace: No space left on device"),
    ],
)
def test_files_and_disks_are_named_without_a_trace(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ends_with(error, monkeypatch)
    assert ended.value.code == 1
    assert capsys.readouterr().err == said + "\n"


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "Bad file descriptor"), ValueError("x")])
def test_a_defect_shows_its_trace(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        ends_with(error, monkeypatch)


def test_ctrl_c_while_a_command_is_loaded_shows_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        ends_with(KeyboardInterrupt(), monkeypatch)
    assert ended.value.code == 130
