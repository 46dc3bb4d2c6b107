"""What a port looks like that does not serve the calls that are made there, by what gRPC says of them."""

import re
from dataclasses import dataclass

_WEB_SERVER = re.compile(
    r"^Received http2 header with status: |^Stream removed \(Data frame|: Received http2 header with status: "
)
_NO_HTTP2 = re.compile("Expected SETTINGS frame|http1.x server")
_NO_SUCH_CALL = re.compile(r"\bMethod not found!")
_NO_TLS = re.compile("WRONG_VERSION_NUMBER")
_ENDED_CERTIFICATE = re.compile("CERTIFICATE_VERIFY_FAILED: certificate (has expired|is not yet valid)")
# The second is what is said where an authority was made anew under its old name.
_UNKNOWN_CERTIFICATE = re.compile("CERTIFICATE_VERIFY_FAILED|certificate signature failure")
_NO_HANDSHAKE = re.compile("Tls handshake failed|Failed to create security handshaker")
_OTHER_NAME = re.compile("Hostname Verification Check failed")
# A server that refuses a client's certificate does so when the client takes the connection for made, without a word.
_HANGS_UP = re.compile(
    r"last error: .*Socket closed|^there is no connection .*Socket closed|^there is no session .*Secure read failed"
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
        readings = {
            _WEB_SERVER: f"{where} answers as a web server, not as gRPC: it looks like a gateway's port; {self.give}",
            _NO_HTTP2: f"{where} answers, but not in HTTP/2: it looks like a port for metrics, or another web "
            f"server's; {self.give}",
            _NO_SUCH_CALL: f"{where} speaks gRPC, but knows no such call: it looks like {self.strangers}; {self.give}",
            _NO_TLS: f"{where} answers without TLS: {self.without_tls}, or give a port with TLS",
            _ENDED_CERTIFICATE: f"the certificate of {where} has ended, or has not begun: renew it there, or set "
            "this machine's clock",
            _OTHER_NAME: f"the certificate of {where} bears another name: {self.give_name}",
            _UNKNOWN_CERTIFICATE: f"the certificate of {where} is not of an authority that is known here: "
            f"{self.name_authority}",
            _NO_HANDSHAKE: f"{where} and this side agree on no TLS: look at the certificates of both, and at their "
            "authorities",
            _HANGS_UP: f"{where} accepts connections and closes them: it looks like {self.with_tls}, or one of another "
            f"protocol; {self.give}",
        }
        found = next((text for sign, text in readings.items() if sign.search(message)), None)
        return found and f"{found} ({message})"
