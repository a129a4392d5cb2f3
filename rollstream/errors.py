"""The error tree.

    RollstreamError
    ├── SettingsError     a setting is missing, unknown or wrong
    ├── SchemaError       a record, its bytes or its schema are wrong
    ├── ProviderError     the inference engine refused, failed or answered nonsense
    ├── BrokerError       Kafka refused or did not acknowledge
    ├── StageError        a stage (join, group, score, reward, credit, build) cannot use its input
    ├── SinkError         a store refused rows
    ├── TrainerError      the trainer side cannot read or record
    ├── AuditError        stored data cannot be read for an audit
    └── ServiceError      a child process could not be started or reached (`rollstream.process`)

A message says what failed with the value, what was expected, and what to do. `reason` is the short code that dead
letters, masks and metrics carry.
"""

from __future__ import annotations

from contextlib import AbstractContextManager


class RollstreamError(Exception):
    """Something in rollstream failed."""

    def __init__(self, message: str | None = None, *, reason: str = "error") -> None:
        super().__init__(message or type(self).__doc__)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.__dict__))


class SettingsError(RollstreamError, ValueError):
    """A setting is missing, unknown or wrong."""


class SchemaError(RollstreamError, ValueError):
    """A record, its bytes or its schema are wrong."""


class ProviderError(RollstreamError):
    """The inference engine refused, failed or answered nonsense."""


class BrokerError(RollstreamError):
    """Kafka refused or did not acknowledge."""


class StageError(RollstreamError):
    """A stage cannot use its input."""


class SinkError(RollstreamError):
    """A store refused rows."""


class TrainerError(RollstreamError):
    """The trainer side cannot read or record."""


class AuditError(RollstreamError):
    """Stored data cannot be read for an audit."""


class _Boundary:
    __slots__ = ("_error", "_reason", "_what")

    def __init__(self, error: type[RollstreamError], what: str, reason: str) -> None:
        self._error, self._what, self._reason = error, what, reason

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, cause: BaseException | None, __: object) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, RollstreamError):
            message = f"cannot {self._what}: {type(cause).__name__}: {cause}"
            raise self._error(message, reason=self._reason) from cause


def boundary(error: type[RollstreamError], what: str, *, reason: str = "error") -> AbstractContextManager[None, None]:
    """Turn whatever a foreign library raises into `error`, saying what was being done.

    Our own errors pass unchanged. This and `main` are the only places that may catch everything. It is passed with every record
    that is read, hence no generator.
    """
    return _Boundary(error, what, reason)


def _rebuild(cls: type[RollstreamError], message: str, state: dict[str, object]) -> RollstreamError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error
