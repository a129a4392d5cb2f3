"""librdkafka's security properties as Faust's credentials, so that one setting serves every process."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import faust

from rollstream.errors import SettingsError

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def broker_credentials(properties: Mapping[str, str]) -> Any:
    """Faust's credentials, or None for a plaintext broker; properties that are not about security are left alone.

    Raises: SettingsError: a protocol or mechanism that Faust does not speak, or user and password missing.
    """
    protocol = properties.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise SettingsError(f"kafka.properties: security.protocol={protocol!r}, expected one of {_PROTOCOLS}")
    context = _context(properties) if protocol.endswith("SSL") else None
    if protocol == "PLAINTEXT":
        return None
    if protocol == "SSL":
        return faust.SSLCredentials(context=context)
    mechanism = properties.get("sasl.mechanism") or properties.get("sasl.mechanisms", "PLAIN")
    user, password = properties.get("sasl.username"), properties.get("sasl.password")
    if mechanism not in _MECHANISMS or user is None or password is None:
        raise SettingsError(
            f"kafka.properties: sasl.mechanism={mechanism!r} with user {user!r}, expected one of {_MECHANISMS} with "
            "sasl.username and sasl.password"
        )
    return faust.SASLCredentials(username=user, password=password, mechanism=mechanism, ssl_context=context)


def _context(properties: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=properties.get("ssl.ca.location"))
    certificate = properties.get("ssl.certificate.location")
    if certificate is not None:
        context.load_cert_chain(certificate, properties.get("ssl.key.location"), properties.get("ssl.key.password"))
    return context
