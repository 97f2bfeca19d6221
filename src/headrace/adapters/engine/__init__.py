"""Engines behind the port: ``fake`` computes nothing, ``remote`` reaches a worker; ``tls`` is how they trust it."""
