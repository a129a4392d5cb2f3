"""A ClickHouse client from an address, with the tables in place.

`chdb://FOLDER` is the embedded engine: the same engine in this process, for one process at a time. `http(s)://` is a
server. Everything after this is the same code.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from rollstream.errors import SettingsError, SinkError, boundary

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

DATABASE = "rollstream"


def connect(url: str, *, migrate: bool = True, timeout_s: int = 300) -> Client:
    """Connect, create the database, and bring its tables up to date.

    Args:
        url: `chdb://FOLDER?database=NAME`, or `http(s)://USER:PASSWORD@HOST:PORT/DATABASE?SETTING=VALUE`. The database is
            `rollstream` where none is named. User and password are percent-encoded where they hold one of `:/?#@%`.
        migrate: False leaves the tables as they are, and opens no folder that is not there.
        timeout_s: how long a server may take to answer a request; nothing to the embedded engine.
    Raises: SettingsError: not such an address. SinkError: the store cannot be opened.
    """
    import clickhouse_connect

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "chdb":
        folder = Path(parts.netloc + parts.path)
        database = options.pop("database", DATABASE)
        if not migrate and not folder.is_dir():
            raise SinkError(
                f"cannot open ClickHouse in {str(folder)!r}: there is no such folder", reason="store_closed"
            )
        with boundary(
            SinkError,
            f"open ClickHouse in {str(folder)!r}: its folder belongs to one process at a time; if a sink or an audit is "
            "using it, stop that one first",
            reason="store_closed",
        ):
            folder.mkdir(parents=True, exist_ok=True)
            client = clickhouse_connect.get_client(interface="chdb", path=str(folder), settings=dict(options))
    elif parts.scheme in ("http", "https") and parts.hostname:
        database = parts.path.strip("/") or DATABASE
        with boundary(SinkError, f"connect to ClickHouse at {parts.hostname}:{parts.port}", reason="store_closed"):
            client = clickhouse_connect.get_client(
                interface=parts.scheme,
                host=parts.hostname,
                port=parts.port or (8443 if parts.scheme == "https" else 8123),
                username=None if parts.username is None else unquote(parts.username),
                password=unquote(parts.password or ""),
                autogenerate_session_id=False,
                send_receive_timeout=timeout_s,
                settings=dict(options),
            )
    else:
        raise SettingsError(
            f"cannot connect: {url!r} is no ClickHouse address, expected chdb://FOLDER or "
            "http(s)://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    with boundary(SinkError, f"prepare database {database}", reason="store_closed"):
        if migrate:
            client.command(f"CREATE DATABASE IF NOT EXISTS {_quoted(database)}")
        client.database = database
        if migrate:
            migrate_tables(client)
    return client


def migrate_tables(client: Client) -> list[str]:
    """Run the files of `ddl/` that this database has not seen, by number. Returns: their names."""
    client.command(
        "CREATE TABLE IF NOT EXISTS schema_migrations (number UInt32, name String, applied_at DateTime DEFAULT now()) "
        "ENGINE = ReplacingMergeTree ORDER BY number"
    )
    done = {row[0] for row in client.query("SELECT number FROM schema_migrations").result_rows}
    ran = []
    for number, name, text in ddl_files():
        if number not in done:
            for statement in statements(text):
                client.command(statement)
            client.insert(
                "schema_migrations", [[number, name]], column_names=["number", "name"], settings=PLAIN_INSERT
            )
            ran.append(name)
    return ran


PLAIN_INSERT = {"async_insert": 0}


def ddl_files() -> list[tuple[int, str, str]]:
    """Number, name and text of the files in `ddl/`, by number."""
    folder = resources.files("rollstream.sinks").joinpath("ddl")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [(int(f.name.partition("_")[0]), f.name, f.read_text("utf-8")) for f in files]


def statements(text: str) -> list[str]:
    """The statements of a file: separated by a semicolon at the end of a line, comment lines left out."""
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    parts = ("\n".join(lines) + "\n").split(";\n")
    return [part.strip() for part in parts if part.strip()]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "") + "`"
