"""The claim store: the content of records that are too large for Kafka. Kafka then holds a `ClaimCheck` (a claim check, as at
a cloakroom), and `Codec` fetches the content for whoever reads.

A claim's name is made of its content's digest, so equal records have one claim, and writing it again changes no byte. It is
written again whenever its record is: a store that deletes by age then counts from the last writing. Nothing here deletes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollstream.errors import BrokerError, SchemaError, boundary
from rollstream.object_store import open_store
from rollstream.settings import ClaimSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_RETRY_S = 5.0
"""How long one request is repeated before the store counts as down."""


class ClaimStore:
    """Puts and gets claims. Any number of processes may share a store.

    Raises: SettingsError: the store's address or an option is wrong.
    """

    def __init__(self, settings: ClaimSettings) -> None:
        self._settings = settings
        self._is_folder = "://" not in settings.store
        # A folder is opened when it is needed: a reader that looks in the wrong place must not make it.
        self._store = None if self._is_folder else open_store(settings.store, settings.s3, retry_timeout_s=_RETRY_S)

    def put(self, name: str, data: bytes) -> None:
        """Store a claim. Blocks until the store has it.

        Raises: BrokerError: reason `claims_down`.
        """
        import obstore

        with boundary(BrokerError, self._what("store", name), reason="claims_down"):
            obstore.put(self._opened(), name, data)

    async def put_async(self, name: str, data: bytes) -> None:
        """As `put`, without blocking the event loop."""
        import obstore

        with boundary(BrokerError, self._what("store", name), reason="claims_down"):
            await obstore.put_async(self._opened(), name, data)

    def get(self, name: str) -> bytes:
        """The content of a claim, unchecked. Blocks.

        Raises: SchemaError: reason `claim_missing`. BrokerError: reason `claims_down`: nothing is known about the claim.
        """
        import obstore

        with boundary(BrokerError, self._what("read", name), reason="claims_down"):
            self._check_folder()
            try:
                return obstore.get(self._opened(), name).bytes().to_bytes()
            except FileNotFoundError as cause:
                self._missing(name, cause)

    async def get_async(self, name: str) -> bytes:
        """As `get`, without blocking the event loop."""
        import obstore

        with boundary(BrokerError, self._what("read", name), reason="claims_down"):
            self._check_folder()
            try:
                found = await obstore.get_async(self._opened(), name)
                return (await found.bytes_async()).to_bytes()
            except FileNotFoundError as cause:
                self._missing(name, cause)

    def _check_folder(self) -> None:
        """A reader that looks in the wrong place must not take every claim for missing."""
        if self._is_folder and not Path(self._settings.store).is_dir():
            raise FileNotFoundError(f"there is no folder {self._settings.store!r}")

    def _missing(self, name: str, cause: FileNotFoundError) -> NoReturn:
        if "NoSuchBucket" in str(cause):
            raise cause
        raise SchemaError(
            f"cannot decode: claim {name!r} is not in {self._settings.store!r} (claims.store); restore it and redrive, or see "
            "whether a lifecycle rule deletes claims before the topics let go of them",
            reason="claim_missing",
        ) from cause

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = open_store(self._settings.store)
        return self._store

    def _what(self, verb: str, name: str) -> str:
        return f"{verb} claim {name!r} in {self._settings.store!r}; see claims.store and claims.s3"
