"""The worker service: one engine, served to many clients over the worker protocol, with health and metrics."""
