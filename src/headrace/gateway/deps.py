"""What a gateway is built from."""

from pathlib import Path

import msgspec

from headrace.core.clock import Clock
from headrace.gateway.config import GatewayConfig
from headrace.gateway.generate import Dispatch
from headrace.gateway.models import Models
from headrace.ports.store import Keys


class GatewayDeps(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that the composition root made; the gateway owns none of them."""

    keys: Keys
    registry: Models
    dispatcher: Dispatch
    config: GatewayConfig
    clock: Clock
    cache_dir: Path
    """Where tokenizers and templates are unpacked."""
