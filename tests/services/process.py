"""Child processes for tests; the class lives in the package because the embedded broker needs it too."""

from rollstream.process import ServiceError, ServiceProcess

__all__ = ["ServiceError", "ServiceProcess"]
