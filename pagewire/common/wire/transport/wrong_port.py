"""What a port looks like that does not serve the calls that are made there, by what gRPC says of them."""

import re
from dataclasses import dataclass

# What gRPC says of a port, and how that is read; the first that fits counts.
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
        "{where} speaks gRPC, but knows no such call: it looks like {port.strangers}; {port.give}",
    ),
    ("WRONG_VERSION_NUMBER", "{where} answers without TLS: {port.without_tls}, or give a port with TLS"),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate (has expired|is not yet valid)",
        "the certificate of {where} has ended, or has not begun: renew it there, or set this machine's clock",
    ),
    ("Hostname Verification Check failed", "the certificate of {where} bears another name: {port.give_name}"),
    (
        # The second is what is said where an authority was made anew under its old name.
        "CERTIFICATE_VERIFY_FAILED|certificate signature failure",
        "the certificate of {where} is not of an authority that is known here: {port.name_authority}",
    ),
    (
        "Tls handshake failed|Failed to create security handshaker",
        "{where} and this side agree on no TLS: look at the certificates of both, and at their authorities",
    ),
    (
        # A server that refuses a client's certificate does so when the client takes the connection for made, without a
        # word.
        r"last error: (?:(?!last error: ).)*Socket closed|^there is no connection .*Socket closed|"
        r"^there is no session .*Secure read failed",
        "{where} accepts connections and closes them: it looks like {port.with_tls}, or one of another protocol; "
        "{port.give}",
    ),
)


@dataclass(frozen=True, slots=True)
class RightPort:
    """What should be there, for people: a clause for each way to give another port."""

    give: str  # which port is the right one
    strangers: str  # whose ports speak gRPC too, and know other calls
    without_tls: str  # how to speak without TLS
    name_authority: str  # how to say whose certificates are known
    give_name: str  # how to say which name is in its certificate
    with_tls: str  # what the port may ask for that hangs up

    @staticmethod
    def of_link(service: str, give: str, strangers: str) -> "RightPort":
        """That of a service's link to another one, whose TLS options begin with that one's name."""
        return RightPort(
            give,
            strangers,
            without_tls=f"leave out --{service}-tls-ca",
            name_authority=f"give --{service}-tls-ca",
            give_name=f"give --{service}-tls-name, or have it made for that host",
            with_tls=f"a port with TLS (--{service}-tls-ca), one that asks for another certificate, or for one that is "
            f"good (--{service}-tls-cert)",
        )

    def reading(self, where: str, message: str) -> str | None:
        """Return what the port looks like of which gRPC says this, or None if it may be the right one."""
        found = next((text for sign, text in _READINGS if re.search(sign, message)), None)
        return found and f"{found.format(where=where, port=self)} ({message})"
