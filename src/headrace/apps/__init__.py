"""Composition roots, one per process: the only places that read configuration or build adapters."""
