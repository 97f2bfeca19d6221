"""Everything a decoder computes, behind :class:`headrace.nn.ops.interface.Ops` and ``linear.Linear``."""
