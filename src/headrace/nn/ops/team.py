"""Running a kernel on the threads that torch already has.

torch's products run on an OpenMP runtime that comes with it. A second pool of threads (numba's own, say) would compete
with it for the same cores: each pool's idle threads spin for a while, waiting for more work, and push the other's
aside. So kernels are handed to that same runtime, by the entry point that compilers use for ``#pragma omp parallel``.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

NUM_HEADER_WORDS = 2
"""Words before a kernel's own arguments: the next item to take, and the number of items."""

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[.\d]*$")
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Parallel = Callable[[int, int, int, int], None]


class Kernel:
    """A compiled function that takes items from a shared counter until none is left."""

    def __init__(self, address: int) -> None:
        """``address`` of a C function ``void (int64_t *words)`` that may run on several threads at once."""
        self._address = address
        self._call = _Function(address)

    def run(self, num_items: int, arguments: Sequence[int], *, alone: bool = False) -> None:
        """Do all items; ``alone`` keeps to the calling thread, for work too small to share."""
        words = (ctypes.c_int64 * (NUM_HEADER_WORDS + len(arguments)))(0, num_items, *arguments)
        num_threads = 1 if alone or num_items == 1 else torch.get_num_threads()
        parallel = None if num_threads == 1 else gomp_parallel()
        if parallel is None:
            self._call(ctypes.addressof(words))
        else:
            # The whole team even for fewer items: another size would make the runtime rebuild its pool.
            parallel(self._address, ctypes.addressof(words), num_threads, 0)


@cache
def gomp_parallel() -> _Parallel | None:
    """``GOMP_parallel(function, data, num_threads, flags)`` of the OpenMP runtime that torch uses.

    GNU's runtime has it, LLVM's and Intel's have it for compatibility. None where no such runtime is loaded; kernels
    then run on the calling thread alone.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if _RUNTIME.search(line)}
    near_torch = str(Path(torch.__file__).parent)
    for path in sorted(paths, key=lambda path: (not path.startswith(near_torch), path)):
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        parallel: _Parallel = function
        return parallel
    return None
