"""What the platform needs from the outside: Protocols, one file each, with the error contract in the docstring.

For each port the same word names ``ports/X.py``, ``adapters/X/`` and ``tests/contracts/test_X.py``.
"""
