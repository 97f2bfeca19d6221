"""The vocabulary every other package speaks: ids, requests, errors, frames, configuration, the clock.

Standard library and msgspec only.
"""
