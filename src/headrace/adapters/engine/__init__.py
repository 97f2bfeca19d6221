"""Engines behind the port: ``fake`` computes nothing, ``remote`` reaches a worker; ``tls`` says who may talk to whom."""
