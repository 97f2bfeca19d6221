"""Measuring: load against any OpenAI-compatible URL (`serve`), and an engine without a server (`engine`).

Each has one typed ``run(options, progress) -> report``; the command line and the scripts in ``benchmarks/`` call these.
"""
