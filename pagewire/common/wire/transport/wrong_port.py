"""Diagnosis of a wrong port from gRPC's error messages."""

import re
from dataclasses import dataclass

# Patterns for gRPC's messages, and the diagnosis for each. The first pattern that matches applies.
_READINGS = (
    (
        r"^Received http2 header with status: |^Stream removed \(Data frame|: Received http2 header with status: ",
        "{where} answers as a web server, not as gRPC: it looks like a router's port; {port.give}",
    ),
    (
        "Expected SETTINGS frame|http1.x server",
        "{where} answers, but not in HTTP/2: it looks like a port for metrics, or another web server's; {port.give}",
    ),
    (
        r"\bMethod not found!",
        "{where} speaks gRPC, but does not have this method: it looks like {port.strangers}; {port.give}",
    ),
    ("WRONG_VERSION_NUMBER", "{where} answers without TLS: {port.without_tls}, or give a port with TLS"),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate (has expired|is not yet valid)",
        "the certificate of {where} has expired or is not valid yet: renew it there, or correct this machine's clock",
    ),
    ("Hostname Verification Check failed", "the certificate of {where} is for another name: {port.give_name}"),
    (
        # The second pattern matches if a CA was recreated under its old name.
        "CERTIFICATE_VERIFY_FAILED|certificate signature failure",
        "the certificate of {where} is not from a CA that is trusted here: {port.name_authority}",
    ),
    (
        "Tls handshake failed|Failed to create security handshaker",
        "{where} and this side cannot agree on TLS: check the certificates and CAs of both sides",
    ),
    (
        # A server that refuses a client's certificate closes the connection without a message, after the client
        # considers the handshake complete.
        r"last error: (?:(?!last error: ).)*Socket closed|^there is no connection .*Socket closed|"
        r"^there is no session .*Secure read failed",
        "{where} accepts connections and closes them: it looks like {port.with_tls}, or one of another protocol; "
        "{port.give}",
    ),
)


@dataclass(frozen=True, slots=True)
class RightPort:
    """Texts for error messages about a connection to a wrong port. Each text describes one way to correct the address
    or the TLS options.
    """

    give: str  # how to give the right port
    strangers: str  # other ports that also speak gRPC but have other methods
    without_tls: str  # how to connect without TLS
    name_authority: str  # how to give the CA of the server
    give_name: str  # how to give the name in the server's certificate
    with_tls: str  # what a port may require if it closes the connection

    @staticmethod
    def of_link(service: str, give: str, strangers: str) -> "RightPort":
        """Return the texts for a connection to another of our services. `service` is the first word in the names of the
        TLS options for this connection.
        """
        return RightPort(
            give,
            strangers,
            without_tls=f"leave out --{service}-tls-ca",
            name_authority=f"give --{service}-tls-ca",
            give_name=f"give --{service}-tls-name, or have it made for that host",
            with_tls=f"a port with TLS (--{service}-tls-ca), or a port that requires another or a valid client "
            f"certificate (--{service}-tls-cert)",
        )

    def reading(self, where: str, message: str) -> str | None:
        """Diagnose an error message of gRPC. If the message suggests a wrong port or wrong TLS settings, return a text
        that describes the cause and the remedy. Otherwise return None.
        """
        found = next((text for sign, text in _READINGS if re.search(sign, message)), None)
        return found and f"{found.format(where=where, port=self)} ({message})"
