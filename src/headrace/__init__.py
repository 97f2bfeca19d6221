"""Headrace: an inference platform for large models.

Read the packages in the order a request travels: ``gateway`` → ``prompts`` → ``dispatch`` → ``worker`` →
``engine`` → ``nn``; then the side path ``registry``; then the foundations ``ports``, ``adapters`` and ``core``.
"""

__version__ = "0.1.0"
