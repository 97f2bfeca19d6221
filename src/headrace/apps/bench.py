"""``headrace bench``: measure a server over HTTP, or the engine alone."""

from cyclopts import App

app = App(name="bench", help="Measure a server or the engine.")
app.command(
    "headrace.apps.bench_serve:serve",
    name="serve",
    help="Load any OpenAI-compatible server; TTFT, TPOT, goodput; table, JSON, plot.",
)
app.command(
    "headrace.apps.bench_engine:engine", name="engine", help="Measure our engine alone, without a server, on one model."
)
