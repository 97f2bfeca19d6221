"""``headrace model``: import models into the registry and list them."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from headrace.apps.progress import Steps
from headrace.apps.storage import open_for_command

app = App(name="model", help="Import models and list them.")

Config = Annotated[Path | None, Parameter(help="A configuration file with a [storage] table (a fleet).")]
Data = Annotated[Path | None, Parameter(help="Data directory of a local installation.")]


@app.command(name="import")
def import_(
    source: Annotated[str, Parameter(help="A Hugging Face directory, a .gguf file, or hf:OWNER/NAME[@REVISION].")],
    *,
    name: Annotated[
        str | None, Parameter(name=["--as"], help="Name to serve it under; default: from the source.")
    ] = None,
    config: Config = None,
    data: Data = None,
) -> None:
    """Import a model as an immutable version. The same content imported again is the same version.

    Only formats that cannot run code are taken: safetensors, JSON, GGUF.
    """
    asyncio.run(_import(source, name, config, data))


@app.command(name="list")
def list_(*, config: Config = None, data: Data = None) -> None:
    """List all models and versions, newest first."""
    asyncio.run(_list(config, data))


async def _import(source: str, name: str | None, config: Path | None, data: Path | None) -> None:
    console = Console(highlight=False)
    async with open_for_command(config, data, create=True) as (_, registry, _):
        with Steps(console) as steps, steps.step(f"Import {source}") as report:
            imported = await registry.import_model(source, name=name, progress=report)
    version, note = imported.version, "" if imported.created else ", which was there already"
    console.print(f"{version.model}@{version.version} ({decimal(version.num_bytes)}){note}")


async def _list(config: Path | None, data: Path | None) -> None:
    async with open_for_command(config, data) as (_, registry, _):
        versions = await registry.list()
    table = Table("MODEL", "VERSION", "SIZE", "SOURCE", box=None, header_style="bold")
    for version in versions:
        table.add_row(version.model, version.version, decimal(version.num_bytes), version.source)
    console = Console(highlight=False)
    console.print(table if versions else "No models yet. Import one: headrace model import DIR|FILE.gguf|hf:ID")
