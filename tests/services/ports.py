"""Free ports for tests; the function lives in the package because the embedded broker needs it too."""

from rollstream.process import free_port

__all__ = ["free_port"]
