"""Writes the pages of ``docs/reference`` that the code itself can tell: configuration, command line, metrics, errors.

``make reference`` runs it. With ``--check`` it writes nothing, names the pages that would change, and ends with status
1 if there are any. Always a process of its own: how Python was started shows in what cyclopts writes about usage.
"""

import ast
import inspect
import logging
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, Union, get_args, get_origin

import msgspec
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from headrace.apps.cli import app
from headrace.apps.config import GatewayProcess, WorkerProcess
from headrace.core import errors
from headrace.core.config import dump
from headrace.core.frames import EngineLoad, EngineStats
from headrace.gateway.metrics import GatewayMetrics
from headrace.worker.metrics import WorkerMetrics

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTICE = "Generated from {source} by `make reference`; edit that, not this page."


def main() -> None:
    rendered = {REFERENCE / name: render() for name, render in PAGES.items()}
    old = [page for page, text in rendered.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    names = ", ".join(page.name for page in old)
    if sys.argv[1:] == ["--check"]:
        if old:
            raise SystemExit(f"out of date in docs/reference: {names}; run `make reference` and commit the result")
        return
    for page in old:
        page.write_text(rendered[page], encoding="utf-8")
    sys.stdout.write(f"changed in docs/reference: {names or 'nothing'}\n")


# --- configuration ---------------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every key of both processes' files, with what the strings after the fields say of it."""
    parts = [
        "# Configuration",
        NOTICE.format(source="`headrace.apps.config`"),
        "`headrace worker` and `headrace gateway` each take one TOML file. A key that is not listed here, or a value "
        "of the wrong type or out of range, ends the process at once with a message that names the key. Neither takes "
        "settings from environment variables. TOML has no null: where the default is *none*, leave the key out. "
        "Complete examples: [gateways and workers on several machines](../how-to/several-machines.md), and `run/` in "
        "the data directory of a `headrace up`.",
    ]
    tables: dict[str, tuple[type[msgspec.Struct], list[str]]] = {}
    processes: tuple[tuple[str, type[msgspec.Struct]], ...] = (("worker", WorkerProcess), ("gateway", GatewayProcess))
    for title, kind in processes:
        parts += [f"## The file of a {title}", _summary(kind), _fields_table(kind)]
        for heading, nested in _nested(kind):
            known, users = tables.setdefault(heading, (nested, []))
            if known is not nested:
                raise SystemExit(
                    f"{heading} means {known.__name__} and {nested.__name__}; one section cannot tell both"
                )
            users.append(title)
    for heading, (kind, users) in tables.items():
        parts += [
            f"## `{heading}`",
            f"In the file of a {' and of a '.join(users)}. {_summary(kind)}",
            _fields_table(kind),
        ]
    return _page(parts)


def _nested(kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The tables inside a file, each with its TOML heading."""
    for field in msgspec.structs.fields(kind):
        nested = _struct_in(field.type)
        if nested is None:
            continue
        if any(_struct_in(inner.type) is not None for inner in msgspec.structs.fields(nested)):
            raise SystemExit(f"{nested.__name__} holds tables; this page has sections for one level of them")
        yield (f"[[{field.encode_name}]]" if _is_list(field.type) else f"[{field.encode_name}]"), nested


def _fields_table(kind: type[msgspec.Struct]) -> str:
    meanings = _field_docs(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        key, type_text, nested = field.encode_name, _type_text(field.type), _struct_in(field.type)
        meaning = meanings.get(field.name, "")
        if nested is not None:
            # A heading's anchor is its text without punctuation.
            type_text, meaning = f"[{type_text}](#{key})", meaning or _summary(nested)
        rows.append((f"`{key}`", type_text, _default(field, is_table=nested is not None), meaning))
    return _table(("key", "type", "default", "meaning"), rows)


def _field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string literal after each field, as Markdown."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    if not isinstance(body, ast.ClassDef):
        raise TypeError(f"{kind.__name__} is not defined by a class statement")
    docs = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _markdown(text)
    return docs


def _default(field: msgspec.structs.FieldInfo, *, is_table: bool) -> str:
    if field.required:
        return "**required**"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "*none*"
    if is_table:
        return "its defaults"
    # As it would stand in the file.
    only = msgspec.defstruct("Only", [("value", Any)])
    return f"`{dump(only(value)).strip().removeprefix('value = ')}`"


def _type_text(kind: Any) -> str:
    """A type in words; absence is said by the default, so ``None`` is left out."""
    if isinstance(kind, NewType):
        return _type_text(kind.__supertype__)
    if _struct_in(kind) is not None:
        return "list of tables" if _is_list(kind) else "table"
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [text for meta in args[1:] if (text := _limits(meta))]
        return ", ".join([_type_text(args[0]), *limits])
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(arg) for arg in args if arg is not type(None))
    if origin in (list, tuple):
        return f"list of {_type_text(args[0])}"
    return {str: "string", int: "integer", float: "number", bool: "`true` or `false`", Path: "path"}[kind]


def _limits(meta: msgspec.Meta) -> str:
    words = (("gt", "above {}"), ("ge", "at least {}"), ("lt", "below {}"), ("le", "at most {}"))
    limits = [text.format(f"{bound:g}") for name, text in words if (bound := getattr(meta, name)) is not None]
    if meta.min_length is not None:
        limits.append(f"at least {meta.min_length} characters")
    return ", ".join(limits)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for arg in get_args(kind) if (found := _struct_in(arg)) is not None), None)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list


# --- command line ----------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command and option, as ``--help`` has them."""
    title, docs = "# headrace\n", app.generate_docs()
    if not docs.startswith(title):
        raise SystemExit("cyclopts starts its page in another way than before; see what it writes now")
    return _page(["# Command line", NOTICE.format(source="`headrace.apps.cli`"), docs.removeprefix(title).strip()])


# --- metrics ---------------------------------------------------------------------------------------------------------


class _MetricRow(NamedTuple):
    names: str
    kind: str
    labels: str
    meaning: str


def metrics() -> str:
    """The metrics of both processes, from the registries that answer their scrapes."""
    return _page(
        [
            "# Metrics",
            NOTICE.format(source="`headrace.gateway.metrics` and `headrace.worker.metrics`"),
            "In Prometheus' text format. Names that begin with `vllm:` are vLLM's, so that existing dashboards find "
            "them; where one stands beside a `headrace_` name, both carry the same value. A histogram `x` is exposed "
            "as `x_bucket`, `x_sum` and `x_count`. Gauges whose names end in `_created` say since when, in Unix "
            "seconds, the metric of that name counts; they are left out here. What the stages of a request are: "
            "[where the time went](api.md#where-the-time-went).",
            "## Gateway",
            "`GET /metrics` on the gateway's port; without a key unless `open_metrics` is `false`.",
            _metrics_table(_gateway_rows()),
            "## Worker",
            "`GET /metrics` on `http_listen`; without a key. Times are the engine's own, from the moment that it was "
            "given a sequence; they leave out the gateway, its queue and the network.",
            _metrics_table(_worker_rows()),
        ]
    )


def _gateway_rows() -> Iterator[_MetricRow]:
    gateway = GatewayMetrics(max_tenant_labels=1)
    _touch(vars(gateway).values())
    gateway.token_gaps.observe("model", 0.01, 1)
    return _rows(gateway.exposition(), lambda name: name)


def _worker_rows() -> Iterator[_MetricRow]:
    any_load = EngineLoad(0, 0, 0, 1, 1, 0, 0.0, 0.0)
    any_stats = EngineStats(any_load, 0, 0.0, True, False, 0, 0, 0, 0, {}, 0, 0, {"any": 0})
    exposition = WorkerMetrics("model").exposition(any_stats, healthy=True)
    return _rows(exposition, lambda name: name.removeprefix("vllm:").removeprefix("headrace_worker_"))


def _touch(values: Iterable[object]) -> None:
    """Give every metric a sample: without one it does not tell its labels."""
    for value in values:
        if isinstance(value, MetricWrapperBase) and value._labelnames:  # the library has no public way to ask
            value.labels(*value._labelnames)


def _rows(exposition: bytes, stem: Callable[[str], str]) -> Iterator[_MetricRow]:
    """One row for each metric that a scrape shows; those that differ in the beginning of the name alone share one."""
    names: dict[tuple[str, str, tuple[str, ...], str], list[str]] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        if family.name.endswith("_created"):
            continue
        if not family.samples:
            raise SystemExit(f"{family.name} has no sample, so its labels are unknown")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = tuple(sorted({label for sample in family.samples for label in sample.labels} - {"le"}))
        names.setdefault((stem(name), family.type, labels, family.documentation), []).append(name)
    for (_, kind, labels, meaning), same in sorted(names.items()):
        yield _MetricRow(_code(sorted(same)), kind, _code(labels), meaning)


def _metrics_table(rows: Iterable[_MetricRow]) -> str:
    return _table(("name", "type", "labels", "meaning"), rows)


# --- errors ----------------------------------------------------------------------------------------------------------


def error_tree() -> str:
    """Every error with what it owns."""
    tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2]
    statuses = dict(re.findall(r"(\w+) +(\d+|–)", tree))
    kinds = sorted(_below(errors.HeadraceError), key=lambda kind: (statuses[kind.__name__], kind.code))
    rows = [
        (
            f"`{kind.code}`",
            f"`{kind.__name__}`",
            statuses[kind.__name__],
            f"`{kind.kind}`",
            logging.getLevelName(kind.log_level).lower(),
        )
        for kind in kinds
    ]
    return _page(
        [
            "# Errors",
            NOTICE.format(source="`headrace.core.errors`"),
            "Everything that Headrace refuses or fails at on purpose is one of these. The code is what stands in an "
            "answer's `error.code`, in a worker's `error_code`, in the gateway's log and in `headrace_errors_total`. "
            "What a caller can see of them, and when: [API](api.md#errors). Configuration, model format and protocol "
            "errors have no status: they end a process, a command or a connection, and their message says why.",
            f"```text\n{tree}\n```",
            _table(("code", "error", "status", "type", "log level"), rows),
        ]
    )


def _below(kind: type[errors.HeadraceError]) -> Iterator[type[errors.HeadraceError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


# --- Markdown --------------------------------------------------------------------------------------------------------


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _summary(kind: type[msgspec.Struct]) -> str:
    return _markdown(inspect.getdoc(kind) or "")


def _markdown(docstring: str) -> str:
    """Docstrings mark code with two backticks and roles; Markdown with one. Lines become one."""
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", docstring)
    return " ".join(text.replace("``", "`").split())


PAGES = {
    "configuration.md": configuration,
    "cli.md": command_line,
    "metrics.md": metrics,
    "errors.md": error_tree,
}
"""The generated pages by file name."""

if __name__ == "__main__":
    main()
