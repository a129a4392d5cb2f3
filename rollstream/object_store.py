"""Opens an object store: a folder, or a bucket. Sinks write their files to one, records too large for Kafka go to one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from rollstream.errors import SettingsError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def open_store(url: str, options: Mapping[str, str] | None = None, *, retry_timeout_s: float = 20.0) -> ObjectStore:
    """A folder, which is made where it is missing, or `s3://bucket/prefix`. A bucket is not asked yet.

    Args:
        options: what the S3 store needs, as obstore names it: `endpoint`, `region`, `access_key_id`, ...
        retry_timeout_s: how long one request is repeated before it fails.

    Raises: SettingsError: not such an address, or an option that obstore does not know.
    """
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, S3Store

    if "://" not in url:
        return LocalStore(prefix=url, mkdir=True)
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise SettingsError(f"cannot open object store {url!r}: expected a folder or s3://BUCKET/PREFIX")
    config = dict(options or {})
    plain = config.get("endpoint", "").startswith("http://")
    try:
        return S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            config=cast(Any, config),
            client_options={"allow_http": True} if plain else None,
            retry_config={"retry_timeout": timedelta(seconds=retry_timeout_s)},
        )
    except BaseError as cause:
        raise SettingsError(
            f"cannot open object store {url!r} with the options {sorted(config)}: {str(cause)[:300]}"
        ) from cause
