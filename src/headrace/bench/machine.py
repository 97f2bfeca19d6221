"""The machine that a figure was measured on; without it a figure means nothing."""

import os
import platform
from pathlib import Path

import msgspec
import psutil

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
"""What decides how fast matrices multiply on x86."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_WAIT_POLICY")


class Machine(msgspec.Struct, frozen=True):
    """What can be read without measuring. ``benchmarks/machine.py`` adds bandwidth and GEMM rates."""

    processor: str
    flags: list[str]
    num_cpus: int
    """That this process may use."""
    memory_bytes: int
    load_1min: float
    """Average number of running processes in the last minute: above about 0.3 something else was running."""
    system: str
    python: str
    environment: dict[str, str]
    """Variables that set thread counts."""

    def line(self) -> str:
        """One line for people."""
        flags = " ".join(self.flags) or "no vector flags known"
        return (
            f"{self.processor}, {self.num_cpus} CPUs, {self.memory_bytes / 2**30:.0f} GiB, {flags}, "
            f"load {self.load_1min:.1f}"
        )


def describe() -> Machine:
    """This machine, now."""
    cpuinfo = _cpuinfo()
    present = set(cpuinfo.get("flags", "").split())
    return Machine(
        processor=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        flags=[flag for flag in FLAGS if flag in present],
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(psutil.virtual_memory().total),
        load_1min=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        environment={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry; empty where the kernel does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
