"""``headrace up``: the whole platform on one machine with one command."""

import asyncio
import errno
import socket
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.apps.local import DataDir, default_data_dir
from headrace.apps.platform import Platform, UpOptions
from headrace.core.errors import ConfigError


def up(
    *,
    port: Annotated[int, Parameter(help="The gateway's port.")] = 8000,
    host: Annotated[str, Parameter(help="The gateway's address; 0.0.0.0 serves the network.")] = "127.0.0.1",
    data: Annotated[
        Path | None,
        Parameter(help="Where everything is kept. Default: .headrace if it is there, else ~/.local/share/headrace."),
    ] = None,
    workers: Annotated[int, Parameter(help="Worker processes.")] = 1,
    gateways: Annotated[int, Parameter(help="Gateway processes, all on the same port.")] = 1,
    engine: Annotated[
        Literal["native", "fake"], Parameter(help="`fake` answers at once with made-up words: for load tests.")
    ] = "native",
    model: Annotated[
        str | None, Parameter(help="What to serve: an imported name, a directory, a .gguf file, or hf:ID.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], Parameter(help="Precision of weights and cache.")] = "bfloat16",
    ready_file: Annotated[
        Path | None, Parameter(help="Write addresses, keys and process ids here as JSON once it serves.")
    ] = None,
) -> None:
    """Run the whole platform on this machine: PostgreSQL, workers and gateways.

    The first start imports a small demo model. Ctrl-C stops every process; the data stays.
    """
    for name, value, high in (("port", port, 65535), ("workers", workers, 64), ("gateways", gateways, 64)):
        if not 1 <= value <= high:
            raise ConfigError(f"--{name} is {value}; it must be between 1 and {high}")
    options = UpOptions(
        host=host,
        port=port,
        num_workers=workers,
        num_gateways=gateways,
        engine=engine,
        model=model,
        dtype=dtype,
        ready_file=ready_file,
    )
    directory = DataDir(data or default_data_dir())
    directory.create()
    with directory.lock():
        _refuse_busy_port(host, port)
        asyncio.run(Platform(options, directory).run())


def _refuse_busy_port(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is in use by another program; choose one with --port"
                ) from error
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
